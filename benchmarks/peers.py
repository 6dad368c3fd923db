"""Other implementations of attention: eager torch, FlexAttention, JAX."""

import warnings
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.harness import Call


def eager(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """Compute attention with dense weights."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value


def broadcast(
    query: Tensor, key: Tensor, value: Tensor, query_map: Tensor, key_map: Tensor, vector: Tensor
) -> Tensor:
    """Compute additive attention (Bahdanau et al. 2015), storing the sums (q, k, d)."""
    sums = (query @ query_map.T).unsqueeze(-2) + (key @ key_map.T).unsqueeze(-3)
    return (torch.tanh(sums) @ vector).softmax(-1) @ value


def flex(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> dict[str, Call]:
    """Compile FlexAttention for these shapes and the current number of threads; empty if that fails."""
    try:
        return {"flex": _compiled(query, key, value, causal)}
    except Exception as error:  # a missing or failing C++ compiler raises various errors
        skip("flex", f"does not compile: {str(error).strip().splitlines()[0] if str(error) else error!r}")
        return {}


def _compiled(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    size = query.shape[-2], key.shape[-2]
    block = create_block_mask(lambda b, h, q, k: q >= k, None, None, *size, device="cpu") if causal else None
    run = partial(torch.compile(flex_attention, dynamic=False), query, key, value, block_mask=block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    return run


def jax(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> dict[str, Call]:
    """Compile JAX's dot_product_attention; it chooses its own number of threads. Empty without jax."""
    try:
        import jax
    except ImportError:
        skip("jax", "is not installed")
        return {}
    arrays = [jax.numpy.asarray(x.transpose(1, 2).numpy()) for x in (query, key, value)]  # b h n d -> b n h d
    run = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal))
    return {"jax": lambda: run(*arrays).block_until_ready()}


@cache
def skip(peer: str, reason: str) -> None:
    """Print once why a peer is skipped."""
    print(f"  ({peer} {reason})")
