"""`regard align`."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard._util.text import pluralize, shorten
from regard.cli.shared import (
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
from regard.translation.alignment.output import (
    AlignedPair,
    Style,
    batch_pairs,
    write_aligned,
    write_aligned_tmx,
)
from regard.translation.data.formats import Format, read_pairs
from regard.translation.model_folder import is_pretrained

if TYPE_CHECKING:
    from regard.translation.alignment.aer import GoldAlignment
    from regard.translation.alignment.cross_attention import AlignmentHead
    from regard.translation.alignment.lexical_aligner import LexicalAligner
    from regard.translation.alignment.links import Links
    from regard.translation.translator import Translator

Pair = tuple[str, str]

_lexical = partial(typer.Option, rich_help_panel="Lexical aligner (default)")
_both = partial(typer.Option, rich_help_panel="Both directions")
_gold = partial(typer.Option, rich_help_panel="Evaluation")
_head = partial(typer.Option, rich_help_panel="Translation model, instead of the lexical aligner")
_input = partial(typer.Option, rich_help_panel="Input format")
_format = partial(typer.Option, rich_help_panel="Output format")
_BATCH_PAIRS = 512
_LEXICAL_BATCH_PAIRS = 10_000
_BATCH_CELLS = 4_000_000  # source words × target words
_MIN_PAIRS = 10  # minimum to guess the index base of a gold file
_FEW_PAIRS = 500  # with fewer, the lexical aligner finds little


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
            help="Treat SOURCE and TARGET as sentences (in quotes), not files; with --aligner or --model.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Output file, written only on success. A .tmx file also contains the sentences.",
            show_default="stdout",
        ),
    ] = None,
    save: Annotated[
        Path | None, _lexical(metavar="FILE", help="Save the aligner, to align new text with --aligner.")
    ] = None,
    aligner: Annotated[
        Path | None,
        _lexical(metavar="FILE", help="Use a saved aligner instead of learning one from SOURCE and TARGET."),
    ] = None,
    symmetrize: Annotated[
        SymmetrizationMethod | None,
        _both(
            metavar="METHOD",
            help="How to combine both directions: intersection (precise), union (complete), or in between "
            "grow-diag or grow-diag-final-and.",
            show_default="grow-diag-final-and",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        _both(
            help="Print every link with at least this score, such as 0.5, instead of combining the best "
            "links of both directions.",
            show_default="off",
        ),
    ] = None,
    format: Annotated[
        Format | None,
        _input(
            help="Format of one file of sentence pairs; moses is source ||| target.",
            show_default="from the file name",
        ),
    ] = None,
    languages: Annotated[
        str | None,
        _input(
            metavar="FROM-TO",
            help="Languages to read from a .tmx file and to write into one, or of a multilingual --model, "
            "such as de-en.",
            show_default="the only two",
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
            help="File with the gold links of each pair: 0-1 is a sure link, 0p1 a possible one. Prints the "
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
) -> None:
    """Align the words of existing translations.

    Learns a lexical aligner from the sentence pairs and aligns them; no model is needed. Prints one line of
    links per pair. For example, 0-0 1-2 links source word 0 to target word 0, and source word 1 to target
    word 2. Words are separated by whitespace and counted from 0.

    Examples:
    regard align corpus.de corpus.en -o corpus.align
    regard align corpus.de corpus.en --save de-en.aligner --symmetrize intersection
    regard align new.de new.en --aligner de-en.aligner --scores
    regard align memory.tmx --languages de-en -o aligned.tmx
    regard align corpus.de corpus.en --gold corpus.gold --index-base 1
    regard align test.de test.en --model de-en --reverse-model en-de
    """
    lexical_options = {"--save": save, "--aligner": aligner, "--scores": scores or None}
    model_options = {"--reverse-model": reverse_model, "--layer": layer, "--heads": heads, "--shift": shift}
    _check_inputs(source, target, text, aligner, model)
    _check_options({"--json": as_json, "--draw": draw, "--scores": scores}, threshold, gold, index_base)
    if reverse_model is not None and (as_json or draw):
        raise ArgumentError("--reverse-model applies only to links; remove it, or remove --json or --draw.")
    _check_aligner(lexical_options, model_options, model, symmetrize, threshold)
    check_output(output)
    check_output(save, "--save")
    is_tmx = output is not None and output.suffix == ".tmx"
    if is_tmx and (as_json or draw or scores):
        raise ArgumentError(f"--output {str(output)!r} is TMX; remove --json, --draw and --scores.")
    overrides = _parse_head(layer, heads, shift)
    tags = parse_languages(languages) if languages else None
    pairs: Iterable[Pair] = (
        [(source, target or "")] if text else read_pairs(source, target, format=format, languages=tags)
    )
    gold_links = None
    if gold is not None:
        pairs = list(pairs)
        gold_links = _read_gold(gold, index_base, pairs)
    aligned = (
        _align_with_attention(pairs, model, reverse_model, languages, overrides, threshold, symmetrize)
        if model is not None
        else _align_lexically(pairs, aligner, save, threshold, symmetrize or "grow-diag-final-and")
    )
    style: Style = "json" if as_json else "draw" if draw else "scores" if scores else "links"
    predicted: list[Links] = []
    aligned = _collect(aligned, predicted) if gold_links is not None else aligned
    if is_tmx and output is not None:
        write_aligned_tmx(output, aligned, tags)
    else:
        # with --gold, only the error rate is printed
        to_stdout = sys.stdout if gold is None else StringIO()
        with nullcontext(to_stdout) if output is None else open_output(output) as file:
            write_aligned(file, aligned, style)
    if gold_links is not None:
        from regard.translation.alignment.aer import error_rate

        print(error_rate(predicted, gold_links))


def _collect(aligned: "Iterable[AlignedPair]", predicted: "list[Links]") -> "Iterator[AlignedPair]":
    """Yield the pairs, and append their links to `predicted`."""
    for pair in aligned:
        predicted.append(pair.links)
        yield pair


def _align_lexically(
    pairs: Iterable[Pair],
    path: Path | None,
    save: Path | None,
    threshold: float | None,
    method: SymmetrizationMethod,
) -> "Iterator[AlignedPair]":
    """Align with a saved aligner, or learn one from the pairs and save it if requested."""
    from regard.translation.alignment.lexical_aligner import LexicalAligner

    if path is not None:
        aligner = LexicalAligner.load(path)
    else:
        pairs = list(pairs)
        with _show_progress("Learning") as progress:
            aligner = LexicalAligner.learn(pairs, progress=progress)
        if len(pairs) < _FEW_PAIRS:
            print(
                f"regard: the aligner learned from only {pluralize(len(pairs), 'sentence pair')}; more text "
                "gives better links.",
                file=sys.stderr,
            )
        if save is not None:
            aligner.save(save)
    checked = path is None
    for batch in batch_pairs(pairs, _LEXICAL_BATCH_PAIRS, _BATCH_CELLS):
        if not checked:
            _check_sides(aligner, batch)
            checked = True
        for pair, alignment in zip(batch, aligner.align(batch), strict=True):
            yield AlignedPair(pair, alignment.links(method, threshold), alignment)


def _check_sides(aligner: "LexicalAligner", pairs: Sequence[Pair]) -> None:
    """Raise if source and target seem to be swapped."""
    sides = list(zip(*pairs, strict=True))
    known = [[_fraction(*aligner.count_known(texts, side)) for side in (0, 1)] for texts in sides]
    if known[0][1] > 2 * known[0][0] and known[1][0] > 2 * known[1][1]:
        raise ArgumentError(
            f"The aligner knows {known[0][0]:.0%} of the words in SOURCE as source words, but "
            f"{known[0][1]:.0%} as target words. SOURCE and TARGET seem to be swapped; pass them in the "
            "other order."
        )


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@contextmanager
def _show_progress(label: str) -> "Iterator[Callable[[int, int], None]]":
    """Show a progress bar on the terminal."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _align_with_attention(
    pairs: Iterable[Pair],
    model: Path,
    reverse_model: Path | None,
    languages: str | None,
    overrides: dict[str, Any],
    threshold: float | None,
    method: SymmetrizationMethod | None,
) -> "Iterator[AlignedPair]":
    """Align with the cross-attention of a translation model, or of one for each direction."""
    needs_head = overrides.keys() != {"layer", "heads", "shift"}
    forward = load(model, aligning=needs_head, languages=languages if is_pretrained(model) else None)
    backward = None
    if reverse_model is not None:
        multilingual = languages is not None and is_pretrained(reverse_model)
        reverse = "-".join(reversed(parse_languages(languages or ""))) if multilingual else None
        backward = load(reverse_model, aligning=True, languages=reverse)
    forward.alignment_head = _alignment_head(forward, overrides)
    for batch in batch_pairs(pairs, _BATCH_PAIRS, _BATCH_CELLS):
        alignments = forward.align(batch)
        links = [alignment.links(threshold) for alignment in alignments]
        if backward is not None:
            links = _symmetrize(links, backward, batch, threshold, method)
        yield from map(AlignedPair, batch, links, alignments)


def _check_inputs(
    source: str, target: str | None, text: bool, aligner: Path | None, model: Path | None
) -> None:
    """Raise unless the arguments are two sentences, or readable files."""
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
    """Raise if options contradict each other. styles: options for what is printed."""
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
    """Raise if options of the lexical aligner and of a translation model are mixed."""
    for name, value in (attention if model is None else lexical).items():
        if value is not None:
            raise ArgumentError(
                f"{name} applies to the attention of a translation model; add --model FOLDER, or remove it."
                if model is None
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
    if symmetrize is not None and threshold is not None and model is None:
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
