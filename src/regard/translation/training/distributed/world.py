"""Distributed training, in one or several processes on one or several machines.

    torchrun --nproc-per-node 4 --max-restarts 5 -m regard train a.en a.de --output FOLDER --resume [--shard]

Each process computes the loss on its part of a batch, and the gradients are summed. The updates are the same
for any number of processes, except for rounding and dropout, which each process samples independently.

- World: each process has the whole model (torch's DistributedDataParallel).
- Sharded: each process holds a part of the parameters, gradients and optimizer state (torch's FSDP2). The
  blocks of a Transformer are gathered one at a time; see `sharding`.

Checkpoints have the same format in all cases: a run can be resumed with any number of processes, sharded or
not.
"""

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from regard.errors import ArgumentError, RegardError
from regard.models.seq2seq import Seq2Seq
from regard.translation.data.batches import Batch
from regard.translation.model_folder import CHECKPOINTS, MODEL, OPTIMIZER, STATE
from regard.translation.tokens import UNKNOWN
from regard.translation.training.checkpoint import (
    Checkpoint,
    optimizer_tensors,
    restore_optimizer,
    temporary_folder,
    write_parameters,
)
from regard.translation.training.distributed.rendezvous import (
    first_sentence,
    init_process_group,
    is_connection_error,
)
from regard.translation.training.distributed.sharding import (
    BLOCKS,
    Shard,
    Share,
    average,
    build_sharded,
    map_tensors,
    materialize,
    read_into,
    streamed_model,
    write_sharded,
)
from regard.translation.training.objective import Objective

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_TIMEOUT = timedelta(days=7)  # the other ranks wait while rank 0 prepares the corpus or validates


class RemoteError(RegardError):
    """Another process failed; its own message reports the cause."""


class Candidate(NamedTuple):
    """A model to validate; `keep` saves it as the best model in the folder."""

    model: Seq2Seq
    keep: Callable[[], None]


