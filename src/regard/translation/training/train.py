"""Train a translator: prepare the data, train, and select the attention head for alignments."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from regard._util.checks import check_type
from regard._util.files import remove_partial_files
from regard._util.name_hints import hint_arguments
from regard.errors import ArgumentError, DTypeError, RegardError
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.alignment.attention_aligner import select_alignment_head
from regard.translation.automatic import choose_config
from regard.translation.config import TranslationConfig
from regard.translation.data.pairs import Pair
from regard.translation.data.statistics import CorpusStatistics
from regard.translation.folder_lock import lock_folder
from regard.translation.model_folder import (
    ALIGNMENT,
    CALIBRATION,
    CONFIG,
    DATA,
    EXTENDED,
    MODEL,
    ORIGIN,
    PREPARED,
    check_folder_name,
    is_prepared,
    read_config,
    write_config,
)
from regard.translation.pretrained.origin import build_model
from regard.translation.training.callbacks import Callback, CallbackList, Report, ValidationResult
from regard.translation.training.checkpoint import Checkpoint, load_model
from regard.translation.training.distributed.sharding import streamed_model
from regard.translation.training.distributed.world import World
from regard.translation.training.initialization import InitialModel
from regard.translation.training.logs import CsvLog, SampleLog, TensorBoardLog
from regard.translation.training.loop import Trainer, TrainingResult
from regard.translation.training.model_card import write_model_card
from regard.translation.training.preparation import ConfigChoice, TrainingData, load_data, prepare_with
from regard.translation.training.training_config import TrainingConfig

_CALIBRATED = 200  # number of validation sentences to translate for calibrating the scores


class Run(NamedTuple):
    """A training run: its config, its data, and the other entries in config.json."""

    config: TranslationConfig
    data: TrainingData
    entries: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> "Run":
        """Load a prepared run."""
        config, entries = _read_config(folder)
        return cls(config, load_data(folder, config), entries)

    def extended_at(self) -> list[int]:
        """Return the updates at which training was extended; each one resets patience."""
        steps = self.entries.get(EXTENDED)
        return [step for step in steps if type(step) is int] if isinstance(steps, list) else []


@hint_arguments
def train(
    folder: str | os.PathLike[str],
    pairs: Iterable[Pair] | None = None,
    *,
    dev: Iterable[Pair] | None = None,
    config: TranslationConfig | ConfigChoice | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    world: World | None = None,
    origin: Mapping[str, Any] | None = None,
    initial: InitialModel | str | os.PathLike[str] | None = None,
) -> TrainingResult:
    """Train a translator and save it in a model folder. Load it with `load_translator(folder)`.

    folder: model folder; docs/reference/files.md describes its files.
    pairs: training pairs, such as `read_pairs("a.en", "a.de")`. Can be None with `resume`.
    dev: validation pairs. Default: held out from `pairs`.
    config: all settings, or a function that chooses them from `CorpusStatistics`. Default: `choose_config`.
    resume: continue from the last checkpoint in the folder, if there is one, with the folder's config. If
        `config` differs only in having more epochs or updates, train longer, even after training has
        finished. The precision may also differ.
    callbacks: each receives all training events. log.csv, samples.jsonl and, if installed, TensorBoard files
        are always written.
    world: the processes that train together; see `join_world`.
    origin: where the pairs come from; stored in config.json.
    initial: folder of a model to start from (fine-tuning), written by `train` or in Hugging Face format, or
        an `InitialModel` with the languages of a multilingual model. Its architecture and vocabulary are
        used; the default learning rate is 1e-4.

    On a CPU, call `regard.models.keep_memory()` first to train faster; with sharded parameters, call
    `regard.models.return_memory()` to save memory.

    >>> import tempfile
    >>> from regard.translation import Pair, TranslationConfig, load_translator, train
    >>> pairs = [
    ...     Pair(f"{word} {i}", f"{i} {word.upper()}") for i in range(8) for word in ("one", "two", "six")
    ... ]
    >>> config = TranslationConfig.preset("tiny").override(
    ...     ["training.updates=2", "tokens.size=40", "model.width=16"]
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train(folder, pairs, config=config)
    ...     translations = load_translator(folder).translate(["one 3"])
    >>> result.finished
    True
    """
    path, world = Path(folder), world or World()
    check_folder_name(path)
    if config is not None and not callable(config):
        check_type("train got a config", config, TranslationConfig, 'TranslationConfig.preset("tiny")')
    for name, value in (("pairs", pairs), ("dev", dev)):
        if isinstance(value, str | bytes | os.PathLike):
            raise DTypeError(
                f"train got {name}={os.fspath(value)[:80]!r}; pass sentence pairs, [(source, target), …], or "
                "read_pairs(file)."
            )
    if world.rank:
        world.barrier()  # rank 0 prepares the data
        return _train(path, Run.load(path), callbacks, world)
    with lock_folder(path):
        with _clean_up_on_error(path), world.sync_errors():
            start = initial if isinstance(initial, InitialModel | None) else InitialModel(Path(initial))
            run = _prepare(path, pairs, dev, config, resume, CallbackList(callbacks), origin or {}, start)
        return _train(path, run, callbacks, world)


@contextmanager
def _clean_up_on_error(folder: Path) -> Iterator[None]:
    """If preparation fails, remove only the files that it wrote."""
    data = folder / DATA
    created = not data.exists()
    new = [folder / name for name in PREPARED if not os.path.lexists(folder / name)]
    try:
        yield
    except RegardError:
        for path in new:
            with suppress(OSError):
                path.unlink()
        if created:
            with suppress(OSError):
                data.rmdir()  # fails unless empty
        raise


class _FolderGuard(Callback):
    """Stops training if its folder is removed, moved or replaced, because nothing could be saved."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._identity = folder, _identity(folder)
        self._required = [path for path in (folder / name for name in PREPARED) if path.is_file()]
        self._step = self._saved = 0

    def on_begin(self, about: str, step: int, steps: int) -> None:
        self._step = self._saved = step

    def on_report(self, report: Report) -> None:
        self._check(report.step)

    def on_validation(self, result: ValidationResult) -> None:
        self._check(result.step)

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        self._check(step)
        self._saved = step

    def on_end(self, text: str) -> None:
        self._check(self._step)

    def _check(self, step: int) -> None:
        self._step = step
        if _identity(self._folder) != self._identity:
            raise ArgumentError(
                f"The folder {os.fspath(self._folder)!r} was removed or moved during training. Training "
                f"stopped after update {self._step}. If the folder was moved, resume (--resume) at its new "
                "location; otherwise train in a new folder."
            )
        missing = next((path for path in self._required if not path.is_file()), None)
        if missing is not None:
            saved = f"the last one was saved at update {self._saved}" if self._saved else "there is none yet"
            raise ArgumentError(
                f"{os.fspath(missing)!r} was removed during training. Training stopped after update "
                f"{self._step}: no checkpoint can be resumed without this file ({saved}). Copy it back and "
                "resume (--resume), or train in a new folder."
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _train(folder: Path, run: Run, callbacks: Sequence[Callback], world: World) -> TrainingResult:
    """Train on the prepared data, and select the alignment head."""
    logs = [CsvLog(folder), SampleLog(folder), TensorBoardLog(folder)]
    # the guard runs first, so that no other callback reports a lost checkpoint as saved
    callbacks = [_FolderGuard(folder), *callbacks, *logs]
    result = Trainer(
        folder, run.config, run.data, callbacks=callbacks, world=world, extended_at=run.extended_at()
    ).run()
    with world.sync_errors():
        if world.rank == 0 and result.finished:
            _select_head(folder, run)
            _calibrate(folder, run)
        if world.rank == 0 and (folder / MODEL).exists():
            entries = _read_config(folder)[1]  # now includes the alignment head
            write_model_card(folder, run.config, run.data, entries, finished=result.finished)
    return result._replace(example=run.data.example())


def _prepare(
    folder: Path,
    pairs: Iterable[Pair] | None,
    dev: Iterable[Pair] | None,
    config: TranslationConfig | ConfigChoice | None,
    resume: bool,
    callbacks: Callback,
    origin: Mapping[str, Any],
    initial: InitialModel | None = None,
) -> Run:
    """Prepare the training data, or load it if the folder already has it."""
    if any(not path.name.startswith(".") for path in folder.glob("*")):
        if not resume and not _preparation_was_cut_off(folder):
            raise ArgumentError(
                f"The folder {os.fspath(folder)!r} is not empty. Resume training with --resume, or choose a "
                "new folder."
            )
        read_config(folder)  # raises unless this is a model folder
        remove_partial_files(folder)  # left by a killed run
        if is_prepared(folder):
            extended = config if isinstance(config, TranslationConfig) else None
            return _extend(folder, Run.load(folder), extended, callbacks)
        if not _preparation_was_cut_off(folder):
            raise ArgumentError(
                f"{os.fspath(folder)!r} has a model, but no training data. Copy its data subfolder too, "
                "or train in a new folder."
            )
    if pairs is None:
        raise ArgumentError(f"Nothing to resume in {os.fspath(folder)!r}. Pass the training pairs.")
    if initial is not None and isinstance(config, TranslationConfig):
        initial.check(config)
    choose = _config_choice(config, initial)
    entries = {ORIGIN: dict(origin)} if origin else {}
    write_config(folder, choose(CorpusStatistics()), **entries)
    tokens = None if initial is None else initial.write(folder)
    chosen, data = prepare_with(folder, choose, pairs, dev, callbacks.on_message, tokens)
    write_config(folder, chosen, **entries)
    return Run(chosen, data, entries)


def _config_choice(
    config: TranslationConfig | ConfigChoice | None, initial: InitialModel | None
) -> ConfigChoice:
    """Return a function that chooses the config and, for fine-tuning, checks it against the initial model."""
    if isinstance(config, TranslationConfig):
        return lambda statistics: config
    if initial is None:
        return config or choose_config

    def choose(statistics: CorpusStatistics) -> TranslationConfig:
        chosen = choose_config(statistics, change=initial.config) if config is None else config(statistics)
        initial.check(chosen)
        return chosen

    return choose


def _extend(folder: Path, run: Run, config: TranslationConfig | None, callbacks: Callback) -> Run:
    """Switch to the given config if it only changes duration or precision, and store it in the folder."""
    if config is None or not run.config.is_extended_by(config):
        return run
    entries, old, new = dict(run.entries), run.config.training, config.training
    longer = old.duration() != new.duration()
    if longer and new.patience:
        last = [checkpoint.step for checkpoint in Checkpoint.all(folder)[-1:]]
        entries[EXTENDED] = sorted({*run.extended_at(), *last})
    write_config(folder, config, **entries)
    if old.precision != new.precision:
        callbacks.on_message(f"precision changed from {old.precision} to {new.precision}")
    if longer:
        callbacks.on_message(_describe_extension(old, new))
    return Run(config, run.data, entries)


def _describe_extension(old: TrainingConfig, new: TrainingConfig) -> str:
    message = f"extended from {old.duration()} to {new.duration()}"
    if new.schedule == "cosine":
        message += (
            "; the cosine schedule is stretched, so the learning rate rises again, and the result differs "
            "slightly from that of a run planned for this length from the start"
        )
    if new.patience:
        message += "; patience is reset"
    return message


def _read_config(folder: Path) -> tuple[TranslationConfig, dict[str, Any]]:
    """Return the settings in config.json, and its other entries."""
    entries = read_config(folder)
    entries.pop("format")
    return TranslationConfig.from_dict(entries.pop("settings")), entries


def _preparation_was_cut_off(folder: Path) -> bool:
    """Return whether preparation was interrupted, so it can be repeated without losing anything."""
    trained = (folder / MODEL).exists() or Checkpoint.all(folder)
    return (folder / CONFIG).exists() and not trained and not is_prepared(folder)


def _select_head(folder: Path, run: Run) -> None:
    """Select the layer and heads that align words best, and store them in config.json."""
    config, data = run.config, run.data
    if config.model.kind == "plain" or not (folder / MODEL).exists():
        return
    with streamed_model(lambda: build_model(config.model, data.tokens), folder / MODEL) as model:
        head = _best_head(model, data)
    write_config(folder, config, **run.entries | {ALIGNMENT: head.to_dict()})


def _calibrate(folder: Path, run: Run) -> None:
    """Store the expected scores and fraction of unseen words in config.json; see `Domain`."""
    from regard.translation.decoding.strategies import Greedy
    from regard.translation.text.domain import calibrate
    from regard.translation.translator import load_translator

    if not (folder / MODEL).exists():
        return
    translator = load_translator(folder)
    sources = [pair.source for pair in run.data.dev[:_CALIBRATED]]
    translated = [each for each in translator.translate(sources, strategy=Greedy()) if each.tokens]
    if not translated:  # the sentences contain only copied text
        return
    scores = [math.log(max(translation.confidence, 1e-30)) for translation in translated]
    assert translator.domain is not None
    calibration = calibrate(translator.domain, [each.source for each in translated], scores)
    write_config(folder, run.config, **_read_config(folder)[1] | {CALIBRATION: calibration})


def load_alignment_head(folder: str | os.PathLike[str]) -> AlignmentHead | None:
    """Return the alignment head selected during training; select one if training has not done so yet.

    Returns None if the model has no attention, or if training has not finished and the folder has no data.
    """
    path = Path(folder)
    config, entries = _read_config(path)
    if entries.get(ALIGNMENT):
        return AlignmentHead.from_dict(entries[ALIGNMENT])
    if config.model.kind == "plain" or not is_prepared(path):
        return None
    return _best_head(load_model(path).model, load_data(path, config))


def _best_head(model: Seq2Seq, data: TrainingData) -> AlignmentHead:
    pairs = data.dev[: len(data.dev_links)]
    return select_alignment_head(model, data.tokens, pairs, data.dev_links)
