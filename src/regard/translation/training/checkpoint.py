"""Models and checkpoints in a model folder; `model_folder` describes the layout."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard._util.files import (
    CHECKSUMS,
    MAX_TEXT_BYTES,
    check_loadable,
    read_regular,
    verify_checksums,
    write_checksums,
)
from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.mechanism.weights.io import checksum
from regard.models.parameters import meta_device, read_parameters
from regard.models.seq2seq import Seq2Seq
from regard.translation.config import TokensConfig, TranslationConfig
from regard.translation.folder_lock import is_training
from regard.translation.model_folder import (
    CHECKPOINTS,
    CHECKSUM,
    CONFIG,
    MODEL,
    OPTIMIZER,
    SHARED,
    SOURCE,
    STATE,
    TARGET,
    check_folder_name,
    damaged_checkpoint,
    read_config,
)
from regard.translation.pretrained.origin import build_model, origin_checksums, read_origin
from regard.translation.saved_model import (
    TENSOR_CHECKSUMS,
    mismatched_vocabulary,
    read_checksums,
    read_vocabularies,
    token_files,
)
from regard.translation.tokens import Tokenizer, TokenizerPair

_STEP = re.compile(r"step-([0-9]+)")
_PART = re.compile(r"\.(step-[0-9]+|best|average)\.part")
_READ_ERRORS = (LookupError, TypeError, ValueError, OverflowError, RuntimeError, OSError, SafetensorError)


class LoadedModel(NamedTuple):
    """The contents of a model folder."""

    model: Seq2Seq
    tokens: TokenizerPair
    config: dict[str, Any]


def load_model(folder: str | os.PathLike[str]) -> LoadedModel:
    """Load the model, the vocabularies and the config from a folder."""
    check_folder_name(folder)
    folder_config = read_config(folder)
    path = Path(folder)
    if not os.path.lexists(path / MODEL):
        cure = (
            "Training is still running; try again later."
            if is_training(path)
            else f"If training was interrupted, run: regard train -o {os.fspath(folder)} --resume"
        )
        raise ArgumentError(f"{os.fspath(folder)!r} has no model yet; the first validation saves one. {cure}")
    try:
        check_loadable(path / MODEL)
        settings = TranslationConfig.from_dict(folder_config["settings"])
        config, tokens = settings.model, read_tokens(path, settings.tokens)
        with safe_open(path / MODEL, "pt") as file:
            tensors, metadata = len(list(file.keys())), file.metadata() or {}
        if config.layers > tensors:  # checked before the layers are built
            raise ValueError(
                f"{CONFIG} has {pluralize(config.layers, 'layer')}, but {MODEL} has "
                f"{pluralize(tensors, 'tensor')}"
            )
        with meta_device():  # allocates no memory until the sizes are checked
            model = build_model(config, tokens)
        parameters = read_parameters(path / MODEL, model)
        _check_parameters(parameters, read_checksums(metadata), path, tokens)
        # float16 only saves space; CPUs compute in float32. bfloat16 has the range of float32 and is kept.
        if all(tensor.dtype == torch.float16 for tensor in parameters.values()):
            parameters = {name: tensor.float() for name, tensor in parameters.items()}
        model.load_state_dict(parameters, assign=True)
    except _READ_ERRORS as error:
        reason = str(error)[:300].rstrip(".")
        raise ArgumentError(
            f"{os.fspath(folder)!r} is corrupted ({reason}). Copy it again, or train a new model."
        ) from None
    return LoadedModel(model.eval(), tokens, folder_config)


def read_tokens(folder: Path, config: TokensConfig) -> TokenizerPair:
    """Load the vocabularies from a folder."""
    origin = read_origin(folder)
    if origin is not None:
        return origin.tokens
    return read_vocabularies(folder, config)


def write_tokens(folder: Path, tokens: TokenizerPair) -> None:
    """Save the vocabularies in a folder, unless they come from a pretrained model and are already there."""
    if tokens.target.origin is not None:
        return
    for name, side in dict(zip(token_files(tokens.shared), tokens, strict=True)).items():
        side.save(folder / name)


def write_parameters(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Atomically replace the parameters of the best model."""
    from regard.translation.training.distributed.sharding import (  # imports torch.distributed
        Shard,
        write_sharded,
    )

    part = folder / CHECKPOINTS / ".best.part"
    with temporary_folder(folder / MODEL, part):
        metadata = _checksums(folder, checksum(tensors, tensors.__getitem__))
        write_sharded({part / MODEL: Shard.all(tensors)}, metadata=metadata)
        _sync(part / MODEL)
        os.replace(part / MODEL, folder / MODEL)
        _sync(folder)


def _checksums(folder: Path, tensor_checksum: str) -> dict[str, str]:
    """Return metadata with the checksums of the tensors and vocabularies."""
    sums = {CHECKSUM: tensor_checksum}
    for name in (SHARED, SOURCE, TARGET):
        if (folder / name).is_file():
            sums[name] = hashlib.sha256(Tokenizer.read(folder / name)).hexdigest()
    sums |= origin_checksums(folder)
    return {TENSOR_CHECKSUMS: json.dumps(sums)}


