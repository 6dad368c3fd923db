"""One training in several processes, on one machine or many; alone, all of this does nothing.

    torchrun --nproc-per-node 4 --max-restarts 5 -m regard train a.en a.de --output FOLDER --resume [--shard]

A batch is shared out among the processes: each computes its part of the loss, and the gradients are added
up. So any number of processes makes the same updates as one, up to float rounding; but for dropout, which
each process draws by itself.

- Parallel: each process has the whole model (torch's DistributedDataParallel).
- Sharded: each holds a part of the parameters, of their gradients and of the optimizer's state (torch's
  FSDP2). A Transformer's blocks are whole one at a time, while they are computed; see `shards`.

Whoever wrote a checkpoint, it is the same files: one training can go on alone, in parallel or sharded, with
any number of processes.
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
from regard.translation.training.rendezvous import brief, lost, meet
from regard.translation.training.sharding import (
    BLOCKS,
    Shard,
    Share,
    average,
    build,
    materialize,
    names_in,
    read_into,
    read_whole,
    streamed,
    write,
)

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # that torchrun sets
# the others wait while the first process prepares a corpus or looks at the dev data
_LONG = timedelta(days=7)


class Objective(nn.Module):
    """A model's share of the loss of a batch: what is differentiated, in each process.

    The loss is a mean over the labels of the whole batch, of which a process may have a part. To it comes
    `guide` times that of a head, for batches that say where words come from.
    """

    def __init__(self, model: Seq2Seq, smoothing: float, guide: float = 0.0) -> None:
        super().__init__()
        self.model, self.smoothing, self.guide = model, smoothing, guide

    def forward(self, batch: Batch, labels: int) -> Tensor:
        """The loss of this batch's labels, as part of that of so many."""
        return self._loss(batch) * (batch.labels / labels)

    def _loss(self, batch: Batch) -> Tensor:
        if not self.guide or not batch.links:
            return self.model.loss(batch.source, batch.target, label_smoothing=self.smoothing)
        with guide_head(self.model, default_guided_head(self.model)) as guide:
            loss = self.model.loss(batch.source, batch.target, label_smoothing=self.smoothing)
            return loss + self.guide * guide.loss(batch.source, batch.target, batch.links)


class Built(NamedTuple):
    """A model, and the objective to be differentiated: its gradients are summed over all processes."""

    model: Seq2Seq
    objective: nn.Module


class Candidate(NamedTuple):
    """A model to be validated, and how to keep its parameters as the best of the model folder."""

    model: Seq2Seq
    keep: Callable[[], None]


