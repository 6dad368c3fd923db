"""`regard translate`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from regard._util.checks import check_int
from regard._util.text import printable
from regard.cli.shared import (
    Languages,
    ModelFolder,
    OutputFile,
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

_decoding = partial(typer.Option, rich_help_panel="Decoding")
_format = partial(typer.Option, rich_help_panel="Output format")


def translate(
    model: ModelFolder,
    sentences: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SENTENCE",
            help="Sentences, each in quotes. If omitted, --file or stdin is read. A single - is stdin.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to translate; - for stdin. With --format lines, it may be gzipped."
        ),
    ] = None,
    output: OutputFile = None,
    languages: Languages = None,
    format: Annotated[
        Format | None,
        typer.Option(
            help="Format of the file: lines (one sentence per line), text (paragraphs), html or tsv. "
            "Tags, blank lines and other columns are kept.",
            show_default="from the file extension, otherwise lines",
        ),
    ] = None,
    column: Annotated[
        int | None,
        typer.Option(help="Column of a TSV file to translate, counted from 1.", show_default="1"),
    ] = None,
    terms: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TSV file with a source term and a target term per line. Where the source term occurs, the "
            "translation contains the target term.",
        ),
    ] = None,
    matches: Annotated[
        int,
        typer.Option(
            help="Also print the N most similar training pairs, one per line, in three tab-separated "
            "columns: the similarity (such as # 87%), the source and the target."
        ),
    ] = 0,
    beam: Annotated[
        int | None,
        _decoding(help="Beam size; 1 is greedy decoding, which is fastest.", show_default=str(Beam.size)),
    ] = None,
    n_best: Annotated[int, _decoding("--n-best", help="Number of translations per sentence.")] = 1,
    sample: Annotated[bool, _decoding("--sample", help="Use sampling instead of beam search.")] = False,
    temperature: Annotated[float | None, _decoding(help="Sampling temperature.", show_default="1")] = None,
    top_p: Annotated[
        float | None,
        _decoding(
            "--top-p",
            help="Nucleus sampling: total probability of the tokens to sample from.",
            show_default="1",
        ),
    ] = None,
    seed: Annotated[int | None, _decoding(help="Random seed for --sample.", show_default="0")] = None,
    batch: Annotated[int, _decoding(help="Batch size in sentences.")] = 64,
    dtype: Annotated[
        str | None,
        _decoding(
            metavar="NAME",
            help="Precision: float32, bfloat16, or int8, which is fastest on a CPU.",
            show_default="as trained",
        ),
    ] = None,
    scores: Annotated[
        bool,
        _format("--scores", help="Append the log probability per token, after a tab."),
    ] = False,
    alignment: Annotated[
        bool,
        _format(
            "--alignment",
            help="Append the word alignment, after a tab: source-target word indices, e.g. 0-0 1-2.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        _format(
            "--json",
            help="Print one JSON object per sentence; with --alignment, it includes links and weights.",
        ),
    ] = False,
) -> None:
    """Translate sentences, a file or stdin, line by line.

    With --n-best, each output line starts with the number of its input line. Empty lines stay empty. Lines
    with more sentences than a typical training line are split and translated in parts. Numbers, URLs, tags,
    placeholders, emoji and unknown words are copied. Notes about unusual lines are printed to stderr.

    Under torchrun, the lines of --file are divided among the processes. To continue after an
    interruption, run the same command again.

    Examples:
    regard translate -m de-en "Zwei Hunde spielen."
    regard translate -m de-en --file test.de -o test.out
    regard translate -m de-en "Zwei Hunde." --n-best 3 --scores --alignment
    regard translate -m m2m100_418M --languages de-en "Zwei Hunde."
    regard translate -m de-en --file page.html -o page.en.html --terms terms.tsv
    """
    if sentences == ["-"] and file is None:
        sentences, file = None, Path("-")
    _check_inputs(sentences, file, output)
    document = _document_format(
        format, column, file, n_best > 1 or scores or alignment or as_json or matches > 0
    )
    _check_terms(terms, matches)
    check_distinct({"--file": file, "--terms": terms}, {"--output": output})
    check_model(model)
    with naming(batch_size="--batch"):
        check_batch_size(batch)
    output_format = OutputFormat(n_best > 1, scores, alignment, as_json, matches)
    strategy = _strategy(beam, n_best, sample, {"temperature": temperature, "top_p": top_p, "seed": seed})
    with naming(dtype="--dtype"):
        precision = None if dtype is None else check_precision(dtype)
    from regard.models.layers.allocation import keep_memory

    keep_memory()
    with _join_world() as world:
        translator = load(
            model,
            device=world.device,
            dtype=precision,
            aligning=alignment,
            quiet=world.rank > 0,
            languages=languages,
        )
        writer = Writer(translator, strategy, batch, output_format)
        if terms is not None:
            from regard.translation.text.terms import Terms

            writer.options["terms"] = Terms.load(terms)
        with _progress(output) as writer.report:
            if document is not None and file is not None:
                with nullcontext(sys.stdout) if output is None else open_output(output, newline="") as to:
                    writer.write_document(read(file), document, column or 1, to)
            elif world.size > 1 and file is not None and output is not None:
                _write_shards(writer, model, file, output, world)
            else:
                _write(writer, sentences, file, output)
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
    with nullcontext(sys.stdout) if output is None else open_output(output) as to:
        if sentences:
            writer.write(sentences, to)
        elif file is None or str(file) == "-":
            writer.write_stream(_stdin(), to)
        else:
            writer.write(read_lines(file), to)


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
