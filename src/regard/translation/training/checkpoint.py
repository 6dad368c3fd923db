"""Model folders: what a training writes, what a translator reads, and what a killed training goes on from.

FOLDER/config.json         the config, and how alignments are read
FOLDER/tokens.model        the vocabulary; or source.model and target.model
FOLDER/model.safetensors   the parameters to translate with: the best so far
FOLDER/checkpoints/step-00001000/   model.safetensors  optimizer.safetensors  state.json  SHA256SUMS
FOLDER/data/  log.csv  tensorboard/

Files and checkpoints are written beside their place and renamed, so that each is whole or not there. All of
them have checksums, which are verified when they are read: config.json has its own inside, model.safetensors
those of its tensors and of the vocabulary in its metadata, and a checkpoint those of its files in SHA256SUMS.
"""

import difflib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard._util.files import (
    CHECKSUMS,
    MAX_TEXT_BYTES,
    check_loadable,
    open_regular,
    read_regular,
    verify_checksums,
    write_atomic,
    write_checksums,
)
from regard.errors import ArgumentError
from regard.mechanism.weights.io import checksum
from regard.models.parameters import read_parameters
from regard.models.seq2seq import Seq2Seq
from regard.translation.config import TranslationConfig
from regard.translation.tokens import Tokenizer, TokenizerPair

FORMAT = "regard translator 2"
_OLD = ("regard translator 1",)  # had no checksums
CONFIG, MODEL, OPTIMIZER, STATE = "config.json", "model.safetensors", "optimizer.safetensors", "state.json"
SHARED, SOURCE, TARGET = "tokens.model", "source.model", "target.model"
ORIGIN, ALIGNMENT, EXTENDED = "origin", "alignment", "extended"  # in config.json, beside the config
_CHECKSUM = "sha256"
_SUMS = "checksums"  # in the metadata of model.safetensors
_KNOWN = ("format", "settings", ORIGIN, ALIGNMENT, EXTENDED, _CHECKSUM)
_STEP = re.compile(r"step-([0-9]+)")
_PART = re.compile(r"\.(step-[0-9]+|best)\.part")
_WRONG = (LookupError, TypeError, ValueError, OverflowError, RuntimeError, OSError, SafetensorError)


class LoadedModel(NamedTuple):
    """What a model folder holds."""

    model: Seq2Seq
    tokens: TokenizerPair
    config: dict[str, Any]


def load_model(folder: str | os.PathLike[str]) -> LoadedModel:
    """The model of a folder, its vocabularies and its config, or an error that says what is wrong with it."""
    check_folder_name(folder)
    folder_config = read_config(folder)
    path = Path(folder)
    if not os.path.lexists(path / MODEL):
        cure = (
            "Its training is running; wait for that."
            if is_training(path)
            else "Go on with regard train --resume."
        )
        raise ArgumentError(
            f"{os.fspath(folder)!r} has no {MODEL} yet; its training has not come to the first look at the "
            f"dev data. {cure}"
        )
    try:
        check_loadable(path / MODEL)
        tokens, config = (
            read_tokens(path, folder_config),
            TranslationConfig.from_dict(folder_config["settings"]).model,
        )
        with safe_open(path / MODEL, "pt") as file:
            tensors, metadata = len(list(file.keys())), file.metadata() or {}
        if config.layers > tensors:  # before a model of that many is made
            raise ValueError(f"{CONFIG} says {config.layers} layers and {MODEL} has {tensors} tensors")
        with torch.device("meta"):  # sizes alone, until they are known to be right
            model = config.make(tokens.sizes())
        parameters = read_parameters(path / MODEL, model)
        _check_parameters(parameters, json.loads(metadata.get(_SUMS, "{}")), tokens)
        model.load_state_dict(parameters, assign=True)
    except _WRONG as error:
        raise ArgumentError(
            f"{os.fspath(folder)!r} is damaged ({str(error)[:300]}); copy it again, or train anew."
        ) from None
    return LoadedModel(model.eval(), tokens, folder_config)


