"""regard.flex_attention agrees with torch's dense FlexAttention, in both passes, for common masks and scores.

The masks and score functions are from the attention-gym collection, written from their definitions; some
have no known formula. torch does not accept inputs that require grad on the CPU, so gradients are
compared with those of torch's dense formula, `math_attention`, computed by autograd.
"""

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, or_masks

import regard
from regard.errors import DTypeError
from regard.mechanism.flex import tiles
from regard.mechanism.flex.attention import FlexCall, choose_route
from tests.recorder import Largest

B, H, Q, K, D, E = 2, 3, 41, 53, 5, 7
dense_flex = importlib.import_module("torch._higher_order_ops.flex_attention").math_attention
Function = Callable[..., Tensor]


class Score(NamedTuple):
    """A score function, its learned tensors, and whether it has a formula for the kernels."""

    function: Function | None
    parameters: tuple[Tensor, ...] = ()
    formula: bool = True


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def scores(queries: int = Q, keys: int = K, dtype: torch.dtype = torch.float64) -> dict[str, Score]:
    generator = torch.manual_seed(1)
    slopes, temperature = parameter(H, dtype=dtype), parameter(dtype=dtype)
    distances = parameter(H, queries + keys, dtype=dtype)
    buckets, column, row = (
        parameter(5, H, dtype=dtype),
        parameter(B, keys, dtype=dtype),
        parameter(queries, dtype=dtype),
    )
    dense, shared = parameter(H, queries, keys, dtype=dtype), parameter(keys, queries, dtype=dtype)
    constant = torch.rand(H, generator=generator, dtype=dtype)

    def bucket(distance: Tensor) -> Tensor:
        far = torch.log(distance.abs().clamp(min=1).to(torch.float32)).long() + 1
        return torch.where(distance.abs() < 2, distance.abs(), torch.min(far, torch.full_like(far, 4)))

    table: dict[str, tuple[Function | None, tuple[Tensor, ...], bool]] = {
        "none": (None, (), True),
        "identity": (lambda s, b, h, q, k: s, (), True),
        "alibi": (lambda s, b, h, q, k: s + (k - q) * constant[h], (), True),
        "learned alibi": (lambda s, b, h, q, k: s - slopes[h].exp() * (q - k).abs(), (slopes,), True),
        "softcap": (lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5), (), True),
        "softcap and bias": (lambda s, b, h, q, k: (s * 0.7).tanh() * -2 + slopes[h], (slopes,), True),
        "relative": (lambda s, b, h, q, k: s + distances[h, q - k + keys], (distances,), True),
        "bucketed": (lambda s, b, h, q, k: s + buckets[bucket(k - q), h], (buckets,), True),
        "right and left": (
            lambda s, b, h, q, k: torch.where(q + 1 > k, s + slopes[h], s - 0.1),
            (slopes,),
            True,
        ),
        "head": (lambda s, b, h, q, k: 2 - s + slopes[h], (slopes,), True),
        "tokens": (lambda s, b, h, q, k: s + column[b, k] + row[q] / 2, (column, row), True),
        "temperature": (lambda s, b, h, q, k: s * temperature / slopes[h], (temperature, slopes), True),
        "row factor": (lambda s, b, h, q, k: (s + 1) * row[q] * column[b, k], (row, column), False),
        "key factor": (lambda s, b, h, q, k: s * column[b, k], (column,), True),
        "dense": (lambda s, b, h, q, k: s + dense[h, q, k], (dense,), True),
        "transposed": (lambda s, b, h, q, k: s + shared[k, q], (shared,), True),
        "causal score": (lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), (), True),
        "filled": (lambda s, b, h, q, k: (s * 2).masked_fill(q - k > 9, -math.inf), (), True),
        "sine": (lambda s, b, h, q, k: s + torch.sin(s * slopes[h]), (slopes,), False),
        "relu": (lambda s, b, h, q, k: torch.relu(s) - 0.1 * s, (), False),
        "decay": (lambda s, b, h, q, k: s * temperature.sigmoid() ** (q - k).abs(), (temperature,), False),
        "products": (lambda s, b, h, q, k: s + row[q] * column[b, k], (row, column), False),
        "parity": (lambda s, b, h, q, k: torch.where((q * k) % 2 == 0, s, s / 2), (), False),
        "twice": (lambda s, b, h, q, k: 3 * torch.tanh(2 * torch.tanh(s)), (), False),
        "square": (lambda s, b, h, q, k: s * s * slopes[h], (slopes,), False),
        "capped sum": (lambda s, b, h, q, k: torch.tanh(s + slopes[h]), (slopes,), False),
    }
    return {name: Score(*row) for name, row in table.items()}


