"""`regard train`."""

import errno
import os
import shlex
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard._util.files import check_regular
from regard._util.text import printable, shorten
from regard.cli import help as help_
from regard.cli.resume import DEFAULT_PRESET, TrainOptions, resumed_config
from regard.cli.shared import (
    CONFIG,
    SIGNAL_EXIT,
    check_folder,
    check_input,
    check_model,
    console,
    parse_languages,
)
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.translation.config import TranslationConfig
    from regard.translation.data.pairs import Pair
    from regard.translation.training.loop import TrainingResult

_model_option = partial(typer.Option, rich_help_panel="Model")
_data_option = partial(typer.Option, rich_help_panel="Data and length")
_BUILT_IN = ("embedded", "bible")  # corpora
# extensions of files with pairs; .txt may have pairs, too, but is usually one side of a corpus
PAIR_EXTENSIONS = (".tsv", ".tab", ".jsonl", ".ndjson", ".json")
# names of settings in other programs, and the equivalent here
_SETTINGS = {
    **dict.fromkeys(("lr", "learning-rate", "rate"), "training.learning_rate=0.001"),
    **dict.fromkeys(
        ("batch", "batch-size", "batch-tokens", "tokens", "max-tokens"), "training.batch_tokens=4096"
    ),
    **dict.fromkeys(("accumulate", "accum", "grad-accum", "update-freq"), "training.accumulate=2"),
    **dict.fromkeys(("steps", "max-steps", "max-updates"), "training.updates=1000"),
    **dict.fromkeys(("warmup", "warmup-steps", "warmup-updates"), "training.warmup=400"),
    **dict.fromkeys(("schedule", "scheduler", "lr-scheduler"), "training.schedule=inverse-sqrt"),
    **dict.fromkeys(("smoothing", "label-smoothing"), "training.label_smoothing=0.1"),
    **dict.fromkeys(("decay", "weight-decay"), "training.weight_decay=0.01"),
    **dict.fromkeys(("clip", "clip-norm", "grad-clip", "max-grad-norm"), "training.max_grad_norm=1.0"),
    **dict.fromkeys(("precision", "bf16", "fp16", "amp"), "training.precision=bfloat16"),
    **dict.fromkeys(("patience", "early-stopping"), "training.patience=5"),
    **dict.fromkeys(("save-every", "save-interval", "save"), "training.save_every=1000"),
    **dict.fromkeys(("judge", "eval-every", "valid-freq", "validate-every"), "training.validate_every=1000"),
    "seed": "training.seed=1",
    "threads": "training.threads=2",
    "average": "training.average_checkpoints=5",
    "guide": "training.guided_alignment_weight=0.3",
    "criterion": "training.metric=loss",
    **dict.fromkeys(("width", "dim", "d-model", "hidden-size", "embed-dim"), "model.width=256"),
    **dict.fromkeys(("hidden", "ffn", "ffn-dim", "d-ff"), "model.ffn_dim=1024"),
    **dict.fromkeys(("layers", "num-layers", "n-layers"), "model.layers=3"),
    **dict.fromkeys(("heads", "num-heads", "n-heads"), "model.heads=8"),
    "dropout": "model.dropout=0.1",
    "norm": "model.norm=rms",
    "activation": "model.activation=gelu",
    "positions": "model.positions=rotary",
    "normalize": "model.normalize=entmax15",
    **dict.fromkeys(("vocab", "vocab-size", "vocabulary"), "tokens.size=8000"),
    **dict.fromkeys(("max-length", "max-len", "longest"), "corpus.max_tokens=256"),
}


class Command(help_.Command):
    """`regard train`: --dev takes two files, or one file of pairs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Complete --dev, and point to --set where an option is the name of a setting."""
        known = {name for param in self.params for name in param.opts}
        for argument in args:
            name = argument.partition("=")[0]
            setting = _SETTINGS.get(name.removeprefix("--").replace("_", "-").lower())
            if argument.startswith("--") and name not in known and setting is not None:
                raise ArgumentError(
                    f"{name} is not an option but a setting: use --set {setting}. See regard train "
                    "--print-config."
                )
        return super().parse_args(ctx, list(_complete_dev(args)))


def _complete_dev(arguments: Sequence[str]) -> Iterator[str]:
    """Add an empty second value to a --dev with one file of pairs: typer expects two values."""
    previous = ""
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, equals, value = argument.partition("=")
        yield argument
        file = argument if previous == "--dev" else value if name == "--dev" and equals else None
        if file is not None and (has_pairs(file) or following is None or following.startswith("-")):
            yield ""
        previous = argument


def has_pairs(path: str) -> bool:
    """Return whether a file has both sides, by its extension."""
    return Path(path.lower().removesuffix(".gz")).suffix in PAIR_EXTENSIONS


