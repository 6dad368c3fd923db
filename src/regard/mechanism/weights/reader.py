"""The base class of `Weights`. It stores the prepared call, tensor versions and τ, and computes tiles."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from regard._util import interrupt
from regard.errors import StaleError
from regard.mechanism import fused, reference, tiled
from regard.mechanism.autocast import in_own_dtype
from regard.mechanism.call.problem import Problem, Tile, kind, tiles
from regard.mechanism.masks.algebra import broadcasts
from regard.mechanism.torch_state import concrete
from regard.mechanism.weights.io import Heads
from regard.mechanism.weights.tiled_matrix import TiledMatrix

_MIN_ROWS = 16  # with fewer rows, torch's matmul may sum in a different order


class _BuiltProblem(NamedTuple):
    """A prepared call with the version of each tensor.

    tau_from_kernels: True if the kernels computed τ for this problem; False if they cannot (NaN); None if
    unknown, in which case the kernels compute τ on first use.
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

    def finish(self) -> _BuiltProblem:
        _check_versions(self.versions, self.inputs)
        return _adopt(self.build(), self.tau, self.tau_from_kernels)


class CachedCall(NamedTuple):
    """A cached call of `attend` for which the kernels computed τ: everything its weights depend on.

    problem: the prepared call, with placeholders for query and key.
    versions: version counters of query and key, or None if unknown.
    grad_enabled: the grad mode of the forward pass.
    """

    problem: Problem
    tau: Tensor
    query: Tensor
    key: Tensor
    versions: tuple[int | None, int | None]
    grad_enabled: bool

    def finish(self) -> _BuiltProblem:
        inputs = {"query": self.query, "key": self.key}  # masks of cached calls are immutable
        _check_versions(dict(zip(inputs, self.versions, strict=True)), inputs)
        return _adopt(self.problem.with_inputs(inputs, self.grad_enabled), self.tau, True)