class World:
    """The processes of a training run, each with the whole model, and their collective operations.

    device: device of this process. group: torch's process group; None for a single process.
    """

    def __init__(self, device: torch.device | str = "cpu", group: Any = None) -> None:
        self.device, self._group = torch.device(device), group
        self.rank = 0 if group is None else distributed.get_rank()
        self.size = 1 if group is None else distributed.get_world_size()
        self._share = Share(self.rank, self.size)

    def build(self, build: Callable[[], Objective]) -> tuple[Seq2Seq, nn.Module]:
        """Build the same model and objective in all processes; gradients are summed over processes."""
        objective = build().to(self.device)
        if self._group is None:
            return objective.model, objective
        from torch.nn.parallel import DistributedDataParallel

        objective.register_forward_hook(self._scale_gradient)
        wrapped = DistributedDataParallel(objective, gradient_as_bucket_view=True)
        # DDP rebuilds its buckets after the first backward pass, which changes the order of summation.
        # Trigger this before the first update, so that updates are the same after a restart.
        pair = Batch.of([([UNKNOWN], [UNKNOWN])]).to(self.device)
        wrapped(pair, pair.labels).backward()
        wrapped.zero_grad()
        return objective.model, wrapped

    def _scale_gradient(self, objective: nn.Module, inputs: Any, loss: Tensor) -> None:
        """Multiply gradients by the number of processes, because DDP and FSDP average instead of summing."""
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self.size)

    def no_sync(self, objective: nn.Module) -> AbstractContextManager[None]:
        """Skip gradient synchronization in this block, because more gradients will be accumulated."""
        return nullcontext() if self._group is None else objective.no_sync()  # type: ignore[operator]

    def sum(self, number: float) -> float:
        """Sum a number over all processes."""
        return self.sums([number])[0]

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over all processes."""
        return self._reduce(numbers, distributed.ReduceOp.SUM)

    def _reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        if self._group is None:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(tensor, operation, self._group)
        return tensor.tolist()

    @contextmanager
    def candidate(
        self, folder: Path, model: Seq2Seq, checkpoints: Sequence[Checkpoint]
    ) -> Iterator[Candidate | None]:
        """Yield the average of model and checkpoints for validation on rank 0, and None on other ranks."""
        candidate = None
        with self.sync_errors():
            if self.rank == 0:
                if checkpoints:
                    means = average(Shard.all(model.state_dict()), _models(checkpoints), self._share)
                    model = copy.deepcopy(model)
                    parameters = model.state_dict()
                    for name, mean in means:
                        parameters[name].copy_(mean.local)
                candidate = Candidate(model, lambda: write_parameters(folder, model.state_dict()))
        yield candidate

    def save(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        """Save a checkpoint."""
        checkpoint = Checkpoint.at(folder, step)
        tensors = {MODEL: model.state_dict(), OPTIMIZER: optimizer_tensors(optimizer, _names(model))}
        files = {checkpoint.part / name: Shard.all(values) for name, values in tensors.items()}
        with self.sync_errors(), checkpoint.writing() if self.rank == 0 else nullcontext():
            self.barrier()  # wait until the folder exists
            write_sharded(files, self._share, self._group)
            if self.rank == 0:
                (checkpoint.part / STATE).write_text(json.dumps(dict(state)))
        return checkpoint

    def restore(self, checkpoint: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        """Restore model and optimizer from a checkpoint."""
        with self.sync_errors():
            if self.rank == 0:
                checkpoint.check()
            parameters, path = model.state_dict(), checkpoint.path / MODEL
            if different := set(parameters) ^ set(map_tensors(path)):
                raise KeyError(f"{min(different)} is missing or unexpected")
            for name, tensor in parameters.items():
                read_into(path, name, tensor, self._share)
            path = checkpoint.path / OPTIMIZER
            tensors = {
                name: self._optimizer_tensor(path, name, tensor, model)
                for name, tensor in map_tensors(path).items()
            }
            restore_optimizer(optimizer, _names(model), tensors)

    def _optimizer_tensor(self, path: Path, name: str, whole: Tensor, model: Seq2Seq) -> Tensor:
        """Read an optimizer state tensor, sharded like its parameter."""
        kind, _, parameter = name.partition(":")
        if kind == "step":
            return whole.clone()
        tensor = torch.empty_like(model.get_parameter(parameter), requires_grad=False)
        read_into(path, name, tensor, self._share)
        return tensor

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Raise in all processes if this block fails in any; the lowest failed rank raises its own error."""
        if self._group is None:
            yield
            return
        failure = None
        try:
            yield
        except RemoteError:  # already synchronized
            raise
        except Exception as error:
            failure = error
        failed = self.size if failure is None else self.rank
        rank = int(self._reduce([failed], distributed.ReduceOp.MIN)[0])
        if failure is not None and rank == self.rank:
            raise failure
        if rank < self.size:
            raise RemoteError(f"Process {rank} failed; see its error message.")

    def barrier(self) -> None:
        """Wait for all processes."""
        with self.sync_errors():
            pass


