"""Checkpoints of sharded models by torch's own distributed checkpoints: each process writes and reads a part.

torch writes safetensors here (no pickle), and joins the parts tensor by tensor: what comes out are the files
of any other checkpoint, and no process holds more than one whole tensor.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from regard.translation.checkpoint import MODEL, OPTIMIZER


def write_shards(
    part: Path,
    parameters: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    group: "distributed.ProcessGroup",
) -> None:
    """All processes together write these tensors into a folder; what fails in one is raised in all."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(
        os.fspath(part),
        fqn_to_index_mapping=dict.fromkeys(sorted(parameters), 1) | dict.fromkeys(sorted(optimizer), 2),
        save_distributed=True,
        enable_consolidation=True,
    )
    # single numbers as vectors of one, as torch's joining loses their value
    vectors = {name: tensor.reshape(tensor.shape or 1) for name, tensor in optimizer.items()}
    with _plain_errors():
        save({**parameters, **vectors}, storage_writer=writer, process_group=group)


def settle(part: Path) -> None:
    """Of what torch has written, the joined files alone, under the names of any checkpoint."""
    parameters, optimizer = sorted(part.glob("*.safetensors"))  # torch numbers them
    parameters.rename(part / MODEL)
    optimizer.rename(part / OPTIMIZER)
    for path in part.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (MODEL, OPTIMIZER):
            path.unlink()


def room(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint is to be read into: the model's own, and new ones for its optimizer."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    own: dict[str, Tensor] = dict(model.state_dict())
    found = {}
    for name, about in HuggingFaceStorageReader(os.fspath(path)).read_metadata().state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata)
        kind, colon, parameter = name.partition(":")
        if not colon:
            found[name] = own.pop(name)
        elif kind == "step":
            found[name] = torch.zeros(about.size)
        else:
            found[name] = torch.zeros_like(model.get_parameter(parameter))
    if own:
        raise KeyError(f"it has no {next(iter(own))}")
    return found


def read_shards(path: Path, tensors: dict[str, Tensor], group: "distributed.ProcessGroup") -> None:
    """Each process reads its part of a checkpoint into these tensors; what fails in one is raised in all."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _plain_errors():
        load(tensors, storage_reader=HuggingFaceStorageReader(os.fspath(path)), process_group=group)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What failed, and not what torch makes of it, which is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise cause from None