def train(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="Source sentences. Without TARGET: sentence pairs (.tsv, .jsonl, - for stdin) or a built-in "
            "corpus, embedded (dates, times, numbers) or bible (Greek-English). Files may be gzipped.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Translations of SOURCE, line by line.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where to save the model. Required."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the last checkpoint. Add --epochs or --updates to train longer."
        ),
    ] = False,
    shard: Annotated[
        bool,
        typer.Option("--shard", help="Shard the parameters across processes (FSDP2). Requires torchrun."),
    ] = False,
    model: Annotated[
        Literal["transformer", "recurrent", "plain"] | None,
        _model_option(
            metavar="NAME",
            help="transformer, recurrent (RNN with Bahdanau attention) or plain (no attention). "
            "[default: transformer]",
        ),
    ] = None,
    preset: Annotated[
        Literal["tiny", "small", "base"] | None,
        _model_option(
            metavar="NAME",
            help="tiny (1-2 minutes), small (20 minutes for 29,000 pairs on two cores) or base (large "
            "machines). [default: small]",
        ),
    ] = None,
    config: Annotated[
        Path | None, _model_option(metavar="FILE", help="TOML file with settings; overrides the preset.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        _model_option(
            "--set",
            metavar="KEY=VALUE",
            help="Override one setting, e.g. training.learning_rate=0.001. Repeatable.",
        ),
    ] = None,
    print_config: Annotated[
        bool, _model_option("--print-config", help="Print all settings as TOML and exit.")
    ] = False,
    dev: Annotated[
        tuple[str, str] | None,
        _data_option(
            metavar="SOURCE TARGET",
            help="Validation set: two text files, or one file of pairs. [default: held out from the training "
            "data]",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        Literal["tsv", "jsonl"] | None,
        _data_option(help="Format of the sentence pairs. [default: from the file extension]"),
    ] = None,
    swap: Annotated[
        bool, _data_option("--swap", help="Train in the other direction, TARGET to SOURCE.")
    ] = False,
    languages: Annotated[
        str, _data_option(metavar="FROM-TO", help="Languages of the embedded corpus.")
    ] = "en-de",
    epochs: Annotated[
        int | None, _data_option(min=1, help="Passes over the training data. [default: from the preset]")
    ] = None,
    updates: Annotated[
        int | None, _data_option(min=1, help="Optimizer updates, instead of --epochs.")
    ] = None,
) -> None:
    """Train a translation model on parallel text: two files with one sentence per line.

    Pass the output folder to regard translate, align, evaluate, curves, draw or look.
    """
    if output is None and not print_config:
        raise ArgumentError("train needs a folder for the model: --output FOLDER.")
    if epochs is not None and updates is not None:
        raise ArgumentError(f"--epochs {epochs} and --updates {updates} are exclusive; pass one of them.")
    dev_files = None if dev is None else [*dev[:1], *filter(None, dev[1:])]
    _check_files(source, target, dev_files, format)
    _check_settings(languages, config, setting or [])
    if output is not None and not print_config:
        _check_folder(source, output, resume)
    settings = list(setting or [])
    settings += [] if epochs is None else [f"training.epochs={epochs}", "training.updates=none"]
    settings += [] if updates is None else [f"training.updates={updates}"]
    options = TrainOptions(preset, model, config, settings, source, target, dev_files, swap, languages)
    training_config = _config(options)
    if print_config:
        print(training_config.to_toml())
        return
    assert output is not None
    if resume:
        training_config = resumed_config(output, options) or training_config
    with _explain_full_disk(output):
        result = _run(output, training_config, options, format=format, resume=resume, shard=shard)
    status = 0 if result.finished else SIGNAL_EXIT + (result.signal or signal.SIGINT)
    if os.environ.get("RANK", "0") != "0":  # only the first of torchrun's processes prints
        raise SystemExit(status)
    if status:
        with suppress(OSError):  # the terminal may be closed
            console().print(f"Resume with: {_resume_command(output)}")
        raise SystemExit(status)
    from regard.translation.training.preparation import sample_source

    sentence = shlex.quote(printable(sample_source(output)))
    console().print(f"Now try: regard translate --model {_quoted(output)} {sentence}")


def _check_files(
    source: str | None, target: str | None, dev: Sequence[str] | None, format: str | None
) -> None:
    """Raise unless the files are readable and fit together."""
    paths = [("SOURCE", source), ("TARGET", target), *(("--dev", path) for path in dev or ())]
    if target is not None:
        _check_sides(source or "", target)
        if format is not None:
            raise ArgumentError(
                f"--format {format} applies to one file of pairs, but there are two files; remove it."
            )
    if dev is not None and len(dev) == 2:
        for file in filter(has_pairs, dev):
            raise ArgumentError(f"--dev {file!r} is a file of pairs; pass it alone.")
    stdin = [name for name, path in paths if path == "-"]
    if len(stdin) > 1:
        raise ArgumentError(f"{' and '.join(stdin)} are both -; stdin can be read only once. Name a file.")
    for name, path in paths:
        if path is not None and path not in _BUILT_IN:
            check_input(Path(path), name)


