"""A lazy matrix: what it holds, and how its parts are computed, tile after tile."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError, DTypeError, ShapeError, StaleError
from regard.mechanism import fused, reference, tiled
from regard.mechanism.call.problem import Problem, Tile, kind, tiles
from regard.mechanism.mask_algebra import broadcasts
from regard.mechanism.precision import in_own_dtype
from regard.mechanism.torch_state import concrete
from regard.mechanism.weights.index import Index, apart, as_slice, some_heads, some_rows
from regard.mechanism.weights.io import Heads
from regard.mechanism.weights.reader import Reader, reads_back, repeat_last_row

_ROWS = 16  # with fewer rows, torch's products may add up scores in another order


class _Made(NamedTuple):
    """The problem of a lazy matrix, the version of each tensor, and where its τ comes from.

    fitted: True if the kernels found τ for exactly this problem, False if they cannot, as for NaN; None if
    unknown: then they fit it when τ is needed.
    """

    problem: Problem
    versions: Mapping[str, int | None]
    fitted: bool | None


class _Pending(NamedTuple):
    """What a problem will be made of on first use, and the versions that the caller's tensors must have."""

    build: Callable[[], Problem]
    tau: Tensor | None
    inputs: Mapping[str, Tensor]
    versions: Mapping[str, int | None]
    fitted: bool


