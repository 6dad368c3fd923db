"""`regard train`."""

import errno
import os
import shlex
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard._util.text import printable
from regard.cli import app
from regard.cli.resume import DEFAULT_LANGUAGES, DEFAULT_PRESET, TrainOptions, resumed_config
from regard.cli.shared import (
    SIGNAL_EXIT,
    check_folder,
    check_input,
    check_model,
    console,
    exclusive,
    naming,
    parse_languages,
)
from regard.errors import ArgumentError
from regard.translation.automatic import choose_config
from regard.translation.config import Model, TranslationConfig
from regard.translation.data.cleaning import clean_pairs
from regard.translation.data.formats import Format, contains_pairs, read_pairs
from regard.translation.data.pairs import Pair
from regard.translation.data.statistics import CorpusStatistics
from regard.translation.model_folder import CONFIG, is_pretrained

if TYPE_CHECKING:
    from regard.translation.training.initialization import InitialModel
    from regard.translation.training.loop import TrainingResult
    from regard.translation.training.preparation import ConfigChoice

_model_option = partial(typer.Option, rich_help_panel="Model")
_data_option = partial(typer.Option, rich_help_panel="Data and training time")
_BUILT_IN = ("embedded", "bible")  # names of built-in corpora
_LOW_BLEU, _HIGH_LOSS = 5.0, 2.0  # validation scores of a model that has hardly learned anything
_UNSET = 10**11  # marks an unset number of epochs
_EXAMPLE_PAIRS, _EXAMPLE_CHARACTERS = 29_000, 3_900_000  # Multi30k; for --print-config without a corpus
# names of our settings in other programs
_SYNONYMS = {
    "training.learning_rate": "lr rate",
    "training.batch_tokens": "batch batch-size tokens max-tokens",
    "training.accumulate": "accum grad-accum update-freq",
    "training.updates": "steps max-steps max-updates",
    "training.warmup": "warmup-steps warmup-updates",
    "training.schedule": "scheduler lr-scheduler",
    "training.label_smoothing": "smoothing",
    "training.weight_decay": "decay",
    "training.max_grad_norm": "clip clip-norm grad-clip",
    "training.guided_alignment_weight": "guided-alignment",
    "training.precision": "bf16 fp16 amp",
    "training.patience": "early-stopping",
    "training.save_every": "save-interval save",
    "training.validate_every": "eval-every valid-freq",
    "training.average_checkpoints": "average",
    "training.metric": "criterion",
    "model.width": "dim d-model hidden-size embed-dim",
    "model.ffn_dim": "hidden ffn d-ff",
    "model.layers": "num-layers n-layers",
    "model.heads": "num-heads n-heads",
    "tokens.size": "vocab vocab-size vocabulary",
    "corpus.max_tokens": "max-length max-len",
}