def check_folder_name(folder: str | os.PathLike[str]) -> None:
    """A folder whose files safetensors can read: their names must be text."""
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            f"the name of the folder {os.fspath(folder)!r} is no UTF-8 text, so that a model in it could not "
            "be read again; give it another name."
        ) from None


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What config.json says."""
    path = Path(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ArgumentError(f"{os.fspath(folder)!r} {what}; give a folder that regard train wrote.")
    try:
        text = read_regular(path / CONFIG, MAX_TEXT_BYTES).decode()
        folder_config = json.loads(text)
    except ArgumentError:
        raise
    except FileNotFoundError:
        raise ArgumentError(
            f"{os.fspath(folder)!r} has no {CONFIG}, so it is no model folder; give one that regard train "
            "wrote."
        ) from None
    except (ValueError, RecursionError):
        folder_config, text = None, ""
    if isinstance(folder_config, dict) and folder_config.get("format") in _OLD:
        raise ArgumentError(
            f"{os.fspath(folder)!r} was written by an older regard ({folder_config['format']!r}; this one reads "
            f"{FORMAT!r}); train anew."
        )
    if (
        not isinstance(folder_config, dict)
        or folder_config.get("format") != FORMAT
        or not isinstance(folder_config.get("settings"), dict)
    ):
        raise ArgumentError(
            f"the {CONFIG} of {os.fspath(folder)!r} does not say {FORMAT!r}; give a folder that regard train "
            "wrote."
        )
    _check_config(folder_config, text, f"the {CONFIG} of {os.fspath(folder)!r}")
    return {name: value for name, value in folder_config.items() if name != _CHECKSUM}


def _check_config(folder_config: dict[str, Any], text: str, where: str) -> None:
    """Names that this version knows, and the checksum of the text, which a person may have removed."""
    unknown = next((name for name in folder_config if name not in _KNOWN), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, _KNOWN, 1)
        cure = f"did you mean {near[0]!r}?" if near else "was it written by a newer regard?"
        raise ArgumentError(f"{where} has the unknown name {unknown[:80]!r}; {cure}")
    if _CHECKSUM in folder_config and text != _config_text(folder_config):
        raise ArgumentError(
            f"{where} is damaged: it does not have its checksum. Copy the folder again; or, if you changed "
            f"the file yourself, remove {_CHECKSUM!r} from it."
        )


def _config_text(folder_config: Mapping[str, Any]) -> str:
    """What config.json contains, with its checksum at the end."""
    known = {name: value for name, value in folder_config.items() if name != _CHECKSUM}
    found = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return json.dumps({**known, _CHECKSUM: found}, indent=2, ensure_ascii=False)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """A folder in which no other training works meanwhile; if it was made here, it goes if it stays empty."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder, timeout=2)  # `is_training` holds the lock for a moment
        try:
            yield
        finally:
            if made:
                with suppress(OSError):
                    folder.rmdir()  # the system refuses if it is not empty, or gone
    finally:
        os.close(handle)  # which unlocks it, and so does being killed


def _lock(handle: int, folder: Path, *, shared: bool = False, timeout: float = 0) -> None:
    """Lock a folder, or raise `ArgumentError` if it stays locked for `timeout` seconds."""
    try:
        import fcntl

        end = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.002)
    except BlockingIOError:
        raise ArgumentError(
            f"another training is at work in {os.fspath(folder)!r}; wait for it, stop it, or train in a new "
            "folder."
        ) from None
    except (ImportError, OSError):  # a system, or a file system, without locks
        pass


def is_training(folder: Path) -> bool:
    """Whether a training is at work in a folder.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from regard.translation.training.checkpoint import lock_folder, is_training
    >>> with tempfile.TemporaryDirectory() as folder, lock_folder(Path(folder)):
    ...     is_training(Path(folder))
    True
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        _lock(handle, folder, shared=True)
    except ArgumentError:
        return True
    finally:
        os.close(handle)
    return False


def write_config(folder: Path, config: TranslationConfig, **more: Any) -> None:
    """Write config.json; `more` goes beside the config."""
    folder_config = {"format": FORMAT, "settings": config.to_dict(), **more}
    write_atomic(folder / CONFIG, _config_text(folder_config).encode())


def read_tokens(folder: Path, folder_config: Mapping[str, Any]) -> TokenizerPair:
    """The vocabularies of a folder."""
    config = TranslationConfig.from_dict(folder_config["settings"]).tokens
    if config.shared:
        shared = Tokenizer.load(folder / SHARED, config.kind)
        return TokenizerPair(shared, shared)
    return TokenizerPair(Tokenizer.load(folder / SOURCE, config.kind), Tokenizer.load(folder / TARGET, config.kind))


def write_tokens(folder: Path, tokens: TokenizerPair) -> None:
    """Write the vocabularies into a folder."""
    if tokens.shared:
        tokens.source.save(folder / SHARED)
    else:
        tokens.source.save(folder / SOURCE)
        tokens.target.save(folder / TARGET)


def write_parameters(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the parameters to translate with; those that were there stay until these are whole."""
    part = folder / "checkpoints" / ".best.part"  # a folder, as safetensors writes beside its file, too
    with _written(folder, folder / MODEL, part):
        _save(part / MODEL, tensors, _sums(folder, checksum(tensors, tensors.__getitem__)))
        _adopt(folder, part / MODEL)


