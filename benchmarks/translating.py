"""Translating Multi30k's test sentences with a beam of 5, in sentences per second, beside others' programs.

All run the same weights in batches of 64 sentences of like lengths, until their own search ends; each in a
process of its own. They take turns batch by batch, the others waiting.
"""

import argparse
import importlib.util
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import converted, joeynmt, multi30k
from benchmarks.data import DATA
from benchmarks.workers import ask, dismiss
from regard.models import Packed, Transformer, TransformerConfig, keep_memory
from regard.translation.decoding.search import Beam, search
from regard.translation.tokens import END, PADDING, SPECIAL_TOKENS

SIZE, BATCH = 5, 64
SENTENCES = DATA / "multi30k" / "test_2016_flickr.de"
TRAINED = 110  # steps of 6,000 tokens if there is no trained model: enough to end sentences where they end
Batches = list[list[list[int]]]  # source sentences, with their end marks
Translate = Callable[[list[list[int]]], list[list[int]]]

TARGETS = {"Hugging Face generate": 2.0, "CTranslate2 float32": 1.0, "JoeyNMT": 10.0}
MODULES = {
    "Hugging Face generate": "transformers",
    "CTranslate2 float32": "ctranslate2",
    "JoeyNMT": "joeynmt",
}
ONCE = ("JoeyNMT",)  # one round takes minutes
# prunes unlikely hypotheses
LEAN = "regard, lean"


class Timing(NamedTuple):
    """One batch: the time it took, and the translations."""

    seconds: float
    found: list[list[int]]


Rounds = list[list[Timing]]


def main(quick: bool = False, folder: str | None = None) -> list[dict[str, object]]:
    """Race all who are here on two threads; one line of results for each target.

    folder: of a trained model, or the environment variable REGARD_BENCH_MODEL; without, one is trained.
    """
    folder = folder or os.environ.get("REGARD_BENCH_MODEL")
    model, sentences, words, origin = _trained(folder) if folder else _train(quick)
    ordered = sorted(sentences[: 12 if quick else None], key=len)
    batches = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
    print(f"\ntranslating, beam {SIZE}, batches of {BATCH}, 2 threads; {len(ordered)} sentences; {origin}")
    peers = [name for name in TARGETS if _takes_part(name, model)]
    entries = ["regard", LEAN, *peers]
    try:
        found = compete(model, words, entries, batches, rounds=1 if quick else 5)
    except Exception as error:  # the other benchmarks are worth running
        print(f"  failed: {type(error).__name__}: {error}", flush=True)
        return [_about(name) | {"error": repr(error), "met": False} for name in peers]
    for name in found:
        _print(name, found, len(ordered))
    return [_result(name, found, len(ordered)) for name in peers]


def _takes_part(name: str, model: Transformer) -> bool:
    missing = importlib.util.find_spec(MODULES[name]) is None
    why = f"{MODULES[name]} is not installed" if missing else converted.refusal(model)
    if why is not None:
        print(f"  ({name} takes no part: {why})")
    return why is None and (name != "JoeyNMT" or joeynmt.is_here())


Known = tuple[Any, list[list[int]], list[int], str]


def _trained(folder: str) -> Known:
    """A model that was trained earlier, the test sentences in its tokens, and the words of targets."""
    from regard.translation.training.checkpoint import load_model

    model, tokens, _ = load_model(folder)
    lines = SENTENCES.read_text("utf-8").splitlines()
    targets = tokens.target.encode_batch((multi30k.FOLDER / "train.en").read_text("utf-8").splitlines())
    sentences = [[*ids, END] for ids in tokens.source.encode_batch(lines)]
    return model, sentences, _seen(targets), f"{SENTENCES.stem}, {folder}"


def _seen(targets: Iterable[list[int]]) -> list[int]:
    return sorted({END}.union(*targets))


def _train(quick: bool) -> Known:
    """A model that has learned in two minutes where sentences end, and sentences that it has not seen."""
    keep_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    data, origin = multi30k.pairs(3_000 if quick else 29_000)
    unseen, batches = data[:1_000], multi30k.in_random_order(data[1_000:], 600 if quick else 6_000)
    model = Transformer(multi30k.VOCABULARY, TransformerConfig(), share=True)
    steps = 3 if quick else TRAINED
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
    about = f"{origin}; trained for {steps} steps, loss {loss.item():.2f}"
    words = _seen(pair.target for pair in data[1_000:])
    return model.eval(), [pair.source for pair in unseen], words, about


def compete(
    model: Any, words: list[int], entries: list[str], batches: Batches, rounds: int
) -> dict[str, Rounds]:
    """The turns of each contender, round by round; all translate each batch, in an order drawn anew."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    workers = []
    try:
        for name in entries:
            pipes[name], theirs = context.Pipe()
            workers.append(context.Process(target=work, args=(theirs, name, model, words), daemon=True))
            workers[-1].start()
            theirs.close()
        order, shuffle = list(entries), random.Random(0).shuffle
        found: dict[str, Rounds] = {name: [] for name in entries}
        for done in range(-1, rounds):  # the first round warms up, on a few batches
            turns: dict[str, list[Timing]] = {name: [] for name in entries if done <= 0 or name not in ONCE}
            for batch in batches if done >= 0 else batches[:: max(len(batches) // 3, 1)]:
                shuffle(order)
                for name in (one for one in order if one in turns):
                    pipes[name].send(batch)
                    turns[name].append(ask(pipes[name]))
            if done >= 0:
                for name in turns:
                    found[name].append(turns[name])
        return found
    finally:
        dismiss(pipes.values(), workers)


def work(pipe: Connection, name: str, model: Any, words: list[int]) -> None:
    """A process that translates, one batch whenever it gets one."""
    torch.set_num_threads(2)
    warnings.filterwarnings("ignore")
    try:
        with tempfile.TemporaryDirectory() as folder:
            translate = CONTENDERS[name](model, words, Path(folder))
            while True:
                batch = pipe.recv()
                begun = time.perf_counter()
                found = translate(batch)
                pipe.send(Timing(time.perf_counter() - begun, found))
    except EOFError:
        return
    except Exception as error:
        pipe.send(error)


def _most(batch: list[list[int]]) -> int:
    return 2 * max(map(len, batch)) + 10


def regards(model: Any, words: list[int], folder: Path) -> Translate:
    """regard's own search."""
    return _by_search(model, Beam(SIZE))


