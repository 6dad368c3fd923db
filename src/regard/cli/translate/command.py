"""`regard translate`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import Languages, ModelFolder, OutputFile
from regard.cli.translate.run import Options, run
from regard.translation.decoding.strategies import Beam
from regard.translation.text.documents import Format

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
    run(
        Options(
            model=model,
            sentences=sentences,
            file=file,
            output=output,
            languages=languages,
            format=format,
            column=column,
            terms=terms,
            matches=matches,
            beam=beam,
            n_best=n_best,
            sample=sample,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            batch=batch,
            dtype=dtype,
            scores=scores,
            alignment=alignment,
            as_json=as_json,
        )
    )