def install_parameters(folder: Path, written: Path) -> None:
    """Make a safetensors file in a model folder the parameters to translate with; it gets its checksums."""
    with safe_open(written, "pt") as file:
        sums = _sums(folder, checksum(file.keys(), file.get_tensor))
    whole = written.with_name(f"whole-{written.name}")
    with written.open("rb") as source, whole.open("wb") as target:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        text = json.dumps({"__metadata__": sums, **header}).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
        target.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, target, 2**20)
    _adopt(folder, whole)


def _adopt(folder: Path, written: Path) -> None:
    _sync(written)
    os.replace(written, folder / MODEL)
    _sync(folder)


def _sums(folder: Path, of_tensors: str) -> dict[str, str]:
    """The checksums of the tensors and of the vocabularies, as a safetensors file keeps them.

    One entry: safetensors writes several in any order, and equal models are to be equal files.
    """
    sums = {_CHECKSUM: of_tensors}
    for name in (SHARED, SOURCE, TARGET):
        if (folder / name).is_file():
            sums[name] = _sum_of_tokens(Tokenizer.read(folder / name))
    return {_SUMS: json.dumps(sums)}


def _check_parameters(
    parameters: Mapping[str, Tensor], sums: Mapping[str, str], tokens: TokenizerPair
) -> None:
    """Raise ValueError unless these are the tensors that were written, and for these vocabularies."""
    if sums.get(_CHECKSUM) != checksum(parameters, parameters.__getitem__):
        raise ValueError(f"{MODEL} does not match its checksum")
    names = (SHARED,) if tokens.shared else (SOURCE, TARGET)
    for name, side in zip(names, tokens, strict=False):
        if sums.get(name) != _sum_of_tokens(side.content):
            raise ValueError(f"{name} is not the vocabulary that {MODEL} was trained with")


