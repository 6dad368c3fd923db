"""The base class of `Weights`. It holds the prepared call, tensor versions and τ, and computes tiles."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from regard._util.text import type_name
from regard.errors import DTypeError, ShapeError, StaleError
from regard.mechanism import fused, reference, tiled
from regard.mechanism.autocast import in_own_dtype
from regard.mechanism.call.problem import Problem, Tile, kind, tiles
from regard.mechanism.mask_algebra import broadcasts
from regard.mechanism.torch_state import concrete
from regard.mechanism.weights.io import Heads
from regard.mechanism.weights.reader import Reader, repeat_last_row
from regard.mechanism.weights.tensor_like import TensorLike

_MIN_ROWS = 16  # with fewer rows, torch's matmul may sum dot products in a different order


class _BuiltProblem(NamedTuple):
    """A prepared call with the version of each tensor.

    tau_from_kernels: True if the kernels computed τ for this problem, False if they cannot (NaN), and None
    if unknown. In the last case, the kernels compute τ on first use.
    """

    problem: Problem
    versions: Mapping[str, int | None]
    tau_from_kernels: bool | None


class _DeferredProblem(NamedTuple):
    """A function that builds the problem on first use, and the expected versions of the caller's tensors."""

    build: Callable[[], Problem]
    tau: Tensor | None
    inputs: Mapping[str, Tensor]
    versions: Mapping[str, int | None]
    tau_from_kernels: bool


