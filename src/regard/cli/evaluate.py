"""`regard evaluate`."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from regard._util.files import short_names
from regard._util.text import pluralize, printable
from regard.cli.shared import (
    check_distinct,
    check_input,
    check_model,
    check_output,
    check_picture,
    console,
    load,
    naming,
    open_output,
    parse_languages,
    print_table,
)
from regard.errors import ArgumentError
from regard.translation.data.formats import read_lines, read_pairs
from regard.translation.decoding.strategies import Beam, check_batch_size
from regard.translation.model_folder import is_pretrained

if TYPE_CHECKING:
    from regard.translation.evaluation import Scores

_decoding = partial(typer.Option, rich_help_panel="Decoding")
_LANGUAGES = "en-de"  # default for the embedded corpus
_report = partial(typer.Option, rich_help_panel="Report")


class Evaluation(NamedTuple):
    """Translations of one model with scores and timing; `seconds` is None for existing translations."""

    name: str
    translations: list[str]
    scores: "Scores"
    tokens: int = 0
    seconds: float | None = None

    def speeds(self) -> list[float | None]:
        """Return sentences and target tokens per second."""
        if self.seconds is None:
            return [None, None]
        return [count / max(self.seconds, 1e-9) for count in (len(self.translations), self.tokens)]


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Source sentences. Without REFERENCE: sentence pairs (.tsv, .csv, .jsonl, .tmx, .src-tgt, "
            '- for stdin) or the name of a built-in test set: "embedded" or "embedded-longer" (adds '
            "sentences longer than those used in training). Files may be gzipped.",
        ),
    ],
    reference: Annotated[
        str | None, typer.Argument(metavar="REFERENCE", help="Reference translations, line by line.")
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="FOLDER",
            help="Folder written by regard train, or in Hugging Face format. Repeat to compare models.",
        ),
    ] = None,
    translations: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text file with existing translations to score. Repeatable."),
    ] = None,
    beam: Annotated[int, _decoding(help="Beam size; 1 is greedy decoding.")] = Beam.size,
    batch: Annotated[int, _decoding(help="Batch size in sentences.")] = 64,
    languages: Annotated[
        str | None,
        typer.Option(
            metavar="FROM-TO",
            help="Languages of the embedded corpus, or of multilingual models.",
            show_default=f"{_LANGUAGES} for the embedded corpus",
        ),
    ] = None,
    tokenize: Annotated[
        str,
        _report(metavar="NAME", help="sacreBLEU tokenizer: 13a, intl, zh, ja-mecab, ko-mecab, char or none."),
    ] = "13a",
    lowercase: Annotated[
        bool, _report("--lowercase", help="Ignore case in BLEU, chrF and exact match.")
    ] = False,
    lengths: Annotated[bool, _report("--by-length", help="Also print scores by sentence length.")] = False,
    picture: Annotated[
        Path | None,
        _report(metavar="FILE", help="Also save a plot of BLEU by sentence length (.png, .svg or .pdf)."),
    ] = None,
    output: Annotated[
        Path | None,
        _report(
            "--output", "-o", metavar="FILE", help="Also write the translations to a file, line by line."
        ),
    ] = None,
    as_json: Annotated[bool, _report("--json", help="Print all results as JSON.")] = False,
) -> None:
    """Translate a test set and score the translations: BLEU, chrF, exact match and speed.

    Examples:
    regard evaluate -m de-en test.de test.en
    regard evaluate -m small -m large test.de test.en --by-length
    regard evaluate --translations test.out test.de test.en
    """
    folders, files = model or [], translations or []
    names = short_names([*folders, *files])
    _check_options(folders, files, output, picture)
    with naming(size="--beam", batch_size="--batch"):
        strategy = Beam(beam)
        check_batch_size(batch)
    _check_corpus(source, reference, languages or _LANGUAGES)
    if not _is_built_in(source, reference):
        check_distinct({"SOURCE": source, "REFERENCE": reference}, {"--output": output, "--picture": picture})
    pairs = _pairs(source, reference, languages or _LANGUAGES)
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    existing = [list(read_lines(file)) for file in files]
    _check_lines(files, existing, len(references))
    from regard.translation.evaluation import check_tokenizer
    from regard.translation.evaluation import evaluate as score

    check_tokenizer(tokenize)
    options: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase}
    if lengths or picture is not None:
        options["sources"] = sources
    evaluations = []
    for folder, name in zip(folders, names, strict=False):
        chosen = languages if is_pretrained(folder) else None
        outputs, tokens, seconds = _translate(folder, name, sources, strategy, batch, chosen)
        scores = score(outputs, references, **options)
        evaluations.append(Evaluation(name, outputs, scores, tokens, seconds))
    for outputs, name in zip(existing, names[len(folders) :], strict=True):
        evaluations.append(Evaluation(name, outputs, score(outputs, references, **options)))
    if output is not None:
        with open_output(output) as file:
            file.writelines(f"{line}\n" for line in evaluations[0].translations)
    if picture is not None:
        from regard.plot.curves import draw_by_length

        draw_by_length({each.name: each.scores.by_length for each in evaluations}, picture)
    _print(evaluations, as_json)


def _check_options(
    folders: Sequence[Path], files: Sequence[Path], output: Path | None, picture: Path | None
) -> None:
    """Raise an error for invalid options, before any model is loaded."""
    if not folders and not files:
        raise ArgumentError(
            "evaluate needs a model (--model FOLDER) or existing translations (--translations FILE)."
        )
    for folder in folders:
        check_model(folder)
    for file in files:
        check_input(file, "--translations")
    if output is not None and (len(folders) != 1 or files):
        raise ArgumentError(
            f"--output writes the translations of a single model; got {len(folders)} --model and "
            f"{len(files)} --translations. Evaluate one model at a time."
        )
    check_output(output)
    if picture is not None:
        check_picture(picture, "--picture")


def _check_corpus(source: str, reference: str | None, languages: str) -> None:
    """Raise an error unless the files are readable or, for a built-in test set, the languages are valid."""
    if _is_built_in(source, reference):
        parse_languages(languages)
        return
    check_input(Path(source), "SOURCE")
    if reference is not None:
        check_input(Path(reference), "REFERENCE")


def _is_built_in(source: str, reference: str | None) -> bool:
    """Return whether the arguments name a built-in test set."""
    return source in ("embedded", "embedded-longer") and reference is None and not Path(source).exists()


def _pairs(source: str, reference: str | None, languages: str) -> Sequence[tuple[str, str]]:
    if _is_built_in(source, reference):
        from regard.translation.data.builtin import embedded_corpus

        corpus = embedded_corpus(*parse_languages(languages))
        return corpus.test if source == "embedded" else [*corpus.test, *corpus.longer]
    pairs = list(read_pairs(source, reference))
    if not pairs:
        raise ArgumentError(f"{source!r} has no sentences; pass at least one pair.")
    return pairs


def _check_lines(files: Sequence[Path], contents: Sequence[Sequence[str]], expected: int) -> None:
    for file, lines in zip(files, contents, strict=True):
        if len(lines) != expected:
            raise ArgumentError(
                f"{str(file)!r} has {pluralize(len(lines), 'line')}, but the test set has "
                f"{pluralize(expected, 'sentence')}; the file needs one line per sentence."
            )


def _translate(
    folder: Path, name: str, sources: list[str], strategy: Beam, batch: int, languages: str | None = None
) -> tuple[list[str], int, float]:
    """Return the translations, the number of target tokens, and the time in seconds."""
    from rich.console import Console
    from rich.text import Text

    status = f"{printable(name)}: translating {pluralize(len(sources), 'sentence')} …"
    with Console(stderr=True).status(Text(status)):
        translator = load(folder, languages=languages)
        translator.translate(sources[:1], strategy=strategy, batch_size=batch)  # warmup
        start = time.perf_counter()
        translations = translator.translate(sources, strategy=strategy, batch_size=batch)
        seconds = time.perf_counter() - start
    return [each.text for each in translations], sum(len(each.tokens) for each in translations), seconds


def _print(evaluations: Sequence[Evaluation], as_json: bool) -> None:
    if as_json:
        results = {each.name: _to_dict(each) for each in evaluations}
        print(json.dumps(results, ensure_ascii=False, indent=2))
    elif len(evaluations) == 1:
        (evaluation,) = evaluations
        screen = console()
        screen.print(printable(evaluation.name), style="bold")
        scores, _, by_length = str(evaluation.scores).partition("\n\n")
        speed = "" if evaluation.seconds is None else f"\nspeed        {_speed(evaluation)}"
        screen.print("\n\n".join([scores + speed, *([by_length] if by_length else [])]))
    else:
        _print_comparison(evaluations)


def _to_dict(evaluation: Evaluation) -> dict[str, Any]:
    """Return JSON-serializable scores and speed."""
    scores = asdict(evaluation.scores)
    scores["by_length"] = [
        {**lengths._asdict(), "bleu": bleu, "sentences": sentences, "exact": exact}
        for lengths, bleu, sentences, exact in evaluation.scores.by_length
    ]
    sentences, tokens = evaluation.speeds()
    return {
        **scores,
        "seconds": evaluation.seconds,
        "sentences_per_second": sentences,
        "tokens_per_second": tokens,
    }


def _speed(evaluation: Evaluation) -> str:
    sentences, tokens = evaluation.speeds()
    return f"{sentences:6.1f} sentences/s, {tokens:,.0f} target tokens/s ({evaluation.seconds:.1f} s)"


def _print_comparison(evaluations: Sequence[Evaluation]) -> None:
    """Print one row per model; then, if requested, one row per length range."""
    header = ["", "BLEU", "lower case", "chrF", "exact match", "sentences/s", "tokens/s"]
    rows = []
    for evaluation in evaluations:
        scores = evaluation.scores
        speeds = ["" if speed is None else f"{speed:,.0f}" for speed in evaluation.speeds()]
        numbers = [f"{score:.2f}" for score in (scores.bleu, scores.lowercase_bleu, scores.chrf)]
        rows.append([printable(evaluation.name), *numbers, f"{100 * scores.exact:.2f} %", *speeds])
    print_table(rows, header, "l" + "r" * (len(header) - 1))
    first = evaluations[0].scores
    screen = console()
    screen.print(f"\nBLEU  {first.bleu_signature}\nchrF  {first.chrf_signature}", style="dim")
    if first.by_length:
        screen.print("\nBLEU by source length", style="bold")
        header = ["words", "sentences", *(printable(evaluation.name) for evaluation in evaluations)]
        columns = [evaluation.scores.by_length for evaluation in evaluations]
        print_table([_length_row(each) for each in zip(*columns, strict=True)], header, "r" * len(header))


def _length_row(buckets: Sequence[Any]) -> list[str]:
    first = buckets[0]
    return [str(first.lengths), f"{first.sentences:,}", *(f"{bucket.bleu:.2f}" for bucket in buckets)]