class MaskCase(NamedTuple):
    """A mask function, and whether each query attends to at most four intervals of keys."""

    function: Function | None
    intervals: bool = True


DOCUMENTS = torch.arange(max(Q, K)) // 11
LENGTHS = torch.tensor([29, 0])
WINDOWS = torch.tensor([3, 0, 17])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[q] == DOCUMENTS[k]


def neighborhood(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Each pixel of an 8 × 7 image attends to a 3 × 5 window (NATTEN)."""
    return ((q // 7 - k // 7).abs() <= 1) & ((q % 7 - k % 7).abs() <= 2)


MASKS = {
    "none": MaskCase(None),
    "all": MaskCase(lambda b, h, q, k: b.new_ones((), dtype=torch.bool)),
    "causal": MaskCase(causal),
    "sliding window": MaskCase(and_masks(causal, lambda b, h, q, k: q - k <= 6)),
    "both sides": MaskCase(lambda b, h, q, k: (q - k).abs() <= 6),
    "prefix": MaskCase(or_masks(causal, lambda b, h, q, k: k < 13)),
    "document": MaskCase(document),
    "causal document": MaskCase(and_masks(causal, document)),
    "unsorted document": MaskCase(lambda b, h, q, k: (DOCUMENTS % 2)[q] == (DOCUMENTS % 2)[k], False),
    "padding": MaskCase(lambda b, h, q, k: k < LENGTHS[b]),
    "window of a head": MaskCase(lambda b, h, q, k: (k <= q) & (q <= k + WINDOWS[h])),
    "sink and window": MaskCase(
        or_masks(lambda b, h, q, k: k < 4, lambda b, h, q, k: (q >= k) & (q - k < 5))
    ),
    "not the window": MaskCase(lambda b, h, q, k: ~((q >= k) & (q - k < 5))),
    "dilated": MaskCase(lambda b, h, q, k: (q >= k) & (q - k <= 20) & ((q - k) % 2 == 0), False),
    "neighborhood": MaskCase(neighborhood, False),
    "half": MaskCase(lambda b, h, q, k: (q > 19) & (q >= k)),
    "nothing": MaskCase(lambda b, h, q, k: q < 0),
}


def draw(dtype: torch.dtype = torch.float64, groups: int = H, batch: int = B) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (B, H, Q, D), (batch, groups, K, D), (batch, groups, K, E)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def block_mask(mask: Function | None, size: int = 16) -> BlockMask | None:
    if mask is None:
        return None
    per_head = mask in (MASKS["padding"].function, MASKS["window of a head"].function)
    lead = (B, H) if per_head else (None, None)
    return create_block_mask(mask, *lead, Q, K, device="cpu", BLOCK_SIZE=size)


def expected(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function | None, mask: Function | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output, logsumexp and maximum by torch's dense formula, which autograd differentiates."""
    score_mod = score_mod or (lambda s, b, h, q, k: s)
    mask = mask or (lambda b, h, q, k: b.new_ones((), dtype=torch.bool))
    output, lse, largest = dense_flex(query, key, value, score_mod, (mask,), query.shape[-1] ** -0.5, {})
    return output, lse * math.log(2), largest * math.log(2)


def gradients(output: Tensor, sources: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    grads = torch.autograd.grad(output, sources, torch.randn_like(output), allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(sources, grads, strict=True)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", scores())
def test_output_and_gradients_equal_torch(score: str, mask: str) -> None:
    inputs, (score_mod, parameters, _) = draw(), scores()[score]
    mask_mod = MASKS[mask].function
    output = regard.flex_attention(*inputs, score_mod=score_mod, block_mask=block_mask(mask_mod))
    correct = expected(*inputs, score_mod, mask_mod)[0]
    torch.testing.assert_close(output, correct)
    sources = [*inputs, *parameters]
    for ours, theirs in zip(gradients(output, sources), gradients(correct, sources), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", ["none", "causal", "sink and window", "dilated"])
@pytest.mark.parametrize("score", scores())
def test_float32_equals_torch(score: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's public function runs a dense formula if it is not compiled."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    inputs = [x.detach() for x in draw(torch.float32)]
    with torch.no_grad():
        score_mod = scores(dtype=torch.float32)[score].function
        options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask(MASKS[mask].function)}
        torch.testing.assert_close(
            regard.flex_attention(*inputs, **options),
            torch_flex.flex_attention(*inputs, **options),
            atol=1e-5,
            rtol=1e-4,
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("score", scores(5, 7))
def test_gradcheck(score: str) -> None:
    """Derivatives with respect to inputs and learned tensors are checked along random directions."""
    inputs, (score_mod, parameters, _) = draw(), scores(5, 7)[score]
    query, key, value = (
        x.detach()[:, :, :n, :2].clone().requires_grad_() for x, n in zip(inputs, (5, 7, 7), strict=True)
    )
    mask = create_block_mask(lambda b, h, q, k: k <= q + 3, None, None, 5, 7, device="cpu", BLOCK_SIZE=2)

    def run(*leaves: Tensor) -> Tensor:
        return regard.flex_attention(*leaves[:3], score_mod=score_mod, block_mask=mask)

    assert gradcheck(run, (query, key, value, *parameters), fast_mode=True)


@pytest.mark.parametrize("score", scores())
def test_formulas_are_found(score: str) -> None:
    query, key, _ = draw()
    route = choose_route(FlexCall(query, key, key, scores()[score].function))
    assert (route.plan is not None) == scores()[score].formula, route.reason


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("blocks", [16, 128])
def test_intervals_are_found(mask: str, blocks: int) -> None:
    query, key, _ = draw()
    route = choose_route(FlexCall(query, key, key, None, block_mask(MASKS[mask].function, blocks)))
    assert (route.plan is not None) == MASKS[mask].intervals, route.reason


def test_the_kernels_run() -> None:
    x = torch.randn(1, 2, 256, 16)
    mask = create_block_mask(causal, None, None, 256, 256, device="cpu")
    explanation = regard.explain(x, x, x, score_mod=scores()["alibi"].function, block_mask=mask)
    assert explanation.implementation == "fused"
    explanation = regard.explain(x, x, x, score_mod=lambda s, b, h, q, k: s.relu())
    assert explanation.implementation == "tiled"
    assert "relu is not supported" in str(explanation)


@pytest.mark.parametrize("name", ["alibi", "sine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """The error is at most the rounding of the inputs and the output."""
    inputs, score_mod = draw(dtype), scores(dtype=torch.float32)[name].function
    output = regard.flex_attention(*inputs, score_mod=score_mod, block_mask=block_mask(causal))
    assert output.dtype is dtype
    exact = expected(*(x.double() for x in inputs), score_mod, causal)[0]
    assert (output - exact).abs().max() <= 4 * torch.finfo(dtype).eps
    assert all(grad.dtype is dtype for grad in torch.autograd.grad(output.sum(), inputs))


@pytest.mark.parametrize("name", ["learned alibi", "sine", "dense"])
def test_grouped_queries_and_a_shared_batch(name: str) -> None:
    inputs, (score_mod, parameters, _) = draw(groups=1, batch=1), scores()[name]
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask(causal)}
    output = regard.flex_attention(*inputs, **options, enable_gqa=True)
    correct = expected(*inputs, score_mod, causal)[0]
    torch.testing.assert_close(output, correct)
    sources = [*inputs, *parameters]
    for ours, theirs in zip(gradients(output, sources), gradients(correct, sources), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["learned alibi", "sine"])
@pytest.mark.parametrize("mask", ["none", "half", "dilated"])
def test_logsumexp_and_maximum(name: str, mask: str) -> None:
    inputs, (score_mod, parameters, _) = draw(), scores()[name]
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask(MASKS[mask].function)}
    output, aux = regard.flex_attention(*inputs, **options, return_aux=AuxRequest(lse=True, max_scores=True))
    correct, lse, largest = expected(*inputs, score_mod, MASKS[mask].function)
    torch.testing.assert_close(output, correct)
    torch.testing.assert_close(aux.lse, lse)
    torch.testing.assert_close(aux.max_scores, largest)
    torch.testing.assert_close(regard.flex_attention(*inputs, **options, return_lse=True)[1], lse)
    visible = lse > -math.inf
    sources = [*inputs[:2], *parameters]
    for ours, theirs in zip(
        gradients(torch.where(visible, aux.lse, 0.0), sources),
        gradients(torch.where(visible, expected(*inputs, score_mod, MASKS[mask].function)[1], 0.0), sources),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs.nan_to_num())


@pytest.mark.parametrize("name", ["none", "sine"])
def test_rows_without_keys_are_zero(name: str) -> None:
    inputs, score_mod = draw(), scores()[name].function
    output = regard.flex_attention(
        *inputs, score_mod=score_mod, block_mask=block_mask(MASKS["half"].function)
    )
    assert (output[:, :, :20] == 0).all()
    assert (output[:, :, 20:] != 0).any(-1).all()
    assert all(grad.isfinite().all() for grad in gradients(output, inputs))


@pytest.mark.parametrize("name", ["none", "sine"])
def test_masked_keys_may_contain_nan(name: str) -> None:
    inputs, score_mod = draw(), scores()[name].function
    mask = block_mask(lambda b, h, q, k: k < 47)
    clean = regard.flex_attention(*inputs, score_mod=score_mod, block_mask=mask)
    bad = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        bad[1][:, :, 47:] = math.nan
        bad[2][:, :, 47:] = math.inf
    output = regard.flex_attention(*bad, score_mod=score_mod, block_mask=mask)
    torch.testing.assert_close(output, clean)
    for ours, theirs in zip(gradients(output, bad), gradients(clean, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["none", "sine"])
@pytest.mark.parametrize("mask", [None, causal])
def test_blocks_that_are_not_listed_are_masked(name: str, mask: Function | None) -> None:
    """The BlockMask is built by hand; torch's compiled kernels skip these blocks too."""
    counts = torch.tensor([2, 1, 2])[None, None].to(torch.int32)
    columns = torch.tensor([[0, 3, 1, 2], [1, 0, 2, 3], [0, 2, 1, 3]])[None, None].to(torch.int32)
    by_hand = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=16, mask_mod=mask, seq_lengths=(Q, K))
    listed = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)

    def dense(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = listed[q // 16, k // 16]
        return visible if mask is None else visible & mask(b, h, q, k)

    inputs, score_mod = draw(), scores()[name].function
    output = regard.flex_attention(*inputs, score_mod=score_mod, block_mask=by_hand)
    torch.testing.assert_close(output, expected(*inputs, score_mod, dense)[0])


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass creates a tensor with one number for each query-key pair."""
    monkeypatch.setattr(tiles, "TILE", 2**12)
    tokens, slope = 320, nn.Parameter(torch.tensor(0.5))
    x = torch.randn(1, 1, tokens, 4, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, k: (q - k) % 3 != 1, None, None, tokens, tokens, device="cpu")
    with Largest() as largest:
        output = regard.flex_attention(
            x, x, x, score_mod=lambda s, b, h, q, k: s * torch.cos(s * slope), block_mask=mask
        )
        torch.autograd.grad(output.sum(), [x, slope])
    assert largest.elements <= 4 * 2**12 < tokens**2 / 4


def test_values_are_read_at_each_call() -> None:
    """Nothing is cached: tensors and numbers that a function captures may change between calls."""
    inputs, numbers, table = draw(), [1.0], torch.rand(H, dtype=torch.float64)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * numbers[0] + table[h] * (q - k)

    for _ in range(2):
        table *= 2
        numbers[0] += 1
        output = regard.flex_attention(*inputs, score_mod=score_mod)
        torch.testing.assert_close(output, expected(*inputs, score_mod, None)[0])


class _Double(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_calls_that_a_trace_cannot_see() -> None:
    """The result of a custom autograd function looks like a captured tensor."""
    inputs = draw()
    for score_mod in (
        lambda s, b, h, q, k: _Double.apply(s) + 0 * q,
        lambda s, b, h, q, k: s + _Double.apply(q - k),
    ):
        output = regard.flex_attention(*inputs, score_mod=score_mod)
        torch.testing.assert_close(output, expected(*inputs, score_mod, None)[0])


def test_stateful_functions_get_no_formula() -> None:
    query, key, _ = draw()
    calls: list[int] = []

    def counting(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        calls.append(0)
        return s + len(calls)

    assert "same torch calls" in choose_route(FlexCall(query, key, key, counting)).reason


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: s if q > k else -s,
        lambda s, b, h, q, k: s + q.item(),
        lambda s, b, h, q, k: s + torch.rand(()),
        lambda s, b, h, q, k: s + [1.0, 2.0, 3.0][h],
    ],
)
def test_functions_that_vmap_refuses(score_mod: Function) -> None:
    with pytest.raises(RuntimeError):
        regard.flex_attention(*draw(), score_mod=score_mod)


def test_hidden_parameters_are_refused() -> None:
    """A gradient that cannot be computed raises an error instead of being zero."""
    hidden = nn.Parameter(torch.ones((), dtype=torch.float64))
    inputs = draw()
    with pytest.raises(regard.ArgumentError, match=r"requires grad, but not through torch functions"):
        regard.flex_attention(*inputs, score_mod=lambda s, b, h, q, k: s + _Double.apply(hidden))
    with torch.no_grad():
        output = regard.flex_attention(*inputs, score_mod=lambda s, b, h, q, k: s + _Double.apply(hidden))
        torch.testing.assert_close(output, regard.flex_attention(*inputs))


def test_changes_before_the_backward_pass_are_refused() -> None:
    inputs, (score_mod, parameters, _) = draw(), scores()["sine"]
    output = regard.flex_attention(*inputs, score_mod=score_mod)
    with torch.no_grad():
        parameters[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_saved_tensor_hooks_keep_the_gradients() -> None:
    """Hooks replace saved tensors with copies, which the function does not use."""
    inputs, (score_mod, parameters, _) = draw(), scores()["sine"]
    plain = gradients(regard.flex_attention(*inputs, score_mod=score_mod), [*parameters])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        hooked = gradients(regard.flex_attention(*inputs, score_mod=score_mod), [*parameters])
    torch.testing.assert_close(hooked, plain)
    assert plain[0].abs().min() > 0


def test_parameters_computed_from_others() -> None:
    """Captured tensors need not be leaves, and may be captured twice."""
    base = parameter(H)
    slopes = base.exp()
    inputs = draw()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.sin(s) + slopes[h] * base[h]

    ours = regard.flex_attention(*inputs, score_mod=score_mod)
    theirs = expected(*inputs, score_mod, None)[0]
    torch.manual_seed(3)
    grad = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, base, grad, retain_graph=True), torch.autograd.grad(theirs, base, grad)
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo, after a graph break
@pytest.mark.parametrize("name", ["learned alibi", "sine"])
def test_compiled(name: str) -> None:
    inputs, (score_mod, parameters, _) = draw(), scores()[name]

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.flex_attention(2 * query, key, value, score_mod=score_mod) + 1

    compiled = torch.compile(model, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, model(*inputs))
    torch.testing.assert_close(gradients(compiled, [*parameters]), gradients(model(*inputs), [*parameters]))


def test_autocast() -> None:
    inputs = [x.detach() for x in draw(torch.float32)]
    for name in ("none", "relu"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = regard.flex_attention(*inputs, score_mod=scores()[name].function)
        low = [x.to(torch.bfloat16) for x in inputs]
        assert output.equal(regard.flex_attention(*low, score_mod=scores()[name].function))


def test_kernel_options_change_nothing() -> None:
    inputs = draw()
    options: Any = {"BLOCK_M": 64}
    assert regard.flex_attention(*inputs, kernel_options=options).equal(regard.flex_attention(*inputs))


@pytest.mark.parametrize("queries", [0, 3])
def test_empty_sizes(queries: int) -> None:
    query, key, value = torch.randn(2, 3, queries, 4), torch.randn(2, 3, 0, 4), torch.randn(2, 3, 0, 5)
    for score_mod in (None, scores()["relu"].function):
        output = regard.flex_attention(query, key, value, score_mod=score_mod)
        assert output.equal(torch.zeros(2, 3, queries, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.ones(3, 5)}, r"query has shape \(3, 5\); .* four axes"),
        ({"query": torch.ones(B, 6, Q, D)}, "query has 6 heads and key has 3; pass enable_gqa=True"),
        ({"query": torch.ones(B, 4, Q, D), "enable_gqa": True}, "4 heads and key has 3; .* multiple"),
        ({"query": torch.ones(B, H, Q, 9)}, "query has 9 features and key has 5"),
        ({"query": torch.ones(7, H, Q, D)}, "batch size 7 and key has 2"),
        ({"value": torch.ones(B, H, 2, D)}, "key has shape .* and value"),
        (
            {"value": torch.ones(B, H, K, D).double()},
            "query has dtype torch.float32 and value has torch.float64",
        ),
        ({"key": [1]}, "key is a list"),
        ({"scale": math.nan}, "scale=nan"),
        ({"block_mask": torch.ones(3)}, "block_mask is a Tensor"),
        (
            {"block_mask": lambda: create_block_mask(causal, None, None, 64, 64, device="cpu")},
            "64 queries and 64 keys",
        ),
        (
            {"block_mask": lambda: create_block_mask(causal, 5, None, Q, K, device="cpu")},
            r"\(batch, heads\) = \(5, 1\)",
        ),
        ({"score_mod": lambda s, b, h, q, k: 1.0}, "score_mod returned"),
        ({"score_mod": lambda s, b, h, q, k: torch.ones(3) * s}, r"score_mod returned .* shape \(3,\)"),
        ({"return_lse": True, "return_aux": AuxRequest()}, "return_lse=True and return_aux"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    inputs = dict(zip(("query", "key", "value"), (x.detach() for x in draw(torch.float32)), strict=True))
    if callable(change.get("block_mask")):  # building it imports the compiler
        change = {"block_mask": change["block_mask"]()}
    with pytest.raises(regard.RegardError, match=message):
        regard.flex_attention(**{**inputs, **change})


def test_mask_functions_must_return_booleans() -> None:
    mask = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=64,
        mask_mod=lambda b, h, q, k: q - k,
        seq_lengths=(Q, K),
    )
    with pytest.raises(regard.DTypeError, match=r"mask_mod returned torch.int64; it must return torch.bool"):
        regard.flex_attention(*draw(), block_mask=mask)


def test_a_block_mask_without_mask_mod_raises_in_one_line():
    x = torch.randn(1, 1, 4, 4)
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 4, 4, device="cpu")
    block_mask.mask_mod = None
    with pytest.raises(DTypeError, match=r"block_mask\.mask_mod is None"):
        regard.flex_attention(x, x, x, block_mask=block_mask)
