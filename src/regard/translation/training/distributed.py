"""Distributed training, in one or several processes on one or several machines.

    torchrun --nproc-per-node 4 --max-restarts 5 -m regard train a.en a.de --output FOLDER --resume [--shard]

Each process computes the loss of its part of a batch, and the gradients are summed. Any number of processes
does the same updates as one, up to rounding and dropout, which each process samples on its own.

- Parallel: each process has the whole model (torch's DistributedDataParallel).
- Sharded: each process holds a part of the parameters, gradients and optimizer state (torch's FSDP2). The
  blocks of a Transformer are gathered one at a time; see `sharding`.

Checkpoints are the same in all cases: a training can be resumed with any number of processes, parallel or
sharded.
"""

import copy
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from regard.errors import ArgumentError, RegardError
from regard.models.seq2seq import Seq2Seq
from regard.translation.alignment.guided_loss import default_guided_head, guide_head
from regard.translation.data.batches import Batch
from regard.translation.tokens import UNKNOWN
from regard.translation.training.checkpoint import (
    MODEL,
    OPTIMIZER,
    Checkpoint,
    install_parameters,
    load_model,
    optimizer_tensors,
    restore_optimizer,
    write_parameters,
    write_state,
)
from regard.translation.training.rendezvous import first_sentence, init_process_group, is_connection_error
from regard.translation.training.sharding import (
    BLOCKS,
    Shard,
    Share,
    average,
    build_sharded,
    materialize,
    read_into,
    read_tensor,
    streamed_model,
    tensor_names,
    write_sharded,
)

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
_TIMEOUT = timedelta(days=7)  # the others wait while rank 0 prepares the corpus or validates


class Objective(nn.Module):
    """The training loss of one process's part of a batch.

    The loss is the mean over the labels of the whole batch, plus the alignment loss of one head if the batch
    has links (Garg et al. 2019).
    """

    def __init__(self, model: Seq2Seq, label_smoothing: float, guided_alignment_weight: float = 0.0) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing
        self.guided_alignment_weight = guided_alignment_weight

    def forward(self, batch: Batch, labels: int) -> Tensor:
        """The loss of this part, relative to `labels` in all parts."""
        return self._loss(batch) * (batch.labels / labels)

    def _loss(self, batch: Batch) -> Tensor:
        if not self.guided_alignment_weight or not batch.links:
            return self.model.loss(batch.source, batch.target, label_smoothing=self.label_smoothing)
        with guide_head(self.model, default_guided_head(self.model)) as guide:
            loss = self.model.loss(batch.source, batch.target, label_smoothing=self.label_smoothing)
            alignment_loss = guide.loss(batch.source, batch.target, batch.links)
            return loss + self.guided_alignment_weight * alignment_loss


class BuiltModel(NamedTuple):
    """A model and its objective, whose gradients are summed over all processes."""

    model: Seq2Seq
    objective: nn.Module


class Candidate(NamedTuple):
    """A model to validate; `keep` saves its parameters as the best of the model folder."""

    model: Seq2Seq
    keep: Callable[[], None]


