"""Sharded models: each process holds some rows of every parameter, and none ever holds the whole model.

build      a new model, initialised layer by layer; of each layer a process keeps its own rows
write      one safetensors file, written by the first process; the others send it their rows in order
read_rows  the rows of a process, from such a file or from any other
average    the mean of parameters and those of checkpoints, tensor by tensor
streamed   a model whose blocks are read from a file while they compute: for validation in one process

The files are the same as those of a training in one process.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, distributed, nn
from torch.nn.modules.module import register_module_module_registration_hook

from regard.errors import ArgumentError
from regard.models.layers.blocks import DecoderBlock, EncoderBlock
from regard.models.seq2seq import Seq2Seq
from regard.translation.training.checkpoint import MODEL, Checkpoint, damaged

BLOCKS = (EncoderBlock, DecoderBlock)  # gathered one at a time; all other parameters together
_ALIGNED = 64  # bytes: where the tensors of a file begin
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}

Device = torch.device | str
Module = TypeVar("Module", bound=nn.Module)


class Share(NamedTuple):
    """One process of several, and the rows of a tensor that are its own: those of FSDP2 and `torch.chunk`.

    >>> from regard.translation.training.sharding import Share
    >>> [Share(rank, 3).rows(7) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 7, None)]
    """

    rank: int
    size: int

    def rows(self, length: int) -> slice:
        """The rows of a tensor that has so many; possibly none."""
        step = -(-length // self.size)
        return slice(min(self.rank * step, length), min((self.rank + 1) * step, length))


class Shard(NamedTuple):
    """What a process holds of a tensor: its rows, or all of them if the tensor is not sharded.

    shape: that of the whole tensor.
    """

    local: Tensor
    shape: torch.Size
    sharded: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Shard":
        """The shard of a parameter of FSDP2's, or any other tensor."""
        from torch.distributed.tensor import DTensor

        sharded = isinstance(tensor, DTensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return cls(local.detach(), tensor.shape, sharded)

    @classmethod
    def all(cls, tensors: Mapping[str, Tensor]) -> "dict[str, Shard]":
        """The shards of several tensors, by name."""
        return {name: cls.of(tensor) for name, tensor in tensors.items()}


def build(make: Callable[[], Module], share: Share) -> tuple[Module, dict[str, Tensor]]:
    """A module whose parameters are on the meta device, and this process's rows of their initial values.

    `make` initialises every layer as usual, so that the random numbers are those of a module in one process.
    As soon as a layer is assigned to its parent, all rows but this process's are freed.

    >>> import torch
    >>> from regard.translation.training.sharding import Share, build
    >>> model, rows = build(lambda: torch.nn.Sequential(torch.nn.Linear(4, 6)), Share(0, 2))
    >>> model[0].weight.device, rows["0.weight"].shape
    (device(type='meta'), torch.Size([3, 4]))
    """
    kept: dict[nn.Parameter, Tensor] = {}
    thread = get_ident()

    def shard(module: nn.Module) -> None:
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for child in module.modules():
            for name, parameter in list(child.named_parameters(recurse=False)):
                if parameter.is_meta:
                    continue
                if parameter not in replaced:
                    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                    kept[empty] = parameter.detach()[share.rows(len(parameter))].clone()
                    replaced[parameter] = empty
                setattr(child, name, replaced[parameter])

    def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and get_ident() == thread:  # other threads may make modules of their own
            shard(child)

    handle = register_module_module_registration_hook(registered)
    try:
        module = make()
    finally:
        handle.remove()
    shard(module)
    for name, parameter in module.named_parameters():
        # in-place operations are counted on the meta device, too
        if parameter._version:
            raise RuntimeError(f"{name} was initialised after its layer was assigned to another one")
    return module, {name: kept[parameter] for name, parameter in module.named_parameters()}


@torch.no_grad()
def materialize(module: nn.Module, rows: dict[str, Tensor], device: torch.device) -> None:
    """Replace the meta parameters of a sharded module by these rows, which are freed one by one."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in module.named_parameters():
        Shard.of(parameter).local.copy_(rows.pop(name))


def write(files: Mapping[Path, Mapping[str, Shard]], share: Share, group: Any) -> None:
    """All processes together write safetensors files; none of them holds more than its rows of two tensors.

    If the first process, which writes, fails, it raises its error after the others have sent their rows.
    """
    ordered = {path: dict(sorted(shards.items())) for path, shards in files.items()}
    coming = {path: _gathered(shards, share, group) for path, shards in ordered.items()}
    try:
        if share.rank == 0:
            for path, shards in ordered.items():
                with path.open("wb") as file:
                    file.write(_header(shards))
                    for piece in coming[path]:
                        file.write(piece.reshape(-1).view(torch.uint8).numpy().data)
    finally:
        for pieces in coming.values():  # send what is left, so that no process waits for ever
            deque(pieces, 0)


def _gathered(shards: Mapping[str, Shard], share: Share, group: Any) -> Iterator[Tensor]:
    """In the first process, the rows of all processes, tensor by tensor; the others send theirs."""
    for shard in shards.values():
        for rank in range(share.size if shard.sharded else 1):
            rows = Share(rank, share.size).rows(shard.shape[0]) if shard.sharded else slice(None)
            if shard.sharded and rows.start == rows.stop:
                continue
            if rank == share.rank:
                piece = shard.local.cpu().contiguous()
                if share.rank == 0:
                    yield piece
                else:
                    distributed.send(piece, 0, group)
            elif share.rank == 0:
                piece = torch.empty(rows.stop - rows.start, *shard.shape[1:], dtype=shard.local.dtype)
                distributed.recv(piece, rank, group)
                yield piece


def _header(shards: Mapping[str, Shard]) -> bytes:
    """What a safetensors file begins with: the length of a JSON text, and the text."""
    about, end = {}, 0
    for name, (local, shape, _) in shards.items():
        start, end = end, end + shape.numel() * local.element_size()
        about[name] = {"dtype": _DTYPES[local.dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(about).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def read_rows(path: Path, name: str, shard: Shard, share: Share) -> Tensor:
    """What a process holds of a tensor in a safetensors file; the shape must be that of `shard`.

    The result is a view of the file, which is mapped for as long as the result lives.
    """
    with _opened(path) as file:
        rows = file.get_slice(name)
        found = rows.get_shape()
        if found != list(shard.shape):
            raise ValueError(f"{name} has the shape {found} and should have {list(shard.shape)}")
        return rows[share.rows(found[0])] if shard.sharded else file.get_tensor(name)


def read_whole(path: Path, name: str) -> Tensor:
    """A copy of a tensor in a safetensors file."""
    with _opened(path) as file:
        return file.get_tensor(name).clone()


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file."""
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of a checkpoint."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ArgumentError(damaged(path.parent, error)) from None


@torch.no_grad()
def read_into(path: Path, name: str, tensor: Tensor, share: Share) -> None:
    """Fill a tensor, or this process's rows of a sharded one, from a safetensors file."""
    shard = Shard.of(tensor)
    shard.local.copy_(read_rows(path, name, shard, share))


def average(
    shards: Mapping[str, Shard], saved: Sequence[Checkpoint], share: Share
) -> Iterator[tuple[str, Shard]]:
    """The mean of these tensors and of those of checkpoints, one by one."""
    for name, shard in shards.items():
        total = shard.local.double()
        for one in saved:
            total += read_rows(one.path / MODEL, name, shard, share).to(total.device)
        yield name, shard._replace(local=(total / (len(saved) + 1)).to(shard.local.dtype))


@contextmanager
def streamed(make: Callable[[], Seq2Seq], path: Path, device: Device = "cpu") -> Iterator[Seq2Seq]:
    """A model that reads each block from a file when it is called, and forgets it afterwards.

    make: makes a model of the right size. path: a safetensors file with its parameters. Blocks are views of
    the file, so that the system reads it once and keeps what fits into memory.
    """
    with torch.device("meta"):
        model = make().eval()
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, BLOCKS)}
    inside = tuple(f"{name}." for name in blocks)
    _load(model, path, device, {name: name for name in model.state_dict() if not name.startswith(inside)})
    for name, block in blocks.items():
        _load_when_called(block, path, device, name)
    yield model


def _load_when_called(block: nn.Module, path: Path, device: Device, prefix: str) -> None:
    """Read the parameters of a block before its methods that need them, and drop them afterwards."""
    names = {name: f"{prefix}.{name}" for name in block.state_dict()}
    empty = dict(block.state_dict(keep_vars=True))
    depth = 0

    def loading(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*given: Any, **options: Any) -> Any:
            nonlocal depth
            if not depth:
                _load(block, path, device, names)
            depth += 1
            try:
                return method(*given, **options)
            finally:
                depth -= 1
                if not depth:
                    _assign(block, empty)

        return call

    block.forward = loading(block.forward)
    if isinstance(block, DecoderBlock):  # the keys and values of a source are made before the first step
        block.cross.project_source = loading(block.cross.project_source)  # type: ignore[method-assign]


def _load(module: nn.Module, path: Path, device: Device, names: Mapping[str, str]) -> None:
    with safe_open(path, "pt") as file:
        _assign(module, {own: file.get_tensor(name).to(device) for own, name in names.items()})


def _assign(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make these tensors the parameters and buffers of a module."""
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        is_parameter = own in owner._parameters
        setattr(owner, own, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
