"""Translate input unlike the training lines: joined lines, uppercase, lowercase, and protected text.

    python -m benchmarks.robust --model de-en --lines 200

Prints BLEU for each kind of input, and the number of URLs, numbers, tags, … that the translations keep.
"""

import argparse
from collections.abc import Iterator, Sequence
from random import Random

from benchmarks.data import DATA
from regard.translation import Greedy, evaluate, load_translator
from regard.translation.decoding.strategies import Beam
from regard.translation.translator import Translator

FOLDER = DATA / "multi30k"
JOINED = 4
# protected text; {} is a random number, so all are different
SPANS = (
    "https://example.org/a{}?x=1&y=2",
    "www.beispiel{}.de",
    "anna.berg{}@post.example",
    "{}",
    "15:{:02}",
    "{},50 €",
    "3.5.20{:02}",
    "{{name{}}}",
    "%s",
    "🎉",
    "Kraków",
    "東京",
    "Wrocław",
    "RX{}",
)


def read(name: str, count: int) -> tuple[list[str], list[str]]:
    """Read source and reference lines."""
    sides = ((FOLDER / f"{name}.{language}").read_text("utf-8").splitlines() for language in ("de", "en"))
    source, target = (side[:count] for side in sides)
    return source, target


def groups(lines: Sequence[str], size: int) -> list[str]:
    """Join consecutive lines."""
    return [" ".join(lines[at : at + size]) for at in range(0, len(lines), size)]


def with_spans(lines: Sequence[str], seed: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Insert one to three spans into each line; yield the line and its spans."""
    random = Random(seed)
    for line in lines:
        words = line.split()
        spans = []
        for template in random.sample(SPANS, random.randint(1, 3)):
            span = template.format(random.randrange(10, 60))
            words.insert(random.randrange(1, len(words)), span)
            spans += span.split()
        if random.random() < 0.3:
            at = random.randrange(len(words) - 1)
            words[at] = f"<b>{words[at]}</b>"
            spans += ["<b>", "</b>"]
        yield " ".join(words), spans


def survival(translator: Translator, lines: Sequence[str], options: dict[str, object]) -> str:
    """Count the spans that appear exactly once in the translation."""
    sources = list(with_spans(lines))
    translations = translator.translate([line for line, _ in sources], **options)
    kept = total = 0
    for (_, spans), translation in zip(sources, translations, strict=True):
        total += len(spans)
        lost = [span for span in spans if translation.text.count(span) != translation.source.count(span)]
        kept += len(spans) - len(lost)
        if lost:
            print(f"lost {lost}: {translation.source!r} → {translation.text!r}")
    return f"{kept} of {total} spans survive in {len(lines)} sentences"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robust", description=__doc__)
    parser.add_argument("--model", required=True, help="Folder of a German-English model.")
    parser.add_argument("--lines", type=int, default=200, help="Lines of test_2016_flickr.")
    parser.add_argument("--beam", type=int, default=5)
    arguments = parser.parse_args()
    translator = load_translator(arguments.model)
    source, target = read("test_2016_flickr", arguments.lines)
    options = {"strategy": Greedy() if arguments.beam == 1 else Beam(arguments.beam)}

    def report(name: str, lines: Sequence[str], references: Sequence[str]) -> None:
        texts = [translation.text for translation in translator.translate(lines, **options)]
        if len(lines) > len(references):
            texts = groups(texts, JOINED)
        print(f"{name:<28} BLEU {evaluate(texts, references).bleu:5.1f}", flush=True)

    report("as they are", source, target)
    joined = groups(target, JOINED)
    report("joined after translation", source, joined)
    report("joined before translation", groups(source, JOINED), joined)
    report("ALL CAPS", [line.upper() for line in source], [line.upper() for line in target])
    report("lower case", [line.lower() for line in source], target)
    print(survival(translator, source, options))


if __name__ == "__main__":
    main()
