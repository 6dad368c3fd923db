"""Fast decoding steps equal teacher forcing; watched and unusual models take the general path."""

from dataclasses import replace

import pytest
import torch

import regard
from regard.mechanism import fused
from regard.models import Packed, Transformer, TransformerConfig
from regard.models.layers import decoder_step

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
    """Decode with `copies` rows per source, select rows between steps; compare with teacher forcing."""
    sources = [[5, 6, 7, 2], [8, 2], [9, 9, 4, 6, 11, 2]]
    rows = [[i] for i in range(3) for _ in range(copies)]  # source, then tokens
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
@pytest.mark.parametrize("copies", [1, 4])  # few rows; more than a compiled step takes
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
