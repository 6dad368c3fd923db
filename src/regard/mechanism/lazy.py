"""A lazy matrix: what it holds, and how its parts are computed, tile after tile."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError, DTypeError, ShapeError, StaleError
from regard.mechanism import fused, interrupt, reference, tiled
from regard.mechanism.concrete import concrete
from regard.mechanism.masking import broadcasts
from regard.mechanism.problem import Problem, Tile, kind, tiles
from regard.mechanism.records import Heads
from regard.mechanism.selection import Index, apart, as_slice, some_heads, some_rows


class LazyMatrix:
    """A matrix (…, q, k) of which only a `Problem` is held; subclasses say what can be asked of it."""

    def __init__(
        self,
        problem: Problem | Callable[[], Problem],
        tau: Tensor | None,
        lead: Sequence[int],
        heads: Heads | None = None,
        inputs: Sequence[Tensor] | Mapping[str, Tensor] = (),
    ) -> None:
        """Of a problem, or of one that `inputs` will be made into when somebody looks."""
        self._lead = tuple(lead)
        self._heads: Heads = ("axis" if self._lead else "one") if heads is None else heads
        self._tau = tau
        if not isinstance(inputs, Mapping):
            inputs = dict(zip(("query", "key", "mask", "mask1"), inputs, strict=False))
        self._inputs: Mapping[str, Tensor] = inputs
        self._versions = {name: _version(tensor) for name, tensor in self._inputs.items()}
        self._later = problem if callable(problem) else None
        self._fitted: Tensor | None = None
        self._made = self._adopt(problem) if isinstance(problem, Problem) else None

    @property
    def _problem(self) -> Problem:
        if self._made is None:
            assert self._later is not None
            _check_versions(self._versions, self._inputs)
            self._made = self._adopt(self._later())
        return self._made

    def _adopt(self, problem: Problem) -> Problem:
        tensors = dict(problem.tensors) if self._tau is None else {**problem.tensors, "tau": self._tau}
        self._versions = {name: _version(tensor) for name, tensor in tensors.items()}
        return problem.with_tensors(tensors)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._lead, self._problem.queries, self._problem.keys))

    @property
    def dtype(self) -> torch.dtype:
        return self._problem["query"].dtype

    @property
    def device(self) -> torch.device:
        return self._problem["query"].device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        """The number of axes."""
        return self.ndim

    def size(self, axis: int | None = None) -> Any:
        """The shape, or one number of it, as a tensor would tell."""
        return self.shape if axis is None else self.shape[axis]

    @property
    def has_heads(self) -> bool:
        """Whether the last axis before queries and keys counts the heads."""
        return self._heads == "axis"

    def numel(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def heads(self, index: int | slice | Sequence[int]) -> Self:
        """The weights of some heads only, still lazy: `heads(3)`, `heads([0, 2])`, `heads(slice(4))`.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> weights.heads(3).shape, weights.heads([0, 2]).shape
        (torch.Size([5, 5]), torch.Size([2, 5, 5]))
        """
        self._needs_heads("heads")
        *batch, heads = self._lead
        with suppress(TypeError):
            index = operator.index(index)  # type: ignore[arg-type]  # numpy's and torch's integers too
        chosen = as_slice(index, heads) if isinstance(index, int | slice) else index
        problem = some_heads(self._problem, [slice(None)] * len(batch), chosen)
        count = torch.arange(heads)[chosen].numel()
        if isinstance(index, int):
            return self._like(problem, batch, "one")
        return self._like(problem, (*batch, count))

    def batch(self, index: int) -> Self:
        """The weights of one sequence of a batch, still lazy, where `weights[0]` is a dense tensor.

        Of several leading axes before the heads, the first is chosen from.

        >>> import torch, regard
        >>> x = torch.randn(3, 8, 5, 4)  # 3 sequences, 8 heads
        >>> regard.attend(x, x, x)[1].batch(-1).top(2).keys.shape
        torch.Size([8, 5, 2])
        """
        axes = len(self._lead) - self.has_heads
        if not axes:
            raise ArgumentError(
                f"batch({index}) needs weights with an axis of sequences before the heads, and these are "
                f"{tuple(self.shape)}; they are of one sequence already."
            )
        one = as_slice(operator.index(index), self._lead[0])
        part = self._part([one, *[slice(None)] * (len(self._lead) - 1)], slice(None))
        problem = apart(part._problem, self._problem).map(lambda _, tensor: tensor.squeeze(0))
        return self._like(problem, self._lead[1:])

    def _like(self, problem: Problem, lead: Sequence[int], heads: Heads | None = None) -> Self:
        self._check()
        return type(self)(problem, None, lead, self._heads if heads is None else heads)

    def _check(self) -> None:
        problem = self._problem  # which is made, and its versions noted, on the first look
        _check_versions(self._versions, problem.tensors)

    def _needs_heads(self, what: str) -> None:
        if not self.has_heads:
            raise ArgumentError(
                f"{what} needs weights with an axis of heads, and these are {tuple(self.shape)}; "
                "they are of one head, or the mean of several, already."
            )

    def _look(self) -> tuple[Problem, Tensor] | None:
        """The problem and its τ for the kernels, if they can look at it and nobody asks for derivatives."""
        self._check()
        if self._heads == "mean" or not _kernels_can(self._problem):
            return None
        # τ anew: a part of the rows, computed on its own, may round differently than in the whole
        if self._fitted is None:
            self._fitted = fused.fit(self._problem)
        return None if self._fitted is None else (self._problem, self._fitted)

    def _settle(self) -> None:
        """Find τ once, where nobody has: that of weights which another's kernel used is unknown, NaN."""
        problem = self._problem
        tau = problem["tau"]
        if not tau.numel() or not _kernels_can(problem) or not bool(tau[(0,) * tau.dim()].isnan()):
            return
        found = interrupt.fit(problem)
        if found is not None:
            self._made = problem.with_tensors({**problem.tensors, "tau": found})
            self._versions["tau"] = _version(found)

    def _blocks(self) -> Iterator[tuple[Tile, Tensor]]:
        """Tile after tile: where it stands, and its weights."""
        self._check()
        if not _kernels_can(self._problem):
            yield from ((at, block) for at, block, _ in self._blocks_in_sight())
            return
        for at in tiles(self._problem, tiled.budget(self._problem), all_heads=self._heads == "mean"):
            part = self._problem.part(at)
            tau = fused.fit(part)
            # what is not finite is solved with care
            found = None if tau is None else fused.weights(part, tau)
            block = self._solve(part.checked())[0] if found is None else found
            if self._heads == "mean":
                at, block = at._replace(lead=at.lead[:-1]), block.mean((-4, -3))
            yield at, block

    def _solve(self, part: Problem) -> tuple[Tensor, Tensor]:
        """The weights of a part, and which of them are in sight."""
        scores = reference.scores(part)
        # τ anew: scores computed in another company round differently, and the row must fit its own τ
        tau = reference.tau(part, scores)
        block, visible = reference.weights(part, scores, tau), scores != -math.inf
        size = (*part.lead(), *block.shape[-2:])
        return block.expand(size), visible.expand(size)

    def _blocks_in_sight(self) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        """Tile after tile: where it stands, its weights, and which of them are in sight."""
        self._check()
        problem = self._problem.checked()
        for at in tiles(problem, tiled.budget(problem), all_heads=self._heads == "mean"):
            block, visible = self._solve(problem.part(at))
            if self._heads == "mean":
                at = at._replace(lead=at.lead[:-1])
                block, visible = block.mean((-4, -3)), visible.any(-3).any(-3)
            yield at, block, visible

    def _inner_lead(self) -> tuple[int, ...]:
        """The leading axes of a block: (…, g, r), or those of the batch where heads are averaged."""
        lead = self._problem.lead()
        return lead[:-2] if self._heads == "mean" else lead

    def _new(self, *size: int) -> Tensor:
        return self._problem["tau"].new_zeros(*self._inner_lead(), *size)

    def _rows_of(self, width: int, dtype: torch.dtype, fill: float) -> Tensor:
        size = (*self._inner_lead(), self.shape[-2], width)
        return self._problem["tau"].new_full(size, fill, dtype=dtype)

    def _merge(self, x: Tensor) -> Tensor:
        """… g r · · -> the weights' own leading axes."""
        return x.reshape(*self._lead, *x.shape[len(self._inner_lead()) :])

    def _operand(self, x: Tensor, size: int) -> tuple[Tensor, bool]:
        """x as a stack of columns in the blocks' layout, and whether it was a single vector."""
        if not isinstance(x, Tensor):
            raise DTypeError(f"weights meet a {type(x).__name__}; multiply them with a torch.Tensor.")
        columns = x[:, None] if x.dim() == 1 else x
        grouped = self._grouped(columns)
        fits = grouped is not None or broadcasts(columns.shape[:-2], self._lead)
        if x.dim() == 0 or columns.shape[-2] != size or not fits:
            raise ShapeError(
                f"weights of shape {tuple(self.shape)} meet a tensor of shape {tuple(x.shape)}; it needs "
                f"{size} rows and leading axes that broadcast to {self._lead}."
            )
        if grouped is not None:
            return grouped.to(self.dtype).resolve_neg(), False
        columns = columns.resolve_neg()
        columns = columns.to(self.dtype).expand(*self._lead, *columns.shape[-2:])
        return columns.reshape(*self._inner_lead(), *columns.shape[-2:]), x.dim() == 1

    def _grouped(self, x: Tensor) -> Tensor | None:
        """Values that several query heads share, … g k e -> … g r k e, if that is what x is."""
        *batch, groups, per_group = self._problem.lead()
        shared = self.has_heads and per_group > 1 and x.dim() > 2 and x.shape[-3] == groups > 1
        if not shared or not broadcasts(x.shape[:-3], batch):
            return None
        return x.unsqueeze(-3).expand(*batch, groups, per_group, *x.shape[-2:])

    def _collect(self, columns: slice) -> Tensor:
        """The dense matrix of some columns."""
        chosen = torch.arange(self.shape[-1], device=self.device)[columns]
        found = self._rows_of(len(chosen), self.dtype, 0)
        for at, block in self._blocks():
            if block.shape[-1] == len(chosen):
                found[at.rows_index] = block
                continue
            here = (chosen >= at.keys.start) & (chosen < at.keys.stop)
            found[at.rows_index][..., here] = block[..., chosen[here] - at.keys.start]
        return self._merge(found)

    def _part(self, lead: Sequence[slice], rows: slice | Tensor) -> Self:
        """Some leading indices and some query rows, still lazy."""
        problem = some_rows(self._problem, rows)
        if lead:
            batch, heads = (lead[:-1], lead[-1]) if self.has_heads else (lead, slice(None))
            problem = some_heads(problem, batch, heads)
        return self._like(problem, [len(range(n)[i]) for n, i in zip(self._lead, lead, strict=True)])

    def _pick(self, index: Index) -> Tensor:
        """Indexing with arrays: which row and which column each result comes from, then row by row."""
        *lead, queries, keys = self.shape
        row_numbers = torch.arange(math.prod(lead) * queries).reshape(*lead, queries, 1)
        rows = row_numbers.expand(self.shape)[index]
        columns = torch.arange(keys).expand(self.shape)[index]
        result = torch.zeros(rows.shape, dtype=self.dtype, device=self.device)
        for head in torch.unique(rows // queries).tolist():
            at = [slice(int(i), int(i) + 1) for i in np.unravel_index(head, lead)] if lead else []
            mine = rows // queries == head
            wanted, where = torch.unique(rows[mine] % queries, return_inverse=True)
            found = self._part(at, wanted.to(self.device))._collect(slice(None)).reshape(len(wanted), keys)
            result[mine.to(self.device)] = found[where.to(self.device), columns[mine].to(self.device)]
        return result


def _kernels_can(problem: Problem) -> bool:
    """Whether the kernels can look at these weights, and nobody differentiates what they find."""
    tensors = problem.tensors.values()
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return problem.rules.fused and concrete(*tensors) and fused.fits(problem)


def _check_versions(versions: Mapping[str, int | None], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if versions[name] not in (None, _version(tensor)):
            raise StaleError(
                f"the {kind(name)} that these weights were made of was changed in place afterwards, so "
                "they can no longer be told. Look before changing it, or what it is a view of, such as a "
                "cache; or attend to a copy: x.clone()."
            )


def _version(tensor: Tensor) -> int | None:
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None  # nobody counts
    return tensor._version
