"""The computation of one weight from query and key, and the formulas of the normalizers."""

import math
from typing import Any

import torch
from msgspec import Struct

from regard.mechanism import reference
from regard.mechanism.normalizers import Entmax, Hard, Mean, Normalizer, Relu, Sigmoid, Softmax, Softmax1
from regard.mechanism.weights.weights import Weights


class WeightComputation(Struct, kw_only=True):
    """The steps from query and key to one weight; values that are not finite are None."""

    query: list[float | None]
    key: list[float | None]
    scale: float
    bias: float | None
    softcap: float | None
    score: float | None
    masked: bool
    tau: float | None
    weight: float
    normalizer: str
    formula: str


@torch.no_grad()
def weight_computation(weights: Weights | Any, query: int, key: int) -> WeightComputation:
    """Return the steps from query and key to one weight, for lazy weights of one head."""
    row = weights.rows(slice(query, query + 1)).problem.nan_checked()
    scores = reference.scores(row)
    tau = reference.tau(row, scores)
    weight = reference.weights(row, scores, tau).flatten()[key]
    unmasked = row.with_config(terms=0)
    score = reference.scores(unmasked).flatten()[key]
    query_vector, key_vector = row["query"].flatten(0, -2)[0], row["key"].flatten(0, -3)[0, key]
    product = row.config.scale * (query_vector.double() @ key_vector.double())
    softcap = row.config.softcap
    without_bias = product if softcap is None else reference.softcap(product, softcap)
    normalize = row.config.normalize
    return WeightComputation(
        query=[_finite(x) for x in query_vector.tolist()],
        key=[_finite(x) for x in key_vector.tolist()],
        scale=row.config.scale,
        bias=_finite(float(score) - float(without_bias)) if row.all("bias") or row.all("line") else 0.0,
        softcap=softcap,
        score=_finite(float(score)),
        masked=bool(scores.flatten()[key] == -math.inf),
        tau=_finite(float(tau.double().sum())),
        weight=_finite(float(weight)) or 0.0,
        normalizer=type(normalize).__name__,
        formula=formula(normalize),
    )


def formula(normalize: Normalizer, score: str = "score") -> str:
    """Return the formula of a normalizer for display, with `score` as the symbol for the score.

    >>> import regard
    >>> from regard.app.weight_computation import formula
    >>> formula(regard.Softmax()), formula(regard.Sparsemax(), "s")
    ('exp(score − τ)', 'max(s − τ, 0)')
    """
    match normalize:
        case Softmax(temperature=t):
            return f"exp({score} − τ)" if t == 1 else f"exp(({score} − τ) / {t:g})"
        case Softmax1():
            return f"exp({score} − τ)"
        case Entmax(alpha=2.0):
            return f"max({score} − τ, 0)"
        case Entmax(alpha=1.5):
            return f"max(({score} − τ) / 2, 0)²"
        case Entmax(alpha=a):
            return f"max({a - 1:g} ({score} − τ), 0)^{1 / (a - 1):g}"
        case Mean():
            return f"{score} / n"
        case Relu():
            return f"max({score}, 0) / n"
        case Sigmoid():
            return f"1 / (1 + exp(τ − {score}))"
        case Hard():
            return f"1 if {score} is the maximum, else 0; ties share the weight"
    return f"φ({score} − τ)"


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