class Command(app.Command):
    """The `regard train` command, whose --dev takes two files, or one file of pairs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add a missing second value to --dev; suggest --set for an unknown option that names a setting."""
        known = {name for param in self.params for name in param.opts}
        for argument in args:
            name = argument.partition("=")[0]
            if name.startswith("--") and name not in known and (setting := _find_setting(name)):
                raise ArgumentError(
                    f"{name} is not an option but a setting: use --set {setting}=VALUE. See regard train "
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
        if file is not None and (contains_pairs(file) or following is None or following.startswith("-")):
            yield ""
        previous = argument


def _find_setting(option: str) -> str | None:
    """Return the setting that an option names, in regard or in other programs."""
    name = option.removeprefix("--").replace("_", "-").lower()
    for path, synonyms in _SYNONYMS.items():
        if name in synonyms.split():
            return path
    for section, values in TranslationConfig().to_dict().items():
        if name.replace("-", "_") in values:
            return f"{section}.{name.replace('-', '_')}"
    return None


def train(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="Source sentences. Without TARGET: sentence pairs (.tsv, .csv, .jsonl, .tmx, .src-tgt, - "
            'for stdin) or the name of a built-in corpus: "embedded" (dates, times, numbers) or "bible" '
            "(Greek-English). Files may be gzipped.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Translations of SOURCE, line by line.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Where to save the model. Required, except with --print-config.",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Fine-tune this model: a folder written by regard train, or in Hugging Face format. Keeps "
            "its architecture and vocabulary; the default learning rate is 1e-4.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the last checkpoint. Add --epochs, --updates or --minutes to train longer.",
        ),
    ] = False,
    shard: Annotated[
        bool,
        typer.Option("--shard", help="Shard the parameters across processes (FSDP2). Requires torchrun."),
    ] = False,
    model: Annotated[
        Model | None,
        _model_option(
            metavar="NAME",
            help="transformer, recurrent (RNN with Bahdanau attention) or plain (no attention).",
            show_default="transformer",
        ),
    ] = None,
    preset: Annotated[
        Literal["auto", "tiny", "small", "base"] | None,
        _model_option(
            metavar="NAME",
            help="auto (based on the size of the corpus), tiny (1-2 minutes), small (3 layers, width 256) "
            "or base (for large machines).",
            show_default=DEFAULT_PRESET,
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
            help="Validation set: two text files, or one file of pairs.",
            show_default="held out from the training data",
        ),
    ] = None,
    format: Annotated[
        Format | None,
        _data_option(help="Format of the sentence pairs.", show_default="from the file extension"),
    ] = None,
    swap: Annotated[
        bool, _data_option("--swap", help="Train in the other direction, TARGET to SOURCE.")
    ] = False,
    languages: Annotated[
        str | None,
        _data_option(
            metavar="FROM-TO",
            help="Languages of the embedded corpus, or of a multilingual model given by --from.",
            show_default=f"{DEFAULT_LANGUAGES} for the embedded corpus",
        ),
    ] = None,
    epochs: Annotated[
        int | None, _data_option(help="Passes over the training data.", show_default="from the preset")
    ] = None,
    updates: Annotated[int | None, _data_option(help="Optimizer updates, instead of --epochs.")] = None,
    minutes: Annotated[
        float | None, _data_option(help="Training time in minutes, instead of --epochs.")
    ] = None,
) -> None:
    """Train a translation model on parallel text: two files with one sentence per line.

    Pass the output folder to regard translate, align, evaluate, curves, draw or look.

    Examples:
    regard train train.de train.en -o de-en --minutes 15
    regard train train.de train.en -o de-en --dev dev.de dev.en --epochs 20
    regard train train.de train.en --from opus-mt-de-en -o tuned --epochs 3  # fine-tune
    regard train -o de-en --resume  # after an interruption
    regard train -o de-en --resume --epochs 40  # train longer
    regard train train.de train.en --print-config  # all settings
    """
    if output is None and not print_config:
        raise ArgumentError("train needs a folder for the model: --output FOLDER.")
    durations = {"--epochs": epochs, "--updates": updates, "--minutes": minutes}
    requested = [f"{name} {value:g}" for name, value in durations.items() if value is not None]
    if len(requested) > 1:
        raise exclusive(*requested[:2])
    dev_files = None if dev is None else [*dev[:1], *filter(None, dev[1:])]
    _check_files(source, target, dev_files, format)
    parse_languages(languages or DEFAULT_LANGUAGES)
    if start is not None:
        _check_start(start, preset, model, shard)
    if output is not None and not print_config:
        _check_folder(source, output, resume)
    settings = list(setting or [])
    settings += [] if epochs is None else [f"training.epochs={epochs}", "training.updates=none"]
    settings += [] if updates is None else [f"training.updates={updates}"]
    settings += [] if minutes is None else [f"training.minutes={minutes}", "training.updates=none"]
    options = TrainOptions(
        preset,
        model,
        config,
        settings,
        source,
        target,
        dev_files,
        swap,
        languages or DEFAULT_LANGUAGES,
        start,
    )
    initial = _initial(start, languages)
    choose = partial(_config, options, toml=_read_toml(options), initial=initial)
    with naming(**{f"training.{name[2:]}": name for name in durations}):
        choose(CorpusStatistics())  # raises an error for invalid settings
    if print_config:
        _print_config(options, format, choose)
        return
    assert output is not None
    training_config = (resumed_config(output, options) if resume else None) or choose
    with _explain_full_disk(output):
        result = _run(
            output, training_config, options, format=format, resume=resume, shard=shard, initial=initial
        )
    status = 0 if result.finished else SIGNAL_EXIT + (result.signal or signal.SIGINT)
    if os.environ.get("RANK", "0") != "0":  # under torchrun, only the first process prints
        raise SystemExit(status)
    if status:
        with suppress(OSError):  # the terminal may be closed
            console().print(f"Resume with: {_resume_command(output)}")
        raise SystemExit(status)
    if advice := _advise(output):
        console().print(advice)
    sentence = shlex.quote(printable(result.example))
    console().print(f"Now try: regard translate --model {_quoted(output)} {sentence}")


