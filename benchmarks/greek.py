"""Alignment error rates of attention between Greek and English, in both directions, on manual links.

The models are trained on the text of the books to align, without the links: by default, books 40 to 44 (the
Gospels and Acts). Punctuation is excluded from the evaluation. Baselines: the diagonal, and the lexical
aligner that guides the attention.

    pip install --no-deps bible-alignments
    python -m benchmarks.greek [--guide 1] [--epochs 12] [--folder greek] [--books 40-44]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from regard.translation import (
    LexicalAligner,
    Pair,
    TranslationConfig,
    error_rate,
    load_translator,
    symmetrize,
    train,
)
from regard.translation.alignment.links import Links, reverse_links
from regard.translation.data.bible import Verse, bible
from regard.translation.training.progress import create_display

SETTINGS = ["tokens.size=4000", "model.dropout=0.2", "training.unknown_rate=0", "training.metric=loss"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.greek", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--guide", type=float, default=1.0, help="weight of the alignment loss; 0: off [default: 1]"
    )
    parser.add_argument("--epochs", type=int, default=12, help="training epochs [default: 12]")
    parser.add_argument(
        "--folder", type=Path, default=Path("greek"), help="folder for the two models [default: greek]"
    )
    parser.add_argument("--books", default="40-44", help="first and last book [default: 40-44]")
    args = parser.parse_args()
    first, last = map(int, args.books.split("-"))
    verses = bible(range(first, last + 1))
    pairs = [verse.pair for verse in verses]
    report("diagonal", verses, [diagonal(verse) for verse in verses])
    aligner = LexicalAligner.learn(pairs)
    report("lexical aligner", verses, aligner.links(pairs, "grow-diag-final-and"))
    weight = f"training.guided_alignment_weight={args.guide}"
    settings = [*SETTINGS, weight, f"training.epochs={args.epochs}"]
    forward = train_and_align(args.folder / "grc-en", pairs, settings)
    report("Greek → English", verses, forward)
    swapped = [Pair(target, source) for source, target in pairs]
    backward = [reverse_links(links) for links in train_and_align(args.folder / "en-grc", swapped, settings)]
    report("English → Greek", verses, backward)
    for method in ("intersection", "union", "grow-diag-final-and"):
        both = [symmetrize(*links, method) for links in zip(forward, backward, strict=True)]
        report(method, verses, both)


def train_and_align(folder: Path, pairs: Sequence[Pair], settings: Sequence[str]) -> list[Links]:
    """Train on all pairs, validate on the first 300, and return the links of all pairs."""
    config = TranslationConfig.preset("tiny").override(settings)
    train(folder, pairs, dev=pairs[:300], config=config, resume=True, callbacks=[create_display()])
    return [alignment.links() for alignment in load_translator(folder).align(pairs)]


def diagonal(verse: Verse) -> Links:
    """Align each English word to the Greek word at the same relative position."""
    source, target = len(verse.source_words), len(verse.target_words)
    return frozenset((min(round(j * source / target), source - 1), j) for j in range(target))


def report(name: str, verses: Sequence[Verse], predictions: Sequence[Links]) -> None:
    """Print one row of the table."""
    pairs = list(zip(verses, predictions, strict=True))
    rates = error_rate(
        [verse.without_punctuation(links) for verse, links in pairs],
        [verse.without_punctuation(verse.links) for verse in verses],
    )
    print(f"{name:22}  {rates}", flush=True)


if __name__ == "__main__":
    main()
