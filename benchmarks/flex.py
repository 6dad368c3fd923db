"""Compare regard with torch's compiled `flex_attention`, which has no backward pass on the CPU.

`python -m benchmarks flex` measures time, `python -m benchmarks.flex` the peak memory at 16,384 tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import regard
from benchmarks.dots import Shape, with_gradients
from benchmarks.harness import Call, Candidates, Comparison
from benchmarks.machine import peak_memory

HEADS = 8
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)
Function = Callable[..., Tensor]


def _alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + SLOPES[h] * (kv_idx - q_idx)


def _softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def _sine(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + torch.sin(score)


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 256)


def _setup(shape: Shape, score_mod: Function | None, mask_mod: Function | None, backward: bool) -> Candidates:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, None, None, shape.q, shape.q, device="cpu")
    leaves = [x.requires_grad_(backward) for x in shape.tensors()]
    ours = partial(regard.flex_attention, *leaves, score_mod=score_mod, block_mask=mask)
    implementation = regard.explain(*leaves, score_mod=score_mod, block_mask=mask).implementation
    if backward:
        calls: dict[str, Call] = {"regard": ours, "dense": partial(_dense, *leaves, score_mod, mask_mod)}
        return Candidates(with_gradients(calls, leaves), implementation)
    torch.compiler.reset()
    theirs = torch.compile(flex_attention, dynamic=False)
    calls = {"regard": ours, "compiled flex": partial(theirs, *leaves, score_mod=score_mod, block_mask=mask)}
    return Candidates(calls, implementation)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function | None, mask_mod: Function | None
) -> Tensor:
    """Compute the formula in plain torch, which materializes the scores."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    b, h, q, k = (
        torch.arange(size).reshape((1,) * axis + (-1,) + (1,) * (3 - axis))
        for axis, size in enumerate(scores.shape)
    )
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    if mask_mod is not None:
        scores = torch.where(mask_mod(b, h, q, k), scores, -torch.inf)
    return scores.softmax(-1) @ value


def flex() -> Iterator[Comparison]:
    """Forward, compared with torch's compiled kernels; with backward, compared with the dense formula."""
    cases: list[tuple[str, Function | None, Function | None, float | None]] = [
        ("plain", None, None, 1.9),
        ("causal", None, _causal, 1.9),
        ("ALiBi causal", _alibi, _causal, 1.9),
        ("window of 256", None, _window, 1.9),
        ("softcap", _softcap, None, 1.9),
        ("sine, tile by tile", _sine, None, None),
    ]
    for name, score_mod, mask_mod, target in cases:
        for tokens in (512, 1024, 2048):
            shape = Shape(1, HEADS, tokens)
            setup = partial(_setup, shape, score_mod, mask_mod, False)
            yield Comparison("flex", f"{name} {shape}", setup, target=target, threads=(2, 1))
    for name, score_mod, mask_mod, _ in cases:
        shape = Shape(1, HEADS, 1024)
        setup = partial(_setup, shape, score_mod, mask_mod, True)
        yield Comparison("flex", f"{name} {shape}, with backward", setup, backward=True)


def memory(tokens: int = 16384) -> float:
    """Return the peak memory of forward and backward, in MB, for a score_mod without a known formula."""
    slope = torch.nn.Parameter(torch.tensor(0.5))
    inputs = [torch.randn(1, 1, tokens, 64).requires_grad_() for _ in range(3)]

    def run(size: int) -> object:
        leaves = [x[:, :, :size] for x in inputs]
        output = regard.flex_attention(*leaves, score_mod=lambda s, b, h, q, k: s + slope * torch.sin(s))
        return torch.autograd.grad(output.sum(), [*leaves, slope])

    run(64)  # warm up: libraries and threads allocate their memory
    start = peak_memory()
    _grads = run(tokens)  # keeps the result alive
    return peak_memory() - start


if __name__ == "__main__":
    print(f"{memory():.0f} MB; a matrix of scores takes {16384**2 * 4 / 1e6:.0f} MB")
