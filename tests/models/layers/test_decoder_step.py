"""Fast decoding steps equal teacher forcing; watched and unusual models take the general path."""

from dataclasses import replace

import pytest
import torch

import regard
from regard.mechanism import fused
from regard.models import Packed, Transformer, TransformerConfig
from regard.models.inference.quantization import quantize
from regard.models.layers import decoder_step
from regard.models.layers.attention import watch_layers

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not fused.available(), reason="fast steps need the kernels"),
]

CONFIG = TransformerConfig(width=24, heads=3, layers=2, ffn_dim=20)
CONFIGS = {
    "default": CONFIG,
    "post-norm, one key head": replace(CONFIG, norm_first=False, key_heads=1),
    "learned, no bias": replace(CONFIG, positions="learned", linear_bias=False),
    "gelu, rms": replace(CONFIG, activation="gelu", norm="rms"),
    "swiglu, no positions": replace(CONFIG, activation="swiglu", positions="none"),
}
GENERAL = {
    "rotary": replace(CONFIG, positions="rotary"),
    "alibi": replace(CONFIG, positions="alibi"),
    "entmax15": replace(CONFIG, normalize=regard.Entmax15()),
}


def make(config):
    torch.manual_seed(0)
    model = Transformer(30, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def compare(model, copies, selections):
    """Decode with `copies` rows per source, selecting rows between steps; compare with teacher forcing."""
    sources = [[5, 6, 7, 2], [8, 2], [9, 9, 4, 6, 11, 2]]
    rows = [[i] for i in range(3) for _ in range(copies)]  # source index, then tokens
    with torch.no_grad():
        state = model.start(Packed.of(sources))
        state.select(torch.tensor([row[0] for row in rows]))
        for number, keep in enumerate([None, *selections]):
            if keep is not None:
                state.select(torch.tensor([i % len(rows) for i in keep]))
                rows = [rows[i % len(rows)] for i in keep]
            rows = [[*row, 1 if number == 0 else 3 + (7 * i + number) % 20] for i, row in enumerate(rows)]
            logits = model.step(torch.tensor([row[-1] for row in rows]), state)
            batch = [Packed.of([sources[row[0]] for row in rows]), Packed.of([row[1:] for row in rows])]
            expected = model(*batch)[batch[1].ends()]
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    return state


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("copies", [1, 4])  # few rows; more rows than a compiled step accepts
def test_steps_equal_teacher_forcing(name, copies):
    model = make(CONFIGS[name])
    unequal = [0, 0, 1, 2, 2, 2, 5] * copies
    state = compare(model, copies, [range(3 * copies), unequal, [1, 0, 4, 4], *[[0, 2, 1]] * 15, [2], [0, 0]])
    assert state.fast is not None


@pytest.mark.parametrize("name", GENERAL)
def test_other_models_take_the_general_path(name):
    assert compare(make(GENERAL[name]), 1, [[0, 0, 2]]).fast is None


def test_watched_hooked_and_training_models_take_the_general_path():
    model = make(CONFIG)
    with torch.no_grad():
        assert decoder_step.supports(model.decoder)
        with regard.watch(model) as seen:
            assert not decoder_step.supports(model.decoder)
            model.step(torch.tensor([1]), model.start(Packed.of([[5, 2]])))
        assert len(seen) == 6
        hook = model.decoder.blocks[0].cross.register_forward_hook(lambda *_: None)
        assert not decoder_step.supports(model.decoder)
        hook.remove()
        assert not decoder_step.supports(model.train().decoder)
    assert not decoder_step.supports(model.eval().decoder)  # gradients are enabled


def test_results_that_are_not_finite_equal_those_of_the_general_path():
    model = make(CONFIG)
    with torch.no_grad():
        model.decoder.blocks[1].cross.in_proj.weight.fill_(1e30)
        state = model.start(Packed.of([[5, 6, 2]]))
        assert state.fast is not None
        for _ in range(2):
            logits = model.step(torch.tensor([4]), state)
        expected = model(Packed.of([[5, 6, 2]]), Packed.of([[4, 4]]))[-1:]
    assert torch.equal(logits.isfinite(), expected.isfinite())
    assert [cache.length for cache in state.caches] == [2, 2]


def steps(model, state, rows, count=2):
    tokens = torch.arange(4, 4 + rows)
    return torch.stack([model.step(tokens, state) for _ in range(count)])


def started(model, rows, fast=True):
    state = model.start(Packed.of([[5, 6, 7, 2], [8, 2], [9, 9, 4, 2]]))
    state.select(torch.arange(rows) % 3)
    if not fast:
        state.fast = None
    return state


def test_int8_steps_without_the_compiled_step_equal_the_general_path():
    # 3 heads of 10 are not a multiple of the 16 columns in a block of int8 weights
    model = make(replace(CONFIG, norm="rms", head_width=10))
    with torch.no_grad():
        model = quantize(model, "int8")
        for rows in (2, 3, 12):
            general = steps(model, started(model, rows, fast=False), rows)
            torch.testing.assert_close(steps(model, started(model, rows), rows), general, atol=0.02, rtol=0)


def test_output_weights_that_are_not_contiguous():
    model = make(CONFIG)
    with torch.no_grad():
        expected = steps(model, started(model, 3), 3)
        model.matrix = torch.nn.Parameter(model.matrix.t().contiguous().t())
        torch.testing.assert_close(steps(model, started(model, 3), 3), expected)


def test_a_model_observed_after_the_start_takes_the_general_path():
    model, calls = make(CONFIG), []
    with torch.no_grad():
        expected = steps(model, started(model, 3), 3)
        state = started(model, 3)
        with regard.watch(model) as seen:
            watched = steps(model, state, 3)
        assert len(seen) == 8
        torch.testing.assert_close(watched, expected)
        state = started(model, 3)
        with watch_layers(model, lambda name, weights: calls.append(name)):
            steps(model, state, 3)
        assert len(calls) == 8
        state = started(model, 3)
        hook = model.decoder.blocks[0].register_forward_hook(lambda *_: calls.append("hook"))
        steps(model, state, 3)
        hook.remove()
        assert calls[8:] == ["hook"] * 2
        with torch.autocast("cpu", torch.bfloat16):
            assert steps(model, started(model, 3), 3).dtype is torch.bfloat16
        state = started(model, 3)
        with torch.autocast("cpu", torch.bfloat16):
            assert steps(model, state, 3).dtype is torch.bfloat16


def test_a_model_that_changes_after_the_start_keeps_its_memory():
    model = make(CONFIG)
    with torch.no_grad():
        state = started(model, 3)
        assert state.fast.addresses
        pointers = {tensor.data_ptr() for tensor in state.fast.kept}
        model.double()
        assert {address for block in state.fast.addresses for address in block} <= pointers | {0}


def test_recorded_queries_have_one_entry_per_step():
    model = make(CONFIG)
    with torch.no_grad():
        state = started(model, 3)
        steps(model, state, 3, 1)
        assert not state.record_queries(0)  # the first step is missing
        state = started(model, 3)
        assert state.record_queries(1)
        steps(model, state, 3, 20)
        bias = model.decoder.blocks[1].attention.in_proj.bias
        old = bias.clone()
        bias.fill_(torch.nan)
        steps(model, state, 3, 1)
        bias.copy_(old)
        queries = state.queries(torch.arange(3))
    assert queries.shape[1] == state.caches[0].length == 21
    assert queries[:, :20].isfinite().all()
    assert queries[:, 20].isnan().all()


def test_recorded_queries_after_steps_with_gradients():
    model = make(CONFIG)
    state = started(model, 3)
    with torch.no_grad():
        expected = started(model, 3)
        expected.record_queries(0)
        state = started(model, 3)
        state.record_queries(0)
        steps(model, expected, 3, 30)
    steps(model, state, 3, 10)
    with torch.no_grad():
        steps(model, state, 3, 20)  # the caches have grown differently from the recorder
    queries = [s.queries(torch.arange(3))[:, 10:] for s in (state, expected)]
    torch.testing.assert_close(*queries)