def _sum_of_tokens(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Checkpoint(NamedTuple):
    """A state of a training, on disk.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from regard.translation.training.checkpoint import Checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     one = Checkpoint.write(Path(folder), 100, {"a": torch.ones(2)}, {}, {"seconds": 1.5})
    ...     found = Checkpoint.all(Path(folder))
    ...     found[-1].step, found[-1].parameters(), found[-1].state()
    (100, {'a': tensor([1., 1.])}, {'seconds': 1.5})
    """

    path: Path
    step: int

    @classmethod
    def all(cls, folder: Path) -> list["Checkpoint"]:
        """Those of a folder, from the first to the last step."""
        paths = [path for path in (folder / "checkpoints").glob("step-*") if _is_checkpoint(path)]
        return sorted((cls(path, int(path.name[5:])) for path in paths), key=lambda one: one.step)

    @classmethod
    def write(
        cls,
        folder: Path,
        step: int,
        parameters: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> "Checkpoint":
        """Write a checkpoint whole; if that fails, the others are as they were."""
        with cls.beside(folder, step) as part:
            _save(part / MODEL, parameters)
            _save(part / OPTIMIZER, optimizer)
            write_state(part, state)
        return cls.at(folder, step)

    @classmethod
    def at(cls, folder: Path, step: int) -> "Checkpoint":
        """That of a step, whether it is there or not."""
        return cls(folder / "checkpoints" / f"step-{step:08}", step)

    @property
    def part(self) -> Path:
        """Where it is before it is whole."""
        return self.path.with_name(f".{self.path.name}.part")

    @classmethod
    @contextmanager
    def beside(cls, folder: Path, step: int) -> Iterator[Path]:
        """A folder to be filled, which becomes the checkpoint of this step if no error ends the block."""
        place = cls.at(folder, step)
        with _written(folder, place.path, place.part):
            yield place.part
            write_checksums(place.part / CHECKSUMS, [path.name for path in place.part.iterdir()])
            for path in place.part.iterdir():
                _sync(path)
            _sync(place.part)
            if not place.path.exists():  # else a training came here before, to the same state
                os.replace(place.part, place.path)
                _sync(place.path.parent)

    @staticmethod
    def tidy(folder: Path, keep: Sequence["Checkpoint"]) -> None:
        """Remove all checkpoints but these, and what a killed training left half written.

        What else is in these folders stays where it is.
        """
        kept = {one.path for one in keep}
        for path in (folder / "checkpoints").glob("*"):
            if _PART.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif path not in kept and _is_checkpoint(path):
                for name in _FILES:
                    (path / name).unlink(missing_ok=True)
                with suppress(OSError):
                    path.rmdir()  # the system refuses if it is not empty

    def check(self) -> None:
        """Raise ArgumentError unless all of its files have their checksums."""
        self._check(MODEL, OPTIMIZER, STATE)

    def _check(self, *names: str) -> None:
        try:
            for name in names:
                if name.endswith(".safetensors"):
                    _check_size(self.path / name)
            verify_checksums(self.path / CHECKSUMS, names)
        except (OSError, ValueError) as error:
            raise ArgumentError(damaged(self.path, error)) from None

    def parameters(self) -> dict[str, Tensor]:
        """The model's tensors."""
        self._check(MODEL)
        return _load(self.path / MODEL)

    def optimizer(self) -> dict[str, Tensor]:
        """The optimizer's tensors."""
        self._check(OPTIMIZER)
        return _load(self.path / OPTIMIZER)

    def state(self) -> dict[str, Any]:
        """All else that a training goes on with."""
        self._check(STATE)
        try:
            return json.loads(read_regular(self.path / STATE, MAX_TEXT_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(damaged(self.path, error)) from None


_FILES = (MODEL, OPTIMIZER, STATE, CHECKSUMS)
_MOST_HEADER = 100_000_000  # bytes, as safetensors reads at most


def _check_size(path: Path) -> None:
    """Raise ValueError unless a safetensors file has the length in its header: hashing a hole takes hours."""
    wrong = ValueError(f"{path.name} is not as long as its header says")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, _MOST_HEADER):
            raise wrong
        try:
            header = json.loads(file.read(length))
            ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
            whole = 8 + length + max(ends, default=0) == size
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise wrong from None
    if not whole:
        raise wrong


def _is_checkpoint(path: Path) -> bool:
    """Whether there is a checkpoint, by its name and files; a folder of such a name may be a person's."""
    return bool(_STEP.fullmatch(path.name)) and any(os.path.lexists(path / name) for name in _FILES)


def write_state(part: Path, state: Mapping[str, Any]) -> None:
    """Write what a checkpoint has beside its tensors."""
    write_atomic(part / STATE, json.dumps(dict(state)).encode())


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """What an optimizer remembers of each parameter, as tensors with names."""
    states = optimizer.state_dict()["state"]
    return {
        f"{kind}:{names[number]}": value
        for number, state in states.items()
        for kind, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    """Give an optimizer back what `optimizer_tensors` took."""
    numbers = {name: number for number, name in enumerate(names)}
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition(":")
        # steps are single numbers; a sharded training writes them as vectors of one
        states.setdefault(numbers[name], {})[kind] = value.reshape(()) if kind == "step" else value
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for number, parameter in enumerate(parameters):
        # a fused optimizer would write beyond tensors that are too small
        shapes = {kind: value.shape for kind, value in states.get(number, {}).items()}
        if shapes != {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
            raise ValueError(f"the optimizer's tensors of {names[number]} are missing or of another shape")
    optimizer.load_state_dict(optimizer.state_dict() | {"state": states})


@contextmanager
def _written(folder: Path, place: Path, part: Path) -> Iterator[None]:
    """An empty folder `part` for as long as the block lasts; what fails names the place that is written.

    The model folder must be there: one that was removed meanwhile would lack all else.
    """
    try:
        shutil.rmtree(part, ignore_errors=True)  # of one that was killed
        os.stat(folder)
        part.parent.mkdir(exist_ok=True)
        part.mkdir()
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(place)) from error
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))  # a full disk, for example
        number, text = (int(found[1]), os.strerror(int(found[1]))) if found else (None, str(error))
        raise OSError(number, text, os.fspath(place)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
    # safetensors lets nobody else read it; whoever may enter the folder may read other files of it
    path.chmod(path.parent.stat().st_mode & 0o666)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        check_loadable(path)
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ArgumentError) as error:
        raise ArgumentError(damaged(path.parent, error)) from None


def damaged(path: Path, error: Exception) -> str:
    """What to say of a checkpoint that cannot be read."""
    return (
        f"the checkpoint {os.fspath(path)!r} is damaged ({error}); remove it, and the training goes on from "
        "the one before."
    )


def _sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