def _advise(output: Path) -> str:
    """Return advice if the validation scores of the best model are poor, otherwise an empty string."""
    from regard.translation.model_folder import LOG
    from regard.translation.training.logs import best_row, read_log

    best = best_row(read_log(output)) if (output / LOG).exists() else None
    # the BLEU of very short sentences is 0 even if they are right, but their loss is then low
    if best is None or (best.dev_bleu or 0.0) >= _LOW_BLEU or (best.dev_loss or 0.0) < _HIGH_LOSS:
        return ""
    return (
        f"BLEU on the validation pairs is only {best.dev_bleu:.1f}: expect poor translations. Train longer, "
        f"with a larger --minutes or --epochs ({_resume_command(output)}), or add sentence pairs."
    )


def _check_files(
    source: str | None, target: str | None, dev: Sequence[str] | None, format: str | None
) -> None:
    """Raise an error unless the files are readable and form a valid combination."""
    paths = [("SOURCE", source), ("TARGET", target), *(("--dev", path) for path in dev or ())]
    if target is not None:
        _check_sides(source or "", target)
        if format is not None:
            raise ArgumentError(
                f"--format {format} applies to one file of pairs, but two files were passed; remove --format."
            )
    if dev is not None and len(dev) == 2:
        for file in filter(contains_pairs, dev):
            raise ArgumentError(f"--dev {file!r} is a file of pairs; pass it without a second file.")
    stdin = [name for name, path in paths if path == "-"]
    if len(stdin) > 1:
        raise ArgumentError(f"{' and '.join(stdin)} are both -; stdin can be read only once. Pass a file.")
    for name, path in paths:
        if path is not None and path not in _BUILT_IN:
            check_input(Path(path), name)


def _check_folder(source: str | None, output: Path, resume: bool) -> None:
    """Raise an error unless the folder can be created or resumed, and there is training data."""
    check_folder(output)
    if source is None and not resume:
        raise ArgumentError("train needs sentence pairs: two files, SOURCE and TARGET, or one file of pairs.")
    if source is None and not (output / CONFIG).exists():
        if output.is_dir() and any(output.iterdir()):
            check_model(output)
        raise ArgumentError(f"Nothing to resume in {str(output)!r}; pass the sentence pairs to train on.")


def _check_sides(source: str, target: str) -> None:
    """Raise an error unless SOURCE and TARGET are two different text files, one per language."""
    if source == target:
        cure = "pass pairs as TSV without TARGET" if source == "-" else "pass the translations as TARGET"
        raise ArgumentError(f"SOURCE and TARGET are both {source!r}; {cure}.")
    for path in (source, target):
        if contains_pairs(path):
            raise ArgumentError(
                f"{path!r} is a file of pairs, but a second file was also passed; pass it alone, or "
                "pass two text files with one sentence per line."
            )


def _check_start(start: Path, preset: str | None, model: Model | None, shard: bool) -> None:
    """Raise an error unless --from is a model, and no option contradicts it."""
    check_model(start)
    if model is not None:
        raise exclusive(f"--from {str(start)!r}", f"--model {model}")
    if shard:
        raise ArgumentError("--from cannot be combined with --shard; fine-tune without --shard.")


def _initial(start: Path | None, languages: str | None) -> "InitialModel | None":
    """Return the model to start from, set to the given languages if it is multilingual."""
    if start is None:
        return None
    from regard.translation.training.initialization import InitialModel

    chosen = is_pretrained(start) and languages is not None
    return InitialModel(start, *parse_languages(languages or "")) if chosen else InitialModel(start)


def _read_toml(options: TrainOptions) -> Mapping[str, Any]:
    return {} if options.config is None else TranslationConfig.read_toml(options.config)


def _config(
    options: TrainOptions,
    statistics: CorpusStatistics,
    *,
    toml: Mapping[str, Any],
    initial: "InitialModel | None" = None,
) -> TranslationConfig:
    """Combine the preset, the model to start from, the config file and individual settings, in this order."""

    def change(config: TranslationConfig) -> TranslationConfig:
        if initial is not None:
            config = initial.config(config)
        config = config.replace(toml)
        if options.model is not None:
            config = config.replace({"model": {"kind": options.model}})
        return config.override(options.settings)

    preset: Any = options.preset or DEFAULT_PRESET
    model: Any = options.model or "transformer"
    if preset == "auto":
        return choose_config(statistics, model, change=change, **_duration(toml, options.settings))
    return change(TranslationConfig.preset(preset, model))


