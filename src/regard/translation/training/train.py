"""From pairs of sentences to a translator: prepare, train, and choose what alignments are read from."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from regard._util.checks import check_type
from regard._util.files import remove_partial_files
from regard.errors import ArgumentError, DTypeError, RegardError
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.alignment import select_alignment_head
from regard.translation.alignment.cross_attention import AlignmentHead
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.config import TranslationConfig
from regard.translation.data.pairs import Pair
from regard.translation.training.checkpoint import (
    ALIGNMENT,
    CONFIG,
    EXTENDED,
    MODEL,
    ORIGIN,
    SHARED,
    SOURCE,
    TARGET,
    Checkpoint,
    check_folder_name,
    load_model,
    lock_folder,
    read_config,
    write_config,
)
from regard.translation.training.distributed import SingleProcess, World
from regard.translation.training.logs import CsvLog, SampleLog, TensorBoardLog
from regard.translation.training.loop import Trainer, TrainingResult
from regard.translation.training.preparation import Prepared, is_prepared, prepare, prepared
from regard.translation.training.progress import Callback, CallbackList, Report, ValidationResult

_ALIGNED = 300  # dev pairs by which layer and heads are chosen
_ANCHORED = 5000  # pairs of the training from which it is learned which of their words belong together
# all that a preparation writes, by names: what else is in a folder is somebody's own
_DATA = tuple(f"data/{name}" for name in ("text.tsv", "train.ids", "links.ids", "dev.tsv", "ready"))
_PREPARED = (CONFIG, SHARED, SOURCE, TARGET, *_DATA)


def train(
    folder: str | os.PathLike[str],
    pairs: Iterable[Pair] | None = None,
    *,
    dev: Iterable[Pair] | None = None,
    config: TranslationConfig | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    world: World | None = None,
    origin: Mapping[str, Any] | None = None,
) -> TrainingResult:
    """Train a translator in a model folder; `load_translator(folder)` reads it.

    folder: where all of it is kept; see the page on files.
    pairs: `read_pairs("a.en", "a.de")`, or any others; None with `resume` are those of the folder.
    dev: pairs to judge by; otherwise some are held back.
    config: all settings; by default those of `TranslationConfig.preset("small")`, as of `regard train`.
    resume: go on from the last checkpoint of the folder, if there is one; its own config counts then. If `config`
        is the same but for more epochs or updates, the training is lengthened, a finished one too.
    origin: where the pairs come from, for config.json to keep.
    callbacks: are told how it goes. The folder gets log.csv and samples.jsonl, and logs for TensorBoard if
        that is installed.
    world: the processes that train together, where torchrun started several.

    The process's memory allocator is left as it is. On a CPU, `regard.models.keep_memory()` before the call
    makes training faster; with sharded parameters, `regard.models.return_memory()` saves memory.

    >>> import tempfile
    >>> from regard.translation import Pair, TranslationConfig, load_translator, train
    >>> pairs = [
    ...     Pair(f"{word} {i}", f"{i} {word.upper()}") for i in range(8) for word in ("one", "two", "six")
    ... ]
    >>> config = TranslationConfig.preset("tiny").override(
    ...     ["training.updates=2", "tokens.size=40", "model.width=16"]
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     outcome = train(folder, pairs, config=config)
    ...     translations = load_translator(folder).translate(["one 3"])
    >>> outcome.finished
    True
    """
    path, world = Path(folder), world or SingleProcess()
    check_folder_name(path)
    if config is not None:
        check_type("train got a config", config, TranslationConfig, 'Plan.preset("tiny")')
    for name, some in (("pairs", pairs), ("dev", dev)):
        if isinstance(some, str | bytes | os.PathLike):
            raise DTypeError(
                f"train got {name}={os.fspath(some)[:80]!r}; give pairs of sentences, [(source, target), …], "
                "or read_pairs(file)."
            )
    if world.rank:
        return _agree_and_train(path, callbacks, world)
    missing = [one for one in (path, *path.parents) if not one.exists()]
    try:
        with lock_folder(path):
            with _nothing_left_if_refused(path), world.agreed():
                _prepare(path, pairs, dev, config, resume, CallbackList(callbacks), origin or {})
            return _train(path, callbacks, world)
    except RegardError:
        for one in missing:
            with suppress(OSError):
                one.rmdir()  # the system refuses if it is not empty
        raise


def _agree_and_train(folder: Path, callbacks: Sequence[Callback], world: World) -> TrainingResult:
    """A process that is not the first, which prepares for all."""
    with world.agreed():
        pass
    return _train(folder, callbacks, world)


@contextmanager
def _nothing_left_if_refused(folder: Path) -> Iterator[None]:
    """A preparation that is refused takes away what it has written, and nothing else."""
    data = folder / "data"
    made = not data.exists()
    new = [folder / name for name in _PREPARED if not os.path.lexists(folder / name)]
    try:
        yield
    except RegardError:
        for one in new:
            with suppress(OSError):
                one.unlink()
        if made:
            with suppress(OSError):
                data.rmdir()  # the system refuses if it is not empty
        raise


class _Guard(Callback):
    """Ends a training whose folder is removed, moved or replaced, as nothing of it can be saved any more."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._found = folder, _identity(folder)
        self._needed = [path for path in (folder / name for name in _PREPARED) if path.is_file()]
        self._step = self._saved = 0

    def on_begin(self, about: str, step: int, steps: int) -> None:
        self._step = self._saved = step

    def on_report(self, report: Report) -> None:
        self._step = report.step
        self._check()

    def on_validation(self, judgement: ValidationResult) -> None:
        self._step = judgement.step
        self._check()

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        self._step = step
        self._check()
        self._saved = step

    def on_end(self, text: str) -> None:
        self._check()

    def _check(self) -> None:
        if _identity(self._folder) != self._found:
            raise ArgumentError(
                f"the folder {os.fspath(self._folder)!r} was removed or moved during training, which ends "
                f"after update {self._step}, as nothing can be saved there. If it was moved, resume "
                "(--resume) where it is now, from its last checkpoint; otherwise train in a new folder."
            )
        missing = next((path for path in self._needed if not path.is_file()), None)
        if missing is not None:
            kept = f"that of update {self._saved} is kept" if self._saved else "there is none yet"
            raise ArgumentError(
                f"{os.fspath(missing)!r} was removed during training, which ends after update {self._step}: "
                f"no checkpoint could be resumed without it ({kept}). Copy it back and resume (--resume), or "
                "train in a new folder."
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from another one in its place; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _train(folder: Path, callbacks: Sequence[Callback], world: World) -> TrainingResult:
    """Train on what is prepared, and choose what alignments are read from."""
    folder_config = read_config(folder)
    found, config = prepared(folder), TranslationConfig.from_dict(folder_config["settings"])
    assert found is not None
    logs = [CsvLog(folder), SampleLog(folder), TensorBoardLog(folder)]
    tokens, ids, held, links = found
    outcome = Trainer(
        folder,
        config,
        tokens,
        ids,
        held,
        links=links,
        # first: no listener may report as saved what is not
        callbacks=[_Guard(folder), *callbacks, *logs],
        world=world,
        anew=_lengthened(folder_config),
    ).run()
    with world.agreed():
        if world.rank == 0 and outcome.finished:
            _choose(folder, config, found, world)
    return outcome


def _prepare(
    folder: Path,
    pairs: Iterable[Pair] | None,
    dev: Iterable[Pair] | None,
    config: TranslationConfig | None,
    resume: bool,
    callbacks: Callback,
    origin: Mapping[str, Any],
) -> None:
    """A folder with all that a training reads, unless it is there."""
    if any(not path.name.startswith(".") for path in folder.glob("*")):
        if not resume and not _only_begun(folder):
            raise ArgumentError(
                f"the folder {os.fspath(folder)!r} is not empty; go on in it with resume (--resume), or "
                "name a new one."
            )
        read_config(folder)  # it must be a model folder, and not just any
        remove_partial_files(
            folder
        )  # of a training that was killed; not before the folder is known to be one
        if is_prepared(folder):
            if config is not None:
                _lengthen(folder, config, callbacks)
            return
        if not _only_begun(folder):
            raise ArgumentError(
                f"{os.fspath(folder)!r} has a model, and no data to go on with; copy its folder data as "
                "well, or train in a new folder."
            )
    if pairs is None:
        raise ArgumentError(
            f"there is nothing to go on with in {os.fspath(folder)!r}; give the pairs to train on as well."
        )
    config = config or TranslationConfig.preset("small")
    write_config(folder, config, **({ORIGIN: dict(origin)} if origin else {}))
    prepare(folder, config, pairs, dev, callbacks.say)


def _lengthen(folder: Path, config: TranslationConfig, callbacks: Callback) -> None:
    """Make the config of a folder this one, if it is the same but for a later end."""
    folder_config = read_config(folder)
    begun = TranslationConfig.from_dict(folder_config.pop("settings"))
    folder_config.pop("format")
    if not begun.is_extended_by(config):
        return
    if config.training.patience:
        last = [one.step for one in Checkpoint.all(folder)[-1:]]
        folder_config[EXTENDED] = sorted({*_lengthened(folder_config), *last})
    write_config(folder, config, **folder_config)
    before, after = begun.training.duration(), config.training.duration()
    told = f"lengthened from {before} to {after}"
    if config.training.schedule == "cosine":  # which knows the end
        told += (
            "; the learning rate goes up again, to where a training of this length has it by now, so that "
            "the end is not quite that of one that was as long from the start"
        )
    if config.training.patience:
        told += "; its patience begins anew"
    callbacks.on_message(told)


def _lengthened(folder_config: Mapping[str, Any]) -> list[int]:
    """The updates after which a training was made longer; there patience began anew."""
    found = folder_config.get(EXTENDED)
    return [step for step in found if type(step) is int] if isinstance(found, list) else []


def _only_begun(folder: Path) -> bool:
    """Whether a preparation was cut off here, so that nothing is lost if it begins again."""
    trained = (folder / MODEL).exists() or Checkpoint.all(folder)
    return (folder / CONFIG).exists() and not trained and not is_prepared(folder)


def _choose(folder: Path, config: TranslationConfig, found: Prepared, world: World) -> None:
    """Which layer and heads show word alignments best, into config.json."""
    if config.model.kind == "plain" or not (folder / MODEL).exists():
        return
    kept = {name: value for name, value in read_config(folder).items() if name not in ("format", "settings")}
    with world.reading(folder, lambda: config.model.build(found.tokens.sizes())) as model:
        choice = _best_choice(model, found)
    write_config(folder, config, **kept | {ALIGNMENT: choice.to_dict()})


def load_alignment_head(folder: str | os.PathLike[str]) -> AlignmentHead | None:
    """Which layer and heads show word alignments best: what the training chose, or would choose by now.

    None if the model does not attend to the source, or if its training is not at its end and there are no
    data to choose by.
    """
    path = Path(folder)
    folder_config = read_config(path)
    if folder_config.get(ALIGNMENT):
        return AlignmentHead.from_dict(folder_config[ALIGNMENT])
    found = prepared(path)
    if found is None or TranslationConfig.from_dict(folder_config["settings"]).model.kind == "plain":
        return None
    return _best_choice(load_model(path).model, found)


def _best_choice(model: Seq2Seq, found: Prepared) -> AlignmentHead:
    tokens, dev = found.tokens, found.dev[:_ALIGNED]
    texts = (
        Pair(*(side.join(ids.tolist()).text for side, ids in zip(tokens, pair, strict=True)))
        for pair in islice(found.pairs, _ANCHORED)
    )
    anchors = LexicalAligner.learn([*dev, *texts]).links(dev)
    return select_alignment_head(model, tokens, dev, anchors)