class Sharded(World):
    """Sharded training: each process holds a part of the parameters, gradients and optimizer state."""

    def build(self, build: Callable[[], Objective]) -> tuple[Seq2Seq, nn.Module]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._build = build
        objective, rows = build_sharded(build, self._share)
        mesh = init_device_mesh(self.device.type, (self.size,))
        for module in list(objective.modules()):
            if isinstance(module, BLOCKS):
                fully_shard(module, mesh=mesh)
        fully_shard(objective, mesh=mesh)
        materialize(objective, rows, self.device)
        objective.register_forward_hook(self._scale_gradient)
        return objective.model, objective

    def no_sync(self, objective: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: unsynchronized gradients would need the memory that sharding saves."""
        return nullcontext()

    @contextmanager
    def candidate(
        self, folder: Path, model: Seq2Seq, checkpoints: Sequence[Checkpoint]
    ) -> Iterator[Candidate | None]:
        """Write the average to a file, from which rank 0 reads one block at a time.

        No process holds all parameters, and the other ranks do not take part in validation.
        """
        part = folder / CHECKPOINTS / ".average.part"
        path = part / MODEL
        with ExitStack() as stack:
            with self.sync_errors():
                if self.rank == 0:
                    stack.enter_context(temporary_folder(folder / MODEL, part))
            with self.sync_errors():
                shards = Shard.all(model.state_dict())
                if checkpoints:
                    shards = dict(average(shards, _models(checkpoints), self._share))
                write_sharded({path: shards}, self._share, self._group)
            del shards
            if self.rank:
                yield None
                return
            with streamed_model(lambda: self._build().model, path, self.device) as average_model:
                yield Candidate(average_model, lambda: write_parameters(folder, map_tensors(path)))


@contextmanager
def join_world(*, shard: bool = False) -> Iterator[World]:
    """Join the processes started by torchrun. Without torchrun, yield a single process.

    shard: shard the parameters across processes, for models that are too large for one.

    A single process uses the GPU if there is one. Several processes communicate over NCCL if each has a GPU,
    otherwise over gloo. All read the model folder, so several machines need a shared file system. If one
    process fails, it reports the error and all processes exit. With torchrun --max-restarts and --resume,
    they restart from the last checkpoint.

    torch.distributed neither encrypts nor authenticates connections. Assume that anyone who can reach its
    ports can execute code, and open them only to the training machines.

    >>> from regard.translation.training.distributed.world import join_world
    >>> with join_world() as world:
    ...     print(world.rank, "of", world.size)
    0 of 1
    >>> with join_world(shard=True) as world:
    ...     pass
    Traceback (most recent call last):
    regard.errors.ArgumentError: shard requires several processes, got 1. ...
    """
    if "WORLD_SIZE" not in os.environ:
        if shard:
            raise ArgumentError(
                "shard requires several processes, got 1. Start them with torchrun: torchrun "
                "--nproc-per-node 2 -m regard train … --output FOLDER --resume --shard"
            )
        yield World("cuda" if torch.cuda.is_available() else "cpu")
        return
    device = _device()
    try:
        init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    except RuntimeError as error:
        raise RemoteError(
            f"The processes could not connect ({first_sentence(error)}). Start all of them again."
        ) from None
    try:
        with _report_once(distributed.get_rank()):
            # this group exchanges values and errors, with a long timeout
            group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)
            yield Sharded(device, group) if shard else World(device, group)
    finally:
        distributed.destroy_process_group()


def _device() -> torch.device:
    """Return this process's GPU if each process on this machine has one, otherwise the CPU."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ArgumentError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {missing[0]} is not set. Start the processes with "
            "torchrun, or unset WORLD_SIZE to train in one process."
        )
    local = int(os.environ["LOCAL_RANK"])
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    if not distributed.is_nccl_available() or torch.cuda.device_count() < needed:
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextmanager
def _report_once(rank: int) -> Iterator[None]:
    """Let one process report an error: the one that failed, or rank 0."""
    try:
        yield
    except RemoteError:
        sys.exit(2)
    except KeyboardInterrupt:
        if rank:
            sys.exit(130)
        raise
    except RuntimeError as error:
        if not is_connection_error(error):
            raise
        if rank:
            sys.exit(1)
        raise RemoteError(
            f"Lost the connection to another process ({first_sentence(error)}). The last checkpoint is "
            "unchanged; torchrun --max-restarts 5 with --resume restarts from it automatically."
        ) from None


def _models(checkpoints: Sequence[Checkpoint]) -> list[Path]:
    return [checkpoint.path / MODEL for checkpoint in checkpoints]


def _names(model: nn.Module) -> list[str]:
    """Return the parameter names in the optimizer's order."""
    return [name for name, _ in model.named_parameters()]
