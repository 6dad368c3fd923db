"""Blocks compared with their formulas and with torch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.models import DecoderBlock, EncoderBlock, FeedForward, KVCache, Residual, Stack, TransformerConfig
from tests.models.exact import close, filled, normal

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = TransformerConfig(width=12, heads=3, layers=2, ffn_dim=7, dropout=0.0, positions="none")
KINDS = [(norm, before) for norm in ("layer", "rms", "none") for before in (True, False)]


# Formulas


def normed(x: Tensor, norm: nn.Module, kind: str) -> Tensor:
    """Compute Ba et al. 2016 or Zhang and Sennrich 2019 by hand."""
    state = norm.state_dict()
    if kind == "none":
        return x
    if kind == "rms":
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state["weight"]
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state["weight"] + state["bias"]


def fed(x: Tensor, feed: FeedForward) -> Tensor:
    state = feed.state_dict()
    zero = torch.zeros((), dtype=x.dtype)
    hidden = x @ state["in_proj.weight"].T + state.get("in_proj.bias", zero)
    if feed.activation == "relu":
        hidden = hidden.clamp(min=0)
    elif feed.activation == "gelu":
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    else:
        half = hidden.shape[-1] // 2
        gate = hidden[..., :half]
        hidden = gate / (1 + torch.exp(-gate)) * hidden[..., half:]
    return hidden @ state["out_proj.weight"].T + state.get("out_proj.bias", zero)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("linear_bias", [True, False])
def test_feed_forward_by_hand(activation: Any, linear_bias: bool) -> None:
    feed, x = filled(FeedForward(12, 7, activation, linear_bias=linear_bias)), normal(2, 5, 12)
    close(feed(x), fed(x, feed))
    assert any("bias" in name for name in feed.state_dict()) == linear_bias
    assert repr(feed).startswith(f"FeedForward(\n  {activation}")


@pytest.mark.parametrize(("norm", "norm_first"), KINDS)
def test_residual_by_hand(norm: Any, norm_first: bool) -> None:
    residual, x = filled(Residual(replace(CONFIG, norm=norm, norm_first=norm_first))), normal(5, 12)
    outcomes = {
        True: x + normed(x, residual.norm, norm).sin(),
        False: normed(x + x.sin(), residual.norm, norm),
    }
    close(residual(x, torch.sin), outcomes[norm_first])


@pytest.mark.parametrize(("norm", "norm_first"), KINDS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_blocks_by_hand(norm: Any, norm_first: bool, activation: Any) -> None:
    config = replace(CONFIG, norm=norm, norm_first=norm_first, activation=activation, key_heads=1)
    encoder, decoder = filled(EncoderBlock(config)), filled(DecoderBlock(config))
    x, source = normal(2, 5, 12), normal(2, 7, 12)
    mask, source_mask = regard.Causal(), regard.Padding([7, 3])

    def around(x: Tensor, residual: Residual, part: Any) -> Tensor:
        if norm_first:
            return x + part(normed(x, residual.norm, norm))
        return normed(x + part(x), residual.norm, norm)

    y = around(x, encoder.attention_residual, lambda x: encoder.attention(x, mask=mask))
    y = around(y, encoder.feed_forward_residual, lambda x: fed(x, encoder.feed_forward))
    close(encoder(x, mask=mask), y)

    y = around(x, decoder.attention_residual, lambda x: decoder.attention(x, mask=mask))
    y = around(y, decoder.cross_residual, lambda x: decoder.cross(x, source, mask=source_mask))
    y = around(y, decoder.feed_forward_residual, lambda x: fed(x, decoder.feed_forward))
    close(decoder(x, source, mask=mask, source_mask=source_mask), y)
    memory = decoder.cross.project_source(source)
    close(decoder(x, memory, mask=mask, source_mask=source_mask), y)


@pytest.mark.parametrize("norm_first", [True, False])
def test_stack_is_its_blocks_and_a_final_norm(norm_first: bool) -> None:
    stack, x = filled(Stack(replace(CONFIG, norm_first=norm_first))), normal(2, 5, 12)
    layers = stack.states(x)
    assert len(layers) == 3
    y = stack.blocks[1](stack.blocks[0](x))
    close(stack(x), normed(y, stack.norm, "layer") if norm_first else y)
    assert torch.equal(layers[0], x)
    close(layers[1], stack.blocks[0](x))
    assert torch.equal(layers[-1], stack(x))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_blocks_equal_those_of_torch(norm_first: bool, activation: Any) -> None:
    """Compare with nn.TransformerEncoderLayer and nn.TransformerDecoderLayer with the same parameters."""
    config = replace(CONFIG, norm_first=norm_first, activation=activation)
    options = {"dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm_first}
    block, x, source = filled(DecoderBlock(config)), normal(2, 5, 12), normal(2, 7, 12)
    theirs = nn.TransformerDecoderLayer(12, 3, 7, **options).double()
    theirs.self_attn, theirs.multihead_attn = block.attention.to_torch(), block.cross.to_torch()
    theirs.linear1, theirs.linear2 = block.feed_forward.in_proj, block.feed_forward.out_proj
    theirs.norm1, theirs.norm2 = block.attention_residual.norm, block.cross_residual.norm
    theirs.norm3 = block.feed_forward_residual.norm
    ahead = torch.ones(5, 5).triu(1).bool()
    close(block(x, source, mask=regard.Causal()), theirs(x, source, tgt_mask=ahead))

    own = filled(EncoderBlock(config))
    their_own = nn.TransformerEncoderLayer(12, 3, 7, **options).double()
    their_own.self_attn = own.attention.to_torch()
    their_own.linear1, their_own.linear2 = own.feed_forward.in_proj, own.feed_forward.out_proj
    their_own.norm1, their_own.norm2 = own.attention_residual.norm, own.feed_forward_residual.norm
    close(own(x), their_own(x))


# Visibility


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary", "alibi", "t5", "none"])
@pytest.mark.parametrize("cross", [False, True])
def test_causal_stack_cannot_see_the_future(kind: Any, cross: bool) -> None:
    stack = filled(Stack(replace(CONFIG, positions=kind), causal=True, cross=cross))
    x, source = normal(2, 7, 12), (normal(2, 5, 12) if cross else None)
    before = stack(x, source, mask=regard.Causal())
    for t in range(7):
        changed = x.clone()
        changed[:, t] += normal(12)  # not a constant, which a norm would remove
        after = stack(changed, source, mask=regard.Causal())
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(-1).all()  # every later position changes


def test_masked_source_is_irrelevant() -> None:
    block, x, source = filled(DecoderBlock(CONFIG)), normal(2, 5, 12), normal(2, 7, 12)
    mask = regard.Padding([7, 3])
    before = block(x, source, source_mask=mask)
    changed = source.clone()
    changed[1, 3:] = 100.0
    assert torch.equal(block(x, changed, source_mask=mask), before)
    changed[1, 2] += 1.0
    assert not torch.equal(block(x, changed, source_mask=mask)[1], before[1])
    close(block(x[1:], source[1:, :3])[0], before[1])


def test_only_the_target_is_cached() -> None:
    block, x, source, cache = filled(DecoderBlock(CONFIG)), normal(2, 5, 12), normal(2, 7, 12), KVCache()
    steps = [block(x[:, i : i + 1], source, mask=regard.Causal(), cache=cache) for i in range(5)]
    assert cache.length == 5
    close(torch.cat(steps, 1), block(x, source, mask=regard.Causal()))


def test_bias_and_mask_apply_to_self_attention_only() -> None:
    block, x, source = filled(DecoderBlock(CONFIG)), normal(2, 5, 12), normal(2, 7, 12)
    with regard.watch(block) as plain:
        block(x, source)
    with regard.watch(block) as biased:
        block(x, source, bias=regard.ALiBi(3), mask=regard.Causal())
    assert (plain["attention"].dense() - biased["attention"].dense()).abs().max() > 1e-3
    assert not biased["attention"].dense().triu(1).any()
    assert biased["cross"].dense().all()


# Configs


def test_configs_are_values() -> None:
    assert TransformerConfig() == TransformerConfig()
    assert hash(TransformerConfig()) == hash(TransformerConfig())
    assert TransformerConfig(width=24, heads=3).resolved_ffn_dim == 96
    assert TransformerConfig(width=24, heads=3, ffn_dim=5).resolved_ffn_dim == 5


def test_every_layer_has_its_own_sink() -> None:
    stack = Stack(replace(CONFIG, normalize=regard.Sink(3)))
    sinks = [block.attention.normalize for block in stack.blocks]
    assert len({id(sink) for sink in sinks}) == 2
    assert sum("normalize.score" in name for name, _ in stack.named_parameters()) == 2


@pytest.mark.parametrize("linear_bias", [True, False])
def test_linear_bias_applies_to_projections(linear_bias: bool) -> None:
    names = [
        name for name, _ in Stack(replace(CONFIG, linear_bias=linear_bias, norm="rms")).named_parameters()
    ]
    assert any(name.endswith("bias") for name in names) == linear_bias


def test_dropout_only_in_training() -> None:
    stack, x = Stack(replace(CONFIG, dropout=0.5)).double(), normal(2, 5, 12)
    assert not torch.equal(stack(x), stack(x))
    stack.eval()
    assert torch.equal(stack(x), stack(x))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 10, "heads": 3}, regard.ArgumentError, "width=10 and heads=3"),
        ({"width": 0}, regard.ArgumentError, "width=0"),
        ({"layers": 0}, regard.ArgumentError, "layers=0"),
        ({"heads": 0}, regard.ArgumentError, "heads=0"),
        ({"max_positions": 0}, regard.ArgumentError, "max_positions=0"),
        ({"ffn_dim": 0}, regard.ArgumentError, "ffn_dim=0"),
        ({"layers": 2.0}, regard.DTypeError, "layers=2.0"),
        ({"dropout": 1.0}, regard.ArgumentError, "dropout=1.0"),
        ({"norm_first": 1}, regard.DTypeError, "norm_first=1; it must be True or False"),
        ({"linear_bias": "yes"}, regard.DTypeError, "linear_bias='yes'; it must be True or False"),
        ({"eps": 0.0}, regard.ArgumentError, "eps=0.0"),
        ({"activation": "tanh"}, regard.ArgumentError, "'tanh'; choose one of relu, gelu, gelu_tanh"),
        ({"heads": 8, "key_heads": 3}, regard.ArgumentError, "heads=8 and key_heads=3"),
        ({"key_heads": "two"}, regard.DTypeError, "key_heads='two'"),
        ({"normalize": "softmax"}, regard.DTypeError, "normalize='softmax'"),
        ({"normalize": regard.Softmax}, regard.DTypeError, "not a normalizer"),
        ({"norm": "batch"}, regard.ArgumentError, "'batch'; choose one of layer, rms"),
        ({"positions": "absolute"}, regard.ArgumentError, "'absolute'; choose one of alibi, learned"),
    ],
)
def test_invalid_configs(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TransformerConfig(**options)


def test_invalid_feed_forwards() -> None:
    with pytest.raises(regard.ArgumentError, match="ffn_dim=-5"):
        FeedForward(12, -5)
    with pytest.raises(regard.DTypeError, match="width='x'"):
        FeedForward("x", 5)  # type: ignore[arg-type]
    with pytest.raises(regard.ArgumentError, match="'tanh'; choose one of relu, gelu, gelu_tanh"):
        FeedForward(12, 7, "tanh")  # type: ignore[arg-type]


@pytest.mark.parametrize("cross", [True, False])
def test_source_is_required_if_and_only_if_cross(cross: bool) -> None:
    x = normal(2, 5, 12).float()
    with pytest.raises(regard.ArgumentError, match=rf"Stack\(cross={cross}\) got"):
        Stack(CONFIG, cross=cross)(x, None if cross else x)


def test_rotary_needs_even_head_width() -> None:
    with pytest.raises(regard.ArgumentError, match="width=3; it rotates pairs"):
        Stack(TransformerConfig(width=9, heads=3, positions="rotary"))