class World(Protocol):
    """The processes of a training, and their collective operations."""

    rank: int
    size: int
    device: torch.device

    def build(self, build: Callable[[], Objective]) -> BuiltModel:
        """Build a new model with the same initial parameters in all processes."""

    def no_sync(self, objective: nn.Module) -> AbstractContextManager[None]:
        """Skip the synchronization of gradients in this block: more will be accumulated."""

    def sum(self, number: float) -> float:
        """Sum a number over all processes."""

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over all processes."""

    def candidate(
        self, folder: Path, model: Seq2Seq, checkpoints: Sequence[Checkpoint]
    ) -> AbstractContextManager[Candidate | None]:
        """In rank 0, the average of the model and the checkpoints, for validation; None in other ranks."""

    def load_for_evaluation(
        self, folder: Path, build: Callable[[], Seq2Seq]
    ) -> AbstractContextManager[Seq2Seq]:
        """Load the model of a folder in one process; `build` creates one of the same size."""

    def save(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        """Save a checkpoint."""

    def restore(self, checkpoint: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        """Restore model and optimizer from a checkpoint."""

    def sync_errors(self) -> AbstractContextManager[None]:
        """An error in this block in any process ends all; the lowest rank that failed raises its own."""

    def barrier(self) -> None:
        """Wait for all processes."""


class SingleProcess(World):
    """Training in a single process.

    >>> import torch
    >>> from regard.translation.training.distributed import SingleProcess
    >>> world = SingleProcess()
    >>> world.rank, world.size, world.sum(2.5), world.device
    (0, 1, 2.5, device(type='cpu'))
    """

    rank, size = 0, 1

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def build(self, build: Callable[[], Objective]) -> BuiltModel:
        objective = build().to(self.device)
        return BuiltModel(objective.model, objective)

    def no_sync(self, objective: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def sum(self, number: float) -> float:
        return number

    def sums(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    @contextmanager
    def candidate(
        self, folder: Path, model: Seq2Seq, checkpoints: Sequence[Checkpoint]
    ) -> Iterator[Candidate | None]:
        """The model itself, or a copy averaged with the checkpoints."""
        if checkpoints:
            means = average(Shard.all(model.state_dict()), checkpoints, Share(0, 1))
            model = copy.deepcopy(model)
            own = model.state_dict()
            for name, mean in means:
                own[name].copy_(mean.local)
        yield Candidate(model, lambda: write_parameters(folder, model.state_dict()))

    def load_for_evaluation(
        self, folder: Path, build: Callable[[], Seq2Seq]
    ) -> AbstractContextManager[Seq2Seq]:
        return nullcontext(load_model(folder).model)

    def save(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        tensors = optimizer_tensors(optimizer, _names(model))
        return Checkpoint.save(folder, step, model.state_dict(), tensors, state)

    def restore(self, checkpoint: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        model.load_state_dict(checkpoint.parameters())
        restore_optimizer(optimizer, _names(model), checkpoint.optimizer())

    def sync_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def barrier(self) -> None:
        pass


class RemoteError(RegardError):
    """Another process failed and reports the error."""


class Parallel(SingleProcess):
    """Data-parallel training: each process has the whole model and a part of each batch."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        # for Python numbers and errors, with a long timeout
        self._group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)

    def build(self, build: Callable[[], Objective]) -> BuiltModel:
        from torch.nn.parallel import DistributedDataParallel

        model, objective = super().build(build)
        objective.register_forward_hook(self._scale_gradient)
        wrapped = DistributedDataParallel(objective, gradient_as_bucket_view=True)
        # DDP rebuilds its buckets after the first backward pass, which changes the order of summation. Let it
        # do so before the first update: updates after a restart are then the same.
        pair = Batch.of([([UNKNOWN], [UNKNOWN])]).to(self.device)
        wrapped(pair, pair.labels).backward()
        wrapped.zero_grad()
        return BuiltModel(model, wrapped)

    def _scale_gradient(self, objective: nn.Module, inputs: Any, loss: Tensor) -> None:
        """DDP and FSDP average gradients over the processes; turn this into a sum."""
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self.size)

    def no_sync(self, objective: nn.Module) -> AbstractContextManager[None]:
        return objective.no_sync()  # type: ignore[operator]

    def sum(self, number: float) -> float:
        return self.sums([number])[0]

    def sums(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(numbers, distributed.ReduceOp.SUM)

    def _reduce(self, numbers: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(tensor, operation, self._group)
        return tensor.tolist()

    @contextmanager
    def candidate(
        self, folder: Path, model: Seq2Seq, checkpoints: Sequence[Checkpoint]
    ) -> Iterator[Candidate | None]:
        with ExitStack() as stack:
            candidate = None
            with self.sync_errors():
                if self.rank == 0:
                    candidate = stack.enter_context(super().candidate(folder, model, checkpoints))
            yield candidate

    def save(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        with self.sync_errors():
            if self.rank == 0:
                super().save(folder, step, model, optimizer, state)
        return Checkpoint.at(folder, step)

    def restore(self, checkpoint: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        with self.sync_errors():
            super().restore(checkpoint, model, optimizer)

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
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
            raise RemoteError(f"Training failed in process {rank}, which reports the error.")

    def barrier(self) -> None:
        with self.sync_errors():
            pass


class Sharded(Parallel):
    """Sharded training: each process holds a part of parameters, gradients and optimizer state."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._share = Share(self.rank, self.size)

    def build(self, build: Callable[[], Objective]) -> BuiltModel:
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
        return BuiltModel(objective.model, objective)

    def no_sync(self, objective: nn.Module) -> AbstractContextManager[None]:
        """Do nothing: unsynchronized gradients would need the memory that sharding saves."""
        return nullcontext()

    @contextmanager
    def candidate(
        self, folder: Path, model: Seq2Seq, checkpoints: Sequence[Checkpoint]
    ) -> Iterator[Candidate | None]:
        """Write the average to a file, from which rank 0 reads one block at a time.

        No process holds all parameters, and the others need not take part in the validation.
        """
        part = folder / "checkpoints" / ".best.part"
        path = part / MODEL
        try:
            with self.sync_errors():
                shards = Shard.all(model.state_dict())
                if checkpoints:
                    shards = dict(average(shards, checkpoints, self._share))
                if self.rank == 0:
                    shutil.rmtree(part, ignore_errors=True)  # of a killed run
                    part.mkdir(parents=True)
            with self.sync_errors():
                write_sharded({path: shards}, self._share, self._group)
            del shards
            if self.rank:
                yield None
                return
            with streamed_model(lambda: self._build().model, path, self.device) as average_model:
                yield Candidate(average_model, lambda: install_parameters(folder, path))
        finally:
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)

    def load_for_evaluation(
        self, folder: Path, build: Callable[[], Seq2Seq]
    ) -> AbstractContextManager[Seq2Seq]:
        return streamed_model(build, folder / MODEL)

    def save(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        checkpoint = Checkpoint.at(folder, step)
        tensors = optimizer_tensors(optimizer, _names(model))
        with self.sync_errors(), Checkpoint.writing(folder, step) if self.rank == 0 else nullcontext():
            self.barrier()  # until the folder exists
            shards = {MODEL: Shard.all(model.state_dict()), OPTIMIZER: Shard.all(tensors)}
            files = {checkpoint.part / name: tensors for name, tensors in shards.items()}
            write_sharded(files, self._share, self._group)
            if self.rank == 0:
                write_state(checkpoint.part, state)
        return checkpoint

    def restore(self, checkpoint: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        with self.sync_errors():
            if self.rank == 0:
                checkpoint.check()
            parameters, path = model.state_dict(), checkpoint.path / MODEL
            if different := set(parameters) ^ set(tensor_names(path)):
                raise KeyError(f"{min(different)} is missing or unexpected")
            for name, tensor in parameters.items():
                read_into(path, name, tensor, self._share)
            path = checkpoint.path / OPTIMIZER
            tensors = {name: self._optimizer_tensor(path, name, model) for name in tensor_names(path)}
            restore_optimizer(optimizer, _names(model), tensors)

    def _optimizer_tensor(self, path: Path, name: str, model: Seq2Seq) -> Tensor:
        """A tensor of the optimizer state, sharded like its parameter."""
        kind, _, parameter = name.partition(":")
        if kind == "step":
            return read_tensor(path, name)
        tensor = torch.empty_like(model.get_parameter(parameter), requires_grad=False)
        read_into(path, name, tensor, self._share)
        return tensor


@contextmanager
def join_world(*, shard: bool = False) -> Iterator[World]:
    """Join the processes started by torchrun; without torchrun, a single process on the GPU, if any.

    shard: shard the parameters across processes, for models that are too large for one.

    The processes communicate over NCCL if each has a GPU, otherwise over gloo. All read the model folder, so
    several machines need a shared file system. If one process fails, it reports the error and all end; with
    torchrun --max-restarts and --resume they restart from the last checkpoint.

    torch.distributed neither encrypts nor authenticates, and metadata of sharded checkpoints is pickled in
    transit (never in a file). Anyone who can reach the ports can execute code: open them only to the training
    machines.

    >>> from regard.translation.training.distributed import join_world
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
        yield SingleProcess("cuda" if torch.cuda.is_available() else "cpu")
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
            yield Sharded(device) if shard else Parallel(device)
    finally:
        distributed.destroy_process_group()


def _device() -> torch.device:
    """A GPU for each process of this machine, or the CPU for all."""
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


def _names(model: nn.Module) -> list[str]:
    """Parameter names in the optimizer's order."""
    return [name for name, _ in model.named_parameters()]
