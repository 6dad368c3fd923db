"""The command `regard translate`, after its arguments have been parsed. Imports neither typer nor torch."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from regard._util.checks import check_int
from regard._util.text import printable
from regard.cli.shared import (
    check_distinct,
    check_input,
    check_model,
    check_output,
    exclusive,
    load,
    naming,
    open_output,
    read,
)
from regard.cli.translate.writer import OutputFormat, Writer
from regard.errors import ArgumentError
from regard.models.configs import check_precision
from regard.translation.data.formats import read_lines
from regard.translation.decoding.strategies import Beam, Sample, Strategy, check_batch_size
from regard.translation.text.documents import Format, format_of

if TYPE_CHECKING:
    from regard.translation.training.distributed.world import World


@dataclass(frozen=True)
class Options:
    """The arguments of `regard translate`; `translate` in command.py describes them."""

    model: Path
    sentences: list[str] | None = None
    file: Path | None = None
    output: Path | None = None
    languages: str | None = None
    format: Format | None = None
    column: int | None = None
    terms: Path | None = None
    matches: int = 0
    beam: int | None = None
    n_best: int = 1
    sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    batch: int = 64
    dtype: str | None = None
    scores: bool = False
    alignment: bool = False
    as_json: bool = False


def run(options: Options) -> None:
    """Translate sentences, a file or stdin."""
    if options.sentences == ["-"] and options.file is None:
        options = replace(options, sentences=None, file=Path("-"))
    output_format = OutputFormat(
        options.n_best > 1, options.scores, options.alignment, options.as_json, options.matches
    )
    _check_inputs(options.sentences, options.file, options.output)
    document = _document_format(options.format, options.column, options.file, any(output_format))
    _check_terms(options.terms, options.matches)
    check_distinct({"--file": options.file, "--terms": options.terms}, {"--output": options.output})
    check_model(options.model)
    with naming(batch_size="--batch"):
        check_batch_size(options.batch)
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
    strategy = _strategy(options.beam, options.n_best, options.sample, sampling)
    with naming(dtype="--dtype"):
        precision = None if options.dtype is None else check_precision(options.dtype)
    if not options.sentences:  # sentences on the command line need little memory
        from regard.models.layers.allocation import keep_memory

        keep_memory()
    with _join_world() as world:
        translator = load(
            options.model,
            device=world.device,
            dtype=precision,
            aligning=options.alignment,
            quiet=world.rank > 0,
            languages=options.languages,
        )
        writer = Writer(translator, strategy, options.batch, output_format)
        if options.terms is not None:
            from regard.translation.text.terms import Terms

            writer.options["terms"] = Terms.load(options.terms)
        with _progress(options.output) as writer.report:
            if document is not None and options.file is not None:
                with _open(options.output, newline="") as to:
                    writer.write_document(read(options.file), document, options.column or 1, to)
            elif world.size > 1 and options.file is not None and options.output is not None:
                _write_shards(writer, options.model, options.file, options.output, world)
            else:
                _write(writer, options.sentences, options.file, options.output)
        writer.print_notes()


@contextmanager
def _join_world() -> Iterator["World | _Alone"]:
    """Join the processes started by torchrun; without it, skip the slow import of torch.distributed."""
    if "WORLD_SIZE" not in os.environ:
        yield _Alone()
        return
    from regard.translation.training.distributed.world import join_world

    with join_world() as world:
        yield world


class _Alone(NamedTuple):
    """A single process, with the interface of `World`."""

    rank: int = 0
    size: int = 1
    device: None = None

    def barrier(self) -> None:
        """Return immediately: there are no other processes."""


def _write(writer: Writer, sentences: list[str] | None, file: Path | None, output: Path | None) -> None:
    with _open(output) as to:
        if sentences:
            writer.write(sentences, to)
        elif file is None or str(file) == "-":
            writer.write_stream(_stdin(), to)
        else:
            writer.write(read_lines(file), to)


def _open(output: Path | None, newline: str = "\n") -> AbstractContextManager[IO[str]]:
    return nullcontext(sys.stdout) if output is None else open_output(output, newline=newline)


@contextmanager
def _progress(output: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress on a terminal, unless the translations are printed there."""
    if output is None:
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("translating …") as status:
        yield status.update


