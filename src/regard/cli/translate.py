"""`regard translate`."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from regard._util.text import printable
from regard.cli.shared import check_input, check_model, check_most, check_output, load, written_whole
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.translation.decoding.search import Strategy
    from regard.translation.training.distributed import World
    from regard.translation.translator import Translation, Translator

BEAM = 5
MOST, MOST_BATCH = 1000, 100_000  # far more than anybody needs
_SEARCH = "Search"
_SHOW = "What is printed"
_NOTES = 5  # that are shown
_GROUP = 16  # batches that are sorted by length together, of a file


class Show(NamedTuple):
    """What is printed of a translation, in columns between tabs or as JSON."""

    n_best: bool
    scores: bool
    alignment: bool
    json: bool

    def lines(self, number: int, found: "Translation") -> Iterator[str]:
        """The lines of a translation, whose source is the line `number`, counted from 1."""
        if self.json:
            yield json.dumps(self._described(found), ensure_ascii=False)
            return
        for one in [found, *found.alternatives]:
            yield "\t".join(
                [
                    *([str(number)] if self.n_best else []),
                    one.text,
                    *([f"{one.score:.4f}"] if self.scores else []),
                    *([one.alignment.pharaoh()] if self.alignment else []),
                ]
            )

    def _described(self, found: "Translation") -> dict[str, Any]:
        described: dict[str, Any] = {
            "source": found.source,
            "text": found.text,
            "score": found.score,
            "tokens": found.tokens,
        }
        if found.note:
            described["note"] = found.note
        if self.alignment:
            described["alignment"] = found.alignment.to_dict()
        if self.n_best:
            described["alternatives"] = [self._described(one) for one in found.alternatives]
        return described


def translate(
    model: Annotated[
        Path, typer.Option("--model", "-m", metavar="FOLDER", help="A folder that regard train wrote.")
    ],
    sentences: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SENTENCE",
            help="Sentences, each in quotes. Without any, and without --file, lines are read from stdin.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A text file with a sentence on each line, also gzipped; - is stdin."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to this file instead of printing; it appears when all is done.",
        ),
    ] = None,
    beam: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"How many translations to follow at a time; 1 is greedy and quickest. [default: {BEAM}]",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    n_best: Annotated[
        int,
        typer.Option(
            "--n-best",
            min=1,
            help="How many translations of each sentence to print.",
            rich_help_panel=_SEARCH,
        ),
    ] = 1,
    sample: Annotated[
        bool,
        typer.Option(
            "--sample", help="Draw translations by chance, without a beam.", rich_help_panel=_SEARCH
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="With --sample: below 1 for likelier ones, above 1 for bolder ones. [default: 1]",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="With --sample: draw each piece among the likeliest, which have this chance together. "
            "[default: 1]",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --sample: the same number, the same draws. [default: 0]",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="How many sentences to translate together.", rich_help_panel=_SEARCH)
    ] = 64,
    scores: Annotated[
        bool,
        typer.Option(
            "--scores",
            help="Also the score of each, after a tab: its log-probability per token.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    alignment: Annotated[
        bool,
        typer.Option(
            "--alignment",
            help="Also which word came from which, after a tab: 0-0 1-2, source-target, from 0.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="All that is known, a JSON object on each line; with --alignment, links and weights too.",
            rich_help_panel=_SHOW,
        ),
    ] = False,
) -> None:
    """Translate sentences, a file, or what comes in on stdin: a line for each, in order.

    With --n-best there are several lines for each sentence, which begin with its number. An empty line stays
    empty, and a very long one is translated in parts. Words that the model does not know are copied.

    Under torchrun --file is shared out, and the parts are put together in --output. The same command goes on
    where it was interrupted.
    """
    _check(sentences, file, output)
    check_model(model)
    check_sizes(beam, batch)
    check_most("--n-best", n_best, MOST)
    show = Show(n_best > 1, scores, alignment, as_json)
    how = _how(beam, n_best, sample, {"temperature": temperature, "top_p": top_p, "seed": seed})
    from regard.translation.training.distributed import join_world

    with join_world() as world:
        translator = load(model, device=world.device, aligning=alignment, quiet=world.rank > 0)
        work = Work(translator, how, batch, show)
        with _shown(output) as work.say:
            if world.size > 1 and file is not None and output is not None:
                _share_out(work, model, file, output, world)
            else:
                _write(work, sentences, file, output)
        work.tell()


def _write(work: "Work", sentences: list[str] | None, file: Path | None, output: Path | None) -> None:
    """All of it, in one process."""
    with nullcontext(sys.stdout) if output is None else written_whole(output) as to:
        if sentences:
            work.write(sentences, to)
        elif file is None or str(file) == "-":
            work.write_stream(_stdin(), to)
        else:
            work.write(_lines(file), to)


@contextmanager
def _shown(output: Path | None) -> Iterator[Callable[[str], None]]:
    """Something that shows how far it is on a terminal, unless one sees the translations themselves."""
    if output is None:
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("translating …") as status:
        yield status.update


def _share_out(work: "Work", model: Path, file: Path, output: Path, world: "World") -> None:
    """The part of this process; the first one puts all together."""
    from regard.cli.sharing import Shards, digest
    from regard.translation.training.checkpoint import MODEL

    key = digest(file, model / MODEL, work.options, work.show)
    shards = Shards.of(output, key, sum(1 for _ in _lines(file)), world.size)
    shards.folder.mkdir(exist_ok=True)
    for number, part in shards.parts(_lines(file), shards.missing(world.rank, world.size)):
        work.number = number * shards.lines
        with written_whole(shards.path(number)) as to:
            work.write(part, to)
    world.wait()
    if world.rank == 0:
        shards.join(output)


class Work:
    """Translates lines, writes them, and says in the end what was out of the ordinary."""

    def __init__(self, translator: "Translator", how: "Strategy", batch: int, show: Show) -> None:
        self.translator, self.show = translator, show
        self.options: dict[str, Any] = {"how": how, "batch": batch, "alignment": show.alignment}
        self.notes: list[str] = []  # the first ones
        self.noted = self.number = 0  # how many have a note; the number of the last line
        self.say: Callable[[str], None] = lambda text: None

    def write(self, lines: Iterable[str], to: IO[str]) -> None:
        """Those of a file, in large groups, so that sentences of like lengths are translated together."""
        lines = iter(lines)
        while group := list(islice(lines, self.options["batch"] * _GROUP)):
            self._write(self.translator.translate(group, **self.options), to)
            self.say(f"line {self.number:,} is translated …")

    def write_stream(self, lines: Iterable[str], to: IO[str]) -> None:
        """Those that come in by and by, each as soon as it is there."""
        self._write(self.translator.stream(lines, **self.options), to)

    def _write(self, translations: Iterable["Translation"], to: IO[str]) -> None:
        for found in translations:
            self.number += 1
            for line in self.show.lines(self.number, found):
                to.write(f"{line}\n")
            to.flush()
            if found.note:
                self.noted += 1
                if self.noted <= _NOTES:
                    self.notes.append(f"line {self.number:,}: {found.note}.")

    def tell(self) -> None:
        """On stderr, so that it does not get among the translations."""
        for note in self.notes:
            print(f"regard: {printable(note)}", file=sys.stderr)
        if self.noted > _NOTES:
            more = self.noted - _NOTES
            print(f"regard: and {more:,} more lines with notes, which --json shows.", file=sys.stderr)


def check_sizes(beam: int | None, batch: int) -> None:
    """Before anything is loaded: what memory may suffice for."""
    check_most("--beam", beam, MOST)
    check_most("--batch", batch, MOST_BATCH)


def _check(sentences: list[str] | None, file: Path | None, output: Path | None) -> None:
    """Before anything is loaded."""
    if sentences and file is not None:
        raise ArgumentError(f"translate got --file {str(file)!r} and sentences as well; give one of the two.")
    if os.environ.get("WORLD_SIZE", "1") != "1" and (file is None or not file.is_file() or output is None):
        raise ArgumentError(
            "under torchrun translate shares out a file; give --file and --output, or start one process."
        )
    if not sentences:
        check_input(file or Path("-"))
    elif len(sentences) == 1 and len(sentences[0]) < 256 and Path(sentences[0]).is_file():
        shown = printable(sentences[0])
        print(f"regard: {shown!r} is a file; what is in it is translated by --file {shown}", file=sys.stderr)
    if output is not None:
        check_output(output)


def _how(beam: int | None, n_best: int, sample: bool, drawing: dict[str, Any]) -> "Strategy":
    """How to search, of options that fit together."""
    given = {name: value for name, value in drawing.items() if value is not None}
    if not sample and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ArgumentError(f"{names} is for drawing by chance; add --sample, or leave it away.")
    _check_drawing(**drawing)
    if sample and beam is not None:
        raise ArgumentError(f"--beam {beam} and --sample are two ways to search; give one of them.")
    if beam is not None and n_best > beam:
        raise ArgumentError(
            f"--n-best is {n_best} and --beam {beam}; no more come out than are followed: --beam {n_best}."
        )
    from regard.translation.decoding.search import Beam, Sample

    if sample:
        return Sample(best=n_best, **given)
    return Beam(beam or max(BEAM, n_best), best=n_best)


def _check_drawing(temperature: float | None, top_p: float | None, seed: int | None) -> None:
    """Numbers that can be meant; `seed` may be any."""
    if temperature is not None and not 1e-6 <= temperature <= 1e6:
        raise ArgumentError(
            f"--temperature is {temperature:g}; give one from 1e-6 to 1e6, 1 for the model's own chances. "
            "For the likeliest leave out --sample."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentError(
            f"--top-p is {top_p:g}; it must be above 0 and at most 1, which is for any piece."
        )


def _lines(file: Path) -> Iterator[str]:
    from regard.translation.data.formats import read_lines

    return read_lines(file)


def _stdin() -> Iterator[str]:
    from regard.translation.streaming import read_stdin

    if sys.stdin.isatty():
        print("regard: type a sentence and Enter; Ctrl-D ends.", file=sys.stderr)
    return read_stdin()
