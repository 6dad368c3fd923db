from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.overrides import _get_current_function_mode_stack

import regard
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.inspection.editing.interventions import attentions
from regard.models import LanguageModel, MultiHeadAttention, Transformer, TransformerConfig
from tests.cases import looped
from tests.inspection import hosts

HOSTS = ("gpt2", "bert", "llama", "t5")


@pytest.fixture(autouse=True)
def quiet(one_thread):
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def host(name, implementation):
    if implementation == "regard":
        regard.huggingface.enable()
    model, inputs = hosts.make(name, implementation), hosts.batch(name, "right")
    return model, lambda: model(**inputs).logits


def own():
    model = LanguageModel(50, TransformerConfig(width=16, heads=4, layers=2)).eval()
    tokens = torch.tensor([[5, 6, 7, 8]])
    return model, lambda: model(tokens)


def translator():
    model = Transformer(50, TransformerConfig(width=16, heads=4, layers=2), share=True).eval()
    source, target = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 9, 10]])
    return model, lambda: model(source, target)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return model, lambda: model(x.to(next(model.parameters()).dtype), src_key_padding_mask=padding)


MODELS = {
    **{f"{n} {i}": (lambda n=n, i=i: host(n, i)) for n in HOSTS for i in ("sdpa", "eager", "regard")},
    "regard's language model": own,
    "regard's transformer": translator,
    "torch's encoder": encoder,
}


@pytest.fixture(params=list(MODELS))
def pair(request):
    return MODELS[request.param]()


# Laws


@pytest.mark.sampled(2)
def test_replacing_weights_by_themselves_changes_nothing(pair):
    """In float64, only rounding differs; in float32, the difference is at most a few times the model's error.

    The edited model sums in a different order than the kernel, and later layers amplify such differences like
    any rounding error. The unedited model's error measures this amplification: both errors have the same
    origin and size.
    """
    model, run = pair
    same = regard.ReplaceWeights(lambda weights: weights)
    before = run()
    with regard.edit(model, None, None, same):
        after = run()
    model.double()
    exact = run()
    with regard.edit(model, None, None, same):
        edited = run()
    scale = max(exact.abs().max(), 1)
    eager = getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager"
    # transformers' eager attention rounds its weights to float32 for any model dtype
    assert (edited - exact).abs().max() <= (4e-7 if eager else 1e-12) * scale
    allowed = 4 * (before - exact).abs().max() + 8 * torch.finfo(before.dtype).eps * scale
    assert (after - exact).abs().max() <= allowed


@pytest.mark.sampled(2)
def test_uniform_attention_equals_equal_weights_on_visible_keys(pair):
    model, run = pair

    def even(weights):
        seen = (weights > 0).to(weights.dtype)
        return seen / seen.sum(-1, keepdim=True).clamp(min=1)

    with regard.edit(model, 0, [1, 3], regard.UniformAttention()):
        first = run()
    with regard.edit(model, 0, [1, 3], regard.ReplaceWeights(even)):
        second = run()
    assert (first - second).abs().max() <= 2e-6 * max(first.abs().max(), 1)
    assert not torch.allclose(first, run(), atol=1e-5)


@pytest.mark.sampled(2)
def test_the_model_is_unchanged_afterwards(pair):
    model, run = pair
    before = run()
    edited = []

    def fail():
        with regard.edit(model, None, None, regard.ZeroAblation()):
            edited.append(run())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not torch.equal(edited[0], before)
    assert torch.equal(run(), before)


@pytest.mark.sampled(2)
def test_edits_nest_and_heads_add_up(pair):
    model, run = pair
    with (
        regard.edit(model, -1, [0], regard.ZeroAblation()),
        regard.edit(model, -1, [1, 2, 3], regard.ZeroAblation()),
    ):
        apart = run()
    with regard.edit(model, -1, None, regard.ZeroAblation()):
        together = run()
    assert torch.equal(apart, together)


