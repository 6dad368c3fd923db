"""Decoding with float32 and int8 keys and values, compared with a plain read of the same memory.

`python -m benchmarks.quantized` compares the perplexity of the stories model on held-out stories.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import regard
from benchmarks.dots import THREADS, Shape
from benchmarks.harness import Candidates, Comparison
from regard.app.stories.grammar import stories
from regard.models import Attends

KEYS = (2_048, 8_192, 32_768)


def quantized() -> Iterator[Comparison]:
    """One query and 8 heads of width 64; and grouped heads: 32 query heads, 8 key heads of width 128."""
    for keys in KEYS:
        shape = Shape(1, 8, 1, keys)
        yield Comparison(
            "quantized",
            f"float32 {shape}",
            partial(_float32, shape),
            bytes=shape.bytes,
            target=0.85,
            threads=THREADS,
        )
        yield _int8(shape, 2.0 if keys >= 8_192 else None)
    yield _int8(Shape(1, 32, 1, 8_192, d=128, g=8), None)


def _int8(shape: Shape, target: float | None) -> Comparison:
    tokens = shape.bytes / shape.d / shape.dtype.itemsize
    size = tokens * (shape.d + 4)  # plus a scale for each token
    return Comparison(
        "quantized",
        f"int8 {shape}",
        partial(_int8_candidates, shape, size),
        bytes=size,
        target=target,
        threads=THREADS,
    )


def _float32(shape: Shape) -> Candidates:
    query, key, value = shape.tensors()
    calls = {"regard": partial(regard.attention, query, key, value), "read": _read(shape.bytes)}
    return Candidates(calls, regard.explain(query, key, value).implementation)


def _int8_candidates(shape: Shape, size: float) -> Candidates:
    query, *tensors = shape.tensors()
    key, value = (regard.quantize(x) for x in tensors)
    calls = {
        "regard": partial(regard.attention, query, key, value),
        "float32": partial(regard.attention, query, key.dequantize(), value.dequantize()),
        "read": _read(size),
    }
    return Candidates(calls, regard.explain(query, key, value).implementation)


def _read(size: float) -> partial[object]:
    """Return a call that reads this many bytes and computes as little as possible."""
    return partial(torch.sum, torch.ones(int(size) // 4))


def perplexity(count: int = 120) -> float:
    """Return the perplexity of the stories model on held-out stories."""
    text_model = regard.load_language_model("stories")
    loss, tokens = 0.0, 0
    with torch.no_grad():
        for story in stories(count, seed=1_000_003):
            ids = torch.as_tensor(text_model.encode(story))
            logits = text_model.model(ids[None, :-1])[0]
            loss += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
            tokens += len(ids) - 1
    return math.exp(loss / tokens)


def _quantized_attention(self: Attends, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend to int8 keys and values. Keys are visible as in a cache filled token by token."""
    return regard.attention(query, regard.quantize(key), regard.quantize(value), **options)


if __name__ == "__main__":
    exact = perplexity()
    with patch.object(Attends, "attention", _quantized_attention):
        rounded = perplexity()
    print(f"perplexity: float32 {exact:.5f}, int8 {rounded:.5f}, {rounded / exact - 1:+.4%}")
