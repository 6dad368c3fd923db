"""`regard align`."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard._util.text import pluralize, shorten
from regard.cli.align.aligners import align_lexically, align_with_attention, align_with_both
from regard.cli.shared import (
    check_distinct,
    check_input,
    check_model,
    check_output,
    exclusive,
    naming,
    open_output,
    parse_languages,
)
from regard.errors import ArgumentError
from regard.translation.alignment.links import SymmetrizationMethod, check_threshold
from regard.translation.alignment.output import (
    AlignedPair,
    Style,
    write_aligned,
    write_aligned_tmx,
)
from regard.translation.data.formats import Format, is_tmx, read_languages, read_pairs

if TYPE_CHECKING:
    from regard.translation.alignment.aer import GoldAlignment
    from regard.translation.alignment.links import Links

Pair = tuple[str, str]

_lexical = partial(typer.Option, rich_help_panel="Lexical aligner (default)")
_both = partial(typer.Option, rich_help_panel="Combining the two directions")
_gold = partial(typer.Option, rich_help_panel="Evaluation")
_head = partial(typer.Option, rich_help_panel="Translation model, instead of the lexical aligner")
_input = partial(typer.Option, rich_help_panel="Input format")
_format = partial(typer.Option, rich_help_panel="Output format")
_MIN_PAIRS = 10  # minimum number of pairs for guessing the index base of a gold file
_SELECTED = "selected during training; guessed for Hugging Face models"


def align(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Source sentences, one per line. Without TARGET: sentence pairs (.tsv, .csv, .jsonl, "
            ".tmx, .src-tgt, - for stdin). Files may be gzipped.",
        ),
    ],
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Translations of SOURCE, line by line.")
    ] = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text",
            help="Treat SOURCE and TARGET as quoted sentences, not files. Requires --aligner or --model.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Output file, written only on success. A .tmx file also contains the sentences. A file "
            "whose name ends in .gz is compressed.",
            show_default="stdout",
        ),
    ] = None,
    save: Annotated[
        Path | None, _lexical(metavar="FILE", help="Save the aligner for later use with --aligner.")
    ] = None,
    aligner: Annotated[
        Path | None,
        _lexical(
            metavar="FILE",
            help="Use a saved aligner instead of learning one from SOURCE and TARGET. With --model and "
            "--reverse-model, combine it with their attention.",
        ),
    ] = None,
    symmetrize: Annotated[
        SymmetrizationMethod | None,
        _both(
            metavar="METHOD",
            help="How to combine both directions: intersection (highest precision), union (highest recall), "
            "or a compromise: grow-diag or grow-diag-final-and.",
            show_default="grow-diag-final-and",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        _both(
            help="Use every link with at least this score, such as 0.5, instead of the best links. With "
            "--reverse-model and without --aligner, the links of both directions are still combined.",
            show_default="off",
        ),
    ] = None,
    format: Annotated[
        Format | None,
        _input(
            help="Format of the sentence-pair file; moses is source ||| target.",
            show_default="from the file extension",
        ),
    ] = None,
    languages: Annotated[
        str | None,
        _input(
            metavar="FROM-TO",
            help="Languages of a .tmx file (input or output), or of a multilingual --model, such as de-en.",
            show_default="the two languages in the file",
        ),
    ] = None,
    scores: Annotated[
        bool,
        _format(
            "--scores",
            help="Print the score of each pair (log probability per word), a tab, and its links with scores.",
        ),
    ] = False,
    as_json: Annotated[
        bool, _format("--json", help="Print one JSON object per sentence pair, with all weights.")
    ] = False,
    draw: Annotated[bool, _format("--draw", help="Draw all weights in the terminal.")] = False,
    gold: Annotated[
        Path | None,
        _gold(
            metavar="FILE",
            help="File with the gold links for each pair: 0-1 is a sure link, 0p1 a possible one. Prints the "
            "alignment error rate, precision and recall instead of links.",
        ),
    ] = None,
    index_base: Annotated[
        int | None,
        _gold(help="Index of the first word in the gold file: 0 or 1.", show_default="0"),
    ] = None,
    model: Annotated[
        Path | None,
        _head(
            "--model",
            "-m",
            metavar="FOLDER",
            help="Folder written by regard train, or in Hugging Face format.",
        ),
    ] = None,
    reverse_model: Annotated[
        Path | None,
        _head(
            metavar="FOLDER",
            help="Model for the other direction, TARGET to SOURCE; its links are combined with the first "
            "model's.",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        _head(help="Decoder layer, counted from 0; -1 is the last.", show_default=_SELECTED),
    ] = None,
    heads: Annotated[
        str | None,
        _head(
            metavar="N,N",
            help="Heads to average, counted from 0 (-1 is the last), or all.",
            show_default=f"{_SELECTED}; with --layer, all",
        ),
    ] = None,
    shift: Annotated[
        Literal["input", "output"] | None,
        _head(
            help="Decoding step whose weights align a target word: the step that predicts it (output) or the "
            "next step, which reads it (input).",
            show_default=_SELECTED,
        ),
    ] = None,
) -> None:
    """Align the words of existing translations.

    Learns a lexical aligner from the sentence pairs and aligns them; no model is needed. Prints one line of
    links per pair. For example, 0-0 1-2 links source word 0 to target word 0, and source word 1 to target
    word 2. Words are separated by whitespace and counted from 0.

    Examples:
    regard align corpus.de corpus.en -o corpus.align
    regard align corpus.de corpus.en --save de-en.aligner
    regard align new.de new.en --aligner de-en.aligner --scores
    regard align memory.tmx --languages de-en -o aligned.tmx
    regard align corpus.de corpus.en --gold corpus.gold --index-base 1
    regard align a.de a.en --model de-en --reverse-model en-de --aligner a.aligner
    """
    lexical_options = {"--save": save, "--aligner": aligner, "--scores": scores or None}
    model_options = {"--reverse-model": reverse_model, "--layer": layer, "--heads": heads, "--shift": shift}
    _check_inputs(source, target, text, aligner, model)
    _check_options({"--json": as_json, "--draw": draw, "--scores": scores}, threshold, gold, index_base)
    if reverse_model is not None and aligner is None and (as_json or draw):
        raise ArgumentError("--reverse-model applies only to links; remove it, or remove --json or --draw.")
    _check_aligner(lexical_options, model_options, model, symmetrize, threshold)
    check_output(output)
    check_output(save, "--save")
    check_distinct(
        {"SOURCE": None if text else source, "TARGET": None if text else target, "--aligner": aligner}
        | {"--gold": gold},
        {"--save": save, "--output": output},
    )
    to_tmx = output is not None and is_tmx(output)
    if to_tmx and (as_json or draw or scores):
        raise ArgumentError(f"--output {str(output)!r} is a TMX file; remove --json, --draw and --scores.")
    overrides = _parse_head(layer, heads, shift)
    tags = parse_languages(languages) if languages else None
    pairs: Iterable[Pair] = (
        [(source, target or "")] if text else read_pairs(source, target, format=format, languages=tags)
    )
    gold_links = None
    if gold is not None:
        pairs = list(pairs)
        gold_links = _read_gold(gold, index_base, pairs)
    method = symmetrize or "grow-diag-final-and"
    if model is None:
        aligned = align_lexically(pairs, aligner, save, threshold, method)
    elif aligner is None or reverse_model is None:
        aligned = align_with_attention(pairs, model, reverse_model, languages, overrides, threshold, method)
    else:
        models = model, reverse_model
        aligned = align_with_both(pairs, aligner, models, languages, overrides, threshold, method)
    style: Style = "json" if as_json else "scores" if scores else "links"
    predicted: list[Links] = []
    aligned = _collect(aligned, predicted) if gold_links is not None else aligned
    if to_tmx and output is not None:
        # a pipe can be read only once
        seekable = not text and Path(source).is_file()
        write_aligned_tmx(output, aligned, tags or (read_languages(source, format) if seekable else None))
    else:
        # with --gold, only the error rate is printed
        to_stdout = sys.stdout if gold is None else StringIO()
        with nullcontext(to_stdout) if output is None else open_output(output) as file:
            if draw:
                _draw(aligned, file)
            else:
                write_aligned(file, aligned, style)
    if gold_links is not None:
        from regard.translation.alignment.aer import error_rate

        print(error_rate(predicted, gold_links))


def _draw(aligned: "Iterable[AlignedPair]", file: IO[str]) -> None:
    from rich.console import Console

    from regard.plot.terminal import draw_alignment

    screen = Console(file=file, highlight=False)
    for pair in aligned:
        draw_alignment(pair.alignment, screen)
        screen.print()


def _collect(aligned: "Iterable[AlignedPair]", predicted: "list[Links]") -> "Iterator[AlignedPair]":
    """Yield the pairs, and append their links to `predicted`."""
    for pair in aligned:
        predicted.append(pair.links)
        yield pair


def _check_inputs(
    source: str, target: str | None, text: bool, aligner: Path | None, model: Path | None
) -> None:
    """Raise an error unless the arguments are two sentences, or readable files."""
    if text:
        if target is None:
            raise ArgumentError('--text needs two sentences: regard align --text "Ja." "Yes."')
        if aligner is None and model is None:
            raise ArgumentError(
                "--text needs an aligner, because one sentence pair is not enough to learn from. Add "
                "--aligner FILE (written by regard align --save) or --model FOLDER (written by regard train)."
            )
        return
    for name, path in (("SOURCE", source), ("TARGET", target)):
        if path is not None and not Path(path).exists() and len(path.split()) > 1:
            raise ArgumentError(f"The file {path!r} does not exist. To align two sentences, add --text.")
        if path is not None:
            check_input(Path(path), name)
    if source == target == "-":
        raise ArgumentError(
            "SOURCE and TARGET are both -; pass pairs (source⇥target) on stdin, and omit TARGET."
        )


def _check_options(
    styles: dict[str, bool], threshold: float | None, gold: Path | None, index_base: int | None
) -> None:
    """Raise an error if options contradict each other, such as two output formats (`styles`)."""
    chosen = [name for name, value in styles.items() if value]
    if len(chosen) > 1:
        raise exclusive(*chosen)
    if gold is not None and chosen:
        raise ArgumentError(f"--gold prints the error rate; remove it, or remove {chosen[0]}.")
    with naming(threshold="--threshold"):
        check_threshold(threshold)
    if index_base is not None and gold is None:
        raise ArgumentError(f"--index-base {index_base} requires a gold file; add --gold FILE.")
    if gold is not None:
        check_input(gold, "--gold")


def _check_aligner(
    lexical: dict[str, Any],
    attention: dict[str, Any],
    model: Path | None,
    symmetrize: str | None,
    threshold: float | None,
) -> None:
    """Raise an error if options for the lexical aligner and for a translation model contradict each other."""
    combined = model is not None and None not in (lexical["--aligner"], attention["--reverse-model"])
    wrong = attention if model is None else {"--save": lexical["--save"]} if combined else lexical
    for name, value in wrong.items():
        if value is not None:
            raise ArgumentError(
                f"{name} applies to the attention of a translation model; add --model FOLDER, or remove it."
                if model is None
                else "--aligner is combined with two models; add --reverse-model FOLDER, or remove --aligner "
                "or --model."
                if name == "--aligner"
                else f"{name} applies to the lexical aligner; remove it, or remove --model."
            )
    if lexical["--save"] is not None and lexical["--aligner"] is not None:
        raise exclusive("--save", "--aligner")
    if lexical["--aligner"] is not None:
        check_input(lexical["--aligner"], "--aligner")
    for folder in filter(None, (model, attention["--reverse-model"])):
        check_model(folder)
    if symmetrize is not None and model is not None and attention["--reverse-model"] is None:
        raise ArgumentError(f"--symmetrize {symmetrize} needs a second model: --reverse-model FOLDER.")
    if symmetrize is not None and threshold is not None and (model is None or combined):
        raise exclusive("--symmetrize", "--threshold")


def _parse_head(layer: int | None, heads: str | None, shift: str | None) -> dict[str, Any]:
    """Return the options that override the model's alignment head; --layer alone averages all heads."""
    overrides: dict[str, Any] = {} if shift is None else {"shift": shift}
    if layer is not None:
        overrides |= {"layer": layer, "heads": None}
    if heads == "all":
        overrides["heads"] = None
    elif heads is not None:
        numbers = heads.replace(",", " ").split()
        if not numbers or not all(re.fullmatch(r"-?[0-9]{1,9}", number) for number in numbers):
            raise ArgumentError(
                f"--heads is {shorten(heads)!r}; pass numbers separated by commas, such as 0,2 (-1 is the "
                "last head), or all."
            )
        overrides["heads"] = tuple(map(int, numbers))
    return overrides