def test_the_inner_edit_sees_what_the_outer_one_did():
    model, run = own()
    twice = regard.ReplaceOutput(lambda output: 2 * output)
    with regard.edit(model, 0, [2], twice), regard.edit(model, 0, 2, twice):
        nested = run()
    with regard.edit(model, 0, [2], regard.ReplaceOutput(lambda output: 4 * output)):
        assert torch.allclose(nested, run(), atol=1e-6)


PROJECTIONS = {
    "gpt2": "transformer.h.0.attn.c_proj",
    "bert": "bert.encoder.layer.0.attention.output.dense",
    "llama": "model.layers.0.self_attn.o_proj",
    "t5": "encoder.block.0.layer.0.SelfAttention.o",
}


@looped("name", HOSTS)
def test_zero_ablation_equals_a_zero_input_of_the_projection(name):
    model, run = host(name, "sdpa")
    with regard.edit(model, 0, None, regard.ZeroAblation()):
        edited = run()
    projection = model.get_submodule(PROJECTIONS[name])
    hook = projection.register_forward_pre_hook(lambda module, args: (args[0] * 0, *args[1:]))
    assert torch.equal(run(), edited)
    hook.remove()
    assert not torch.equal(run(), edited)


def test_zero_ablation_of_one_head_equals_zero_columns_of_the_projection():
    model, run = own()
    with regard.edit(model, 1, [2], regard.ZeroAblation()):
        edited = run()
    out_proj = model.decoder.blocks[1].attention.out_proj
    out_proj.weight[:, 8:12] = 0
    torch.testing.assert_close(run(), edited, atol=1e-6, rtol=1e-6)


def test_mean_ablation_is_the_mean_over_batch_and_positions():
    layer, x = MultiHeadAttention(8, 2), torch.randn(3, 5, 8)
    seen = []
    with regard.edit(layer, 0, [1], regard.ReplaceOutput(lambda output: seen.append(output) or output)):
        layer(x)
    mean = seen[0].mean((0, 2), keepdim=True)
    with regard.edit(layer, 0, [1], regard.MeanAblation()):
        averaged = layer(x)
    with regard.edit(layer, 0, [1], regard.ReplaceOutput(lambda output: mean.expand_as(output))):
        assert torch.equal(layer(x), averaged)


def test_layers_before_the_edited_one_are_untouched():
    model = hosts.make("gpt2", "sdpa")
    inputs = hosts.batch("gpt2", "right")
    before = model(**inputs, output_hidden_states=True).hidden_states
    with regard.edit(model, "transformer.h.1.attn", None, regard.ZeroAblation()):
        after = model(**inputs, output_hidden_states=True).hidden_states
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[2], after[2])


def test_other_heads_of_the_layer_keep_their_outputs():
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    layer.out_proj.weight.copy_(torch.eye(16))
    x = torch.randn(2, 5, 16)
    expected, weights = layer(x, x, x)
    with regard.edit(layer, 0, [1], regard.ZeroAblation()):
        result, same = layer(x, x, x)
    assert torch.equal(result[..., 4:8], torch.zeros(2, 5, 4))
    torch.testing.assert_close(result[..., 8:], expected[..., 8:], atol=1e-6, rtol=1e-6)
    assert torch.equal(weights, same)


def test_generation_is_edited():
    model, inputs = hosts.make("llama", "sdpa"), hosts.batch("llama", "left")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    before = model.generate(**inputs, **options)
    with regard.edit(model, None, None, regard.ReplaceWeights(lambda weights: weights)):
        assert torch.equal(model.generate(**inputs, **options), before)
    with regard.edit(model, None, None, regard.ZeroAblation()):
        assert not torch.equal(model.generate(**inputs, **options), before)


def test_gradients_pass_through_an_edit():
    model, inputs = hosts.make("llama", "sdpa"), hosts.batch("llama")
    query = model.model.layers[0].self_attn.q_proj.weight
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(model(**inputs).logits.square().mean(), query)
        with regard.edit(model, 0, None, regard.ReplaceWeights(lambda weights: weights)):
            (result,) = torch.autograd.grad(model(**inputs).logits.square().mean(), query)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-4)