class World(Protocol):
    """The processes of a training: how many, which one this is, and what they do together."""

    rank: int
    size: int
    device: torch.device

    def build(self, make: Callable[[], Objective]) -> Built:
        """A new model, initialised equally in all processes."""

    def apart(self, objective: nn.Module) -> AbstractContextManager[None]:
        """In this block gradients may stay where they are: more will be added to them."""

    def total(self, number: float) -> float:
        """The sum of every process's number."""

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """The sums of every process's numbers."""

    def candidate(
        self, folder: Path, model: Seq2Seq, saved: Sequence[Checkpoint]
    ) -> AbstractContextManager[Candidate | None]:
        """In the first process, the average of a model and of checkpoints, for validation; None in others."""

    def reading(self, folder: Path, make: Callable[[], Seq2Seq]) -> AbstractContextManager[Seq2Seq]:
        """The model of a folder, for evaluation in one process; `make` makes one of its size."""

    def write(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        """A checkpoint, written whole."""

    def restore(self, saved: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        """Model and optimizer as they were when it was written."""

    def agreed(self) -> AbstractContextManager[None]:
        """An error in this block, in any process, ends all of them; where it came first, it is raised."""

    def wait(self) -> None:
        """Until every process is here."""


class SingleProcess:
    """One process.

    >>> import torch
    >>> from regard.translation.training.distributed import SingleProcess
    >>> world = SingleProcess()
    >>> world.rank, world.size, world.total(2.5), world.device
    (0, 1, 2.5, device(type='cpu'))
    """

    rank, size = 0, 1

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def build(self, make: Callable[[], Objective]) -> Built:
        """A new model."""
        objective = make().to(self.device)
        return Built(objective.model, objective)

    def apart(self, objective: nn.Module) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def total(self, number: float) -> float:
        """The number."""
        return number

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """The numbers."""
        return list(numbers)

    @contextmanager
    def candidate(
        self, folder: Path, model: Seq2Seq, saved: Sequence[Checkpoint]
    ) -> Iterator[Candidate | None]:
        """The model itself, or a copy that is averaged with the checkpoints."""
        if saved:
            means = average(Shard.all(model.state_dict()), saved, Share(0, 1))
            model = copy.deepcopy(model)
            own = model.state_dict()
            for name, mean in means:
                own[name].copy_(mean.local)
        yield Candidate(model, lambda: write_parameters(folder, model.state_dict()))

    def reading(self, folder: Path, make: Callable[[], Seq2Seq]) -> AbstractContextManager[Seq2Seq]:
        """The model of a folder."""
        return nullcontext(load_model(folder).model)

    def write(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        """A checkpoint, written whole."""
        tensors = optimizer_tensors(optimizer, _names(model))
        return Checkpoint.write(folder, step, model.state_dict(), tensors, state)

    def restore(self, saved: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        """Model and optimizer as they were when it was written."""
        model.load_state_dict(saved.parameters())
        restore_optimizer(optimizer, _names(model), saved.optimizer())

    def agreed(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def wait(self) -> None:
        """Not at all."""


class RemoteError(RegardError):
    """Another process has failed, and tells it; this one has nothing to add."""


class Parallel:
    """Processes that each have the whole model, and a part of each batch."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.device = device
        # for numbers and news, which are on no GPU and may be long in coming
        self._group = distributed.new_group(backend="gloo", timeout=_LONG)
        self._alone = SingleProcess(device)

    def build(self, make: Callable[[], Objective]) -> Built:
        """A new model; each process has all of it."""
        from torch.nn.parallel import DistributedDataParallel

        model, objective = self._alone.build(make)
        objective.register_forward_hook(self._sum)
        wrapped = DistributedDataParallel(objective, gradient_as_bucket_view=True)
        # After the first gradient it lays them out anew, in another order of adding up. So that the first
        # update after a restart is the same as without one, that happens before any.
        pair = Batch.of([([UNKNOWN], [UNKNOWN])]).to(self.device)
        wrapped(pair, pair.labels).backward()
        wrapped.zero_grad()
        return Built(model, wrapped)

    def _sum(self, objective: nn.Module, given: Any, loss: Tensor) -> None:
        """Both kinds of torch's take the mean over the processes; this makes it a sum."""
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self.size)

    def apart(self, objective: nn.Module) -> AbstractContextManager[None]:
        """In this block gradients stay in their processes."""
        return objective.no_sync()  # type: ignore[operator]

    def total(self, number: float) -> float:
        """The sum of every process's number."""
        return self.totals([number])[0]

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """The sums of every process's numbers."""
        return self._reduced(numbers, distributed.ReduceOp.SUM)

    def _reduced(self, numbers: Sequence[float], how: Any) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(tensor, how, self._group)
        return tensor.tolist()

    @contextmanager
    def candidate(
        self, folder: Path, model: Seq2Seq, saved: Sequence[Checkpoint]
    ) -> Iterator[Candidate | None]:
        """As alone, in the first process."""
        with ExitStack() as stack:
            found = None
            with self.agreed():
                if self.rank == 0:
                    found = stack.enter_context(self._alone.candidate(folder, model, saved))
            yield found

    def reading(self, folder: Path, make: Callable[[], Seq2Seq]) -> AbstractContextManager[Seq2Seq]:
        """The model of a folder."""
        return self._alone.reading(folder, make)

    def write(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        """A checkpoint, written whole by the first process."""
        with self.agreed():
            if self.rank == 0:
                self._alone.write(folder, step, model, optimizer, state)
        return Checkpoint.at(folder, step)

    def restore(self, saved: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        """Model and optimizer as they were when it was written; each process reads all."""
        with self.agreed():
            self._alone.restore(saved, model, optimizer)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """An error in this block, in any process, ends all of them; where it came first, it is raised."""
        failure = None
        try:
            yield
        except RemoteError:  # then all know it
            raise
        except Exception as error:
            failure = error
        mine = self.size if failure is None else self.rank
        rank = int(self._reduced([mine], distributed.ReduceOp.MIN)[0])
        if failure is not None and rank == self.rank:
            raise failure
        if rank < self.size:
            raise RemoteError(f"the training has failed in process {rank}, which says why.")

    def wait(self) -> None:
        """Until every process is here."""
        with self.agreed():
            pass


class Sharded(Parallel):
    """Processes that each hold a part of the parameters, of their gradients and of the optimizer's state."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._share = Share(self.rank, self.size)

    def build(self, make: Callable[[], Objective]) -> Built:
        """A new model of which each process has its rows: those of each block, and all others, together."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._make = make
        objective, rows = build(make, self._share)
        mesh = init_device_mesh(self.device.type, (self.size,))
        for module in list(objective.modules()):
            if isinstance(module, BLOCKS):
                fully_shard(module, mesh=mesh)
        fully_shard(objective, mesh=mesh)
        materialize(objective, rows, self.device)
        objective.register_forward_hook(self._sum)
        return Built(objective.model, objective)

    def apart(self, objective: nn.Module) -> AbstractContextManager[None]:
        """Nothing: whole gradients that wait for more would take the room that sharding saves."""
        return nullcontext()

    @contextmanager
    def candidate(
        self, folder: Path, model: Seq2Seq, saved: Sequence[Checkpoint]
    ) -> Iterator[Candidate | None]:
        """A file with the average, of which the first process reads what it computes with.

        So the processes need not validate in step, and none holds all parameters.
        """
        part = folder / "checkpoints" / ".best.part"
        path = part / MODEL
        try:
            with self.agreed():
                shards = Shard.all(model.state_dict())
                if saved:
                    shards = dict(average(shards, saved, self._share))
                if self.rank == 0:
                    shutil.rmtree(part, ignore_errors=True)  # of a training that was killed
                    part.mkdir(parents=True)
            with self.agreed():
                write({path: shards}, self._share, self._group)
            del shards
            if self.rank:
                yield None
                return
            with streamed(lambda: self._make().model, path, self.device) as found:
                yield Candidate(found, lambda: install_parameters(folder, path))
        finally:
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)

    def reading(self, folder: Path, make: Callable[[], Seq2Seq]) -> AbstractContextManager[Seq2Seq]:
        """The model of a folder, of which one block is read at a time."""
        return streamed(make, folder / MODEL)

    def write(
        self, folder: Path, step: int, model: Seq2Seq, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> Checkpoint:
        """A checkpoint, written whole by the first process, to which the others send their parts."""
        place = Checkpoint.at(folder, step)
        tensors = optimizer_tensors(optimizer, _names(model))
        with self.agreed(), Checkpoint.beside(folder, step) if self.rank == 0 else nullcontext():
            self.wait()  # until there is a folder
            shards = {MODEL: Shard.all(model.state_dict()), OPTIMIZER: Shard.all(tensors)}
            write({place.part / name: some for name, some in shards.items()}, self._share, self._group)
            if self.rank == 0:
                write_state(place.part, state)
        return place

    def restore(self, saved: Checkpoint, model: Seq2Seq, optimizer: Optimizer) -> None:
        """Model and optimizer as they were when it was written; each process reads its part."""
        with self.agreed():
            if self.rank == 0:
                saved.check()
            parameters, path = model.state_dict(), saved.path / MODEL
            if different := set(parameters) ^ set(names_in(path)):
                raise KeyError(f"{min(different)} is missing, or too many")
            for name, tensor in parameters.items():
                read_into(path, name, tensor, self._share)
            path = saved.path / OPTIMIZER
            tensors = {name: self._optimizer_tensor(path, name, model) for name in names_in(path)}
            restore_optimizer(optimizer, _names(model), tensors)

    def _optimizer_tensor(self, path: Path, name: str, model: Seq2Seq) -> Tensor:
        """A tensor of the optimizer's state, sharded as its parameter is."""
        kind, _, parameter = name.partition(":")
        if kind == "step":
            return read_whole(path, name)
        tensor = torch.empty_like(model.get_parameter(parameter), requires_grad=False)
        read_into(path, name, tensor, self._share)
        return tensor


@contextmanager
def join_world(*, shard: bool = False) -> Iterator[World]:
    """The processes that torchrun started, for as long as the block lasts; or this one, on its GPU if any.

    shard: the parameters are shared out, too; for models that are too large for one process.

    The processes talk over NCCL if there is a GPU for each of those on a machine, else over gloo. All read
    the model folder, which several machines need on a file system that they share. Who fails says why, and
    all end; with torchrun --max-restarts they begin again, with --resume from the last checkpoint.

    torch.distributed neither encrypts what the processes send each other nor asks who they are, and what they
    say about a sharded checkpoint is pickled on its way (never in a file). Whoever reaches their ports can
    run code in them: keep these closed to all but the machines of the training.

    >>> from regard.translation.training.distributed import join_world
    >>> with join_world() as world:
    ...     print(world.rank, "of", world.size)
    0 of 1
    >>> with join_world(shard=True) as world:
    ...     pass
    Traceback (most recent call last):
    regard.errors.ArgumentError: shard needs several processes, and this is the only one; ...
    """
    if "WORLD_SIZE" not in os.environ:
        if shard:
            raise ArgumentError(
                "shard needs several processes, and this is the only one; start them with torchrun: torchrun "
                "--nproc-per-node 2 -m regard train … --output FOLDER --resume --shard"
            )
        yield SingleProcess("cuda" if torch.cuda.is_available() else "cpu")
        return
    device = _device()
    try:
        meet("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    except RuntimeError as error:
        raise RemoteError(
            f"the processes did not find each other ({brief(error)}); start all again."
        ) from None
    try:
        with _told_once(distributed.get_rank()):
            yield Sharded(device) if shard else Parallel(device)
    finally:
        distributed.destroy_process_group()


def _device() -> torch.device:
    """A GPU for each process of a machine, or the CPU for all."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ArgumentError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and {missing[0]} is not set; start the processes with "
            "torchrun, or unset WORLD_SIZE for a training in one process."
        )
    local = int(os.environ["LOCAL_RANK"])
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    if not distributed.is_nccl_available() or torch.cuda.device_count() < needed:
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextmanager
def _told_once(rank: int) -> Iterator[None]:
    """What ends all processes is told by the one that it came from, or by the first, and once."""
    try:
        yield
    except RemoteError:
        sys.exit(2)
    except KeyboardInterrupt:
        if rank:
            sys.exit(130)
        raise
    except RuntimeError as error:
        if not lost(error):
            raise
        if rank:
            sys.exit(1)
        raise RemoteError(
            f"another process of this training is gone ({brief(error)}); the last checkpoint is as it "
            "was. With torchrun --max-restarts 5 and --resume, training goes on from it by itself."
        ) from None


def _names(model: nn.Module) -> list[str]:
    """The names of its parameters, in the order in which an optimizer numbers them."""
    return [name for name, _ in model.named_parameters()]
