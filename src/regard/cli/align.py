"""`regard align`."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard._util.text import shorten
from regard.cli.shared import check_input, check_model, check_output, load, written_whole
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.translation.alignment.alignment import Alignment
    from regard.translation.alignment.cross_attention import AlignmentHead
    from regard.translation.data.links import Links
    from regard.translation.translator import Translator

SymmetrizationMethod = Literal["intersection", "union", "grow-diag-final-and"]
Pair = tuple[str, str]

_BOTH = "Both directions"
_GOLD = "Compared with people"
_READ = "Which attention is read"
_SHOW = "What is written"
_GROUP = 512  # pairs that are aligned together
_CELLS = 4_000_000  # pairs of words, in a group
_TELLING = 10  # pairs in which a first word is linked somewhere


def align(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A text file with a sentence on each line; or, without TARGET, one with pairs: .tsv or "
            ".jsonl, or - for stdin. All may be gzipped.",
        ),
    ],
    model: Annotated[
        Path, typer.Option("--model", "-m", metavar="FOLDER", help="A folder that regard train wrote.")
    ],
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="A text file with their translations, line by line."),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="SOURCE and TARGET are two sentences in quotes, and no files.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to this file instead of printing; it appears when all is done.",
        ),
    ] = None,
    reverse_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A second model, from TARGET to SOURCE, whose links are joined with those of the first.",
            rich_help_panel=_BOTH,
        ),
    ] = None,
    symmetrize: Annotated[
        SymmetrizationMethod | None,
        typer.Option(
            metavar="HOW",
            help="How the links are joined: intersection (few, and sure), union (many), or in between "
            "grow-diag-final-and. [default: grow-diag-final-and]",
            rich_help_panel=_BOTH,
        ),
    ] = None,
    gold: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with the right links of each pair, 0-1 if sure and 0p1 if possible. Prints the "
            "alignment error rate, precision and recall instead of links.",
            rich_help_panel=_GOLD,
        ),
    ] = None,
    base: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1,
            help="Whether that file counts words from 0 or from 1. [default: 0]",
            rich_help_panel=_GOLD,
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="The decoder's layer, counted from 0; -1 is the last. By default the one that the training "
            "chose.",
            rich_help_panel=_READ,
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Its heads, counted from 0 (-1 is the last), of which the mean is taken; or all. By default "
            "those that the training chose, and all of another --layer.",
            rich_help_panel=_READ,
        ),
    ] = None,
    shift: Annotated[
        Literal["input", "output"] | None,
        typer.Option(
            help="A target word's weights are read when it comes out of the decoder (output) or, a step "
            "later, when it goes in (input). By default what the training chose.",
            rich_help_panel=_READ,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Every link of at least this weight, such as 0.2. By default each target word has one link, "
            "to the source word of its largest weight.",
            rich_help_panel=_SHOW,
        ),
    ] = None,
    soft: Annotated[
        bool,
        typer.Option(
            "--soft", help="All weights instead of links, a JSON object on each line.", rich_help_panel=_SHOW
        ),
    ] = False,
    draw: Annotated[
        bool,
        typer.Option("--draw", help="All weights, drawn in the terminal.", rich_help_panel=_SHOW),
    ] = False,
) -> None:
    """Find which word came from which in sentences that are translated already.

    For each pair a line of links, 0-0 1-2: source word 0 with target word 0, 1 with 2. Words stand between
    white space and are counted from 0. The model reads both sentences, and its attention to the source links
    their words; which layer and heads do that best was found in the training.
    """
    _check_input(source, target, text)
    _check_flags(soft or draw, soft and draw, threshold, reverse_model, symmetrize, gold, base)
    for folder in filter(None, (model, reverse_model)):
        check_model(folder)
    if output is not None:
        check_output(output)
    chosen = _chosen(layer, heads, shift)
    from regard.translation.alignment.aer import error_rate
    from regard.translation.data.links import to_pharaoh

    pairs: Iterable[Pair] = _pairs(source, target, text)
    true = None
    if gold is not None:
        pairs = list(pairs)
        true = _gold(gold, base, pairs)
    forward = load(model, aligning=chosen.keys() != {"layer", "heads", "shift"})
    backward = None if reverse_model is None else load(reverse_model, aligning=True)
    forward.choice = _choice(forward, chosen)
    links: list[Links] = []
    with _opened(output, quiet=gold is not None) as to:
        for group in _groups(pairs):
            read = forward.align(group)
            if soft or draw:
                _write_weights(read, to, draw)
                continue
            some = [one.links(threshold) for one in read]
            if backward is not None:
                some = _both(some, backward, group, threshold, symmetrize)
            links += some if true is not None else []
            to.writelines(f"{to_pharaoh(one)}\n" for one in some)
    if true is not None:
        print(error_rate(links, true))


def _check_input(source: str, target: str | None, text: bool) -> None:
    """Before anything is loaded: two sentences, or files that can be read."""
    if text:
        if target is None:
            raise ArgumentError('--text needs two sentences; give both: regard align --text "Ja." "Yes."')
        return
    for name, path in (("SOURCE", source), ("TARGET", target)):
        if path is not None and not Path(path).exists() and len(path.split()) > 1:
            raise ArgumentError(f"there is no file {path!r}; to align two sentences, add --text.")
        if path is not None:
            check_input(Path(path), name)
    if source == target == "-":
        raise ArgumentError("SOURCE and TARGET are both -; give pairs, source⇥target, and no TARGET.")


def _check_flags(
    weights: bool,
    twice: bool,
    threshold: float | None,
    reverse_model: Path | None,
    symmetrize: str | None,
    gold: Path | None,
    base: int | None,
) -> None:
    """Options that make sense together."""
    if twice:
        raise ArgumentError("--soft and --draw are two ways to show weights; give one of them.")
    if weights:
        wrong = {"--threshold": threshold, "--reverse-model": reverse_model, "--gold": gold}
        for name, value in wrong.items():
            if value is not None:
                raise ArgumentError(f"{name} is about links; leave it away, or --soft and --draw.")
    if symmetrize is not None and reverse_model is None:
        raise ArgumentError(
            f"--symmetrize {symmetrize} joins two directions; give the other one: --reverse-model FOLDER."
        )
    if threshold is not None and not 0 < threshold <= 1:
        raise ArgumentError(
            f"--threshold is {threshold:g}; weights are above 0 and at most 1: --threshold 0.2."
        )
    if base is not None and gold is None:
        raise ArgumentError(f"--base {base} says how a gold file counts; give it, too: --gold FILE.")
    if gold is not None:
        check_input(gold, "--gold")


def _chosen(layer: int | None, heads: str | None, shift: str | None) -> dict[str, Any]:
    """What was asked for of the attention that is read; heads of one layer say nothing about another."""
    chosen: dict[str, Any] = {} if shift is None else {"shift": shift}
    if layer is not None:
        chosen |= {"layer": layer, "heads": None}
    if heads == "all":
        chosen["heads"] = None
    elif heads is not None:
        numbers = heads.replace(",", " ").split()
        if not numbers or not all(re.fullmatch(r"-?[0-9]{1,9}", number) for number in numbers):
            raise ArgumentError(
                f"--heads is {shorten(heads)!r}; give numbers from 0 on, with commas between: 0,2; or -1 for "
                "the last; or all."
            )
        chosen["heads"] = tuple(map(int, numbers))
    return chosen


def _choice(translator: "Translator", chosen: dict[str, Any]) -> "AlignmentHead":
    """What is read: as it was asked for, with heads counted from 0."""
    from regard.translation.alignment.cross_attention import chosen as name_of
    from regard.translation.alignment.cross_attention import cross_attention_layers

    heads = chosen.get("heads")
    choice = replace(translator.choice, **{**chosen, "heads": None} if heads else chosen)
    if not heads:
        return choice
    number = cross_attention_layers(translator.model)[name_of(translator.model, choice)]
    if min(heads) < -number:
        raise ArgumentError(
            f"--heads has {min(heads)} and the attention has {number}; give 0 to {number - 1}, or -1 for the "
            "last."
        )
    return replace(choice, heads=tuple(head + number if head < 0 else head for head in heads))


def _pairs(source: str, target: str | None, text: bool) -> Iterable[Pair]:
    if text and target is not None:
        return [(source, target)]
    from regard.translation.data.formats import read_pairs

    return read_pairs(source, target)


def _gold(path: Path, base: int | None, pairs: Sequence[Pair]) -> "list[Gold]":
    """The right links of all pairs, between words that are there."""
    from regard.translation.alignment.aer import read_gold

    gold = read_gold(path, base or 0)
    if base is None:
        _check_base(path, gold)
    if len(gold) != len(pairs):
        raise ArgumentError(
            f"{str(path)!r} has links of {len(gold):,} pairs and there are {len(pairs):,}; give a line for "
            "each, an empty one where there are no links."
        )
    first = base or 0
    for line, ((source, target), one) in enumerate(zip(pairs, gold, strict=True), start=1):
        words = len(source.split()), len(target.split())
        for link in one.sure | one.possible:
            if link[0] >= words[0] or link[1] >= words[1]:
                counted = "" if first else " If its words are counted from 1, say --base 1."
                raise ArgumentError(
                    f"{str(path)!r}, line {line}, links word {link[0] + first} with {link[1] + first}, and "
                    f"the pair has {words[0]} and {words[1]} words, between white space.{counted}"
                )
    return gold


def _check_base(path: Path, gold: "Sequence[Gold]") -> None:
    """Words counted from 1 would be taken for others, and nothing but the error rate would tell."""
    links = [link for one in gold for link in one.sure | one.possible]
    if len(gold) >= _TELLING and links and all(0 not in link for link in links):
        raise ArgumentError(
            f"{str(path)!r} links no first word, of either side, in {len(gold):,} pairs, so it seems to "
            "count from 1; say --base 1, or --base 0 if it does not."
        )


def _groups(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Pairs that are aligned together: not too many, and of very long ones fewer, as weights take memory."""
    group: list[Pair] = []
    cells = 0
    for source, target in pairs:
        group.append((source, target))
        cells += len(source.split()) * len(target.split())
        if len(group) == _GROUP or cells > _CELLS:
            yield group
            group, cells = [], 0
    if group:
        yield group


@contextmanager
def _opened(output: Path | None, quiet: bool) -> Iterator[IO[str]]:
    """Where the links go: to a file, to stdout, or nowhere."""
    if output is not None:
        with written_whole(output) as to:
            yield to
    elif quiet:
        yield StringIO()
    else:
        yield sys.stdout


def _both(
    forward: "list[Links]",
    backward: "Translator",
    pairs: Sequence[Pair],
    threshold: float | None,
    how: SymmetrizationMethod | None,
) -> "list[Links]":
    """One set of links out of those of both directions."""
    from regard.translation.data.links import reverse_links, symmetrize

    read = backward.align([(target, source) for source, target in pairs])
    return [
        symmetrize(there, reverse_links(back.links(threshold)), how or "grow-diag-final-and")
        for there, back in zip(forward, read, strict=True)
    ]


def _write_weights(read: "Sequence[Alignment]", to: IO[str], draw: bool) -> None:
    if draw:
        from rich.console import Console

        from regard.plot.terminal import draw_alignment

        screen = Console(file=to, highlight=False)
        for one in read:
            draw_alignment(one, screen)
            screen.print()
        return
    for one in read:
        to.write(f"{json.dumps(one.to_dict(), ensure_ascii=False)}\n")