def test_other_threads_are_not_edited():
    model, run = own()
    before = run()
    with regard.edit(model, None, None, regard.ZeroAblation()):
        assert torch.equal(elsewhere(run), before)


def test_no_patch_remains_afterwards():
    from transformers.modeling_utils import AttentionInterface

    from regard.models.layers.attention import Attends

    owners = (
        (F, "scaled_dot_product_attention"),
        (nn.MultiheadAttention, "forward"),
        (nn.TransformerEncoder, "forward"),
        (nn.TransformerEncoderLayer, "forward"),
        (Attends, "attention"),
        (AttentionInterface, "get_interface"),
        (torch.backends.mha, "get_fastpath_enabled"),
    )
    before = [getattr(owner, name) for owner, name in owners]
    model, run = own()
    with (
        regard.edit(model, 0, None, regard.ZeroAblation()),
        regard.edit(model, 1, None, regard.ZeroAblation()),
    ):
        run()
    assert all(
        getattr(owner, name) is original for (owner, name), original in zip(owners, before, strict=True)
    )
    assert torch.backends.mha.get_fastpath_enabled()


# Errors


def test_layers_by_number_name_and_pattern():
    model = hosts.make("t5", "sdpa")
    names = list(attentions(model))
    assert names[0] == "encoder.block.0.layer.0.SelfAttention"
    assert len(names) == 6
    for layers in (3, -1, "decoder.block.0", "*EncDec*", ["encoder.*", 5]):
        with regard.edit(model, layers, None, regard.ZeroAblation()):
            pass


@looped(
    ("layers", "heads", "intervention", "error", "message"),
    [
        ("nowhere", None, regard.ZeroAblation(), ArgumentError, r"'nowhere'.*decoder.blocks.0.attention"),
        (7, None, regard.ZeroAblation(), ArgumentError, r"layers=7\): out of range for 2 layers"),
        (True, None, regard.ZeroAblation(), DTypeError, "number, a name or a pattern"),
        (0, [4], regard.ZeroAblation(), ArgumentError, r"head 4 is out of range; .* has heads 0 to 3"),
        (0, ["a"], regard.ZeroAblation(), DTypeError, "got 'a'; pass a number, a list of numbers"),
        (0, None, regard.ZeroAblation, DTypeError, r"ZeroAblation\(\)"),
        (0, None, "zero", DTypeError, "'zero'"),
    ],
)
def test_errors_of_edit(layers, heads, intervention, error, message):
    model, _ = own()
    with pytest.raises(error, match=message), regard.edit(model, layers, heads, intervention):
        pass


def test_a_model_without_attention_and_a_wrong_shape():
    none, zero = nn.Linear(2, 2), regard.ZeroAblation()
    with (
        pytest.raises(ArgumentError, match="recognizes no attention layers in a Linear"),
        regard.edit(none, 0, None, zero),
    ):
        pass
    with pytest.raises(DTypeError, match="a str"), regard.edit("model", 0, None, regard.ZeroAblation()):
        pass
    model, run = own()
    message = r"\(1, 4, 4, 4\) and returned \(1, 4, 4\)"
    wrong = regard.ReplaceOutput(lambda output: output[:, 0])
    with pytest.raises(ShapeError, match=message), regard.edit(model, 0, None, wrong):
        run()


# Importance


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.sampled(2)
def test_importance_of_every_head_is_its_divergence(name):
    model = hosts.make(name, "sdpa").train()
    inputs = hosts.batch(name)
    table = regard.importance(model, inputs)
    assert len(table) == 4 * len(attentions(model))
    assert model.training
    assert (table["change"].diff().dropna() <= 0).all()
    assert (table["change"] >= -1e-6).all()
    first = table.iloc[0]
    model.eval()
    before = model(**inputs).logits.log_softmax(-1)
    with regard.edit(model, first["layer"], int(first["head"]), regard.ZeroAblation()):
        after = model(**inputs).logits.log_softmax(-1)
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    assert first["change"] == pytest.approx(divergence.item(), rel=1e-3)
    assert attentions(model)[first["layer"]] is list(attentions(model).values())[first["number"]]


