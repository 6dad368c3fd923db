"""`regard align`."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard._util.text import pluralize, shorten
from regard.cli.shared import (
    Languages,
    ModelFolder,
    OutputFile,
    check_input,
    check_model,
    check_output,
    exclusive,
    index,
    load,
    naming,
    open_output,
    parse_languages,
)
from regard.errors import ArgumentError
from regard.translation.alignment.links import SymmetrizationMethod, check_threshold
from regard.translation.data.formats import read_pairs

if TYPE_CHECKING:
    from regard.translation.alignment.aer import GoldAlignment
    from regard.translation.alignment.alignment import Alignment
    from regard.translation.alignment.cross_attention import AlignmentHead
    from regard.translation.alignment.links import Links
    from regard.translation.translator import Translator

Pair = tuple[str, str]

_both = partial(typer.Option, rich_help_panel="Both directions")
_gold = partial(typer.Option, rich_help_panel="Evaluation")
_head = partial(typer.Option, rich_help_panel="Attention head")
_format = partial(typer.Option, rich_help_panel="Output format")
_BATCH_PAIRS = 512
_BATCH_CELLS = 4_000_000  # source words × target words
_MIN_PAIRS = 10  # minimum to guess the index base of a gold file


def align(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Source sentences. Without TARGET: sentence pairs (.tsv, .jsonl, - for stdin). Files may be "
            "gzipped.",
        ),
    ],
    model: ModelFolder,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Translations of SOURCE, line by line.")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Treat SOURCE and TARGET as sentences (in quotes), not files.")
    ] = False,
    output: OutputFile = None,
    languages: Languages = None,
    reverse_model: Annotated[
        Path | None,
        _both(
            metavar="FOLDER",
            help="Model for the other direction, TARGET to SOURCE; its links are combined with the first "
            "model's.",
        ),
    ] = None,
    symmetrize: Annotated[
        SymmetrizationMethod | None,
        _both(
            metavar="METHOD",
            help="How to combine both directions: intersection (precise), union (complete) or "
            "grow-diag-final-and (in between).",
            show_default="grow-diag-final-and",
        ),
    ] = None,
    gold: Annotated[
        Path | None,
        _gold(
            metavar="FILE",
            help="File with the gold links of each pair: 0-1 is a sure link, 0p1 a possible one. Prints the "
            "alignment error rate, precision and recall instead of links.",
        ),
    ] = None,
    index_base: Annotated[
        int | None,
        _gold(help="Index of the first word in the gold file: 0 or 1.", show_default="0"),
    ] = None,
    layer: Annotated[
        int | None,
        _head(help="Decoder layer, counted from 0; -1 is the last.", show_default="selected by training"),
    ] = None,
    heads: Annotated[
        str | None,
        _head(
            metavar="N,N",
            help="Heads to average, counted from 0 (-1 is the last), or all.",
            show_default="selected by training; with --layer, all",
        ),
    ] = None,
    shift: Annotated[
        Literal["input", "output"] | None,
        _head(
            help="Decoding step whose weights align a target word: the step that predicts it (output) or the "
            "next step, which reads it (input).",
            show_default="selected by training",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        _format(
            help="Print every link with at least this weight, such as 0.2.",
            show_default="one link per target word, to the source word with the largest weight",
        ),
    ] = None,
    as_json: Annotated[
        bool, _format("--json", help="Print one JSON object per sentence pair, with all weights.")
    ] = False,
    draw: Annotated[bool, _format("--draw", help="Draw all weights in the terminal.")] = False,
) -> None:
    """Align the words of existing translations.

    Prints one line of links per pair. For example, 0-0 1-2 links source word 0 to target word 0, and source
    word 1 to target word 2. Words are separated by whitespace and counted from 0. The links come from the
    model's cross-attention; training selects the layer and heads that align best.

    Examples:
    regard align -m de-en test.de test.en -o test.align
    regard align -m de-en --text "Zwei Hunde ." "Two dogs ." --draw
    regard align -m de-en --reverse-model en-de test.de test.en  # more accurate
    regard align -m de-en test.de test.en --gold test.gold
    """
    _check_inputs(source, target, text)
    _check_options(
        {"--json": as_json, "--draw": draw},
        {"--threshold": threshold, "--reverse-model": reverse_model, "--gold": gold},
        symmetrize,
        index_base,
    )
    for folder in filter(None, (model, reverse_model)):
        check_model(folder)
    check_output(output)
    overrides = _parse_head(layer, heads, shift)
    from regard.translation.alignment.aer import error_rate
    from regard.translation.alignment.links import to_pharaoh

    pairs: Iterable[Pair] = [(source, target or "")] if text else read_pairs(source, target)
    gold_links = None
    if gold is not None:
        pairs = list(pairs)
        gold_links = _read_gold(gold, index_base, pairs)
    needs_head = overrides.keys() != {"layer", "heads", "shift"}
    forward = load(model, aligning=needs_head, languages=languages)
    reverse = None if languages is None else "-".join(reversed(parse_languages(languages)))
    backward = None if reverse_model is None else load(reverse_model, aligning=True, languages=reverse)
    forward.alignment_head = _alignment_head(forward, overrides)
    predicted: list[Links] = []
    stdout = sys.stdout if gold is None else StringIO()  # with --gold, only the error rate is printed
    with nullcontext(stdout) if output is None else open_output(output) as to:
        for batch in _batches(pairs):
            alignments = forward.align(batch)
            if as_json or draw:
                _write_weights(alignments, to, draw)
                continue
            links = [alignment.links(threshold) for alignment in alignments]
            if backward is not None:
                links = _symmetrize(links, backward, batch, threshold, symmetrize)
            predicted += links if gold_links is not None else []
            to.writelines(f"{to_pharaoh(pair_links)}\n" for pair_links in links)
    if gold_links is not None:
        print(error_rate(predicted, gold_links))


def _check_inputs(source: str, target: str | None, text: bool) -> None:
    """Raise unless the arguments are two sentences, or readable files."""
    if text:
        if target is None:
            raise ArgumentError('--text needs two sentences: regard align --text "Ja." "Yes."')
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
    weights: dict[str, bool], links: dict[str, Any], symmetrize: str | None, index_base: int | None
) -> None:
    """Raise if options contradict each other. weights, links: options that print weights and links."""
    if all(weights.values()):
        raise exclusive(*weights)
    for name, value in links.items():
        if value is not None and any(weights.values()):
            raise ArgumentError(f"{name} applies only to links; remove it, or remove --json or --draw.")
    if symmetrize is not None and links["--reverse-model"] is None:
        raise ArgumentError(f"--symmetrize {symmetrize} needs a second model: --reverse-model FOLDER.")
    with naming(threshold="--threshold"):
        check_threshold(links["--threshold"])
    gold = links["--gold"]
    if index_base is not None and gold is None:
        raise ArgumentError(f"--index-base {index_base} requires a gold file; add --gold FILE.")
    if gold is not None:
        check_input(gold, "--gold")


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


def _alignment_head(translator: "Translator", overrides: dict[str, Any]) -> "AlignmentHead":
    """Apply the options to the model's alignment head; negative heads count from the last."""
    from regard.translation.alignment.cross_attention import cross_attention_layers, layer_name

    heads = overrides.get("heads")
    head = replace(translator.alignment_head, **{**overrides, "heads": None} if heads else overrides)
    if not heads:
        return head
    count = cross_attention_layers(translator.model)[layer_name(translator.model, head)]
    return replace(head, heads=tuple(index("--heads", number, count) for number in heads))


