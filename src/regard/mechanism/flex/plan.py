"""Express a FlexAttention call as a call to `attention`, if its functions have known formulas."""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.mechanism.biases import RelativeBias
from regard.mechanism.flex.expressions import Constant, Index, Operand, ScoreForm, evaluate, lookup
from regard.mechanism.flex.intervals import Sizes, index_vectors


class Plan(NamedTuple):
    """Arguments of `attention` that compute a score form.

    query_factor, key_factor: factors for query (b, h, q, 1) and key (b, g, k, 1), or None.
    scale: factor for the dot product.
    softcap: see `Dot`.
    biases: terms added to the scores.
    """

    query_factor: Tensor | None
    key_factor: Tensor | None
    scale: float
    softcap: float | None
    biases: list[Tensor | RelativeBias]

    def copy(self) -> "Plan":
        """Return a plan that shares no memory with the tensors captured by its functions."""
        factors = [None if x is None else x.clone() for x in (self.query_factor, self.key_factor)]
        biases: list[Tensor | RelativeBias] = [
            x.copy() if isinstance(x, _Line) else cast(Tensor, x).clone() for x in self.biases
        ]
        return self._replace(query_factor=factors[0], key_factor=factors[1], biases=biases)


def make_plan(form: ScoreForm, sizes: Sizes, groups: int, scale: float, like: Tensor) -> Plan | str:
    """Return the plan for a score form, or the reason why there is none.

    groups: number of key heads.
    scale: the scale passed to the call.
    like: a tensor that determines the dtype and device of the plan.
    """
    indices = index_vectors(sizes, like.device)
    query_factor = key_factor = None
    for factor in form.factors:
        depends = factor.depends if isinstance(factor, Index) else frozenset()
        if depends <= set("bhq"):
            values = evaluate(factor, indices).to(like.dtype)[..., :1]
            query_factor = values if query_factor is None else query_factor * values
        elif depends <= set("bhk") and ("h" not in depends or groups == sizes.heads):
            values = evaluate(factor, indices).to(like.dtype)[..., :1, :].mT
            key_factor = values if key_factor is None else key_factor * values
        else:
            return "the score is multiplied by a different factor for each pair of query and key"
    softcap = None
    total = scale * form.gain
    if form.inner_gain is not None:  # gain · tanh(inner · score) is gain · inner · score with softcap |gain|
        softcap, total = abs(form.gain), scale * form.gain * form.inner_gain
        if not 1e-30 <= softcap < 1e31:
            return f"the softcap {form.gain} is out of range"
    if not math.isfinite(total):
        return f"the score is multiplied by {total}"
    biases = _biases(form.terms, sizes, like)
    if isinstance(biases, str):
        return biases
    return Plan(query_factor, key_factor, total, softcap, biases)


def _biases(terms: tuple[Operand, ...], sizes: Sizes, like: Tensor) -> list[Tensor | RelativeBias] | str:
    """Sum the terms that depend on the same indices; return one bias for each such sum."""
    sums: dict[str, Tensor] = {}
    dense: list[Tensor | RelativeBias] = []
    indices = index_vectors(sizes, like.device)
    for term in terms:
        depends = term.depends if isinstance(term, Index) else frozenset()
        at = indices
        if not depends & {"q", "k", "d"}:
            kind = "head"
        elif depends <= set("hd"):
            kind, at = "distance", _distance_indices(sizes, like.device)
        elif depends <= set("bhq"):
            kind = "query"
        elif depends <= set("bhk"):
            kind = "key"
        else:
            table = _dense_table(term, sizes)
            if table is None:
                return "a different number is added to the score for each pair of query and key"
            dense.append(table.to(like.dtype))
            continue
        values = torch.as_tensor(evaluate(term, at), dtype=like.dtype, device=like.device)
        values = values.reshape((1,) * (4 - values.dim()) + tuple(values.shape))
        sums[kind] = sums[kind] + values if kind in sums else values
    line = sums.pop("distance", None)
    biases = [*dense, *sums.values()]
    if line is not None:
        heads = line[0, :, 0].expand(-1, sizes.queries + sizes.keys - 1)
        biases.append(_Line(heads if len(heads) > 1 else heads[0]))
    return biases


def _dense_table(term: Operand, sizes: Sizes) -> Tensor | None:
    """Return the captured tensor indexed by a term such as bias[h, q, k], as a view (b, h, q, k)."""
    if not isinstance(term, Index) or term.function is not lookup:
        return None
    table, *at = term.args
    names = [i.name if isinstance(i, Index) else "" for i in at]
    if not isinstance(table, Constant) or "" in names or len(set(names)) < len(names):
        return None
    axes, view = [name for name in "bhqk" if name in names], table.tensor
    view = view.permute([names.index(name) for name in axes])
    for axis, (name, size) in enumerate(zip("bhqk", sizes, strict=True)):
        if name not in axes:
            view = view.unsqueeze(axis)
        elif view.shape[axis] < size:
            return None  # out of range: torch raises an index error when the function is evaluated
        else:
            view = view.narrow(axis, 0, size)
    return view


class _Line(RelativeBias):
    """A relative bias with known values at every distance, (h, l) or (l)."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self._values = values

    def line(self, queries: int, keys: int, device: Any) -> Tensor:
        return self._values

    def copy(self) -> "_Line":
        return _Line(self._values.clone())


def _distance_indices(sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
    """Return one pair of query and key for each distance, in increasing order, along the last axis."""
    distance = torch.arange(sizes.queries + sizes.keys - 1, device=device) - (sizes.queries - 1)
    query = (-distance).clamp(min=0).view(1, 1, 1, -1)
    heads = torch.arange(sizes.heads, device=device)
    return {"h": heads.view(1, -1, 1, 1), "q": query, "k": query + distance}
