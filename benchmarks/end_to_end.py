"""Text-to-text translation, excluding start-up: `Translator.translate` and CTranslate2, float32 and int8.

Both libraries use the same parameters, the same SentencePiece model and two threads. Each entry runs in its
own process; only one works at a time, in random order. regard is measured with and without alignments.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.data import DATA
from benchmarks.workers import receive, start_workers

SENTENCES = DATA / "multi30k" / "test_2016_flickr.de"
THREADS = 2
BATCHED, SINGLE = 256, 24  # sentences measured with batches of 64, and one by one
ROUNDS = 3
ENTRIES = {  # name: library, precision, alignment
    "regard float32": ("regard", "float32", False),
    "regard float32 + alignment": ("regard", "float32", True),
    "CTranslate2 float32": ("ctranslate2", "float32", False),
    "regard int8": ("regard", "int8", False),
    "regard int8 + alignment": ("regard", "int8", True),
    "CTranslate2 int8": ("ctranslate2", "int8", False),
}
Translate = Callable[[list[str], int, int], list[str]]  # lines, batch size, beam size


def main(quick: bool = False, folder: str | None = None) -> list[dict[str, object]]:
    """Print sentences per second of all installed libraries; return one result per setting.

    folder: a trained model; default: the environment variable REGARD_BENCH_MODEL.
    """
    folder = folder or os.environ.get("REGARD_BENCH_MODEL")
    if folder is None:
        print("\nend-to-end: skipped; set REGARD_BENCH_MODEL to a folder written by regard train.")
        return []
    lines = SENTENCES.read_text("utf-8").splitlines()
    random.Random(0).shuffle(lines)
    print(f"\nend-to-end, {THREADS} threads, sentences per second; {SENTENCES.stem}, {folder}")
    entries = [name for name, (library, *_) in ENTRIES.items() if _is_installed(library)]
    with start_workers(work, {name: (name, folder) for name in entries}) as pipes:
        for pipe in pipes.values():
            receive(pipe)  # sent after the model is loaded
        results = []
        for batch_size, count in ((64, BATCHED), (1, SINGLE)):
            for beam in (5, 1):
                chosen = lines[: 4 if quick else count]
                rates = _rates(pipes, chosen, batch_size, beam, 1 if quick else ROUNDS)
                results.append(_report(rates, batch_size, beam))
        return results


def _rates(
    pipes: dict[str, Connection], lines: list[str], batch_size: int, beam: int, rounds: int
) -> dict[str, float]:
    """Return the sentences per second of each library in its median round; the first round warms up."""
    order, shuffle = list(pipes), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for number in range(-1, rounds):
        shuffle(order)
        part = lines if number >= 0 else lines[: max(len(lines) // 8, 2)]
        for name in order:
            pipes[name].send((part, batch_size, beam))
            elapsed, _ = receive(pipes[name])
            if number >= 0:
                seconds[name].append(elapsed)
    return {name: len(lines) / statistics.median(times) for name, times in seconds.items()}


def _report(rates: dict[str, float], batch_size: int, beam: int) -> dict[str, object]:
    ratios = {}
    print(f"  batch {batch_size}, beam {beam}")
    for name, rate in rates.items():
        precision = ENTRIES[name][1]
        peer = rates.get(f"CTranslate2 {precision}")
        ratios[name] = 0.0 if peer is None else rate / peer
        ratio = "" if peer is None else f"{ratios[name]:7.2f} × CTranslate2 {precision}"
        print(f"    {name:30}{rate:8.1f}{ratio}", flush=True)
    return {
        "group": "end-to-end",
        "name": f"batch {batch_size}, beam {beam}",
        "threads": THREADS,
        "rates": rates,
        "ratios": ratios,
        "met": all(ratio >= 1 for name, ratio in ratios.items() if name.startswith("regard")),
    }


def _is_installed(library: str) -> bool:
    import importlib.util

    installed = importlib.util.find_spec(library) is not None
    if not installed:
        print(f"  ({library} is not installed)")
    return installed


def work(pipe: Connection, name: str, folder: str) -> None:
    """Worker process: translate the lines of each message; send the time and the translations."""
    library, precision, alignment = ENTRIES[name]
    with tempfile.TemporaryDirectory() as converted:
        if library == "regard":
            translate = create_regard(folder, precision, alignment)
        else:
            translate = create_ctranslate2(folder, precision, Path(converted))
        pipe.send("ready")
        while True:
            lines, batch_size, beam = pipe.recv()
            start = time.perf_counter()
            texts = translate(lines, batch_size, beam)
            pipe.send((time.perf_counter() - start, texts))


def create_regard(folder: str, precision: Any, alignment: bool) -> Translate:
    """Create regard's translator, with the memory setting of the command line."""
    import torch

    from regard.models import keep_memory
    from regard.translation import Beam, load_translator

    keep_memory()
    torch.set_num_threads(THREADS)
    translator = load_translator(folder, dtype=precision)

    def translate(lines: list[str], batch_size: int, beam: int) -> list[str]:
        options = {"strategy": Beam(beam), "batch_size": batch_size, "alignment": alignment}
        return [translation.text for translation in translator.translate(lines, **options)]  # type: ignore[arg-type]

    return translate


def create_ctranslate2(folder: str, precision: str, converted_folder: Path) -> Translate:
    """Create CTranslate2's translator; its tokens are token ids as text.

    Each kind of batch runs on one thread or on all, whichever was faster in the first call: on some machines,
    two threads translate single sentences in int8 ten times more slowly than one.
    """
    import ctranslate2

    from benchmarks import converted
    from regard.translation.tokens import END
    from regard.translation.training.checkpoint import load_model

    model, tokens, _ = load_model(folder)
    converted.to_ctranslate2(model, converted_folder)  # type: ignore[arg-type]
    translators = [
        ctranslate2.Translator(
            str(converted_folder), inter_threads=1, intra_threads=n, compute_type=precision
        )
        for n in (1, THREADS)
    ]
    fastest: dict[tuple[int, int], Any] = {}

    def run(translator: Any, lines: list[str], batch_size: int, beam: int) -> list[str]:
        sources = [[*map(str, ids), str(END)] for ids in tokens.source.encode_batch(lines)]
        limit = 2 * max(map(len, sources)) + 10
        results = translator.translate_batch(
            sources, beam_size=beam, max_batch_size=batch_size, max_decoding_length=limit
        )
        return [tokens.target.decode(list(map(int, result.hypotheses[0]))).text for result in results]

    def translate(lines: list[str], batch_size: int, beam: int) -> list[str]:
        if (batch_size, beam) not in fastest:
            seconds = []
            for translator in translators:
                run(translator, lines, batch_size, beam)  # warmup
                start = time.perf_counter()
                run(translator, lines, batch_size, beam)
                seconds.append(time.perf_counter() - start)
            fastest[batch_size, beam] = translators[seconds.index(min(seconds))]
        return run(fastest[batch_size, beam], lines, batch_size, beam)

    return translate


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", metavar="FOLDER", help="trained model [default: REGARD_BENCH_MODEL]")
    parser.add_argument("--quick", action="store_true", help="only check that everything runs")
    args = parser.parse_args()
    main(args.quick, args.model)
