"""`regard evaluate`."""

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from regard._util.files import write_atomic
from regard._util.text import printable
from regard.cli.shared import check_input, check_model, check_output, console, load, padded, two_languages
from regard.cli.translate import check_sizes
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.translation.evaluation import Scores

_HOW = "How to translate"
_MORE = "What to show"


class Tried(NamedTuple):
    """What a model wrote, how good it is, and how long it took; a ready file took no time."""

    name: str
    translations: list[str]
    scores: "Scores"
    tokens: int = 0
    seconds: float | None = None

    def speeds(self) -> list[float | None]:
        """Sentences and target tokens a second."""
        if self.seconds is None:
            return [None, None]
        return [each / max(self.seconds, 1e-9) for each in (len(self.translations), self.tokens)]


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A text file with a sentence on each line. Without REFERENCE: a file with pairs, .tsv or "
            ".jsonl, or - for stdin; or embedded, the held-out part of the corpus that comes along; or "
            "embedded-longer, that and sentences longer than any of a training. All may be gzipped.",
        ),
    ],
    reference: Annotated[
        str | None,
        typer.Argument(metavar="REFERENCE", help="A text file with the right translations, line by line."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="FOLDER",
            help="A folder that regard train wrote; repeat it to compare several.",
        ),
    ] = None,
    translations: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A text file with translations that are there already; can be repeated."
        ),
    ] = None,
    beam: Annotated[
        int,
        typer.Option(
            min=1, help="How many translations to follow at a time; 1 is greedy.", rich_help_panel=_HOW
        ),
    ] = 5,
    batch: Annotated[
        int, typer.Option(min=1, help="How many sentences to translate together.", rich_help_panel=_HOW)
    ] = 64,
    languages: Annotated[
        str,
        typer.Option(
            metavar="FROM-TO", help="Of the embedded corpus: from which to which.", rich_help_panel=_HOW
        ),
    ] = "en-de",
    tokenize: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How sacreBLEU cuts a sentence into words: 13a, intl, zh, ja-mecab, char, none …",
            rich_help_panel=_MORE,
        ),
    ] = "13a",
    lowercase: Annotated[
        bool,
        typer.Option(
            "--lowercase",
            help="Take upper and lower case for the same, in BLEU and chrF.",
            rich_help_panel=_MORE,
        ),
    ] = False,
    lengths: Annotated[
        bool,
        typer.Option(
            "--by-length", help="Also BLEU of short and of long sentences apart.", rich_help_panel=_MORE
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also draw BLEU by length: a .png, .svg or .pdf file.", rich_help_panel=_MORE
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write the translations to this file, line by line.",
            rich_help_panel=_MORE,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all figures as JSON.", rich_help_panel=_MORE)
    ] = False,
) -> None:
    """Translate a test set and say how good it is: sacreBLEU, chrF, exact match and speed."""
    folders, files = model or [], translations or []
    names = names_of([*folders, *files])
    _check(folders, files, output, picture)
    check_sizes(beam, batch)
    _check_corpus(source, reference, languages)
    pairs = _pairs(source, reference, languages)
    sources, references = [one for one, _ in pairs], [one for _, one in pairs]
    from regard.translation.data.formats import read_lines

    ready = [list(read_lines(file)) for file in files]
    _check_lines(files, ready, len(references))
    from regard.translation.evaluation import check_tokenizer
    from regard.translation.evaluation import evaluate as score

    check_tokenizer(tokenize)
    options: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase}
    if lengths or picture is not None:
        options["sources"] = sources
    tried = []
    for folder, name in zip(folders, names, strict=False):
        written, tokens, seconds = _translate(folder, name, sources, beam, batch)
        tried.append(Tried(name, written, score(written, references, **options), tokens, seconds))
    for written, name in zip(ready, names[len(folders) :], strict=True):
        tried.append(Tried(name, written, score(written, references, **options)))
    if output is not None:
        write_atomic(output, "".join(f"{line}\n" for line in tried[0].translations).encode())
    if picture is not None:
        from regard.plot.curves import draw_by_length

        draw_by_length({one.name: one.scores.by_length for one in tried}, picture)
    _show(tried, as_json)


def _check(folders: Sequence[Path], files: Sequence[Path], output: Path | None, picture: Path | None) -> None:
    """Before anything is loaded."""
    if not folders and not files:
        raise ArgumentError(
            "evaluate got no model; name one: --model FOLDER, or give its translations: --translations FILE."
        )
    for folder in folders:
        check_model(folder)
    for file in files:
        check_input(file, "--translations")
    if output is not None:
        if len(folders) != 1 or files:
            raise ArgumentError(
                f"--output is for the translations of one model, and there are {len(folders)} models and "
                f"{len(files)} files; evaluate one model at a time."
            )
        check_output(output)
    if picture is not None:
        check_picture(picture, "--picture")


def _check_corpus(source: str, reference: str | None, languages: str) -> None:
    """Before anything is loaded: languages, or files that can be read."""
    if _is_own(source, reference):
        two_languages(languages)
        return
    check_input(Path(source), "SOURCE")
    if reference is not None:
        check_input(Path(reference), "REFERENCE")


def _is_own(source: str, reference: str | None) -> bool:
    """Whether the corpus is the one that comes along."""
    return source in ("embedded", "embedded-longer") and reference is None and not Path(source).exists()