def _read_gold(path: Path, index_base: int | None, pairs: Sequence[Pair]) -> "list[GoldAlignment]":
    """Read the gold links for all pairs; raise an error if they do not match the pairs."""
    from regard.translation.alignment.aer import read_gold

    base = index_base or 0
    with naming(index_base="--index-base"):
        gold = read_gold(path, base)
    if index_base is None:
        _check_index_base(path, gold)
    if len(gold) != len(pairs):
        raise ArgumentError(
            f"{str(path)!r} has {pluralize(len(gold), 'line')}, but the corpus has "
            f"{pluralize(len(pairs), 'sentence pair')}; the file needs one line per pair, empty if the pair "
            "has no links."
        )
    for line, ((source, target), links) in enumerate(zip(pairs, gold, strict=True), start=1):
        lengths = len(source.split()), len(target.split())
        for link in links.sure | links.possible:
            if link[0] >= lengths[0] or link[1] >= lengths[1]:
                hint = "" if base else " If the file counts words from 1, use --index-base 1."
                raise ArgumentError(
                    f"{str(path)!r}, line {line}: link {link[0] + base}-{link[1] + base} is out of range; "
                    f"the pair has {lengths[0]} source and {lengths[1]} target words, separated by "
                    f"whitespace.{hint}"
                )
    return gold


def _check_index_base(path: Path, gold: "Sequence[GoldAlignment]") -> None:
    """Raise an error if the file seems to count from 1; otherwise, a high error rate is the only sign."""
    links = [link for pair in gold for link in pair.sure | pair.possible]
    if len(gold) >= _MIN_PAIRS and links and all(0 not in link for link in links):
        raise ArgumentError(
            f"{str(path)!r} never links word 0 in {len(gold):,} pairs, so it seems to count from 1. Use "
            "--index-base 1, or --index-base 0 if it counts from 0."
        )
