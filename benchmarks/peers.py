"""What regard is compared with: torch as a textbook writes it, FlexAttention, JAX."""

import warnings
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.harness import Contender


def eager(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """Attention with dense weights."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value


def broadcast(
    query: Tensor, key: Tensor, value: Tensor, query_map: Tensor, key_map: Tensor, vector: Tensor
) -> Tensor:
    """Attention with Bahdanau's score, whose sums q × k × d are held."""
    sums = (query @ query_map.T).unsqueeze(-2) + (key @ key_map.T).unsqueeze(-3)
    return (torch.tanh(sums) @ vector).softmax(-1) @ value


def flex(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> dict[str, Contender]:
    """FlexAttention, compiled for these shapes and the present number of threads; nothing where it fails."""
    try:
        return {"flex": _compiled(query, key, value, causal)}
    except Exception as error:  # what a missing or failing C++ compiler raises is torch's business
        skip("flex", f"does not compile: {str(error).strip().splitlines()[0] if str(error) else error!r}")
        return {}


def _compiled(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    size = query.shape[-2], key.shape[-2]
    block = create_block_mask(lambda b, h, q, k: q >= k, None, None, *size, device="cpu") if causal else None
    run = partial(torch.compile(flex_attention, dynamic=False), query, key, value, block_mask=block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    return run


def jax(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> dict[str, Contender]:
    """JAX's dot_product_attention, compiled, on as many threads as it likes; nothing where jax is missing."""
    try:
        import jax
    except ImportError:
        skip("jax", "is not installed")
        return {}
    arrays = [jax.numpy.asarray(x.transpose(1, 2).numpy()) for x in (query, key, value)]  # b h n d -> b n h d
    run = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal))
    return {"jax": lambda: run(*arrays).block_until_ready()}


@cache
def skip(peer: str, why: str) -> None:
    """Say once why a peer does not take part."""
    print(f"  ({peer} {why})")