def _write_shards(writer: Writer, model: Path, file: Path, output: Path, world: "World | _Alone") -> None:
    """Translate this process's shards; the first process joins all of them."""
    from regard.cli.translate.shards import Shards, digest
    from regard.translation.model_folder import MODEL

    key = digest(file, model / MODEL, writer.options, writer.format)
    shards = Shards.of(output, key, sum(1 for _ in read_lines(file)), world.size)
    shards.folder.mkdir(exist_ok=True)
    for number, lines in shards.parts(read_lines(file), shards.missing(world.rank, world.size)):
        writer.number = number * shards.lines
        with open_output(shards.path(number)) as to:
            writer.write(lines, to)
    world.barrier()
    if world.rank == 0:
        shards.join(output)


def _check_inputs(sentences: list[str] | None, file: Path | None, output: Path | None) -> None:
    if sentences and file is not None:
        raise exclusive(f"--file {str(file)!r}", "sentences")
    if os.environ.get("WORLD_SIZE", "1") != "1" and (file is None or not file.is_file() or output is None):
        raise ArgumentError(
            "Under torchrun, translate needs --file and --output; pass both, or start one process."
        )
    if not sentences:
        check_input(file or Path("-"))
    elif len(sentences) == 1 and len(sentences[0]) < 256 and Path(sentences[0]).is_file():
        path = printable(sentences[0])
        print(f"regard: {path!r} is a file; to translate its lines, use --file {path}", file=sys.stderr)
    check_output(output)


def _document_format(
    format: Format | None, column: int | None, file: Path | None, has_columns: bool
) -> Format | None:
    """Return the format of a document; None to translate line by line."""
    chosen = format or ("lines" if file is None else format_of(file.name))
    if column is not None:
        if chosen != "tsv":
            raise ArgumentError(f"--column {column} requires --format tsv; add it, or remove --column.")
        with naming(column="--column"):
            check_int("translate got column", column, min=1)
    if chosen == "lines":
        return None
    if file is None:
        raise ArgumentError(f"--format {chosen} requires --file; pass a file, or - for stdin.")
    if has_columns:
        raise ArgumentError(
            f"The format {chosen} writes a document, without scores or alternatives; remove --n-best, "
            "--scores, --alignment, --matches and --json, or use --format lines."
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ArgumentError(
            f"--format {chosen} is not supported under torchrun; run the command without torchrun."
        )
    return chosen


def _check_terms(terms: Path | None, matches: int) -> None:
    if terms is not None:
        check_input(terms, "--terms")
    with naming(matches="--matches"):
        check_int("translate got matches", matches)


def _strategy(beam: int | None, n_best: int, sample: bool, sampling: dict[str, Any]) -> Strategy:
    """Create the decoding strategy; raise an error if the options contradict each other."""
    options = {name: value for name, value in sampling.items() if value is not None}
    if not sample and options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        verb = "requires" if len(options) == 1 else "require"
        raise ArgumentError(f"{names} {verb} --sample; add it, or remove {names}.")
    if sample and beam is not None:
        raise exclusive(f"--beam {beam}", "--sample")
    parameters = {name: f"--{name.replace('_', '-')}" for name in ("n_best", *sampling)}
    with naming(size="--beam", n_samples="--n-best", **parameters):
        if sample:
            return Sample(n_samples=n_best, **options)
        return Beam(max(Beam.size, n_best) if beam is None else beam, n_best=n_best)


def _stdin() -> Iterator[str]:
    from regard.translation.streaming import read_stdin

    if sys.stdin.isatty():
        print("regard: type a sentence and press Enter; Ctrl-D to quit.", file=sys.stderr)
    return read_stdin()