class Reader(NamedTuple):
    """A problem and the τ that the kernels computed for it.

    A row is bitwise identical in every part that contains it.

    The kernels sum a dot product in one of two orders: vectorized over features if a key head has few rows
    (decoding), otherwise feature by feature. For scores of 9e4 the two sums differ by 5e-3. If τ and the
    scores used different orders, the weights would have relative errors of this size. Each part is therefore
    computed in the same order as the full matrix. If the part has too few rows to select this order, its last
    row is repeated.

    rows_per_key_head: number of rows per key head in the full matrix, over all query heads of the key head.
    """

    problem: Problem
    rows_per_key_head: int

    @classmethod
    def with_tau(cls, problem: Problem, rows_per_key_head: int) -> Self | None:
        """Compute τ and return a reader, or None if τ is not finite."""
        lead = problem.lead()
        lead_slices = tuple(slice(0, n) for n in lead[:-1])
        bands = []
        for rows in interrupt.bands(problem.queries, math.prod(lead) * problem.keys):
            part = problem.part(Tile(lead_slices, rows, slice(0, problem.keys)))
            reader = cls(part, rows_per_key_head)
            tau = reader._join([fused.compute_tau(padded) for padded in reader._parts()])
            if tau is None:
                return None
            bands.append(tau)
        tau = bands[0] if len(bands) == 1 else torch.cat(bands, -2)
        return cls(problem.with_tensors({**problem.tensors, "tau": tau}), rows_per_key_head)

    def weights(self) -> Tensor | None:
        """Return dense weights (…, g, r, q, k), or None if they are not finite."""
        return self._read(fused.weights)

    def entropy(self) -> Tensor | None:
        """Return the entropy of each row, (…, g, r, q, 1), or None if the weights are not finite."""
        return self._read(fused.entropy)

    def sums(self) -> Tensor | None:
        """Return the sums of `fused.sums`, (…, g, r, q, c), or None if the weights are not finite."""
        return self._read(fused.sums)

    def topk(self, k: int) -> tuple[Tensor, Tensor] | None:
        """Return the k largest weights of each row and their keys, or None if the weights are not finite."""
        best = [fused.topk(part, part["tau"], k) for part in self._parts()]
        values, keys = (self._join([pair and pair[i] for pair in best]) for i in range(2))
        return None if values is None or keys is None else (values, keys)

    def product(self, x: Tensor) -> Tensor | None:
        """Return weights · x, (…, g, r, k, e) → (…, g, r, q, e), or None if it is not finite."""
        return self._join([fused.product(part, x) for part in self._parts(per_group=1)])

    def transposed_product(self, x: Tensor) -> Tensor | None:
        """Return weightsᵀ · x, (…, g, r, q, e) → (…, g, r, k, e), or None if it is not finite."""
        total, first = None, 0
        for part in self._parts(per_group=1):
            rows = x[..., first : first + part.queries, :]
            first += part.queries
            if part.queries > rows.shape[-2]:  # repeated rows contribute zero
                rows = torch.nn.functional.pad(rows, (0, 0, 0, part.queries - rows.shape[-2]))
            product = fused.transposed_product(part, part["tau"], rows)
            if product is None:
                return None
            total = product if total is None else total + product
        return total

    def _read(self, kernel: Callable[[Problem, Tensor], Tensor | None]) -> Tensor | None:
        return self._join([kernel(part, part["tau"]) for part in self._parts()])

    def _parts(self, per_group: int | None = None) -> list[Problem]:
        """Return the problem with a number of rows that selects the summation order of the full matrix.

        A part with too few rows is padded. A part with too many rows, which contains rows repeatedly, is
        divided.

        per_group: number of query heads per key head; 1 for the product kernels.
        """
        problem, max_rows = self.problem, fused.few_rows(self.problem)
        per_group = per_group or problem.lead()[-1]
        few = self.rows_per_key_head <= max_rows and problem.config.family == "dot"
        if not few or per_group * problem.queries <= max_rows:
            return [_padded(problem, self.rows_per_key_head, per_group)]
        lead = tuple(slice(0, n) for n in problem.lead()[:-1])
        step = max(max_rows // per_group, 1)
        bands = (slice(at, min(at + step, problem.queries)) for at in range(0, problem.queries, step))
        return [problem.part(Tile(lead, band, slice(0, problem.keys))) for band in bands]

    def _join(self, results: Sequence[Tensor | None]) -> Tensor | None:
        """Concatenate the rows of all parts, and drop repeated rows. Returns None if a part is None."""
        rows = [result for result in results if result is not None]
        if len(rows) < len(results):
            return None
        return (rows[0] if len(rows) == 1 else torch.cat(rows, -2))[..., : self.problem.queries, :]


def _padded(problem: Problem, rows_per_key_head: int, per_group: int) -> Problem:
    max_rows = fused.few_rows(problem)
    if rows_per_key_head <= max_rows or problem.config.family != "dot":
        return problem
    return repeat_last_row(problem, max_rows // max(per_group, 1) + 1)


def repeat_last_row(problem: Problem, min_rows: int) -> Problem:
    """Pad the problem to `min_rows` query rows by repeating the last row."""
    queries = problem.queries
    if not 0 < queries < min_rows:
        return problem
    return problem.select_rows(torch.arange(min_rows, device=problem["query"].device).clamp(max=queries - 1))


class LazyMatrix(TiledMatrix):
    """A matrix (…, q, k) computed on demand from a `Problem`."""

    _lead: tuple[int, ...]
    _heads: Heads = "axis"
    _full_rows: int | None = None
    _built: _BuiltProblem | None = None
    # the kernels set a plain tuple with the fields of a `CachedCall`
    _deferred: _DeferredProblem | CachedCall | None = None

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
        tau: row statistic, or None if the problem contains it.
        lead: leading axes, (…, heads).
        heads: "axis" if the last leading axis is the heads axis, "single" for one head, "mean" for a mean.
        inputs: the caller's tensors by name. If one is modified before the problem is built, building raises
            StaleError.
        tau_from_kernels: whether the kernels computed τ, for this problem or for the full matrix.
        rows_per_key_head: number of rows per key head in the full matrix; see `Reader`.
        """
        self._lead = tuple(lead)
        self._heads = heads or ("axis" if self._lead else "single")
        self._full_rows = rows_per_key_head
        if isinstance(problem, Problem):
            self._built = _adopt(problem, tau, tau_from_kernels)
        else:
            inputs = inputs or {}
            self._deferred = _DeferredProblem(problem, tau, inputs, _versions(inputs), tau_from_kernels)

    @classmethod
    def of_cached_call(
        cls, problem: Problem, tau: Tensor, query: Tensor, key: Tensor, lead: tuple[int, ...]
    ) -> Self:
        """Create the matrix of a cached call; see `CachedCall`.

        This runs after each call, when the kernels have evicted Python's code from the CPU caches. It
        therefore does as little as possible, and `_state` does the rest on first use. For float32 calls, the
        kernels do the same without executing Python code (`Calls::make_weights` in kernels/calls.h).
        """
        self = cls.__new__(cls)
        self._lead = lead
        if not lead:
            self._heads = "single"
        try:
            versions: tuple[int | None, int | None] = (query._version, key._version)
        except RuntimeError:  # one of them is an inference tensor
            versions = tuple(_versions({"query": query, "key": key}).values())  # type: ignore[assignment]
        self._deferred = CachedCall(problem, tau, query, key, versions, torch.is_grad_enabled())
        return self

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
            if type(deferred) is tuple:
                deferred = CachedCall(*deferred)
            built = self._built = deferred.finish()
            self._deferred = None
        built = built or self._built  # another thread may have built the problem between the two reads above
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
            if block is None:  # no kernels, or the tile contains NaN or inf and needs the reference
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
        """Return a matrix for a part of this one. `problem` contains τ."""
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
        """Return a reader that uses the kernels; None if they cannot be used or gradients are needed.

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
        """Compute the weights of a part with the reference implementation."""
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

    def _new(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Create a tensor of zeros (…, g, r, *size)."""
        return self.problem["tau"].new_zeros((*self.problem_lead, *size), dtype=dtype)

    def _grouped(self, x: Tensor) -> Tensor | None:
        """Expand x from key heads to query heads, … g k e -> … g r k e, or return None for other shapes."""
        *batch, groups, per_group = self.problem.lead()
        shared = self.has_heads and per_group > 1 and x.dim() > 2 and x.shape[-3] == groups > 1
        if not shared or not broadcasts(x.shape[:-3], batch):
            return None
        return x.unsqueeze(-3).expand(*batch, groups, per_group, *x.shape[-2:])


def kernels_support(problem: Problem) -> bool:
    """Whether the kernels can compute the weights and no gradients are needed."""
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
    """Return the version counter of each tensor, or None for inference tensors and during compilation."""
    if torch.compiler.is_compiling():
        return dict.fromkeys(tensors)
    try:
        return {name: tensor._version for name, tensor in tensors.items()}
    except RuntimeError:  # one of them is an inference tensor
        return {name: None if x.is_inference() else x._version for name, x in tensors.items()}