class LazyMatrix(TensorLike):
    """A matrix (…, q, k) computed on demand from a `Problem`."""

    def __init__(
        self,
        problem: Problem | Callable[[], Problem],
        tau: Tensor | None,
        lead: Sequence[int],
        heads: Heads | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        *,
        tau_from_kernels: bool = False,
        rows_per_key_head: int | None = None,
    ) -> None:
        """Create a matrix from a prepared call, or from a function that builds it on first use.

        problem: the prepared call, or the function. After use, the function and `inputs` are released.
        tau: row statistic, or None if the problem contains it. lead: leading axes, (…, heads).
        heads: "axis" if the last leading axis is the heads axis, "single" for one head, "mean" for a mean.
        inputs: the caller's tensors by name. If one is modified before the problem is built, building raises
            StaleError.
        tau_from_kernels: whether the kernels computed τ, for this problem or for the full matrix.
        rows_per_key_head: number of rows per key head in the full matrix; see `Reader`.
        """
        self._lead = tuple(lead)
        self._heads: Heads = heads or ("axis" if self._lead else "single")
        self._full_rows = rows_per_key_head
        self._built: _BuiltProblem | None = None
        self._deferred: _DeferredProblem | None = None
        if isinstance(problem, Problem):
            self._built = _adopt(problem, tau, tau_from_kernels)
        else:
            inputs = inputs or {}
            self._deferred = _DeferredProblem(problem, tau, inputs, _versions(inputs), tau_from_kernels)

    # The prepared call

    @property
    def problem(self) -> Problem:
        """The prepared call: query, key, mask and biases in one layout, and its configuration.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> regard.attend(x, x, x)[1].problem["query"].shape  # (key heads, query heads per key head, q, d)
        torch.Size([8, 1, 5, 4])
        """
        return self._state().problem

    def _state(self) -> _BuiltProblem:
        """Build the problem on first use. Concurrent threads may build it twice, with equal results."""
        built, deferred = self._built, self._deferred
        if built is None and deferred is not None:
            _check_versions(deferred.versions, deferred.inputs)
            built = self._built = _adopt(deferred.build(), deferred.tau, deferred.tau_from_kernels)
            self._deferred = None
        built = built or self._built  # another thread may have built it between the two reads above
        assert built is not None
        return built

    def check_inputs(self) -> None:
        """Raise StaleError if an input was modified in place since `attend` ran.

        >>> import torch, regard
        >>> x = torch.randn(5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> weights.check_inputs()
        """
        state = self._state()
        _check_versions(state.versions, state.problem.tensors)

    def compute_tau(self) -> bool:
        """Compute τ with the kernels if they have not done so yet; return whether τ comes from the kernels.

        A τ from a file or from torch is rounded differently. Watched SDPA calls have no τ.

        >>> import torch, regard
        >>> x = torch.randn(5, 4)
        >>> computed = regard.attend(x, x, x)[1].compute_tau()
        """
        state = self._state()
        pending = state.tau_from_kernels is None and state.problem["tau"].numel() > 0
        if pending and kernels_support(state.problem):
            with torch.inference_mode(False), torch.no_grad():  # later reads may run outside these modes
                reader = Reader.with_tau(state.problem, self._rows_per_key_head())
            self._built = (
                state._replace(tau_from_kernels=False)
                if reader is None
                else _adopt(reader.problem, None, True)
            )
        return bool(self._state().tau_from_kernels)

    @property
    def problem_lead(self) -> tuple[int, ...]:
        """Leading axes of the tiles: (…, g, r), or the batch axes if the heads are averaged.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> weights.problem_lead, weights.mean("heads").problem_lead
        ((8, 1), ())
        """
        lead = self.problem.lead()
        return lead[:-2] if self.is_head_mean else lead

    def tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Yield each `Tile` with its weights, in linear memory.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> [(tile.rows, block.shape) for tile, block in regard.attend(x, x, x)[1].tiles()]
        [(slice(0, 5, None), torch.Size([8, 1, 5, 5]))]
        """
        self.check_inputs()
        problem, _, from_kernels = self._state()
        kernels, rows = kernels_support(problem), self._rows_per_key_head()
        if not kernels:
            problem = problem.nan_checked()
        for tile in tiles(problem, tiled.budget(problem), all_heads=self.is_head_mean):
            part, block = problem.part(tile), None
            if kernels:
                reader = Reader(part, rows) if from_kernels else Reader.with_tau(part, rows)
                block = None if reader is None else reader.weights()
            if block is None:  # no kernels; or NaN or inf in this tile, which needs the NaN-safe reference
                block = self._reference_weights(part.nan_checked() if kernels else part)
            if self.is_head_mean:
                tile, block = tile._replace(lead=tile.lead[:-1]), block.mean((-4, -3))
            yield tile, block

    # Shape

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._lead, self.problem.queries, self.problem.keys))

    @property
    def dtype(self) -> torch.dtype:
        return self.problem["query"].dtype

    @property
    def device(self) -> torch.device:
        return self.problem["query"].device

    @property
    def requires_grad(self) -> bool:
        """Whether query, key, a bias or another input requires a gradient."""
        return any(tensor.requires_grad for tensor in self.problem.tensors.values())

    @property
    def has_heads(self) -> bool:
        """Whether the axis before queries and keys is a heads axis."""
        return self._heads == "axis"

    @property
    def is_head_mean(self) -> bool:
        """Whether this is a mean over heads, the result of `weights.mean("heads")`."""
        return self._heads == "mean"

    def _like(self, problem: Problem, lead: Sequence[int], heads: Heads | None = None) -> Self:
        """Wrap a part of this matrix; its problem contains τ."""
        self.check_inputs()
        return type(self)(
            problem,
            None,
            lead,
            heads or self._heads,
            tau_from_kernels=self._state().tau_from_kernels is True,
            rows_per_key_head=self._rows_per_key_head(),
        )

    def _rows_per_key_head(self) -> int:
        """Return the number of rows per key head, over all its query heads, in the full matrix."""
        if self._full_rows is None:
            self._full_rows = self.problem.lead()[-1] * self.problem.queries
        return self._full_rows

    def reader(self) -> Reader | None:
        """Return a reader that uses the kernels, or None if they lack support or gradients are needed.

        >>> import torch, regard
        >>> x = torch.randn(5, 4)
        >>> reader = regard.attend(x, x, x)[1].reader()  # None without compiled kernels
        """
        self.check_inputs()
        if self.is_head_mean or not kernels_support(self.problem) or not self.compute_tau():
            return None
        return Reader(self.problem, self._rows_per_key_head())

    @in_own_dtype
    def _reference_weights(self, part: Problem) -> Tensor:
        """Compute the weights of a part with the reference."""
        scores = self._scores(part)
        # recompute τ: torch rounds scores differently for a different number of rows
        block = reference.weights(part, scores, reference.tau(part, scores))
        return block.expand(*part.lead(), *block.shape[-2:])

    def _scores(self, part: Problem) -> Tensor:
        """Compute the scores of a part, adding rows if needed to round the scores as in the full matrix."""
        if torch.compiler.is_compiling() or part.config.family != "dot":
            return reference.scores(part)
        min_rows = -(-min(self._rows_per_key_head(), _MIN_ROWS) // max(part.lead()[-1], 1))
        return reference.scores(repeat_last_row(part, min_rows))[..., : part.queries, :]

    def _from_rows(
        self,
        size: int,
        read: Callable[[Reader], Tensor | None],
        compute: Callable[[Tile, Tensor], Tensor],
    ) -> Tensor:
        """Compute (…, q, size) with the kernels, or if they cannot, from the weights of each tile."""
        reader = self.reader()
        result = None if reader is None else read(reader)
        if result is None:
            result = self._new(self.shape[-2], size)
            for tile, block in self.tiles():
                result[tile.rows_index] = compute(tile, block)
        return self._merge_heads(result)

    def _new(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Create a tensor of zeros (…, g, r, *size)."""
        return self.problem["tau"].new_zeros((*self.problem_lead, *size), dtype=dtype)

    def _merge_heads(self, x: Tensor) -> Tensor:
        """Merge the axes … g r into the leading axes of the weights."""
        return x.reshape(*self._lead, *x.shape[len(self.problem_lead) :])

    @in_own_dtype
    def _product(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """Return weights · x, or weightsᵀ · x."""
        queries, keys = self.shape[-2:]
        columns, is_vector = self._operand(x, queries if transposed else keys)
        reader = None if _records_grad(columns) else self.reader()
        result = None
        if reader is not None:
            result = reader.transposed_product(columns) if transposed else reader.product(columns)
        if result is None:
            nan_safe = not (concrete(columns) and bool(torch.isfinite(columns).all()))
            result = self._new(keys if transposed else queries, columns.shape[-1])
            for tile, block in self.tiles():
                if transposed:
                    part = reference.weighted_sum(block.mT, columns[tile.rows_index], nan_safe=nan_safe)
                    result[tile.keys_index] += part
                else:
                    part = reference.weighted_sum(block, columns[tile.keys_index], nan_safe=nan_safe)
                    result[tile.rows_index] = part
        result = self._merge_heads(result)
        return result[..., 0] if is_vector else result

    def _operand(self, x: Tensor, size: int) -> tuple[Tensor, bool]:
        """Return x as columns in the layout of the tiles, and whether it was a single vector."""
        if not isinstance(x, Tensor):
            raise DTypeError(f"cannot multiply weights by {type_name(x)}; pass a torch.Tensor.")
        columns = x[:, None] if x.dim() == 1 else x
        grouped = self._grouped(columns)
        fits = grouped is not None or broadcasts(columns.shape[:-2], self._lead)
        if x.dim() == 0 or columns.shape[-2] != size or not fits:
            raise ShapeError(
                f"cannot multiply weights of shape {tuple(self.shape)} by a tensor of shape "
                f"{tuple(x.shape)}; it needs {size} rows and leading axes that broadcast to {self._lead}."
            )
        if grouped is not None:
            return grouped.to(self.dtype).resolve_neg(), False
        columns = columns.resolve_neg()
        columns = columns.to(self.dtype).expand(*self._lead, *columns.shape[-2:])
        return columns.reshape(*self.problem_lead, *columns.shape[-2:]), x.dim() == 1

    def _grouped(self, x: Tensor) -> Tensor | None:
        """Expand x from key heads to query heads, … g k e -> … g r k e, or return None for other shapes."""
        *batch, groups, per_group = self.problem.lead()
        shared = self.has_heads and per_group > 1 and x.dim() > 2 and x.shape[-3] == groups > 1
        if not shared or not broadcasts(x.shape[:-3], batch):
            return None
        return x.unsqueeze(-3).expand(*batch, groups, per_group, *x.shape[-2:])


def kernels_support(problem: Problem) -> bool:
    """Whether the kernels can compute these weights and no gradients are needed."""
    tensors = problem.tensors.values()
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return problem.config.fused and concrete(*tensors) and fused.unsupported(problem) is None


def _adopt(problem: Problem, tau: Tensor | None, tau_from_kernels: bool) -> _BuiltProblem:
    tensors = dict(problem.tensors) if tau is None else {**problem.tensors, "tau": tau}
    return _BuiltProblem(problem.with_tensors(tensors), _versions(tensors), tau_from_kernels or None)


def _check_versions(expected: Mapping[str, int | None], tensors: Mapping[str, Tensor]) -> None:
    for name, version in _versions(tensors).items():
        if version != expected[name] and version is not None and expected[name] is not None:
            raise StaleError(
                f"{kind(name)} was modified in place after attend(), so these weights can no longer be "
                f"recomputed. Read them first, or pass {kind(name)}.clone()."
            )


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int | None]:
    """Return the version counter of each tensor, or None for inference tensors and while compiling."""
    if torch.compiler.is_compiling():
        return dict.fromkeys(tensors)
    return {name: None if tensor.is_inference() else tensor._version for name, tensor in tensors.items()}


def _records_grad(x: Tensor) -> bool:
    return not concrete(x) or (torch.is_grad_enabled() and x.requires_grad)
