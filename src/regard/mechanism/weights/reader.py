"""Reading weights with the kernels, so that a row has the same bits in every part that it is read in.

A score is a sum of products, rounded after each addition, and the kernels add in one of two orders: along the
width where a key head has few rows, as in decoding, and term by term where it has more. At scores of 9e4 the
two differ by 5e-3, and so do weights whose τ comes from one order and whose scores come from the other. Each
part is therefore read in the order of the whole it was cut from: where it has too few rows for that, its last
row is repeated.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from regard._util import interrupt
from regard.mechanism import fused
from regard.mechanism.call.problem import Problem, Tile
from regard.mechanism.normalizers import Softmax
from regard.mechanism.weights.index import some_rows


class Reader(NamedTuple):
    """A problem with the τ that the kernels found for it.

    together: the rows of a key head, over its query heads, in the whole that the problem is a part of.
    """

    problem: Problem
    together: int

    @classmethod
    def fit(cls, problem: Problem, together: int) -> Self | None:
        """A reader of a problem whose τ is not known; None if it is not finite."""
        *outer, per_group = lead = problem.lead()
        every = tuple(slice(0, n) for n in outer)
        bands = []
        for rows in interrupt.bands(problem.queries, math.prod(lead) * problem.keys):
            part = problem.part(Tile(every, rows, slice(0, problem.keys)))
            tau = fused.fit(_padded(part, together, per_group))
            if tau is None:
                return None
            bands.append(tau[..., : part.queries, :])
        tau = bands[0] if len(bands) == 1 else torch.cat(bands, -2)
        return cls(problem.with_tensors({**problem.tensors, "tau": tau}), together)

    def weights(self) -> Tensor | None:
        """The weights, dense: (…, g, r, q, k); None if they are not finite."""
        rows = self._rows()
        result = fused.weights(rows, rows["tau"])
        return None if result is None else self._cut(result)

    def entropy(self) -> Tensor | None:
        """−Σ w log w of each row: (…, g, r, q, 1); None if the weights are not finite."""
        rows = self._rows()
        result = fused.entropy(rows, rows["tau"])
        return None if result is None else self._cut(result)

    def topk(self, k: int) -> tuple[Tensor, Tensor] | None:
        """The k largest weights of each row, and their keys; None if they are not finite."""
        rows = self._rows()
        best = fused.topk(rows, rows["tau"], k)
        return None if best is None else (self._cut(best[0]), self._cut(best[1]))

    def product(self, x: Tensor) -> Tensor | None:
        """weights · x, (…, g, r, k, e) → (…, g, r, q, e); None if it is not finite."""
        result = fused.product(self._rows(per_group=1), x)
        return None if result is None else self._cut(result)

    def transposed_product(self, x: Tensor) -> Tensor | None:
        """weightsᵀ · x, (…, g, r, q, e) → (…, g, r, k, e); None if it is not finite."""
        rows = self._rows(per_group=1)
        if rows.queries > x.shape[-2]:  # repeated rows count for nothing
            x = torch.nn.functional.pad(x, (0, 0, 0, rows.queries - x.shape[-2]))
        return fused.transposed_product(rows, rows["tau"], x)

    def _rows(self, per_group: int | None = None) -> Problem:
        """The problem with enough rows; the kernels of both products take the query heads one by one."""
        return _padded(self.problem, self.together, per_group or self.problem.lead()[-1])

    def _cut(self, rows: Tensor) -> Tensor:
        """Without the rows that were repeated."""
        return rows[..., : self.problem.queries, :]


def reads_back(problem: Problem) -> bool:
    """Whether the scores that are read have the bits of those that forward found τ for.

    Softmax of a single row for each key head has a kernel of its own (kernels/single.h), for forward alone,
    which adds in a third order. There τ has to be found again.
    """
    single = problem.lead()[-1] * problem.queries == 1 and problem.rules.family == "dot"
    return not (single and type(problem.rules.normalize) is Softmax)


def _padded(problem: Problem, together: int, per_group: int) -> Problem:
    few = fused.few_rows()
    if together <= few or problem.rules.family != "dot":
        return problem
    return repeat_last_row(problem, few // max(per_group, 1) + 1)


def repeat_last_row(problem: Problem, least: int) -> Problem:
    """The problem with at least so many query rows, the last of which are one and the same."""
    queries = problem.queries
    if not 0 < queries < least:
        return problem
    return some_rows(problem, torch.arange(least, device=problem["query"].device).clamp(max=queries - 1))
