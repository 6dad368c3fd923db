"""The search in the kernels equals the search in Python, and leaves to it what the kernels do not support."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch.nn.modules import module as nn_module

import regard
from regard._util import interrupt
from regard.mechanism import fused
from regard.models import (
    FeedForward,
    MultiHeadAttention,
    Packed,
    PositionEncoding,
    SinusoidalPositions,
    Transformer,
    TransformerConfig,
    quantize,
)
from regard.models.generation import DecodingDefaults, SpecialTokens
from regard.models.layers.dropout import eval_mode
from regard.models.layers.positions.rotary import RotaryPositions
from regard.translation.decoding import search as search_module
from regard.translation.decoding.compiled_search import search_compiled
from regard.translation.decoding.constraints import Constraints
from regard.translation.decoding.search import search
from regard.translation.decoding.strategies import Beam, Greedy

pytestmark = pytest.mark.skipif(not fused.available(), reason="needs the kernels")

WORDS = 53
CONFIG = TransformerConfig(width=32, heads=2, layers=2, ffn_dim=48, dropout=0.3)
CONFIGS = {
    "pre-norm": CONFIG,
    "post-norm, one key head": replace(CONFIG, norm_first=False, key_heads=1),
    "learned positions, no bias": replace(CONFIG, positions="learned", max_positions=64, linear_bias=False),
    "no positions, embedding norm": replace(CONFIG, positions="none", embedding_norm=True),
    "odd sizes": replace(CONFIG, width=30, heads=3, ffn_dim=21),
    "odd width": replace(CONFIG, width=33, heads=2, head_width=16, norm_first=False),
    "narrow heads": replace(CONFIG, width=32, heads=16),
    "fairseq": replace(CONFIG, sinusoids="fairseq", scale_embedding=False),
}
SOURCES = [[5, 6, 2], [4, 2], [*range(3, 40), 2], [2], [9, 9, 9, 9, 9, 9, 9, 2]]


def make(name="pre-norm", precision="float32", **options):
    torch.manual_seed(0)
    model = Transformer(WORDS, CONFIGS[name], **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.25 * torch.randn_like(parameter)
    return quantize(model, precision)


def compiled(model, sources=SOURCES, beam=Beam(4), limits=9, **options):  # noqa: B008
    limits = [limits] * len(sources) if isinstance(limits, int) else limits
    with torch.inference_mode(), eval_mode(model):
        found = search_compiled(model, Packed.of(sources), beam, limits, **options)
    return None if found is None else search_module.rank(found, beam.n_best)


def in_python(monkeypatch, model, sources=SOURCES, beam=Beam(4), limits=9, **options):  # noqa: B008
    with monkeypatch.context() as context:
        context.setattr(search_module, "search_compiled", lambda *_, **__: None)
        return search(model, Packed.of(sources), beam, max_new_tokens=limits, **options)


def assert_equal(found, expected):
    assert found is not None
    for ranked, others in zip(found, expected, strict=True):
        assert [(h.tokens, h.finished) for h in ranked] == [(h.tokens, h.finished) for h in others]
        for hypothesis, other in zip(ranked, others, strict=True):
            # int8 layers round their inputs, so a rounding error of 1e-7 can grow to 1e-4
            assert hypothesis.score == pytest.approx(other.score, rel=1e-3, abs=1e-4)
            assert hypothesis.log_probability == pytest.approx(other.log_probability, rel=1e-3, abs=1e-4)
            if other.weights is not None:
                weights = other.weights[:, :, : hypothesis.weights.shape[2]]
                torch.testing.assert_close(hypothesis.weights, weights, atol=3e-4, rtol=1e-3)
                assert not other.weights[:, :, hypothesis.weights.shape[2] :].any()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_results_equal_those_of_the_search_in_python(name, precision, threads, monkeypatch):
    if precision == "int8" and name == "odd sizes":
        pytest.skip("the projection of 30 queries cannot be divided; tested below")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = make(name, precision)
        for beam in (Beam(1), Beam(4, n_best=3), Beam(7, length_penalty=0.4), Beam(5, prune_threshold=1.5)):
            options = {"beam": beam, "attention_layer": -1}
            found = compiled(model, limits=[9, 0, 12, 3, 1], **options)
            assert_equal(found, in_python(monkeypatch, model, limits=[9, 0, 12, 3, 1], **options))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 8, 9, 17, 70])  # rows per step on both sides of the kernels' thresholds
def test_any_number_of_sentences(count, monkeypatch):
    model, sources = make(), [[3 + i % 40, 4 + i % 7, 2] for i in range(count)]
    for beam in (Beam(1), Beam(3)):
        assert_equal(compiled(model, sources, beam), in_python(monkeypatch, model, sources, beam))


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_sentence_has_the_same_result_whenever_it_is_translated(precision):
    """The search tries both one thread and all threads, so the result must not depend on their number."""
    model = make(precision=precision)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        results = [compiled(model, [SOURCES[2]], Beam(3), 12) for _ in range(40)]
    finally:
        torch.set_num_threads(threads)
    ((first,),) = results[0]
    assert all((h.tokens, h.score) == (first.tokens, first.score) for [[h]] in results)


def test_separate_embeddings_output_bias_and_target_prefix(monkeypatch):
    model = make(share=False, tie_output=False, output_bias=True)
    model.special_tokens = SpecialTokens(target_prefix=(7, 8), suppressed=(0, 1, 2, 3)[:2])
    assert_equal(compiled(model), in_python(monkeypatch, model))


@pytest.mark.parametrize("allowed", [0, 1])
def test_unknown_tokens_are_limited(allowed, monkeypatch):
    model = make(share=False, tie_output=False, output_bias=True)
    with torch.no_grad():
        model.bias[model.special_tokens.unknown] += 4
    constraints = Constraints([[]] * len(SOURCES), [allowed] * len(SOURCES), ())
    found = compiled(model, constraints=constraints)
    assert_equal(found, in_python(monkeypatch, model, constraints=constraints))
    unknown = [h.tokens.count(model.special_tokens.unknown) for ranked in found for h in ranked]
    assert max(unknown) == allowed


def test_unknown_tokens_of_the_target_prefix_count(monkeypatch):
    model = make(share=False, tie_output=False, output_bias=True)
    unknown = model.special_tokens.unknown
    with torch.no_grad():
        model.bias[unknown] += 4
    model.special_tokens = SpecialTokens(target_prefix=(unknown, 8))
    constraints = Constraints([[]] * len(SOURCES), [1] * len(SOURCES), ())
    found = compiled(model, constraints=constraints)
    assert_equal(found, in_python(monkeypatch, model, constraints=constraints))
    assert not any(unknown in h.tokens for ranked in found for h in ranked)


def test_search_uses_the_kernels(monkeypatch):
    model, expected = make(), compiled(make(), beam=Beam(1))
    monkeypatch.setattr(search_module, "make_extender", None)  # Python's search would fail
    assert_equal(search(model, Packed.of(SOURCES), Greedy(), max_new_tokens=9), expected)


def test_unsupported_calls_are_left_to_python():
    model = make()
    phrases = Constraints([[[5]]] + [[]] * 4, None, ())
    assert compiled(model, constraints=phrases) is None
    assert compiled(model, [[]]) is None
    assert compiled(model, [[5, WORDS]]) is None  # not in the vocabulary
    assert compiled(model, attention_layer=2) is None
    assert compiled(make("learned positions, no bias"), limits=64) is None  # more than the learned positions
    assert compiled(make("odd sizes", "int8")) is None
    assert compiled(make().double()) is None
    with torch.autocast("cpu"):
        assert compiled(model) is None
    without_encoder = make()
    without_encoder.encoder.blocks = torch.nn.ModuleList()
    assert compiled(without_encoder) is None
    for config in (replace(CONFIG, positions="rotary"), replace(CONFIG, activation="gelu")):
        assert compiled(Transformer(WORDS, config)) is None
    model.decoding = DecodingDefaults(forced_end=True)
    assert compiled(model) is None


def test_watched_and_hooked_models_are_left_to_python():
    model = make()
    assert compiled(model) is not None
    with regard.watch(model) as seen:
        assert compiled(model) is None
        search(model, Packed.of(SOURCES), max_new_tokens=3)
    assert len(seen)
    for module in (model, model.embedding, model.encoder.blocks[0].attention, model.decoder.norm):
        hook = module.register_forward_hook(lambda *_: None)
        assert compiled(model) is None
        hook.remove()
    assert compiled(model) is not None
    model.decoder.blocks[0].cross.forward = lambda *_, **__: None
    assert compiled(model) is None


def test_global_hooks_are_left_to_python():
    model = make()
    assert compiled(model) is not None
    for register in (nn_module.register_module_forward_hook, nn_module.register_module_forward_pre_hook):
        hook = register(lambda *_: None)
        assert compiled(model) is None
        hook.remove()
    assert compiled(model) is not None


class Halved(torch.nn.Identity):
    def forward(self, x):
        return x / 2


class Scaled(PositionEncoding):
    def encode(self, x, positions):
        return x * (1 + positions[:, None] / 3), {}


class Rotated(PositionEncoding):  # without submodules
    def encode(self, x, positions):
        return RotaryPositions(16).encode(x, positions)


class Tripled(SinusoidalPositions):
    def encode(self, x, positions):
        return x + 3 * self(positions, x.dtype), {}


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def replace_in(path, module):
    """Return a function that replaces a module of a stack."""
    parent, _, name = path.rpartition(".")

    def change(stack):
        setattr(stack.get_submodule(parent), name, module().eval())

    return change


def set_in(path, value):
    """Return a function that sets an attribute of a module of a stack."""
    parent, _, name = path.rpartition(".")
    return lambda stack: setattr(stack.get_submodule(parent), name, value)


CHANGES = {
    "linear subclass": replace_in("blocks.0.feed_forward.in_proj", lambda: Doubled(32, 48)),
    "norm without parameters": replace_in("norm", lambda: torch.nn.LayerNorm(32, elementwise_affine=False)),
    "eps of the last norm": set_in("norm.eps", 1.0),
    "eps of a block": set_in("blocks.0.feed_forward_residual.norm.eps", 1.0),
    "norm_first of a block": set_in("blocks.1.attention_residual.norm_first", False),
    "identity subclass": replace_in("norm", Halved),
    "embedding norm": replace_in("embedding_norm", Halved),
    "dropout subclass": replace_in("dropout", Halved),
    "narrow feed-forward": replace_in("blocks.1.feed_forward", lambda: FeedForward(32, 16)),
    "wide feed-forward": replace_in("blocks.1.feed_forward", lambda: FeedForward(32, 80)),
    "more heads": replace_in("blocks.1.attention", lambda: MultiHeadAttention(32, 4)),
    "fewer heads": replace_in("blocks.1.attention", lambda: MultiHeadAttention(32, 1, head_width=16)),
    "scaled positions": replace_in("positions", Scaled),
    "rotated positions": replace_in("positions", Rotated),
    "other sinusoids": replace_in("positions", lambda: Tripled(32)),
    "replaced method": set_in("positions.encode", lambda x, positions: (x, {})),
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers_are_left_to_python_and_equal_teacher_forcing(change, name, before):
    model = make()
    if before:  # the second search must not use the addresses that the first stored
        assert compiled(model) is not None
    torch.manual_seed(1)
    CHANGES[change](getattr(model, name))
    assert compiled(model) is None
    for source, (best, *_) in zip(SOURCES, search(model, Packed.of(SOURCES), max_new_tokens=5), strict=True):
        assert best.log_probability == pytest.approx(log_probability(model, source, best), abs=1e-4)


def log_probability(model, source, hypothesis):
    """Return the log probability of a hypothesis according to the forward pass."""
    special = model.special_tokens
    tokens = [*hypothesis.tokens, special.end] if hypothesis.finished else hypothesis.tokens
    with torch.no_grad():
        logits = model(torch.tensor([source]), torch.tensor([[special.start, *tokens][: len(tokens)]]))[0]
    return float(logits.log_softmax(-1)[range(len(tokens)), tokens].sum())


def test_changes_of_the_model_are_noticed(monkeypatch):
    model = make()
    before = compiled(model)
    with torch.no_grad():
        model.encoder.blocks[0].feed_forward.in_proj.weight.mul_(-1)  # in place, at the same address
    assert compiled(model) != before
    assert_equal(compiled(model), in_python(monkeypatch, model))
    model.decoder.blocks[1].attention.out_proj = torch.nn.Linear(32, 32)  # a new module
    assert_equal(compiled(model), in_python(monkeypatch, model))
    model.embedding.weight = torch.nn.Parameter(torch.randn(WORDS, 32))  # a new parameter
    model.matrix = torch.nn.Parameter(torch.randn(WORDS, 32))
    assert_equal(compiled(model), in_python(monkeypatch, model))
    model.load_state_dict(make().state_dict())
    model.decoder.blocks[0].attention.normalize = regard.Sparsemax()
    assert compiled(model) is None


def test_views_of_the_same_memory_are_noticed(monkeypatch):
    model = make()
    assert compiled(model) is not None
    weight = model.decoder.blocks[0].attention.out_proj.weight
    weight.data = weight.data.t()
    assert compiled(model) is None
    weight.data = weight.data.t()
    assert compiled(model) is not None
    model.matrix.data = model.matrix.data[:20]
    assert_equal(compiled(model), in_python(monkeypatch, model))


def test_embeddings_that_are_too_small_are_left_to_python():
    """The kernels would read beyond their end."""
    model = make(share=False, tie_output=False)
    model.matrix = torch.nn.Parameter(torch.randn(500_000, 32))
    assert compiled(model) is None
    with pytest.raises(regard.ArgumentError, match="out of range for a vocabulary of 53"):
        search(model, Packed.of(SOURCES), max_new_tokens=3)
    model = make(share=False, tie_output=False)
    model.source_embedding.weight = torch.nn.Parameter(torch.randn(9, 32))
    assert compiled(model) is None
    model = make(share=False, tie_output=False)
    model.decoder.positions = SinusoidalPositions(16)
    assert compiled(model) is None


def test_embeddings_with_a_maximum_norm_are_left_to_python():
    model = make()
    assert compiled(model) is not None
    model.embedding.max_norm = 0.5
    assert compiled(model) is None


@pytest.mark.parametrize("name", ["learned positions, no bias", "no positions, embedding norm"])
def test_the_default_dtype_does_not_change_the_result(name):
    model = make(name)
    expected = compiled(model)
    try:
        torch.set_default_dtype(torch.float64)
        found = compiled(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(found, expected)


def test_changes_of_a_shallow_copy_and_of_a_class_are_noticed():
    model = make()
    assert compiled(model) is not None
    other = copy.copy(model)
    other.output_scale = 0.5
    assert compiled(other) is None
    assert compiled(model) is not None

    class Other(Transformer):
        pass

    model.__class__ = Other
    assert compiled(model) is None


def test_large_weights_are_not_recorded(monkeypatch):
    monkeypatch.setattr("regard.translation.decoding.kernel_search._MAX_RECORDED", 2000)
    model = make()
    assert all(h.weights is None for ranked in compiled(model, attention_layer=0) for h in ranked)
    (ranked,) = compiled(model, [[5, 2]], attention_layer=0)
    assert ranked[0].weights is not None


def test_copies_have_their_own_parameters(monkeypatch):
    model = make()
    compiled(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.decoder.blocks[0].cross.in_proj.weight.mul_(-1)
        assert_equal(compiled(other), in_python(monkeypatch, other))
        assert_equal(compiled(model), in_python(monkeypatch, model))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_results_that_are_not_finite_are_left_to_python(name, value):
    model = make()
    with torch.no_grad():
        getattr(model, name).blocks[1].attention.in_proj.weight.fill_(value)
    assert compiled(model) is None


def test_a_row_without_a_possible_token_is_left_to_python():
    model = make(share=False, tie_output=False, output_bias=True)
    with torch.no_grad():
        model.bias.fill_(-math.inf)
    assert compiled(model) is None
    with pytest.raises(regard.ArgumentError, match="zero probability for every allowed token"):
        search(model, Packed.of(SOURCES), max_new_tokens=3)


def test_the_search_can_be_interrupted(monkeypatch):
    def stop():
        raise interrupt.Interrupted

    monkeypatch.setattr("regard.translation.decoding.kernel_search._SECONDS", 0.0)
    with interrupt.checked_by(stop), pytest.raises(interrupt.Interrupted):
        compiled(make())
