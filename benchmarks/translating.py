"""Translation speed on Multi30k's test set with a beam of 5, compared with other libraries.

All libraries use the same parameters and batches of 64 sentences of similar length; each runs its own beam
search in its own process. The processes alternate batch by batch; only one runs at a time.
"""

import argparse
import importlib.util
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import converted, joeynmt, multi30k
from benchmarks.data import DATA
from benchmarks.workers import receive, start_workers
from regard.models import Packed, Transformer, TransformerConfig, keep_memory
from regard.translation.decoding.search import search
from regard.translation.decoding.strategies import Beam
from regard.translation.tokens import END, PADDING, SPECIAL_TOKENS

BEAM_SIZE, BATCH_SIZE = 5, 64
SENTENCES = DATA / "multi30k" / "test_2016_flickr.de"
TRAINING_STEPS = 110  # without a trained model: steps of 6,000 tokens, enough to learn to end sentences
Batches = list[list[list[int]]]  # source sentences with end tokens
Translate = Callable[[list[list[int]]], list[list[int]]]

TARGETS = {"Hugging Face generate": 2.0, "CTranslate2 float32": 1.0, "JoeyNMT": 10.0}
MODULES = {
    "Hugging Face generate": "transformers",
    "CTranslate2 float32": "ctranslate2",
    "JoeyNMT": "joeynmt",
}
SINGLE_ROUND = ("JoeyNMT",)  # a round takes minutes
PRUNED = "regard, pruned"  # Beam(5, prune_threshold=3)


class Timing(NamedTuple):
    """Time and translations of one batch."""

    seconds: float
    translations: list[list[int]]


Rounds = list[list[Timing]]


def main(quick: bool = False, folder: str | None = None) -> list[dict[str, object]]:
    """Compare all installed libraries on two threads; return one result per target.

    folder: a trained model. Default: the environment variable REGARD_BENCH_MODEL, or a model trained here.
    """
    folder = folder or os.environ.get("REGARD_BENCH_MODEL")
    model, sentences, origin = _load_model(folder) if folder else _train_model(quick)
    ordered = sorted(sentences[: 12 if quick else None], key=len)
    batches = [ordered[i : i + BATCH_SIZE] for i in range(0, len(ordered), BATCH_SIZE)]
    print(
        f"\ntranslating, beam {BEAM_SIZE}, batches of {BATCH_SIZE}, 2 threads; "
        f"{len(ordered)} sentences; {origin}"
    )
    peers = [name for name in TARGETS if _is_available(name, model)]
    entries = ["regard", PRUNED, *peers]
    try:
        timings = time_batches(model, entries, batches, rounds=1 if quick else 5)
    except Exception as error:  # continue with the other benchmarks
        print(f"  failed: {type(error).__name__}: {error}", flush=True)
        return [_header(name) | {"error": repr(error), "met": False} for name in peers]
    for name in timings:
        _print_row(name, timings, len(ordered))
    return [_result(name, timings, len(ordered)) for name in peers]


def _is_available(name: str, model: Transformer) -> bool:
    missing = importlib.util.find_spec(MODULES[name]) is None
    reason = f"{MODULES[name]} is not installed" if missing else converted.unsupported(model)
    if reason is not None:
        print(f"  ({name} skipped: {reason})")
    return reason is None and (name != "JoeyNMT" or joeynmt.is_available())


TestSet = tuple[Any, list[list[int]], str]  # model, source sentences, description


def _load_model(folder: str) -> TestSet:
    """Load a trained model and encode the test sentences with its tokenizer."""
    from regard.translation.training.checkpoint import load_model

    model, tokens, _ = load_model(folder)
    lines = SENTENCES.read_text("utf-8").splitlines()
    sentences = [[*ids, END] for ids in tokens.source.encode_batch(lines)]
    return model, sentences, f"{SENTENCES.stem}, {folder}"