class LazyMatrix:
    """A matrix (…, q, k) of which only a `Problem` is held; subclasses say what can be asked of it."""

    def __init__(
        self,
        problem: Problem | Callable[[], Problem],
        tau: Tensor | None,
        lead: Sequence[int],
        heads: Heads | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        *,
        fitted: bool = False,
        together: int | None = None,
    ) -> None:
        """Create a matrix of a prepared problem, or of one that is built on first use.

        problem: the problem, or a function that builds it. It is dropped after use, with `inputs`.
        tau: the row statistic; None if the problem has it. lead: leading axes, (…, heads).
        heads: whether the last leading axis counts heads.
        inputs: the tensors it will be built from, by name; StaleError if one is modified before that.
        fitted: whether the kernels found τ for exactly this problem, or for the whole that it is a part of.
        together: rows of a key head in the whole that this is a part of; see `Reader`.
        """
        self._lead = tuple(lead)
        self._heads: Heads = ("axis" if self._lead else "one") if heads is None else heads
        self._together = together
        self._made: _Made | None = None
        self._pending: _Pending | None = None
        if isinstance(problem, Problem):
            self._made = _adopt(problem, tau, fitted and (together is not None or reads_back(problem)))
        else:
            inputs = inputs or {}
            self._pending = _Pending(problem, tau, inputs, _versions(inputs), fitted)

    @property
    def _problem(self) -> Problem:
        return self._now().problem

    def _now(self) -> _Made:
        """The problem, built on first use. Threads may build it at once: they build the same."""
        made, pending = self._made, self._pending
        if made is None and pending is not None:
            _check_versions(pending.versions, pending.inputs)
            problem = pending.build()
            made = self._made = _adopt(problem, pending.tau, pending.fitted and reads_back(problem))
            self._pending = None
        made = made or self._made  # another thread may have built it between the two reads above
        assert made is not None
        return made

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
        count = torch.arange(heads, device="cpu")[chosen].numel()
        if isinstance(index, int):
            return self._like(problem, batch, "one")
        return self._like(problem, (*batch, count))

    def batch(self, index: int) -> Self:
        """The weights of one sequence of a batch, still lazy, where `weights[0]` is a dense tensor.

        Of several leading axes before the heads, the first is chosen from.

        >>> import torch, regard
        >>> x = torch.randn(3, 8, 5, 4)  # 3 sequences, 8 heads
        >>> regard.attend(x, x, x)[1].batch(-1).topk(2).indices.shape
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
        """A part of this matrix; τ was cut with it."""
        self._check()
        return type(self)(
            problem,
            None,
            lead,
            self._heads if heads is None else heads,
            fitted=self._now().fitted is True,
            together=self._rows_together(),
        )

    def _rows_together(self) -> int:
        """The rows of a key head, over its query heads, in the whole that this is a part of."""
        if self._together is None:
            self._together = self._problem.lead()[-1] * self._problem.queries
        return self._together

    def _check(self) -> None:
        made = self._now()
        _check_versions(made.versions, made.problem.tensors)

    def _needs_heads(self, what: str) -> None:
        if not self.has_heads:
            raise ArgumentError(
                f"{what} needs weights with an axis of heads, and these are {tuple(self.shape)}; "
                "they are of one head, or the mean of several, already."
            )

    def _reader(self) -> Reader | None:
        """The kernels' reader of this matrix, if they can read it and no derivative is asked for."""
        self._check()
        if self._heads == "mean" or not _kernels_can(self._problem):
            return None
        self._settle()
        made = self._now()
        return Reader(made.problem, self._rows_together()) if made.fitted else None

    def _settle(self) -> None:
        """Let the kernels find τ, once, unless they have: that of a file or of torch rounds differently."""
        made = self._now()
        if made.fitted is not None or not made.problem["tau"].numel() or not _kernels_can(made.problem):
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # τ is kept for later reads, which may be in no such mode
            reader = Reader.fit(made.problem, self._rows_together())
        self._made = made._replace(fitted=False) if reader is None else _adopt(reader.problem, None, True)

    def _blocks(self) -> Iterator[tuple[Tile, Tensor]]:
        """Tile after tile: where it stands, and its weights."""
        self._check()
        problem, _, fitted = self._now()
        if not _kernels_can(problem):
            yield from ((at, block) for at, block, _ in self._blocks_in_sight())
            return
        for at in tiles(problem, tiled.budget(problem), all_heads=self._heads == "mean"):
            part, together = problem.part(at), self._rows_together()
            reader = Reader(part, together) if fitted else Reader.fit(part, together)
            found = None if reader is None else reader.weights()
            # the kernels return None for NaN and infinity: this tile is solved with care
            block = self._solve(part.checked())[0] if found is None else found
            if self._heads == "mean":
                at, block = at._replace(lead=at.lead[:-1]), block.mean((-4, -3))
            yield at, block

    @in_own_dtype
    def _solve(self, part: Problem) -> tuple[Tensor, Tensor]:
        """The weights of a part, and which of them are in sight."""
        scores = self._scores(part)
        # τ again: torch rounds scores differently for other numbers of rows, and a row must fit its own τ
        block = reference.weights(part, scores, reference.tau(part, scores))
        size = (*part.lead(), *block.shape[-2:])
        return block.expand(size), (scores != -math.inf).expand(size)

    def _scores(self, part: Problem) -> Tensor:
        """The scores of a part, by torch, with enough rows in its products to round as in the whole."""
        if torch.compiler.is_compiling() or part.rules.family != "dot":
            return reference.scores(part)
        least = -(-min(self._rows_together(), _ROWS) // max(part.lead()[-1], 1))
        return reference.scores(repeat_last_row(part, least))[..., : part.queries, :]

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
        row_numbers = torch.arange(math.prod(lead) * queries, device="cpu").reshape(*lead, queries, 1)
        rows = row_numbers.expand(self.shape)[index]
        columns = torch.arange(keys, device="cpu").expand(self.shape)[index]
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


def _adopt(problem: Problem, tau: Tensor | None, fitted: bool) -> _Made:
    tensors = dict(problem.tensors) if tau is None else {**problem.tensors, "tau": tau}
    return _Made(problem.with_tensors(tensors), _versions(tensors), fitted or None)


def _check_versions(versions: Mapping[str, int | None], tensors: Mapping[str, Tensor]) -> None:
    for name, now in _versions(tensors).items():
        if now != versions[name] and now is not None and versions[name] is not None:
            raise StaleError(
                f"the {kind(name)} that these weights were made of was changed in place afterwards, so "
                "they can no longer be told. Look before changing it, or what it is a view of, such as a "
                "cache; or attend to a copy: x.clone()."
            )


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int | None]:
    """How often each tensor has been changed in place; None where torch does not count."""
    if torch.compiler.is_compiling():
        return dict.fromkeys(tensors)
    return {name: None if tensor.is_inference() else tensor._version for name, tensor in tensors.items()}