def _read_gold(path: Path, index_base: int | None, pairs: Sequence[Pair]) -> "list[GoldAlignment]":
    """Read the gold links of all pairs; raise if they do not match the pairs."""
    from regard.translation.alignment.aer import read_gold

    base = index_base or 0
    with naming(index_base="--index-base"):
        gold = read_gold(path, base)
    if index_base is None:
        _check_index_base(path, gold)
    if len(gold) != len(pairs):
        raise ArgumentError(
            f"{str(path)!r} has {pluralize(len(gold), 'line')}, but there are {len(pairs):,} sentence pairs; "
            "it needs one line per pair, empty if the pair has no links."
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
    """Raise if the file seems to count from 1. Without this check, only a high error rate would show it."""
    links = [link for pair in gold for link in pair.sure | pair.possible]
    if len(gold) >= _MIN_PAIRS and links and all(0 not in link for link in links):
        raise ArgumentError(
            f"{str(path)!r} never links word 0 in {len(gold):,} pairs, so it seems to count from 1. Use "
            "--index-base 1, or --index-base 0 if it counts from 0."
        )


def _batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Group pairs into batches; long sentences get smaller ones, because their weights need more memory."""
    batch: list[Pair] = []
    cells = 0
    for source, target in pairs:
        batch.append((source, target))
        cells += len(source.split()) * len(target.split())
        if len(batch) == _BATCH_PAIRS or cells > _BATCH_CELLS:
            yield batch
            batch, cells = [], 0
    if batch:
        yield batch


def _symmetrize(
    forward: "list[Links]",
    backward: "Translator",
    pairs: Sequence[Pair],
    threshold: float | None,
    method: SymmetrizationMethod | None,
) -> "list[Links]":
    from regard.translation.alignment.links import reverse_links, symmetrize

    alignments = backward.align([(target, source) for source, target in pairs])
    return [
        symmetrize(links, reverse_links(alignment.links(threshold)), method or "grow-diag-final-and")
        for links, alignment in zip(forward, alignments, strict=True)
    ]


def _write_weights(alignments: "Sequence[Alignment]", to: IO[str], draw: bool) -> None:
    if draw:
        from rich.console import Console

        from regard.plot.terminal import draw_alignment

        screen = Console(file=to, highlight=False)
        for alignment in alignments:
            draw_alignment(alignment, screen)
            screen.print()
        return
    for alignment in alignments:
        to.write(f"{json.dumps(alignment.to_dict(), ensure_ascii=False)}\n")