def _duration(toml: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return the requested epochs and minutes, on which the preset auto depends; None if not requested."""
    section = toml.get("training")
    from_file = section if isinstance(section, Mapping) else {}
    durations = {name: from_file[name] for name in ("epochs", "minutes") if name in from_file}
    config = TranslationConfig().replace({"training": {"epochs": _UNSET} | durations})
    names = ("training.epochs", "training.minutes")
    chosen = [setting for setting in settings if setting.partition("=")[0].strip() in names]
    training = config.override(chosen).training
    epochs = None if training.epochs == _UNSET else training.epochs
    return {"epochs": epochs, "minutes": training.minutes or None}


def _print_config(options: TrainOptions, format: Format | None, choose: "ConfigChoice") -> None:
    """Print all settings; the preset auto bases them on the corpus, if one is given."""
    statistics = CorpusStatistics(pairs=_EXAMPLE_PAIRS, characters=_EXAMPLE_CHARACTERS)
    if (options.preset or DEFAULT_PRESET) == "auto":
        if options.source is not None:
            statistics = CorpusStatistics()
            pairs, _ = _corpus(options, format)
            deque(statistics.observe(clean_pairs(pairs or [])), maxlen=0)
        print(f"# preset auto for {statistics.pairs:,} pairs with {statistics.tokens:,} tokens")
    print(choose(statistics).to_toml())


def _run(
    output: Path,
    config: "TranslationConfig | ConfigChoice",
    options: TrainOptions,
    *,
    format: Format | None,
    resume: bool,
    shard: bool,
    initial: "InitialModel | None" = None,
) -> "TrainingResult":
    from regard.models.layers.allocation import keep_memory, return_memory
    from regard.translation.training.distributed.world import join_world
    from regard.translation.training.progress import create_display
    from regard.translation.training.train import train

    pairs, dev = _corpus(options, format)
    if options.dev is not None:
        dev = read_pairs(*options.dev)
    if options.swap:
        pairs, dev = _swapped(pairs), _swapped(dev)
    display = create_display()
    with join_world(shard=shard) as world:
        if world.rank == 0 and (warning := _check_direction(options, output)):
            display.on_message(f"Warning: {warning}")
        if world.device.type == "cpu":
            return_memory() if shard else keep_memory()
        return train(
            output,
            pairs,
            dev=dev,
            config=config,
            resume=resume,
            callbacks=[display] if world.rank == 0 else [],
            world=world,
            origin=options.origin(),
            initial=initial,
        )


def _corpus(
    options: TrainOptions, format: Format | None
) -> tuple[Iterable[Pair] | None, Iterable[Pair] | None]:
    """Return the training pairs, and the validation pairs if the corpus has them."""
    source, target = options.source, options.target
    if source is None:
        return None, None
    if source not in _BUILT_IN or target is not None or Path(source).exists():
        return read_pairs(source, target, format=format), None
    if source == "bible":
        from regard.translation.data.bible import bible

        return [verse.pair for verse in bible()], None
    from regard.translation.data.builtin import embedded_corpus

    corpus = embedded_corpus(*parse_languages(options.languages))
    return corpus.train, corpus.dev


def _check_direction(options: TrainOptions, output: Path) -> str | None:
    """Return a warning if the files contradict the folder name, such as train.en train.de for de-en."""
    languages = output.name.lower().split("-")
    files = [file for file in (options.source, options.target) if file]
    sides = [Path(file.removesuffix(".gz")).suffix[1:].lower() for file in files]
    sides = sides[::-1] if options.swap else sides
    if len(languages) != 2 or len(sides) != 2 or sides[0] == sides[1] or sides != languages[::-1]:
        return None
    return (
        f"the folder is named {output.name!r}, but the model will translate from {sides[0]} to {sides[1]}. "
        "Swap the files if this is not intended."
    )


def _swapped(pairs: Iterable[Pair] | None) -> Iterable[Pair] | None:
    return None if pairs is None else (Pair(target, source) for source, target in pairs)


@contextmanager
def _explain_full_disk(output: Path) -> Iterator[None]:
    """Add the resume command to the error for a full disk."""
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
