"""Word aligners compared on gold links: AER, precision and recall of intersection and grow-diag-final-and.

Each aligner is trained only on the sentences of the gold set, without the links. eflomal (`eflomal-align`,
`pip install eflomal`) and fast_align (`fast_align`) are run if they are on the PATH.

A gold set is two files: NAME.src-tgt (source ||| target) and NAME.gold (1-2 sure, 1p2 possible, counted from
1), such as those of https://github.com/neulab/awesome-align, folder examples. Greek-English needs
`pip install --no-deps bible-alignments`; punctuation is excluded there. Guided attention is included if
`python -m benchmarks.greek` has trained its two models. With --threshold, the lexical aligner is also rated
as in `regard align --threshold`, which does not combine two directions: both columns show the same links.

    python -m benchmarks.aligners --gold FOLDER [--sets roen,enfr,greek] [--peers eflomal,fast_align]
        [--threshold 0.6,0.8]
"""

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from regard.translation import (
    GoldAlignment,
    LexicalAligner,
    error_rate,
    load_translator,
    read_gold,
    read_pairs,
)
from regard.translation.alignment.links import (
    Links,
    SymmetrizationMethod,
    read_links,
    reverse_links,
    symmetrize,
)
from regard.translation.data.bible import bible

Pairs = Sequence[tuple[str, str]]
Directions = list[tuple[Links, Links]]  # links source → target and target → source, for each pair

METHODS: tuple[SymmetrizationMethod, ...] = ("intersection", "grow-diag-final-and")
BOOKS = {"greek": range(40, 45), "greek-letters": range(45, 67)}


class GoldSet(NamedTuple):
    """Sentence pairs and their gold links. counted: selects the links of a pair to evaluate, by its index."""

    name: str
    pairs: Pairs
    gold: list[GoldAlignment]
    counted: Callable[[int, Links], Links]


def main() -> None:
    """Print one table row per gold set and aligner."""
    parser = argparse.ArgumentParser(prog="benchmarks.aligners", description=__doc__.split("\n")[0])
    parser.add_argument("--gold", type=Path, help="folder with NAME.src-tgt and NAME.gold")
    parser.add_argument("--sets", help="names of gold sets, separated by commas [default: all]")
    parser.add_argument("--peers", default="eflomal,fast_align", help="[default: eflomal,fast_align]")
    parser.add_argument(
        "--models", type=Path, default=Path("greek"), help="folder of benchmarks.greek [default: greek]"
    )
    parser.add_argument("--threshold", help="minimum scores of links, separated by commas [default: off]")
    args = parser.parse_args()
    aligners: dict[str, Callable[[Pairs], Directions]] = {"lexical aligner": align_lexically}
    for threshold in args.threshold.split(",") if args.threshold else []:
        aligners[f"lexical aligner, threshold {threshold}"] = partial(
            align_lexically, threshold=float(threshold)
        )
    for name, run, program in (
        ("eflomal", run_eflomal, "eflomal-align"),
        ("fast_align", run_fast_align, "fast_align"),
    ):
        if name in args.peers.split(","):
            if shutil.which(program):
                aligners[name] = run
            else:
                print(f"{name} is skipped: {program} is not on the PATH.")
    print(
        "| gold set | pairs | aligner | CPU s | intersection: AER (P, R) | grow-diag-final-and: AER (P, R) |"
    )
    print("|---|---|---|---|---|---|")
    for gold_set in read_sets(args.gold, args.sets.split(",") if args.sets else None):
        chosen = dict(aligners)
        if gold_set.name == "greek" and (args.models / "en-grc").is_dir():
            chosen["guided attention"] = lambda pairs: align_with_attention(pairs, args.models)
        for name, run in chosen.items():
            before = cpu_seconds()
            links = run(gold_set.pairs)
            seconds = cpu_seconds() - before
            cells = " | ".join(rate(gold_set, links, method) for method in METHODS)
            print(
                f"| {gold_set.name} | {len(gold_set.pairs):,} | {name} | {seconds:.1f} | {cells} |",
                flush=True,
            )


def read_sets(folder: Path | None, names: Sequence[str] | None) -> Iterator[GoldSet]:
    """Yield the gold sets of a folder, then Greek-English if its package is installed."""
    for path in sorted(folder.glob("*.src-tgt")) if folder else []:
        gold = path.with_suffix(".gold")
        if gold.exists() and (names is None or path.stem in names):
            yield GoldSet(path.stem, list(read_pairs(path)), read_gold(gold, 1), lambda _, links: links)
    if find_spec("bible_alignments") is None:
        print("Greek-English is skipped: pip install --no-deps bible-alignments")
        return
    for name, books in BOOKS.items():
        if names is None or name in names:
            verses = bible(books)
            gold_links = [GoldAlignment(verse.without_punctuation(verse.links)) for verse in verses]
            yield GoldSet(
                name,
                [verse.pair for verse in verses],
                gold_links,
                lambda i, links, verses=verses: verses[i].without_punctuation(links),  # type: ignore[misc]
            )


def rate(gold_set: GoldSet, links: Directions, method: SymmetrizationMethod) -> str:
    """Format the error rates of the links in both directions."""
    predicted = [gold_set.counted(i, symmetrize(*both, method)) for i, both in enumerate(links)]
    rates = error_rate(predicted, gold_set.gold)
    return f"{100 * rates.aer:.1f} ({100 * rates.precision:.1f}, {100 * rates.recall:.1f})"


def align_lexically(pairs: Pairs, threshold: float | None = None) -> Directions:
    """Align with regard's lexical aligner; with a threshold, both directions have the same links."""
    alignments = LexicalAligner.learn(pairs).align(pairs)
    if threshold is None:
        return [alignment.best_links() for alignment in alignments]
    return [(links, links) for links in (alignment.links(threshold=threshold) for alignment in alignments)]


def align_with_attention(pairs: Pairs, folder: Path) -> Directions:
    """Align with the guided attention of two translation models."""
    forward = load_translator(folder / "grc-en").align(pairs)
    backward = load_translator(folder / "en-grc").align([(target, source) for source, target in pairs])
    return [
        (direct.links(), reverse_links(inverse.links()))
        for direct, inverse in zip(forward, backward, strict=True)
    ]


def run_eflomal(pairs: Pairs) -> Directions:
    """Align with eflomal's default settings."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, name) for name in ("source", "target", "forward", "backward")}
        paths["source"].write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
        paths["target"].write_text("".join(f"{target}\n" for _, target in pairs), encoding="utf-8")
        options = (
            "-s",
            paths["source"],
            "-t",
            paths["target"],
            "-f",
            paths["forward"],
            "-r",
            paths["backward"],
        )
        subprocess.run(["eflomal-align", *options], check=True, capture_output=True)
        return _directions(*(paths[name].read_text() for name in ("forward", "backward")))


def run_fast_align(pairs: Pairs) -> Directions:
    """Align with fast_align and the options that its documentation recommends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs")
        path.write_text("".join(f"{source} ||| {target}\n" for source, target in pairs), encoding="utf-8")
        command = ["fast_align", "-i", str(path), "-d", "-o", "-v"]
        runs = [
            subprocess.run([*command, *reverse], check=True, capture_output=True, text=True)
            for reverse in ([], ["-r"])
        ]
    return _directions(*(run.stdout for run in runs))


def _directions(forward: str, backward: str) -> Directions:
    lines = zip(forward.split("\n")[:-1], backward.split("\n")[:-1], strict=True)
    return [(read_links(first)[0], read_links(second)[0]) for first, second in lines]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the programs that it has run."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