def test_importance_by_the_models_loss_and_by_a_custom_one():
    model, inputs = hosts.make("gpt2", "sdpa"), hosts.batch("gpt2")
    labels = {**inputs, "labels": inputs["input_ids"]}
    table = regard.importance(model, labels)
    with regard.edit(model, 0, 1, regard.ZeroAblation()):
        change = model(**labels).loss - 0
    change = change - model(**labels).loss
    row = table[(table["number"] == 0) & (table["head"] == 1)]
    assert row["change"].item() == pytest.approx(change.item(), abs=1e-6)
    own_loss = regard.importance(model, labels, loss=lambda output: output.loss)
    assert own_loss.equals(table)


def test_a_head_that_is_not_used_has_no_importance():
    model, _ = own()
    model.decoder.blocks[0].attention.out_proj.weight[:, :4] = 0
    table = regard.importance(model, torch.tensor([[5, 6, 7]]))
    last = table.iloc[-1]
    assert (last["number"], last["head"]) == (0, 0)
    assert last["change"] == pytest.approx(0, abs=1e-7)


def test_importance_needs_a_loss_or_logits():
    model, _ = encoder()
    x = torch.randn(1, 3, 16)
    with pytest.raises(ArgumentError, match="loss=lambda"):
        regard.importance(model, x)
    assert len(regard.importance(model, x, loss=lambda output: output.square().mean())) == 8


# Threads


def elsewhere(function):
    """Call a function in another thread, with gradients off and one torch thread, as in the main thread."""

    def run():
        torch.set_num_threads(1)  # a per-thread setting that affects rounding
        with torch.no_grad():
            return function()

    with ThreadPoolExecutor() as pool:
        return pool.submit(run).result()


def test_other_threads_keep_torchs_fast_path():
    model, run = encoder()
    expected, fast = run(), torch.backends.mha.get_fastpath_enabled
    seen = []

    def observe(output):
        seen.append(
            (torch.backends.mha.get_fastpath_enabled(), elsewhere(torch.backends.mha.get_fastpath_enabled))
        )
        assert torch.equal(elsewhere(run), expected)
        return output * 0

    with regard.edit(model, 0, [1], regard.ReplaceOutput(observe)):
        assert not torch.equal(run(), expected)
    assert seen == [(False, True)]
    assert torch.backends.mha.get_fastpath_enabled is fast
    assert torch.equal(run(), expected)


def test_a_fast_path_set_during_the_edit_stays():
    model, run = encoder()

    def off(output):
        torch.backends.mha.set_fastpath_enabled(False)
        return output

    try:
        with regard.edit(model, 0, [1], regard.ReplaceOutput(off)):
            run()
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Direct(nn.Module):
    """Calls SDPA directly, like timm's attention."""

    def __init__(self, by_hand=False):
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x if self.by_hand else F.scaled_dot_product_attention(x, x, x)


def sdpa_elsewhere(x):
    return F.scaled_dot_product_attention(x, x, x)


class Indirect(nn.Module):
    def forward(self, x):
        return sdpa_elsewhere(x)


@pytest.mark.parametrize("layers", [None, "0", "*"])
def test_direct_calls_of_sdpa_are_edited(layers):
    model, x = nn.Sequential(Direct()), torch.randn(1, 2, 3, 5)
    before = model(x)
    with regard.edit(model, layers, [1], regard.ZeroAblation()):
        after = model(x)
    assert torch.equal(after[:, 0], before[:, 0])
    assert not after[:, 1].any()
    table = regard.importance(model, x, lambda output: output.abs().sum())
    assert len(table) == 2


def test_sdpa_called_by_a_function_is_edited_by_the_name_of_its_module():
    model, x = nn.Sequential(Indirect()), torch.randn(1, 2, 3, 5)
    with regard.edit(model, "0", None, regard.ZeroAblation()):
        assert not model(x).any()
    with (
        pytest.raises(ArgumentError, match="recognizes no attention layers in"),
        regard.edit(model, None, None, regard.ZeroAblation()),
    ):
        pass


