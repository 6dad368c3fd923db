"""Multi-head attention compared with a loop over heads, in one call and step by step."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.models import Attends, KeyValues, KVCache, MultiHeadAttention, RotaryPositions, SelfAttention
from tests import naive
from tests.cases import looped
from tests.models.exact import close, filled, normal

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HEADS = 12, 4


def layer_of(**options: Any) -> MultiHeadAttention:
    return filled(MultiHeadAttention(WIDTH, HEADS, **options))


def projections(layer: MultiHeadAttention) -> list[tuple[Tensor, Tensor | float]]:
    """Return weight and bias of queries, keys and values from the state dict."""
    state = layer.state_dict()
    sizes = [layer.heads * layer.head_width, layer.key_heads * layer.head_width]
    sizes.append(layer.key_heads * layer.head_value_width)
    if "in_proj.weight" in state:
        matrices = state["in_proj.weight"].split(sizes)
        biases = state["in_proj.bias"].split(sizes) if "in_proj.bias" in state else (0.0,) * 3
    else:
        matrices = tuple(state[f"in_proj.{i}.weight"] for i in range(3))
        biases = tuple(state.get(f"in_proj.{i}.bias", 0.0) for i in range(3))
    return list(zip(matrices, biases, strict=True))


def by_hand(
    layer: MultiHeadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    bias: Any = None,
) -> Tensor:
    """Compute one head and one query-key pair at a time."""
    parts = []
    for x, (matrix, shift), own in zip(
        (query, key, value), projections(layer), (layer.heads, layer.key_heads, layer.key_heads), strict=True
    ):
        size = len(matrix) // own
        heads = []
        for head in range(layer.heads):
            key_head = head * own // layer.heads  # adjacent heads share a key head
            rows = slice(key_head * size, (key_head + 1) * size)
            heads.append(x @ matrix[rows].T + (shift[rows] if isinstance(shift, Tensor) else 0.0))
        parts.append(torch.stack(heads, -3))
    output, _ = naive.attention(*parts, score=layer.score, normalize=layer.normalize, mask=mask, bias=bias)
    beside = torch.cat(list(output.unbind(-3)), -1)
    state = layer.state_dict()
    return beside @ state["out_proj.weight"].T + state.get("out_proj.bias", 0.0)


def laplace(query: Tensor, key: Tensor) -> Tensor:
    return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)


LAYERS: dict[str, Callable[[], MultiHeadAttention]] = {
    "plain": lambda: layer_of(),
    "not linear_bias": lambda: layer_of(linear_bias=False),
    "two key heads": lambda: layer_of(key_heads=2),
    "one key head": lambda: layer_of(key_heads=1),
    "head width": lambda: layer_of(head_width=5),
    "head widths": lambda: layer_of(head_width=(2, 5), key_heads=2),
    "general": lambda: layer_of(score=regard.General(3, 3)),
    "additive": lambda: layer_of(score=regard.Additive(3, 3, width=7)),
    "cosine": lambda: layer_of(score=regard.Cosine(2.0), key_heads=2),
    "gaussian": lambda: layer_of(score=regard.Gaussian(2.0)),
    "function": lambda: layer_of(score=laplace),
    "sparsemax": lambda: layer_of(normalize=regard.Sparsemax()),
    "entmax15": lambda: layer_of(normalize=regard.Entmax15(), key_heads=2),
    "sigmoid": lambda: layer_of(normalize=regard.Sigmoid()),
    "mean": lambda: layer_of(normalize=regard.Mean()),
    "hard": lambda: layer_of(normalize=regard.Hard()),
    "softmax1": lambda: layer_of(normalize=regard.Softmax1(0.5)),
    "sink": lambda: layer_of(normalize=regard.Sink(HEADS)),
}
MASKS: dict[str, Callable[[int, int], Any]] = {
    "no mask": lambda q, k: None,
    "causal": lambda q, k: regard.Causal(),
    "padding": lambda q, k: regard.Padding([k, 2]),
    "tensor": lambda q, k: normal(2, 1, q, k) > -0.5,
}
BIASES: dict[str, Callable[[int, int], Any]] = {
    "no bias": lambda q, k: None,
    "dense": lambda q, k: normal(HEADS, q, k),
    "alibi": lambda q, k: regard.ALiBi(HEADS),
    "t5": lambda q, k: filled(regard.T5Bias(HEADS)),
}


# Comparison with a loop over heads


@looped("kind", LAYERS)
def test_heads_equal_separate_attentions(kind: str) -> None:
    layer, x, source, value = LAYERS[kind](), normal(2, 3, 12), normal(2, 5, 12), normal(2, 5, 12, seed=1)
    close(layer(x), by_hand(layer, x, x, x))
    close(layer(x, source), by_hand(layer, x, source, source))
    close(layer(x, source, value), by_hand(layer, x, source, value))


@looped("mask", MASKS)
@looped("bias", BIASES)
def test_any_mask_and_bias(mask: str, bias: str) -> None:
    layer, x, source = layer_of(key_heads=2), normal(2, 3, 12), normal(2, 5, 12)
    for y in (x, source):
        options = {"mask": MASKS[mask](3, y.shape[1]), "bias": BIASES[bias](3, y.shape[1])}
        close(layer(x, y, **options), by_hand(layer, x, y, y, **options))
    options = {"mask": MASKS[mask](3, 3), "bias": BIASES[bias](3, 3)}
    close(layer(x, **options), by_hand(layer, x, x, x, **options))


@looped("widths", [7, (7, 5), (12, 5), (7, 12)])
def test_sources_of_other_widths(widths: Any) -> None:
    layer = layer_of(source_width=widths, key_heads=2, head_width=(2, 3))
    wide, wider = widths if isinstance(widths, tuple) else (widths, widths)
    x, key, value = normal(2, 3, 12), normal(2, 5, wide), normal(2, 5, wider, seed=1)
    close(layer(x, key, value), by_hand(layer, x, key, value))
    if wide == wider:
        close(layer(x, key), by_hand(layer, x, key, key))


def test_self_attention_needs_equal_widths() -> None:
    with pytest.raises(regard.ShapeError, match=r"key has shape \(3, 12\).*\(…, n, 7\)"):
        layer_of(source_width=7)(normal(3, 12))


@looped("lead", [(), (2,), (2, 3), (0,)])
def test_any_leading_axes(lead: tuple[int, ...]) -> None:
    layer, x = layer_of(key_heads=2), normal(*lead, 5, 12)
    actual = layer(x, mask=regard.Causal())
    assert actual.shape == x.shape
    for one, output in zip(x.reshape(-1, 5, 12), actual.reshape(-1, 5, 12), strict=True):
        close(output, layer(one, mask=regard.Causal()))


def test_initialization() -> None:
    """Each part of the fused matrix has the initialization bound of a separate projection."""
    layer = MultiHeadAttention(64, 4, key_heads=1)
    for which, rows in enumerate((64, 16, 16)):
        matrix, bias = layer.projection(which)
        bound = (6 / (rows + 64)) ** 0.5
        assert 0.9 * bound < matrix.abs().max() <= bound
        assert bias is not None
        assert not bias.any()


# Projections


class Products(TorchDispatchMode):
    """Counts matrix products with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@looped(
    ("call", "products"),
    [
        (lambda layer, x: layer(x), 2),
        (lambda layer, x: layer(x, x[:1]), 3),  # queries; keys and values; out_proj
        (lambda layer, x: layer(x, x[:1], x[:1] + 1), 4),
        (lambda layer, x: layer.project_source(x), 1),
    ],
)
def test_projections_are_fused(call: Any, products: int) -> None:
    layer = layer_of(key_heads=2)
    with Products() as seen:
        call(layer, normal(5, 12))
    assert seen.count["addmm"] == products
    assert seen.count["mm"] == 0


