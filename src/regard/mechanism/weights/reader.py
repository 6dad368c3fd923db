"""Read weights with the kernels. A row is bitwise identical in every part that contains it.

The kernels sum a dot product in one of two orders: along the width if a key head has few rows (decoding),
otherwise term by term. For scores of 9e4 the two sums differ by 5e-3. If τ and the scores used different
orders, the weights would have relative errors of this size. Each part is therefore read in the order of the
full matrix. If the part has too few rows to select this order, its last row is repeated.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from regard._util import interrupt
from regard.mechanism import fused
from regard.mechanism.call.problem import Problem, Tile
from regard.mechanism.weights.index import select_rows


class Reader(NamedTuple):
    """A problem and the τ that the kernels computed for it.

    rows_per_key_head: number of rows per key head in the full matrix, over all query heads of the key head.
    """

    problem: Problem
    rows_per_key_head: int

    @classmethod
    def with_tau(cls, problem: Problem, rows_per_key_head: int) -> Self | None:
        """Compute τ and return a reader, or None if τ is not finite."""
        *outer, per_group = lead = problem.lead()
        lead_slices = tuple(slice(0, n) for n in outer)
        bands = []
        for rows in interrupt.bands(problem.queries, math.prod(lead) * problem.keys):
            part = problem.part(Tile(lead_slices, rows, slice(0, problem.keys)))
            tau = fused.compute_tau(_padded(part, rows_per_key_head, per_group))
            if tau is None:
                return None
            bands.append(tau[..., : part.queries, :])
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
        rows = self._rows()
        best = fused.topk(rows, rows["tau"], k)
        return None if best is None else (self._cut(best[0]), self._cut(best[1]))

    def product(self, x: Tensor) -> Tensor | None:
        """Return weights · x, (…, g, r, k, e) → (…, g, r, q, e), or None if it is not finite."""
        result = fused.product(self._rows(per_group=1), x)
        return None if result is None else self._cut(result)

    def transposed_product(self, x: Tensor) -> Tensor | None:
        """Return weightsᵀ · x, (…, g, r, q, e) → (…, g, r, k, e), or None if it is not finite."""
        rows = self._rows(per_group=1)
        if rows.queries > x.shape[-2]:  # repeated rows contribute zero
            x = torch.nn.functional.pad(x, (0, 0, 0, rows.queries - x.shape[-2]))
        return fused.transposed_product(rows, rows["tau"], x)

    def _read(self, kernel: Callable[[Problem, Tensor], Tensor | None]) -> Tensor | None:
        rows = self._rows()
        result = kernel(rows, rows["tau"])
        return None if result is None else self._cut(result)

    def _rows(self, per_group: int | None = None) -> Problem:
        """Pad the problem to enough rows. per_group: query heads per key head; 1 for the product kernels."""
        return _padded(self.problem, self.rows_per_key_head, per_group or self.problem.lead()[-1])

    def _cut(self, rows: Tensor) -> Tensor:
        """Drop the repeated rows."""
        return rows[..., : self.problem.queries, :]


def _padded(problem: Problem, rows_per_key_head: int, per_group: int) -> Problem:
    max_rows = fused.few_rows()
    if rows_per_key_head <= max_rows or problem.config.family != "dot":
        return problem
    return repeat_last_row(problem, max_rows // max(per_group, 1) + 1)


def repeat_last_row(problem: Problem, min_rows: int) -> Problem:
    """Pad the problem to `min_rows` query rows by repeating the last row."""
    queries = problem.queries
    if not 0 < queries < min_rows:
        return problem
    return select_rows(problem, torch.arange(min_rows, device=problem["query"].device).clamp(max=queries - 1))
