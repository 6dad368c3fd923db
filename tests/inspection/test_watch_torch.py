"""Watched torch models: outputs do not change, and the weights equal those returned by torch."""

import gc
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from tests.cases import looped

pytestmark = pytest.mark.usefixtures("one_thread")
SDPA, MULTIHEAD, LAYER = (
    F.scaled_dot_product_attention,
    nn.MultiheadAttention.forward,
    nn.TransformerEncoderLayer.forward,
)


@pytest.fixture(autouse=True)
def everything_is_restored() -> Any:
    yield
    assert F.scaled_dot_product_attention is SDPA
    assert nn.MultiheadAttention.forward is MULTIHEAD
    assert nn.TransformerEncoderLayer.forward is LAYER


def causal_mask(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)  # True hides a key in torch


# nn.MultiheadAttention


@looped("batch_first", [True, False])
@looped(
    "options", [{}, {"kdim": 6, "vdim": 10}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}]
)
@looped("masks", ["none", "padding", "causal", "both", "heads", "added"])
def test_multihead_attention_returns_the_same_weights(
    batch_first: bool, options: dict[str, Any], masks: str
) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=batch_first, **options).eval()
    query, key, value = torch.randn(2, 5, 12), torch.randn(2, 5, layer.kdim), torch.randn(2, 5, layer.vdim)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    inputs = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "causal": {"attn_mask": causal_mask(5)},
        "both": {"key_padding_mask": padding, "attn_mask": causal_mask(5)},
        "heads": {"attn_mask": (torch.rand(6, 5, 5) < 0.3) & ~torch.eye(5, dtype=torch.bool)},
        "added": {"attn_mask": torch.randn(5, 5)},
    }[masks]
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    output, expected = layer(query, key, value, average_attn_weights=False, **inputs)
    with regard.watch(layer) as seen:
        without_weights = layer(query, key, value, need_weights=False, **inputs)[0]
    assert list(seen) == [""]
    torch.testing.assert_close(without_weights, output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[0].dense(), expected, rtol=1e-4, atol=1e-6)


def test_unbatched_multihead_attention() -> None:
    layer, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(5, 8)
    with regard.watch(layer) as seen:
        _, expected = layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(seen[0].dense(), expected)
    assert seen.kind(0) == "self"


# Encoder layers, whose fast path calls no Python function