@pytest.mark.parametrize("options", [{}, {"source_width": 12}, {"source_width": (7, 5)}])
def test_projection_matches_the_state_dict(options: dict[str, Any]) -> None:
    layer = layer_of(**options)
    for which, (matrix, bias) in enumerate(projections(layer)):
        assert torch.equal(layer.projection(which)[0], matrix)
        assert torch.equal(layer.projection(which)[1], bias)


# Projected sources and caches


@looped("kind", ["plain", "two key heads", "head widths", "additive"])
def test_projected_source_gives_the_same_output(kind: str) -> None:
    layer, x, source = LAYERS[kind](), normal(2, 3, 12), normal(2, 5, 12)
    projected = layer.project_source(source)
    assert projected.key.shape[-3] == projected.value.shape[-3] == layer.key_heads
    close(layer(x, projected), layer(x, source))
    rows = torch.tensor([1, 1, 0])
    close(layer(x[rows], projected.select(rows)), layer(x, source)[rows])


@given(
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    kind=st.sampled_from(["plain", "two key heads", "one key head", "head widths", "additive", "entmax15"]),
    lead=st.sampled_from([(), (2,), (2, 3)]),
    turned=st.booleans(),
    alibi=st.booleans(),
    grad=st.booleans(),
)
def test_steps_equal_one_call(
    chunks: list[int], kind: str, lead: tuple[int, ...], turned: bool, alibi: bool, grad: bool
) -> None:
    layer, n = LAYERS[kind](), sum(chunks)
    x, cache, rotary = normal(*lead, n, 12), KVCache(), RotaryPositions(2)
    bias = regard.ALiBi(HEADS) if alibi else None

    def call(start: int, stop: int, cache: KVCache | None = None) -> Tensor:
        rotation = rotary(torch.arange(start, stop)) if turned else None
        return layer(x[..., start:stop, :], mask=regard.Causal(), bias=bias, rotation=rotation, cache=cache)

    with torch.set_grad_enabled(grad):
        steps, start = [], 0
        for chunk in chunks:
            steps.append(call(start, start + chunk, cache))
            start += chunk
            assert cache.length == start
        close(torch.cat(steps, -2), call(0, n))