class ByName(nn.Module):
    """Calls SDPA under a name that was imported before edit."""

    def forward(self, x):
        return imported_by_name(x, x, x)


INTERVENTIONS = (
    regard.ZeroAblation(),
    regard.UniformAttention(),
    regard.Block(queries=2, keys=[0]),
    regard.ReplaceWeights(lambda weights: (weights @ weights.mT).softmax(-1) @ weights),
)


@looped("intervention", INTERVENTIONS, ids=lambda x: type(x).__name__)
def test_sdpa_imported_by_name_is_edited(intervention):
    x, outputs = torch.randn(1, 2, 3, 5), []
    for model in (ByName(), Direct()):
        with regard.edit(model, "", [1], intervention):
            outputs.append(model(x))
        assert torch.equal(model(x), imported_by_name(x, x, x))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], imported_by_name(x, x, x))
    assert not _get_current_function_mode_stack()


@looped("hidden", [0.0, -torch.inf, -1e9])
def test_uniform_attention_ignores_a_position_bias_passed_to_sdpa(hidden):
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), hidden)
    bias = 3 * torch.randn(2, 5, 5) + mask

    class Biased(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    model, x, visible = Biased(), torch.randn(3, 2, 5, 4), (mask == 0).float()
    with regard.edit(model, "", None, regard.UniformAttention()):
        torch.testing.assert_close(model(x), visible / visible.sum(-1, keepdim=True) @ x)


@looped("module", [ByName, Direct])
@looped("intervention", INTERVENTIONS, ids=lambda x: type(x).__name__)
@looped("watch_first", [True, False])
def test_an_edited_call_is_recorded_once(module, intervention, watch_first):
    """An intervention may itself run an operation that watch recognizes as attention."""
    model, x = module(), torch.randn(1, 2, 3, 5)
    blocks = [regard.watch(model, values=True), regard.edit(model, "", None, intervention)]
    first, second = blocks if watch_first else blocks[::-1]
    with first as one, second as two:
        model(x)
    seen = one if watch_first else two
    assert list(seen) == [""]
    expected = (x @ x.mT / 5**0.5).softmax(-1)
    torch.testing.assert_close(seen[""].dense(), expected)
    norms = seen.norms(project=False)[""].dense()
    torch.testing.assert_close(norms, expected * x.norm(dim=-1)[..., None, :])


def test_an_edit_without_effect_raises():
    """The module can call SDPA but computes no attention in this configuration."""

    class Mean(Direct):
        def forward(self, x):
            return x.mean(-2) if self.by_hand else super().forward(x)

    model = nn.Sequential(Mean(by_hand=True))
    with (
        pytest.raises(ArgumentError, match="edit had no effect"),
        regard.edit(model, None, None, regard.ZeroAblation()),
    ):
        model(torch.randn(1, 2, 3, 5))


# regard's functions in other modules


class CallsOperator(nn.Module):
    def forward(self, x):
        return regard.attention(x, x, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_calls_to_the_operator_are_edited_whole(dtype):
    """In float64, 1,500 queries take several tiles."""
    model, x = nn.Sequential(CallsOperator()), torch.randn(1, 4, 1500, 4, dtype=dtype)
    before = model(x)
    with regard.edit(model, "0", [1], regard.ZeroAblation()), regard.watch(model) as seen:
        after = model(x)
    assert not after[:, 1].any()
    assert torch.equal(after[:, [0, 2, 3]], before[:, [0, 2, 3]])
    torch.testing.assert_close(seen[0][0, 1, 7], torch.softmax(x[0, 1, 7] @ x[0, 1].T / 2, -1))
    with regard.edit(model, "0", None, regard.Block(queries=1499, keys=0)):
        after = model(x)
    assert torch.equal(after[:, :, :-1], before[:, :, :-1])
    weights = torch.softmax((x @ x.mT / 2)[:, :, -1, 1:], -1)
    torch.testing.assert_close(after[:, :, -1], (weights.unsqueeze(-2) @ x[:, :, 1:]).squeeze(-2))
    assert torch.equal(model(x), before)