def expected_of(model: nn.TransformerEncoder, x: Tensor, **masks: Any) -> list[Tensor]:
    """Return the weights of each layer on the slow path, from nn.MultiheadAttention."""
    result: list[Any] = []

    def on_forward(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        inputs = {**kwargs, "need_weights": True, "average_attn_weights": False}
        with torch.no_grad():
            result.append(MULTIHEAD(layer, *args, **inputs)[1])

    hooks = [layer.self_attn.register_forward_hook(on_forward, with_kwargs=True) for layer in model.layers]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model(x, **masks)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        for hook in hooks:
            hook.remove()
    return result


def encoder(norm_first: bool = False, nested: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()


@looped("norm_first", [True, False])
@looped("masks", ["none", "causal", "padding"])
def test_the_fast_path_is_recorded(norm_first: bool, masks: str) -> None:
    model, x = encoder(norm_first), torch.randn(2, 5, 16)
    inputs: dict[str, Any] = {
        "causal": {"mask": causal_mask(5)},
        "padding": {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    }.get(masks, {})
    with torch.no_grad():
        before = model(x, **inputs)
        with regard.watch(model) as seen:
            during = model(x, **inputs)
        expected = expected_of(model, x, **inputs)
    assert torch.equal(before, during)
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    for weights, right in zip(seen.values(), expected, strict=True):
        torch.testing.assert_close(weights.dense(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")
def test_nested_tensors_are_recorded_with_padding() -> None:
    model, x = encoder(nested=True), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
        with regard.watch(model) as seen:
            during = model(x, src_key_padding_mask=padding)
        expected = expected_of(model, x, src_key_padding_mask=padding)
    assert torch.equal(before, during)
    for weights, right in zip(seen.values(), expected, strict=True):
        torch.testing.assert_close(weights.dense()[0], right[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(weights.dense()[1, :, :3], right[1, :, :3], rtol=1e-4, atol=1e-6)


def test_a_single_encoder_layer_keeps_its_fast_path() -> None:
    layer, x = encoder().layers[0], torch.randn(2, 5, 16)
    with torch.no_grad():
        before = layer(x)
        with regard.watch(layer) as seen:
            during = layer(x)
    assert torch.equal(before, during)
    assert list(seen) == ["self_attn"]


def test_a_whole_transformer() -> None:
    model = nn.Transformer(16, 4, 1, 2, 32, batch_first=True)
    source, target = torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    torch.manual_seed(1)
    before = model(source, target, tgt_mask=causal_mask(3))
    torch.manual_seed(1)
    with regard.watch(model) as seen:
        during = model(source, target, tgt_mask=causal_mask(3))
    assert torch.equal(before, during)
    assert [(name, seen.kind(name), seen.causal(name)) for name in seen] == [
        ("encoder.layers.0.self_attn", "self", False),
        ("decoder.layers.0.self_attn", "self", True),
        ("decoder.layers.0.multihead_attn", "cross", False),
        ("decoder.layers.1.self_attn", "self", True),
        ("decoder.layers.1.multihead_attn", "cross", False),
    ]
    assert seen["decoder.layers.0.multihead_attn"].shape == (2, 4, 3, 5)


# SDPA


class Direct(nn.Module):
    """A custom attention layer that calls SDPA."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(query, key, value, **self.options).transpose(-3, -2).flatten(-2)


def expected_sdpa(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    """Compute the weights by attending to unit vectors."""
    return SDPA(query, key, torch.eye(key.shape[-2]).expand(*key.shape[:-1], key.shape[-2]), **options)


@looped(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
        {"attn_mask": torch.tensor([[[[True, False, True, True, False]]]])},
        {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5)},
        {"attn_mask": torch.zeros(5, 5).masked_fill(causal_mask(5), -torch.inf)},
    ],
)
def test_calls_of_sdpa(options: dict[str, Any]) -> None:
    first, second, x = nn.Linear(8, 8), Direct(**options), torch.randn(2, 5, 8)
    model = nn.Sequential(first, second)
    before = model(x)
    with regard.watch(model) as seen:
        during = model(x)
    assert torch.equal(before, during)
    assert list(seen) == ["1"]
    query, key, _ = second.project(first(x)).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-3, -2)
    torch.testing.assert_close(seen[0].dense(), expected_sdpa(query, key, **options), rtol=1e-4, atol=1e-6)


def test_grouped_heads_and_more_keys_than_queries() -> None:
    class Grouped(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    query, key = torch.randn(2, 6, 3, 4), torch.randn(2, 2, 7, 4)
    with regard.watch(Grouped()) as seen:
        seen_module = Grouped()
        seen_module(query, key)
    assert not seen  # another instance is not watched
    model = Grouped()
    with regard.watch(model) as seen:
        model(query, key)
    expected = expected_sdpa(query, key.repeat_interleave(3, 1), is_causal=True)
    torch.testing.assert_close(seen[0].dense(), expected, rtol=1e-4, atol=1e-6)


def test_patched_sdpa_is_recorded_once() -> None:
    model, x = Direct(), torch.randn(2, 5, 8)
    theirs = F.scaled_dot_product_attention
    setattr(F, "scaled_dot_product_attention", regard.scaled_dot_product_attention)  # noqa: B010
    try:
        with regard.watch(model) as seen:
            model(x)
        assert F.scaled_dot_product_attention is regard.scaled_dot_product_attention
    finally:
        F.scaled_dot_product_attention = theirs
    assert list(seen) == [""]


def test_inputs_modified_later_raise() -> None:
    class Buffered(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, key)

    model, query, fresh = Buffered(), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    cache = torch.zeros(1, 2, 5, 4).copy_(fresh)  # a static cache
    with regard.watch(model) as seen:
        model(query, fresh)
        model(query, cache)
    expected = seen["@2"].dense()
    cache += 1
    torch.testing.assert_close(seen["@2"].dense(), expected)  # copied
    fresh += 1
    with pytest.raises(regard.StaleError):
        seen[0].dense()


# Selection


def test_select_layers() -> None:
    model = nn.Transformer(16, 4, 2, 2, 32, batch_first=True).eval()
    source, target = torch.randn(1, 5, 16), torch.randn(1, 3, 16)
    cases: list[tuple[Any, list[str]]] = [
        ([0, -1], ["encoder.layers.0.self_attn", "decoder.layers.1.multihead_attn"]),
        ("encoder.*", ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]),
        ("decoder.layers.1", ["decoder.layers.1.self_attn", "decoder.layers.1.multihead_attn"]),
        (["*.0.self_attn"], ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"]),
    ]
    for layers, expected in cases:
        with regard.watch(model, layers=layers) as seen:
            model(source, target)
        assert list(seen) == expected
    with (
        pytest.raises(
            regard.ArgumentError,
            match=r"'encoder.layers.7'.*no layer matches. The layers are encoder.layers.0",
        ),
        regard.watch(model, layers="encoder.layers.7"),
    ):
        pass
    with (
        pytest.raises(regard.ArgumentError, match=r"watch\(layers=6\): out of range for 6 layers"),
        regard.watch(model, layers=6),
    ):
        pass


def test_select_heads() -> None:
    model, x = encoder(), torch.randn(2, 5, 16)
    mask = (torch.rand(8, 5, 5) < 0.4) & ~torch.eye(5, dtype=torch.bool)
    with torch.no_grad(), regard.watch(model) as full, regard.watch(model, heads=[3, 1]) as selected:
        model(x, mask=mask)
    for name in full:
        torch.testing.assert_close(selected[name].dense(), full[name].dense()[:, [3, 1]])


# Concurrency


def test_nested_watches_and_threads() -> None:
    model = Direct()
    result: dict[int, set[tuple[int, ...]]] = {}

    def record(size: int) -> None:
        shapes = result.setdefault(size, set())
        for _ in range(20):
            with regard.watch(model) as seen, regard.watch(model) as inner:
                model(torch.randn(1, size, 8))
            shapes.update(tuple(w.shape) for w in (*seen.values(), *inner.values()))
            shapes.add((len(seen), len(inner)))

    with ThreadPoolExecutor() as pool:
        list(pool.map(record, (3, 5)))
    assert result == {size: {(1, 2, size, size), (1, 1)} for size in (3, 5)}


def test_an_exception_restores_everything() -> None:
    model = Direct()
    with pytest.raises(RuntimeError), regard.watch(model):
        model(torch.randn(1, 5, 7))
    assert not model._forward_pre_hooks


# Missed attention


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() @ (x.relu().mT @ x)


def test_a_warning_names_unseen_attention() -> None:
    model = nn.Sequential(LinearAttention())
    with (
        pytest.warns(
            UserWarning,
            match="watch recorded nothing, although the model ran: LinearAttention: it does not call softmax",
        ),
        regard.watch(model) as seen,
    ):
        model(torch.randn(1, 3, 4))
    with pytest.raises(IndexError, match="LinearAttention: it does not call softmax"):
        seen[0]


def test_a_model_that_did_not_run() -> None:
    with regard.watch(Direct()) as seen:
        pass
    with pytest.raises(IndexError, match=r"nothing yet\. Call the model inside the with block"):
        seen[0]


def test_checkpointed_attention_is_recorded_once():
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model, x = Model(), torch.randn(1, 2, 3, 4, requires_grad=True)
    with regard.watch(model) as seen:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert len(seen) == 1


# Other threads


class Own(nn.Module):
    """Calls SDPA directly."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_proj(x)
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:.*called in another thread")
def test_a_half_registered_hook_does_nothing() -> None:
    """torch registers a hook before its with_kwargs flag; another thread may run in between."""
    model, x = Own(), torch.randn(1, 2, 5, 8)
    expected = model(x)
    with regard.watch(model) as seen, ThreadPoolExecutor() as pool:
        model._forward_pre_hooks_with_kwargs.clear()
        assert torch.equal(pool.submit(model, x).result(), expected)
    assert not seen


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*called in another thread")
@pytest.mark.parametrize("rounds", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_calls_in_one_thread_while_another_watches_and_edits(rounds: int) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    models = [
        nn.MultiheadAttention(16, 2, batch_first=True).eval(),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(),
        Own(),
    ]
    x, y = torch.randn(2, 5, 16), torch.randn(1, 2, 5, 8)
    runs = [lambda: models[0](x, x, x)[0], lambda: models[1](x), lambda: models[2](y)]
    expected = [run() for run in runs]
    wrong: list[Any] = []
    done = Event()
    threads_of_torch = torch.get_num_threads()

    def plain(number: int) -> None:
        torch.set_num_threads(threads_of_torch)  # a per-thread setting that affects rounding
        with torch.no_grad():
            while not done.is_set() and not wrong:
                try:
                    if not torch.equal(runs[number](), expected[number]):
                        wrong.append(f"{number}: another output")
                except Exception as error:
                    wrong.append(error)

    threads = [Thread(target=plain, args=(number,)) for number in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # frequent thread switches
    try:
        for thread in threads:
            thread.start()
        for _ in range(rounds):
            for model, run in zip(models, runs, strict=True):
                with regard.watch(model) as nothing:
                    pass
                with regard.watch(model) as seen:
                    run()
                assert (len(nothing), len(seen)) == (0, 2 if model is models[1] else 1)
            with regard.edit(models[1], 0, [0], regard.ZeroAblation()):
                assert not torch.equal(runs[1](), expected[1])
    finally:
        done.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("form", ["intervals", "holes", "numbers"])
def test_the_cache_entry_of_a_mask_is_freed_with_it(form: str) -> None:
    from regard.inspection.calls import mask_reading

    x, before = torch.zeros(6, 1), len(mask_reading._RESULTS)
    masks = {
        "intervals": torch.ones(6, 6, dtype=torch.bool).tril(),
        "holes": torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.5,
        "numbers": torch.randn(6, 6),
    }
    mask = masks.pop(form)
    rows = mask_reading.row_mask(mask, x, x)
    assert rows is not None
    assert mask_reading.row_mask(mask, x, x) is rows  # cached as long as the mask exists
    references = [weakref.ref(part) for part in rows if part is not None]
    del rows, mask
    gc.collect()
    assert [ref() for ref in references] == [None] * len(references)
    assert len(mask_reading._RESULTS) == before


# Warnings


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Own(), Own()).eval()


def test_a_compiled_model_runs_uncompiled_while_it_is_watched() -> None:
    model, x = blocks(), torch.randn(1, 2, 5, 8)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    fast(x)
    with regard.watch(fast) as seen:
        output = fast(x)
        with ThreadPoolExecutor() as pool:  # other threads run compiled code
            assert pool.submit(stance).result() == "default"
        assert stance() == "force_eager"
    assert list(seen) == ["0", "1"]
    assert torch.equal(output, model(x))
    assert stance() == "default"


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_compiled_block_among_others_is_seen(wrapped: bool) -> None:
    model, x = blocks(), torch.randn(1, 2, 5, 8)
    if wrapped:
        model[1] = torch.compile(model[1], backend="eager")
    else:
        model[1].compile(backend="eager")
    with regard.watch(model) as seen:
        model(x)
    assert list(seen) == ["0", "1"]


def test_no_warning_for_compiled_blocks_that_are_not_selected() -> None:
    model = blocks()
    model[1].compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with regard.watch(model, layers=0) as seen:
            model(torch.randn(1, 2, 5, 8))
    assert repr(seen) == "Seen(0: Weights(1 × 2 × 5 × 5))"


def test_a_warning_for_a_call_in_another_thread() -> None:
    model = blocks()
    warning = pytest.warns(UserWarning, match="called in another thread")
    with warning, regard.watch(model) as seen, ThreadPoolExecutor() as pool:
        pool.submit(model, torch.randn(1, 2, 5, 8)).result()
    with pytest.raises(IndexError, match="Open the block in the thread that calls the model"):
        _ = seen[0]
