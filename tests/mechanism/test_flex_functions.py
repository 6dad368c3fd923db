"""flex_attention evaluates its functions exactly, even if the captured values change between calls."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

import regard
from tests.mechanism.test_flex import H, K, Q, block_mask, causal, draw, expected, gradients

Function = Callable[..., Tensor]
torch.manual_seed(4)
BYTES = torch.arange(K, dtype=torch.uint8) * 5  # 0 … 260 − 256
SMALL = (torch.arange(K) * 7 % 256 - 128).to(torch.int8)
HALF = torch.randn(K).half()
SINGLE = torch.randn(K)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: s - BYTES[k],
        lambda s, b, h, q, k: (s + BYTES[k]) * 2,
        lambda s, b, h, q, k: (s + SMALL[k]) * 2,
        lambda s, b, h, q, k: (s + SMALL[k]) * SMALL[k],
        lambda s, b, h, q, k: 2 - (s + SMALL[k]),
        lambda s, b, h, q, k: (s + HALF[k]) * 0.1,
        lambda s, b, h, q, k: s / HALF[k],
        lambda s, b, h, q, k: (s + 0.1) * SINGLE[k],
        lambda s, b, h, q, k: s / (q + 1),
        lambda s, b, h, q, k: (s + k) / 3,
        lambda s, b, h, q, k: s * 1e200 * 1e200,
    ],
)
def test_arithmetic_on_the_score_has_its_precision(score_mod: Function) -> None:
    """A score plus an integer is a float: later factors neither overflow the integer nor round it."""
    inputs = draw()
    output = regard.flex_attention(*inputs, score_mod=score_mod)
    correct = expected(*inputs, score_mod, None)[0]
    torch.testing.assert_close(output, correct, atol=1e-12, rtol=1e-12, equal_nan=True)


@pytest.mark.parametrize("function", [torch.log, torch.sqrt])
def test_masked_pairs_give_captured_tensors_no_nan(function: Function) -> None:
    inputs, factor = draw(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return function(s.abs() * factor)

    output = regard.flex_attention(*inputs, score_mod=score_mod, block_mask=block_mask(causal))
    correct = expected(*inputs, score_mod, causal)[0]
    for ours, theirs in zip(
        gradients(output, [*inputs, factor]), gradients(correct, [*inputs, factor]), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_functions_of_a_loop_keep_their_values_until_backward() -> None:
    """All functions in the loop share `table` and `power`, which have their last values in backward."""
    inputs = draw()
    tables = [torch.randn(H, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    ours, theirs = torch.zeros(()), torch.zeros(())
    for power, table in enumerate(tables, 1):

        def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.sin(s * power) * table[h]  # noqa: B023

        def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q - k) % (power + 1) == 0  # noqa: B023

        mask_mod = and_masks(causal, window)
        mask = create_block_mask(mask_mod, None, None, Q, K, device="cpu", BLOCK_SIZE=16)
        ours = ours + regard.flex_attention(*inputs, score_mod=score_mod, block_mask=mask)
        theirs = theirs + expected(*inputs, score_mod, mask_mod)[0]
    sources = [*inputs, *tables]
    for grad, correct in zip(gradients(ours, sources), gradients(theirs, sources), strict=True):
        torch.testing.assert_close(grad, correct)


@pytest.mark.parametrize("change", ["number", "tensor"])
def test_an_attribute_replaced_before_backward_is_an_error(change: str) -> None:
    values = {"number": 2.0, "tensor": torch.ones(H, dtype=torch.float64)}
    new = {"number": 3.0, "tensor": torch.zeros(H, dtype=torch.float64)}

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.sin(s * values["number"]) * values["tensor"][h]

    output = regard.flex_attention(*draw(), score_mod=score_mod)
    output.sum().backward(retain_graph=True)
    values[change] = new[change]
    with pytest.raises(
        regard.errors.StaleError, match="score_mod changed between the forward and the backward pass"
    ):
        output.sum().backward()


def test_a_bool_compares_with_a_distance() -> None:
    inputs, one = draw(), torch.tensor(True)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k <= one

    output = regard.flex_attention(*inputs, block_mask=block_mask(mask_mod))
    torch.testing.assert_close(output, expected(*inputs, None, mask_mod)[0])


@pytest.mark.parametrize("axes", [1, 2])
def test_a_mask_with_axes_is_an_error(axes: int) -> None:
    table = torch.ones((1,) * (axes - 1) + (K,), dtype=torch.bool)
    blocks = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=64, mask_mod=lambda b, h, q, k: table, seq_lengths=(Q, K)
    )
    with pytest.raises(regard.errors.ShapeError, match="mask_mod returned a tensor of shape"):
        regard.flex_attention(*draw(), block_mask=mask)


def test_indices_that_cancel() -> None:
    inputs = draw()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * (k - k + 2) * (k + q - q)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= k

    output = regard.flex_attention(*inputs, score_mod=score_mod, block_mask=block_mask(mask_mod))
    torch.testing.assert_close(output, expected(*inputs, score_mod, mask_mod)[0])


def test_a_second_derivative_is_an_error_not_zero() -> None:
    inputs = draw()
    output = regard.flex_attention(*inputs, score_mod=lambda s, b, h, q, k: torch.sin(s))
    (grad,) = torch.autograd.grad(output.sum(), inputs[0], create_graph=True)
    with pytest.raises(regard.errors.ArgumentError, match="no second derivative"):
        grad.square().sum().backward()
