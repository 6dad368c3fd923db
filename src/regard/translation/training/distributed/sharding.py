"""Sharded models: each process holds some rows of every parameter; no process holds the whole model.

build_sharded    a new model, initialized layer by layer; a process keeps its rows of each layer
write_sharded    one safetensors file, written by rank 0; the other ranks send their rows in order
read_rows        the rows of a process, from any safetensors file
average          the mean of a model and checkpoints, tensor by tensor
streamed_model   a model whose blocks are read from a file when called, for validation in one process

The files are the same as in single-process training.
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

from regard.models.layers.blocks import DecoderBlock, EncoderBlock
from regard.models.seq2seq import Seq2Seq
from regard.translation.model_folder import damaged_checkpoint

BLOCKS = (EncoderBlock, DecoderBlock)  # gathered one at a time; all other parameters together
_ALIGNMENT = 64  # alignment of the tensor data in bytes
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
    """One of `size` processes. Rows are divided among the processes as in FSDP2 and `torch.chunk`."""

    rank: int
    size: int

    def rows(self, length: int) -> slice:
        """Return this process's rows in a tensor with `length` rows; possibly none."""
        step = -(-length // self.size)
        return slice(min(self.rank * step, length), min((self.rank + 1) * step, length))


ALONE = Share(0, 1)  # a single process


class Shard(NamedTuple):
    """The rows of a tensor that one process holds; all rows if the tensor is not sharded.

    shape: shape of the whole tensor.
    """

    local: Tensor
    shape: torch.Size
    sharded: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Shard":
        """Return this process's shard of an FSDP2 parameter. Any other tensor counts as unsharded."""
        to_local = getattr(tensor, "to_local", None)  # only DTensor has it; importing DTensor is slow
        local = tensor if to_local is None else to_local()
        return cls(local.detach(), tensor.shape, sharded=to_local is not None)

    @classmethod
    def all(cls, tensors: Mapping[str, Tensor]) -> "dict[str, Shard]":
        """Return the shards of several tensors by name."""
        return {name: cls.of(tensor) for name, tensor in tensors.items()}


def build_sharded(build: Callable[[], Module], share: Share) -> tuple[Module, dict[str, Tensor]]:
    """Build a module on the meta device; return it with this process's rows of its parameters, by name.

    `build` initializes every layer as usual, with the same random numbers as in one process. As soon as a
    layer is assigned to its parent, the rows of other processes are freed.
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
        if child is not None and get_ident() == thread:  # other threads may also build modules
            shard(child)

    handle = register_module_module_registration_hook(registered)
    try:
        module = build()
    finally:
        handle.remove()
    shard(module)
    for name, parameter in module.named_parameters():
        # in-place operations are also counted on the meta device
        if parameter._version:
            raise RuntimeError(f"{name} was initialized after its layer was assigned to its parent")
    return module, {name: kept[parameter] for name, parameter in module.named_parameters()}


@torch.no_grad()
def materialize(module: nn.Module, rows: dict[str, Tensor], device: torch.device) -> None:
    """Replace the meta parameters of a sharded module with `rows`, removing each entry after use."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    for name, parameter in module.named_parameters():
        Shard.of(parameter).local.copy_(rows.pop(name))


def write_sharded(
    files: Mapping[Path, Mapping[str, Shard]],
    share: Share = ALONE,
    group: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write safetensors files from all processes; no process holds more than its rows of two tensors.

    If rank 0 fails to write, it raises after the others have sent their rows.
    """
    ordered = {path: dict(sorted(shards.items())) for path, shards in files.items()}
    incoming = {path: _gather(shards, share, group) for path, shards in ordered.items()}
    try:
        if share.rank == 0:
            for path, shards in ordered.items():
                with path.open("wb") as file:
                    file.write(_header(shards, metadata))
                    for piece in incoming[path]:
                        file.write(piece.reshape(-1).view(torch.uint8).numpy().data)
    finally:
        for pieces in incoming.values():  # exchange the rest, so no process waits forever
            deque(pieces, 0)


def _gather(shards: Mapping[str, Shard], share: Share, group: Any) -> Iterator[Tensor]:
    """On rank 0, yield the rows from all processes, tensor by tensor; other ranks send theirs."""
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


def _header(shards: Mapping[str, Shard], metadata: Mapping[str, str] | None) -> bytes:
    """Return the header of a safetensors file: the length of a JSON text, and the text."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (local, shape, _) in shards.items():
        start, end = end, end + shape.numel() * local.element_size()
        entries[name] = {"dtype": _DTYPES[local.dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_rows(path: Path, name: str, shard: Shard, share: Share) -> Tensor:
    """Return this process's rows of a tensor in a safetensors file, as a view of the memory-mapped file.

    Raises ValueError if the tensor does not have the shape of `shard`.
    """
    with _open(path) as file:
        rows = file.get_slice(name)
        shape = rows.get_shape()
        if shape != list(shard.shape):
            raise ValueError(f"{name} has shape {shape}, expected {list(shard.shape)}")
        return rows[share.rows(shape[0])] if shard.sharded else file.get_tensor(name)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file by name, as views of the memory-mapped file."""
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a checkpoint file."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise damaged_checkpoint(path.parent, error) from None


@torch.no_grad()
def read_into(path: Path, name: str, tensor: Tensor, share: Share) -> None:
    """Fill a tensor, or this process's rows of a sharded tensor, from a safetensors file."""
    shard = Shard.of(tensor)
    shard.local.copy_(read_rows(path, name, shard, share))


def average(shards: Mapping[str, Shard], paths: Sequence[Path], share: Share) -> Iterator[tuple[str, Shard]]:
    """Yield each tensor averaged with its versions in the given safetensors files."""
    for name, shard in shards.items():
        total = shard.local.double()
        for path in paths:
            total += read_rows(path, name, shard, share).to(total.device)
        yield name, shard._replace(local=(total / (len(paths) + 1)).to(shard.local.dtype))


@contextmanager
def streamed_model(build: Callable[[], Seq2Seq], path: Path, device: Device = "cpu") -> Iterator[Seq2Seq]:
    """Yield a model that reads each block from a file when it is called, and frees it afterwards.

    build: builds a model of the same size. path: safetensors file with its parameters. Blocks are views of
    the file, which the system caches as memory permits.
    """
    with torch.device("meta"):
        model = build().eval()
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, BLOCKS)}
    inside = tuple(f"{name}." for name in blocks)
    _load(model, path, device, {name: name for name in model.state_dict() if not name.startswith(inside)})
    for name, block in blocks.items():
        _load_when_called(block, path, device, name)
    yield model


def _load_when_called(block: nn.Module, path: Path, device: Device, prefix: str) -> None:
    """Load the parameters of a block when its methods are called, and free them afterwards."""
    names = {name: f"{prefix}.{name}" for name in block.state_dict()}
    empty = dict(block.state_dict(keep_vars=True))
    depth = 0

    def load_first(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not depth:
                _load(block, path, device, names)
            depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                depth -= 1
                if not depth:
                    _assign(block, empty)

        return call

    block.forward = load_first(block.forward)
    if isinstance(block, DecoderBlock):  # source keys and values are projected before the first step
        block.cross.project_source = load_first(block.cross.project_source)  # type: ignore[method-assign]


def _load(module: nn.Module, path: Path, device: Device, names: Mapping[str, str]) -> None:
    with _open(path) as file:
        _assign(module, {key: file.get_tensor(name).to(device) for key, name in names.items()})


def _assign(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace a module's parameters and buffers."""
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        is_parameter = attribute in owner._parameters
        setattr(owner, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