def leans(model: Any, words: list[int], folder: Path) -> Translate:
    """The same with less work."""
    return _by_search(model, Beam(SIZE, prune_threshold=3))


def _by_search(model: Any, how: Beam) -> Translate:
    keep_memory()

    def translate(batch: list[list[int]]) -> list[list[int]]:
        limits = [2 * len(sentence) + 10 for sentence in batch]
        results = search(model, Packed.of(batch), how, max_new_tokens=limits)
        return [best[0].tokens for best in results]

    return translate


def hugging_faces(model: Any, words: list[int], folder: Path) -> Translate:
    """`generate` of transformers, with freed memory kept as well."""
    keep_memory()
    theirs = converted.hugging_face(model)

    def translate(batch: list[list[int]]) -> list[list[int]]:
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in batch], batch_first=True)
        found = theirs.generate(
            tokens,
            attention_mask=(tokens != PADDING).long(),
            num_beams=SIZE,
            do_sample=False,
            length_penalty=1.0,
            max_length=None,
            max_new_tokens=_most(batch),
        )
        return [[token for token in row if token >= SPECIAL_TOKENS - 1] for row in found.tolist()]

    return translate


def ctranslate2s(model: Any, words: list[int], folder: Path) -> Translate:
    """CTranslate2 in float32; its tokens are words."""
    import ctranslate2

    converted.ctranslate2(model, folder)
    theirs = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=2, compute_type="float32")

    def translate(batch: list[list[int]]) -> list[list[int]]:
        words = [[str(token) for token in sentence] for sentence in batch]
        found = theirs.translate_batch(words, beam_size=SIZE, max_decoding_length=_most(batch))
        return [[int(word) for word in one.hypotheses[0]] for one in found]

    return translate


def joeynmts(model: Any, words: list[int], folder: Path) -> Translate:
    """JoeyNMT's beam search, with freed memory kept as well; it has no caches."""
    keep_memory()
    return joeynmt.translator(model, SIZE, _most)


CONTENDERS: dict[str, Callable[[Any, list[int], Path], Translate]] = {
    "regard": regards,
    LEAN: leans,
    "Hugging Face generate": hugging_faces,
    "CTranslate2 float32": ctranslate2s,
    "JoeyNMT": joeynmts,
}


def seconds(rounds: Rounds) -> float:
    """Of all batches, in the median round."""
    return statistics.median(sum(turn.seconds for turn in turns) for turns in rounds)


def _same(rounds: Rounds, ours: Rounds) -> float:
    """The share of sentences that are translated alike."""
    theirs, own = ([found for turn in turns[0] for found in turn.found] for turns in (rounds, ours))
    return statistics.mean(x == y for x, y in zip(theirs, own, strict=True))


def _length(rounds: Rounds) -> float:
    return statistics.mean(len(found) for turn in rounds[0] for found in turn.found)


def _ratio(name: str, found: dict[str, Rounds]) -> float:
    """How many times as long as regard's search a peer takes."""
    return seconds(found[name]) / seconds(found["regard"])


def _print(name: str, found: dict[str, Rounds], sentences: int) -> None:
    rounds, ratio, target = found[name], _ratio(name, found), TARGETS.get(name)
    same = f"{_same(rounds, found['regard']):5.0%} as regard, {_length(rounds):.1f} tokens"
    goal = "" if target is None else f"≥ {target} {'met' if ratio >= target else 'NOT'}"
    cells = f"{sentences / seconds(rounds):7.1f} sentences/s   {same}{ratio:7.2f} ×   {goal}"
    print(f"  {name:24}{cells}", flush=True)


def _about(name: str) -> dict[str, object]:
    """What a line of benchmarks.json begins with, in the form of the other races."""
    about = {"group": "translating", "name": f"regard, beside {name}", "threads": 2}
    return about | {"target": TARGETS[name], "limit": None}


def _result(name: str, found: dict[str, Rounds], sentences: int) -> dict[str, object]:
    some = {who: found[who] for who in ("regard", LEAN, name)}
    return _about(name) | {
        "implementation": "fused",
        "rates": {who: sentences / seconds(rounds) for who, rounds in some.items()},
        "seconds": {who: seconds(rounds) for who, rounds in some.items()},
        "lengths": {who: _length(rounds) for who, rounds in some.items()},
        "same": {who: _same(rounds, found["regard"]) for who, rounds in some.items()},
        "rounds": len(found[name]),
        "ratios": {name: _ratio(name, found)},
        "wrong": {},
        "met": _ratio(name, found) >= TARGETS[name],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", metavar="FOLDER", help="of a trained model; without, one is trained")
    parser.add_argument("--quick", action="store_true", help="see that everything runs")
    asked = parser.parse_args()
    main(asked.quick, asked.model)
