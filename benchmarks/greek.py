"""Greek and English: alignment error rates of attention, in both directions, against links made by hand.

Trained on the text of books 40 to 44 (the Gospels and Acts) alone, without its links; punctuation is excluded
from what is counted. Beside it stand the diagonal and the lexical aligner that guides the attention.

    pip install --no-deps bible-alignments
    python -m benchmarks.greek [--guide 1] [--epochs 12] [--folder greek]
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
from regard.translation.data.bible import Verse, bible
from regard.translation.data.links import Links, reverse_links
from regard.translation.training.progress import create_display

BOOKS = range(40, 45)
SETTINGS = ["tokens.size=4000", "model.dropout=0.2", "training.unknown_rate=0", "training.metric=loss"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.greek", description=__doc__.split("\n")[0])
    parser.add_argument("--guide", type=float, default=1.0, help="0 is attention that nobody guides")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path("greek"), help="for the two models")
    asked = parser.parse_args()
    verses = bible(BOOKS)
    pairs = [verse.pair for verse in verses]
    report("diagonal", verses, [diagonal(verse) for verse in verses])
    anchors = LexicalAligner.learn(pairs)
    report("lexical aligner", verses, anchors.links(pairs, "grow-diag-final-and"))
    guided = f"training.guided_alignment_weight={asked.guide}"
    settings = [*SETTINGS, guided, f"training.epochs={asked.epochs}"]
    forward = aligned(asked.folder / "grc-en", pairs, settings)
    report("Greek → English", verses, forward)
    back = aligned(asked.folder / "en-grc", [Pair(target, source) for source, target in pairs], settings)
    backward = [reverse_links(links) for links in back]
    report("English → Greek", verses, backward)
    for how in ("intersection", "union", "grow-diag-final-and"):
        both = [symmetrize(*links, how) for links in zip(forward, backward, strict=True)]
        report(how, verses, both)


def aligned(folder: Path, pairs: Sequence[Pair], settings: Sequence[str]) -> list[Links]:
    """Train on all pairs, validate on some of them, and read the links of all."""
    config = TranslationConfig.preset("tiny").override(settings)
    train(folder, pairs, dev=pairs[:300], config=config, resume=True, callbacks=[create_display()])
    return [alignment.links() for alignment in load_translator(folder).align(pairs)]


def diagonal(verse: Verse) -> Links:
    """Each English word goes to the Greek one at the same share of the verse."""
    source, target = len(verse.source_words), len(verse.target_words)
    return frozenset((min(round(j * source / target), source - 1), j) for j in range(target))


def report(name: str, verses: Sequence[Verse], found: Sequence[Links]) -> None:
    """One line of the table."""
    pairs = list(zip(verses, found, strict=True))
    rates = error_rate(
        [verse.without_punctuation(links) for verse, links in pairs],
        [verse.without_punctuation(verse.links) for verse in verses],
    )
    print(f"{name:22}  {rates}", flush=True)


if __name__ == "__main__":
    main()