def _check_settings(languages: str, config: Path | None, settings: Sequence[str]) -> None:
    """Raise for mistakes that can be found before torch is imported."""
    parse_languages(languages)
    if config is not None:
        check_regular(config)
    for setting in settings:
        name, equals, _ = setting.partition("=")
        if not equals or name.count(".") != 1:
            raise ArgumentError(f"--set {shorten(setting)!r} is not of the form section.name=value.")


def _check_folder(source: str | None, output: Path, resume: bool) -> None:
    """Raise unless the folder can be created or resumed, and there is something to train on."""
    check_folder(output)
    if source is None and not resume:
        raise ArgumentError("train needs sentence pairs: two files, SOURCE and TARGET, or one file of pairs.")
    if source is None and not (output / CONFIG).exists():
        if output.is_dir() and any(output.iterdir()):
            check_model(output)
        raise ArgumentError(f"Nothing to resume in {str(output)!r}; pass the sentence pairs to train on.")


def _check_sides(source: str, target: str) -> None:
    """Raise unless SOURCE and TARGET are two different text files, one per language."""
    if source == target:
        cure = "pass pairs as TSV without TARGET" if source == "-" else "pass the translations as TARGET"
        raise ArgumentError(f"SOURCE and TARGET are both {source!r}; {cure}.")
    for path in (source, target):
        if has_pairs(path):
            raise ArgumentError(
                f"{path!r} is a file of pairs, but there are two files; pass it alone, or two text files "
                "with one sentence per line."
            )


def _config(options: TrainOptions) -> "TranslationConfig":
    """Combine the preset, the config file and single settings, in this order."""
    from regard.translation.config import TranslationConfig

    config = TranslationConfig.preset(
        options.preset or DEFAULT_PRESET,  # type: ignore[arg-type]
        options.model or "transformer",  # type: ignore[arg-type]
    )
    if options.config is not None:
        config = TranslationConfig.from_toml(options.config, config)
        if options.model is not None:
            config = config.replace({"model": {"kind": options.model}})
    return config.override(options.settings)


def _run(
    output: Path,
    config: "TranslationConfig",
    options: TrainOptions,
    *,
    format: Any,
    resume: bool,
    shard: bool,
) -> "TrainingResult":
    from regard.models.layers.allocation import keep_memory, return_memory
    from regard.translation.data.formats import read_pairs
    from regard.translation.training.distributed import join_world
    from regard.translation.training.progress import create_display
    from regard.translation.training.train import train

    pairs, dev = _corpus(options, format)
    if options.dev is not None:
        dev = read_pairs(*options.dev)
    if options.swap:
        pairs, dev = _swapped(pairs), _swapped(dev)
    with join_world(shard=shard) as world:
        if world.device.type == "cpu":
            return_memory() if shard else keep_memory()
        return train(
            output,
            pairs,
            dev=dev,
            config=config,
            resume=resume,
            callbacks=[create_display()] if world.rank == 0 else [],
            world=world,
            origin=options.origin(),
        )


def _corpus(options: TrainOptions, format: Any) -> "tuple[Iterable[Pair] | None, Iterable[Pair] | None]":
    """Return the training pairs, and the validation pairs if the corpus has them."""
    source, target = options.source, options.target
    if source is None:
        return None, None
    if source in _BUILT_IN and target is None and not Path(source).exists():
        return _embedded(options.languages) if source == "embedded" else (_bible(), None)
    from regard.translation.data.formats import read_pairs

    return read_pairs(source, target, format=format), None


def _embedded(languages: str) -> "tuple[Iterable[Pair], Iterable[Pair]]":
    from regard.translation.data.builtin import embedded_corpus

    corpus = embedded_corpus(*parse_languages(languages))
    return corpus.train, corpus.dev


def _bible() -> "Iterable[Pair]":
    from regard.translation.data.bible import bible

    return [verse.pair for verse in bible()]


def _swapped(pairs: "Iterable[Pair] | None") -> "Iterable[Pair] | None":
    from regard.translation.data.pairs import Pair

    return None if pairs is None else (Pair(target, source) for source, target in pairs)


@contextmanager
def _explain_full_disk(output: Path) -> Iterator[None]:
    """Add to the error of a full disk how to resume."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ArgumentError(
            f"{error.filename or output}: {error.strerror}. Free some space, then resume with "
            f"{_resume_command(output)}"
        ) from None


def _resume_command(output: Path) -> str:
    return f"regard train --output {_quoted(output)} --resume"


def _quoted(path: Path) -> str:
    return shlex.quote(printable(str(path)))