def test_gradients_of_steps_equal_those_of_one_call() -> None:
    layer, x, cache = layer_of(key_heads=2), normal(2, 5, 12).requires_grad_(), KVCache()
    inputs = [x, *layer.parameters()]
    steps = torch.cat([layer(x[:, i : i + 1], mask=regard.Causal(), cache=cache) for i in range(5)], 1)
    actual = torch.autograd.grad(steps.square().sum(), inputs)
    once = torch.autograd.grad(layer(x, mask=regard.Causal()).square().sum(), inputs)
    for ours, theirs in zip(actual, once, strict=True):
        close(ours, theirs)


def test_cache_may_switch_to_gradients() -> None:
    layer, x, cache = layer_of(), normal(2, 5, 12), KVCache()
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
    last = layer(x[:, 3:], mask=regard.Causal(), cache=cache)
    close(last, layer(x, mask=regard.Causal())[:, 3:])
    last.sum().backward()
    with torch.no_grad():
        more = layer(x[:, :1], cache=cache)
    close(more, layer(torch.cat([x, x[:, :1]], 1))[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("before", [3, 16, 20])
def test_rows_are_selected_repeated_and_reordered(before: int) -> None:
    layer, x, cache, rows = (
        layer_of(key_heads=2),
        normal(3, before, 12),
        KVCache(),
        torch.tensor([2, 0, 0, 2, 1]),
    )
    more = normal(5, 2, 12)
    layer(x, mask=regard.Causal(), cache=cache)
    cache.select(rows)
    actual = layer(more, mask=regard.Causal(), cache=cache)
    close(actual, layer(torch.cat([x[rows], more], 1), mask=regard.Causal())[:, before:])


@torch.no_grad()
@looped("kept", [0, 2, 17, 19, 50])
def test_crop(kept: int) -> None:
    layer, x, cache, more = layer_of(), normal(2, 19, 12), KVCache(), normal(2, 3, 12)
    for i in range(19):
        layer(x[:, i : i + 1], cache=cache)
    cache.crop(kept)
    assert cache.length == min(kept, 19)
    actual = layer(more, mask=regard.Causal(), cache=cache)
    close(actual, layer(torch.cat([x[:, :kept], more], 1), mask=regard.Causal())[:, -3:])


def test_empty_cache_crop_and_select() -> None:
    cache = KVCache()
    cache.crop(3)
    cache.select(torch.tensor([0]))
    assert repr(cache) == "KVCache(<0 tokens>)"
    with pytest.raises(regard.ArgumentError, match="length=-1"):
        cache.crop(-1)


@torch.no_grad()
def test_cache_grows_geometrically() -> None:
    """The buffer is reallocated only when the capacity doubles, not at every step."""
    cache, places = KVCache(), set()
    for _ in range(200):
        projected = cache.extend(normal(2, 3, 1, 5), normal(2, 3, 1, 7))
        places.add(projected.key.untyped_storage().data_ptr())
    assert projected.key.shape == (2, 3, 200, 5)
    assert projected.value.shape == (2, 3, 200, 7)
    assert len(places) <= 5


@torch.no_grad()
def test_weights_of_earlier_steps_stay_valid() -> None:
    layer, x, cache = layer_of(key_heads=2), normal(2, 40, 12), KVCache()
    with regard.watch(layer) as seen:
        for i in range(37):
            layer(x[:, i : i + 1], mask=regard.Causal(), cache=cache)
        cache.crop(30)
        layer(x[:, 37:38], mask=regard.Causal(), cache=cache)
        cache.select(torch.tensor([1, 0]))
        layer(x[:, 38:], mask=regard.Causal(), cache=cache)
        layer(x[:, :37], mask=regard.Causal())
    expected = seen[-1].dense()
    for i in range(37):
        close(seen[i].dense(), expected[..., i : i + 1, : i + 1])


@pytest.mark.parametrize("grad", [False, True])
def test_cache_is_for_one_batch(grad: bool) -> None:
    layer, cache = layer_of(), KVCache()
    with torch.set_grad_enabled(grad):
        layer(normal(2, 3, 12), cache=cache)
        with pytest.raises(regard.ShapeError, match=r"\(2, 4, 3, 3\).*\(5, 4, 1, 3\).*new KVCache"):
            layer(normal(5, 1, 12), cache=cache)


@torch.no_grad()
def test_rejected_keys_leave_the_cache_unchanged() -> None:
    cache, x, wide = KVCache(), normal(2, 3, 5), normal(2, 3, 7)
    cache.extend(x, wide)
    for key, value, error, message in (
        (
            normal(2, 1, 5),
            normal(2, 2, 7),
            regard.ShapeError,
            r"keys of shape \(2, 1, 5\) and values of shape",
        ),
        (normal(2, 1, 5), normal(2, 1, 6), regard.ShapeError, r"holds values of shape \(2, 3, 7\)"),
        (normal(2, 1, 5).float(), normal(2, 1, 7).float(), regard.DTypeError, "keys of dtype torch.float64"),
    ):
        with pytest.raises(error, match=message):
            cache.extend(key, value)
        assert cache.length == 3
    assert torch.equal(cache.extend(x[:, :1], wide[:, :1]).value, torch.cat([wide, wide[:, :1]], 1))


@pytest.mark.parametrize("more", [{"value": normal(5, 12)}, {"cache": KVCache()}])
def test_key_values_exclude_value_and_cache(more: dict[str, Any]) -> None:
    layer = layer_of()
    with pytest.raises(regard.ArgumentError, match=f"got KeyValues .*{next(iter(more))}; omit the latter"):
        layer(normal(3, 12), layer.project_source(normal(5, 12)), **more)


# Training


@looped("kind", ["plain", "two key heads", "not linear_bias", "general", "additive", "sink"])
def test_gradients_equal_finite_differences(kind: str) -> None:
    layer, x, source = LAYERS[kind](), normal(2, 12), normal(3, 12)
    names, values = zip(*((n, p.detach().clone()) for n, p in layer.named_parameters()), strict=True)

    def call(x: Tensor, source: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        state = dict(zip(names, values, strict=True))
        return (
            torch.func.functional_call(layer, state, (x, source)),
            torch.func.functional_call(layer, state, (x,), {"mask": regard.Causal()}),
        )

    inputs = [tensor.requires_grad_() for tensor in (x, source, *values)]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@looped("kind", [kind for kind in LAYERS if kind != "hard"])
def test_gradients_reach_every_parameter(kind: str) -> None:
    layer = LAYERS[kind]()
    layer(normal(2, 3, 12), mask=regard.Causal()).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


def test_dropout_only_in_training() -> None:
    layer, x = layer_of(dropout=0.5), normal(2, 5, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    close(layer(x), by_hand(layer, x, x, x))


@looped("kind", LAYERS)
def test_state_dict_is_complete(kind: str) -> None:
    layer, x = LAYERS[kind](), normal(2, 3, 12)
    other = LAYERS[kind]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


# Invalid arguments


@looped(
    ("make", "error", "message"),
    [
        (
            lambda: MultiHeadAttention(10, 4),
            regard.ArgumentError,
            "width=10 and heads=4; width must be a multiple of heads",
        ),
        (lambda: MultiHeadAttention(12, 4, key_heads=3), regard.ArgumentError, "heads=4 and key_heads=3"),
        (lambda: MultiHeadAttention(12, 4, key_heads=8), regard.ArgumentError, "heads=4 and key_heads=8"),
        (lambda: MultiHeadAttention(12, 0), regard.ArgumentError, "heads=0"),
        (lambda: MultiHeadAttention(0, 1), regard.ArgumentError, "width=0"),
        (lambda: MultiHeadAttention(12, 2.0), regard.DTypeError, "heads=2.0"),
        (lambda: MultiHeadAttention(12, 4, key_heads=0), regard.ArgumentError, "key_heads=0"),
        (lambda: MultiHeadAttention(12, 4, dropout=1.0), regard.ArgumentError, "dropout=1.0"),
        (lambda: MultiHeadAttention(12, 4, head_width=0), regard.ArgumentError, "head_width=0"),
        (lambda: MultiHeadAttention(12, 4, source_width=(7, 0)), regard.ArgumentError, "source_width=0"),
    ],
)
def test_invalid_layers(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@looped(
    ("call", "error", "message"),
    [
        (lambda layer: layer(normal(3, 11)), regard.ShapeError, r"query has shape \(3, 11\)"),
        (lambda layer: layer(normal(12)), regard.ShapeError, r"query has shape \(12,\)"),
        (lambda layer: layer([1.0]), regard.DTypeError, "query of type list"),
        (lambda layer: layer(normal(3, 12), normal(5, 7)), regard.ShapeError, r"key has shape \(5, 7\)"),
        (
            lambda layer: layer(normal(3, 12), normal(5, 12), normal(5, 7)),
            regard.ShapeError,
            r"value has shape \(5, 7\)",
        ),
        (
            lambda layer: layer(normal(3, 12), normal(5, 12), normal(4, 12)),
            regard.ShapeError,
            "key has 5 tokens and value has 4",
        ),
        (
            lambda layer: layer(normal(3, 12), value=normal(5, 12)),
            regard.ArgumentError,
            r"value of shape \(5, 12\) and no key",
        ),
        (
            lambda layer: layer(normal(3, 12), rotation=RotaryPositions(4)(torch.arange(3))),
            regard.ShapeError,
            r"this rotation needs \(…, 3, 4\)",
        ),
        (
            lambda layer: layer(normal(3, 12), rotation=RotaryPositions(2)(torch.arange(5))),
            regard.ShapeError,
            r"this rotation needs \(…, 5,",
        ),
    ],
)
def test_invalid_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(layer_of())


# Attention without parameters


def test_self_attention_equals_the_lecture() -> None:
    layer, x = SelfAttention(), normal(2, 5, 7)
    assert not list(layer.parameters())
    for one, output in zip(x, layer(x), strict=True):
        close(output, torch.softmax(one @ one.T / 7**0.5, -1) @ one)
        close(layer(one), output)
    below = torch.ones(5, 5).tril().bool()
    scores = (x @ x.mT).masked_fill(~below, -torch.inf)
    close(
        layer(x, mask=regard.Causal(), score=regard.Dot()),
        torch.softmax(scores, -1) @ x,
    )
    close(layer(x, mask=regard.Padding([5, 3]))[1], layer(x[1], mask=regard.Padding(3)))


def test_self_attention_can_be_watched() -> None:
    layer, x = SelfAttention(), normal(2, 5, 7)
    with regard.watch(layer) as seen:
        layer(x)
    close(seen[0].dense().squeeze(1), torch.softmax(x @ x.mT / 7**0.5, -1))


def test_custom_attention_layer() -> None:
    class Own(Attends):
        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, mask=regard.Causal())

    x = normal(2, 3, 5)
    close(Own()(x), regard.attention(x, x, x, mask=regard.Causal()))


def test_key_values_default_row_map() -> None:
    key, value, row_map = KeyValues(normal(2, 3), normal(2, 5))
    assert (key.shape, value.shape, row_map) == ((2, 3), (2, 5), None)


def test_failed_call_leaves_the_cache_unchanged() -> None:
    layer, cache, x = MultiHeadAttention(8, 2), KVCache(), torch.randn(1, 4, 8)
    with torch.no_grad():
        layer(x[:, :3], mask=regard.Causal(), cache=cache)
        with pytest.raises(regard.RegardError):
            layer(x[:, 3:], mask=torch.ones(7, 7, dtype=torch.bool), cache=cache)
        assert cache.length == 3
        output = layer(x[:, 3:], mask=regard.Causal(), cache=cache)
        torch.testing.assert_close(output, layer(x, mask=regard.Causal())[:, 3:])