def _train_model(quick: bool) -> TestSet:
    """Train a model for two minutes, until it ends its sentences; also return held-out sentences."""
    keep_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    data, origin = multi30k.load_pairs(3_000 if quick else 29_000)
    held_out, batches = data[:1_000], multi30k.random_batches(data[1_000:], 600 if quick else 6_000)
    model = Transformer(multi30k.VOCABULARY, TransformerConfig(), share=True)
    steps = 3 if quick else TRAINING_STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for i in range(steps):
        sides = zip(*batches[i % len(batches)], strict=True)
        loss = model.loss(*(Packed.of(side) for side in sides), label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    description = f"{origin}; trained for {steps} steps, loss {loss.item():.2f}"
    return model.eval(), [pair.source for pair in held_out], description


def time_batches(model: Any, entries: list[str], batches: Batches, rounds: int) -> dict[str, Rounds]:
    """Translate every batch with every library, in random order, and return the timings by round."""
    with start_workers(work, {name: (name, model) for name in entries}) as pipes:
        order, shuffle = list(entries), random.Random(0).shuffle
        timings: dict[str, Rounds] = {name: [] for name in entries}
        for number in range(-1, rounds):  # round -1 warms up, on a few batches
            active = [name for name in entries if number <= 0 or name not in SINGLE_ROUND]
            current: dict[str, list[Timing]] = {name: [] for name in active}
            for batch in batches if number >= 0 else batches[:: max(len(batches) // 3, 1)]:
                shuffle(order)
                for name in order:
                    if name in current:
                        pipes[name].send(batch)
                        current[name].append(receive(pipes[name]))
            if number >= 0:
                for name in current:
                    timings[name].append(current[name])
        return timings


def work(pipe: Connection, name: str, model: Any) -> None:
    """Worker process: translate one batch per message."""
    torch.set_num_threads(2)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        translate = CREATE[name](model, Path(folder))
        while True:
            batch = pipe.recv()
            start = time.perf_counter()
            translations = translate(batch)
            pipe.send(Timing(time.perf_counter() - start, translations))


def _max_new_tokens(batch: list[list[int]]) -> int:
    return 2 * max(map(len, batch)) + 10


def create_regard(model: Any, folder: Path) -> Translate:
    """Create regard's beam search."""
    return _create_search(model, Beam(BEAM_SIZE))


def create_pruned(model: Any, folder: Path) -> Translate:
    """Create regard's beam search with pruning of improbable hypotheses."""
    return _create_search(model, Beam(BEAM_SIZE, prune_threshold=3))


def _create_search(model: Any, strategy: Beam) -> Translate:
    keep_memory()

    def translate(batch: list[list[int]]) -> list[list[int]]:
        limits = [2 * len(sentence) + 10 for sentence in batch]
        results = search(model, Packed.of(batch), strategy, max_new_tokens=limits)
        return [best[0].tokens for best in results]

    return translate


def create_hugging_face(model: Any, folder: Path) -> Translate:
    """Create `generate` of transformers, also with `keep_memory`."""
    keep_memory()
    hugging_face_model = converted.to_hugging_face(model)

    def translate(batch: list[list[int]]) -> list[list[int]]:
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in batch], batch_first=True)
        output = hugging_face_model.generate(
            tokens,
            attention_mask=(tokens != PADDING).long(),
            num_beams=BEAM_SIZE,
            do_sample=False,
            length_penalty=1.0,
            max_length=None,
            max_new_tokens=_max_new_tokens(batch),
        )
        return [[token for token in row if token >= SPECIAL_TOKENS - 1] for row in output.tolist()]

    return translate


def create_ctranslate2(model: Any, folder: Path) -> Translate:
    """Create CTranslate2's translator in float32; its tokens are token ids as text."""
    import ctranslate2

    converted.to_ctranslate2(model, folder)
    translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=2, compute_type="float32")

    def translate(batch: list[list[int]]) -> list[list[int]]:
        texts = [[str(token) for token in sentence] for sentence in batch]
        results = translator.translate_batch(
            texts, beam_size=BEAM_SIZE, max_decoding_length=_max_new_tokens(batch)
        )
        return [[int(token) for token in result.hypotheses[0]] for result in results]

    return translate


def create_joeynmt(model: Any, folder: Path) -> Translate:
    """Create JoeyNMT's beam search, also with `keep_memory`; it has no KV cache."""
    keep_memory()
    return joeynmt.create_translator(model, BEAM_SIZE, _max_new_tokens)


CREATE: dict[str, Callable[[Any, Path], Translate]] = {
    "regard": create_regard,
    PRUNED: create_pruned,
    "Hugging Face generate": create_hugging_face,
    "CTranslate2 float32": create_ctranslate2,
    "JoeyNMT": create_joeynmt,
}


def seconds(rounds: Rounds) -> float:
    """Compute the time for all batches in the median round."""
    return statistics.median(sum(timing.seconds for timing in timings) for timings in rounds)


def _agreement(rounds: Rounds, expected: Rounds) -> float:
    """Compute the fraction of identical translations."""
    pairs = zip(_translations(rounds), _translations(expected), strict=True)
    return statistics.mean(x == y for x, y in pairs)


def _mean_length(rounds: Rounds) -> float:
    return statistics.mean(map(len, _translations(rounds)))


def _translations(rounds: Rounds) -> list[list[int]]:
    return [translation for timing in rounds[0] for translation in timing.translations]


def _speedup(name: str, timings: dict[str, Rounds]) -> float:
    """Compute a peer's time relative to regard's."""
    return seconds(timings[name]) / seconds(timings["regard"])


def _print_row(name: str, timings: dict[str, Rounds], sentences: int) -> None:
    rounds, ratio, target = timings[name], _speedup(name, timings), TARGETS.get(name)
    agreement = f"{_agreement(rounds, timings['regard']):5.0%} same output as regard"
    status = "" if target is None else f"≥ {target} {'met' if ratio >= target else 'missed'}"
    speed = f"{sentences / seconds(rounds):7.1f} sentences/s"
    cells = f"{speed}   {agreement}, {_mean_length(rounds):.1f} tokens{ratio:7.2f} ×   {status}"
    print(f"  {name:24}{cells}", flush=True)


def _header(name: str) -> dict[str, object]:
    """Return the fields that all results in benchmarks.json share."""
    header = {"group": "translating", "name": f"regard compared with {name}", "threads": 2}
    return header | {"target": TARGETS[name], "limit": None}


def _result(name: str, timings: dict[str, Rounds], sentences: int) -> dict[str, object]:
    selected = {entry: timings[entry] for entry in ("regard", PRUNED, name)}
    return _header(name) | {
        "implementation": "fused",
        "rates": {entry: sentences / seconds(rounds) for entry, rounds in selected.items()},
        "seconds": {entry: seconds(rounds) for entry, rounds in selected.items()},
        "lengths": {entry: _mean_length(rounds) for entry, rounds in selected.items()},
        "same": {entry: _agreement(rounds, timings["regard"]) for entry, rounds in selected.items()},
        "rounds": len(timings[name]),
        "ratios": {name: _speedup(name, timings)},
        "wrong": {},
        "met": _speedup(name, timings) >= TARGETS[name],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", metavar="FOLDER", help="trained model [default: train one]")
    parser.add_argument("--quick", action="store_true", help="only check that everything runs")
    args = parser.parse_args()
    main(args.quick, args.model)