def _check_parameters(
    parameters: Mapping[str, Tensor], sums: Mapping[str, str], folder: Path, tokens: TokenizerPair
) -> None:
    """Raise ValueError unless tensors and vocabularies match their checksums."""
    if sums.get(CHECKSUM) != checksum(parameters, parameters.__getitem__):
        raise ValueError(f"{MODEL} does not match its checksum")
    for name, digest in origin_checksums(folder).items():
        if sums.get(name) != digest:
            raise ValueError(f"{name} is not the file that the model in {MODEL} was trained with")
    if tokens.target.origin is not None:
        return
    mismatched = mismatched_vocabulary(sums, tokens)
    if mismatched is not None:
        raise ValueError(f"{mismatched} is not the vocabulary that the model in {MODEL} was trained with")


class Checkpoint(NamedTuple):
    """A checkpoint of a training run."""

    path: Path
    step: int

    @classmethod
    def all(cls, folder: Path) -> list["Checkpoint"]:
        """Return the checkpoints in a folder, sorted by step."""
        paths = [path for path in (folder / CHECKPOINTS).glob("step-*") if _is_checkpoint(path)]
        return sorted(
            (cls(path, int(path.name[5:])) for path in paths), key=lambda checkpoint: checkpoint.step
        )

    @classmethod
    def at(cls, folder: Path, step: int) -> "Checkpoint":
        """Return the checkpoint for a step, whether or not it exists."""
        return cls(folder / CHECKPOINTS / f"step-{step:08}", step)

    @property
    def part(self) -> Path:
        """Temporary folder used while the checkpoint is being written."""
        return self.path.with_name(f".{self.path.name}.part")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Create the folder `part`, which becomes the checkpoint if the block ends without an error."""
        with temporary_folder(self.path, self.part):
            yield
            write_checksums(self.part / CHECKSUMS, [path.name for path in self.part.iterdir()])
            for path in self.part.iterdir():
                _sync(path)
            _sync(self.part)
            if not self.path.exists():  # otherwise an earlier run reached the same state
                os.replace(self.part, self.path)
                _sync(self.path.parent)

    @staticmethod
    def prune(folder: Path, keep: Sequence["Checkpoint"]) -> None:
        """Remove all checkpoints, complete or not, except those in `keep`. Other files are left in place."""
        kept = {checkpoint.path for checkpoint in keep}
        for path in (folder / CHECKPOINTS).glob("*"):
            if _PART.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif path not in kept and _is_checkpoint(path):
                for name in _FILES:
                    (path / name).unlink(missing_ok=True)
                with suppress(OSError):
                    path.rmdir()  # fails unless empty

    def check(self) -> None:
        """Raise ArgumentError unless all files match their checksums."""
        self._check(MODEL, OPTIMIZER, STATE)

    def _check(self, *names: str) -> None:
        try:
            for name in names:
                if name.endswith(".safetensors"):
                    _check_size(self.path / name)
            verify_checksums(self.path / CHECKSUMS, names)
        except (OSError, ValueError) as error:
            raise damaged_checkpoint(self.path, error) from None

    def state(self) -> dict[str, Any]:
        """Return the training state, excluding tensors."""
        self._check(STATE)
        try:
            return json.loads(read_regular(self.path / STATE, MAX_TEXT_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise damaged_checkpoint(self.path, error) from None


_FILES = (MODEL, OPTIMIZER, STATE, CHECKSUMS)


def _check_size(path: Path) -> None:
    """Raise ValueError unless a file's size matches its header. Hashing a sparse file could take hours."""
    check_loadable(path)
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError:
        raise ValueError(f"{path.name} does not have the size stated in its header") from None


def _is_checkpoint(path: Path) -> bool:
    """Return whether a folder has the name and files of a checkpoint; a user's folder may share the name."""
    return bool(_STEP.fullmatch(path.name)) and any(os.path.lexists(path / name) for name in _FILES)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the optimizer state as named tensors."""
    states = optimizer.state_dict()["state"]
    return {
        f"{kind}:{names[index]}": value
        for index, state in states.items()
        for kind, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    """Restore the optimizer state from `optimizer_tensors`."""
    indices = {name: index for index, name in enumerate(names)}
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition(":")
        # sharded runs write steps as vectors of length 1
        states.setdefault(indices[name], {})[kind] = value.reshape(()) if kind == "step" else value
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        # a fused optimizer would write past the end of smaller tensors
        shapes = {kind: value.shape for kind, value in states.get(index, {}).items()}
        if shapes != {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}:
            raise ValueError(f"the optimizer state for {names[index]} is missing or has a different shape")
    optimizer.load_state_dict(optimizer.state_dict() | {"state": states})


@contextmanager
def temporary_folder(destination: Path, part: Path) -> Iterator[None]:
    """Create FOLDER/checkpoints/`part` for the duration of the block; raise if FOLDER was removed.

    Errors about files in FOLDER/checkpoints name `destination` instead.
    """
    try:
        shutil.rmtree(part, ignore_errors=True)  # left by a killed run
        part.parent.mkdir(exist_ok=True)
        part.mkdir()
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(os.fspath(part.parent)):
            raise OSError(error.errno, error.strerror or str(error), os.fspath(destination)) from error
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