def _pairs(source: str, reference: str | None, languages: str) -> Sequence[tuple[str, str]]:
    if _is_own(source, reference):
        from regard.translation.data.builtin import embedded_corpus

        corpus = embedded_corpus(*two_languages(languages))
        return corpus.test if source == "embedded" else [*corpus.test, *corpus.longer]
    from regard.translation.data.formats import read_pairs

    pairs = list(read_pairs(source, reference))
    if not pairs:
        raise ArgumentError(f"{source!r} has no sentences; name a file with some.")
    return pairs


def _check_lines(files: Sequence[Path], ready: Sequence[Sequence[str]], wanted: int) -> None:
    for file, lines in zip(files, ready, strict=True):
        if len(lines) != wanted:
            raise ArgumentError(
                f"{str(file)!r} has {len(lines):,} translations and there are {wanted:,} sentences; "
                "each needs its own line."
            )


def check_picture(path: Path, option: str) -> None:
    """Before anything is loaded: a picture of a kind that can be drawn, in a folder that is there."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ArgumentError(f"{option} is {str(path)!r}; it can end in .png, .svg, .pdf.")
    check_output(path, option)


def names_of(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, or all of it where others have the same."""
    for path in paths:
        if paths.count(path) > 1:
            raise ArgumentError(f"{str(path)!r} is given {paths.count(path)} times; once is enough.")
    short = [os.path.basename(os.path.realpath(path)) or str(path) for path in paths]
    return [str(path) if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]


def _translate(
    folder: Path, name: str, sources: list[str], beam: int, batch: int
) -> tuple[list[str], int, float]:
    """The translations, how many target tokens they have, and how long they took."""
    from rich.console import Console
    from rich.text import Text

    from regard.translation.decoding.search import Beam

    about = f"{printable(name)} translates {len(sources):,} sentences …"
    with Console(stderr=True).status(Text(about)):
        translator = load(folder)
        translator.translate(sources[:1], how=Beam(beam), batch=batch)  # the first time takes longer
        start = time.perf_counter()
        found = translator.translate(sources, how=Beam(beam), batch=batch)
        seconds = time.perf_counter() - start
    return [one.text for one in found], sum(len(one.tokens) for one in found), seconds


def _show(tried: Sequence[Tried], as_json: bool) -> None:
    if as_json:
        print(json.dumps({one.name: _described(one) for one in tried}, ensure_ascii=False, indent=2))
    elif len(tried) == 1:
        (one,) = tried
        screen = console()
        screen.print(printable(one.name), style="bold")
        figures, _, table = str(one.scores).partition("\n\n")
        speed = "" if one.seconds is None else f"\nspeed        {_speed(one)}"
        screen.print("\n\n".join([figures + speed, *([table] if table else [])]))
    else:
        _compare(tried)


def _described(one: Tried) -> dict[str, Any]:
    """For JSON: the scores by name, and the speed."""
    found = asdict(one.scores)
    found["by_length"] = [
        {"first": each.lengths.first, "last": each.lengths.last, **each._asdict()}
        for each in one.scores.by_length
    ]
    for each in found["by_length"]:
        del each["lengths"]
    sentences, tokens = one.speeds()
    return {**found, "seconds": one.seconds, "sentences_per_second": sentences, "tokens_per_second": tokens}


def _speed(one: Tried) -> str:
    sentences, tokens = one.speeds()
    return f"{sentences:6.1f} sentences/s, {tokens:,.0f} target tokens/s ({one.seconds:.1f} s)"


def _compare(tried: Sequence[Tried]) -> None:
    """A line for each model; below, if asked for, a line for each length."""
    heads = ["", "BLEU", "lower case", "chrF", "exact match", "sentences/s", "tokens/s"]
    rows = []
    for one in tried:
        scores = one.scores
        speeds = ["" if each is None else f"{each:,.0f}" for each in one.speeds()]
        numbers = [f"{each:.2f}" for each in (scores.bleu, scores.lowercase_bleu, scores.chrf)]
        rows.append([printable(one.name), *numbers, f"{100 * scores.exact:.2f} %", *speeds])
    _table([heads, *rows])
    first = tried[0].scores
    screen = console()
    screen.print(f"\nBLEU  {first.bleu_signature}\nchrF  {first.chrf_signature}", style="dim")
    if first.by_length:
        screen.print("\nBLEU by words of the source", style="bold")
        heads = ["words", "sentences", *(printable(one.name) for one in tried)]
        columns = [one.scores.by_length for one in tried]
        _table([heads, *(_length_row(each) for each in zip(*columns, strict=True))])


def _length_row(entries: Sequence[Any]) -> list[str]:
    first = entries[0]
    return [str(first.lengths), f"{first.sentences:,}", *(f"{each.bleu:.2f}" for each in entries)]


def _table(rows: Iterable[Sequence[str]]) -> None:
    """The first column to the left, the others to the right; the first row is the heading."""
    from rich.cells import cell_len

    columns = list(zip(*rows, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    screen = console()
    names = padded(columns[0])
    for number, (name, *cells) in enumerate(zip(names, *columns[1:], strict=True)):
        right = (" " * (width - cell_len(cell)) + cell for width, cell in zip(widths[1:], cells, strict=True))
        screen.print("  ".join([name, *right]).rstrip(), style="dim" if number == 0 else None)
