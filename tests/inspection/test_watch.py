"""Watching a model does not change it and records each attention layer by name."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.models import (
    Attends,
    KVCache,
    LanguageModel,
    MaskedLanguageModel,
    MultiHeadAttention,
    Packed,
    SelfAttention,
    Transformer,
    TransformerConfig,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = TransformerConfig(width=12, heads=3, layers=2, dropout=0.0)
TOKENS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])


def language_model(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(
        23, TransformerConfig(**{"width": 12, "heads": 3, "layers": 2, "dropout": 0.0, **options})
    )


def unwatched(model: nn.Module) -> bool:
    """Check that no hook is left in any module, not even an empty list."""
    return not any("watchers" in vars(module) for module in model.modules())


class Failure(Exception):
    pass


# Names


def test_layers_are_named_by_their_modules() -> None:
    model = language_model()
    with regard.watch(model) as seen:
        model(TOKENS)
    assert list(seen) == ["decoder.blocks.0.attention", "decoder.blocks.1.attention"]
    assert len(seen) == 2
    assert seen["decoder.blocks.1.attention"].shape == (2, 3, 5, 5)
    modules = dict(model.named_modules())
    assert all(isinstance(modules[name], MultiHeadAttention) for name in seen)


def test_a_transformer_has_encoder_and_decoder_layers() -> None:
    model = Transformer(23, CONFIG)
    with regard.watch(model) as seen:
        model(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8, 9, 10, 2]]))
    assert {name: tuple(weights.shape) for name, weights in seen.items()} == {
        "encoder.blocks.0.attention": (1, 3, 3, 3),
        "encoder.blocks.1.attention": (1, 3, 3, 3),
        "decoder.blocks.0.attention": (1, 3, 5, 5),
        "decoder.blocks.0.cross": (1, 3, 5, 3),
        "decoder.blocks.1.attention": (1, 3, 5, 5),
        "decoder.blocks.1.cross": (1, 3, 5, 3),
    }
    assert not seen["decoder.blocks.0.attention"].dense().triu(1).any()
    assert seen["decoder.blocks.0.cross"].dense().all()


def test_layers_are_numbered_in_order() -> None:
    model = language_model(layers=3)
    with regard.watch(model) as seen:
        model(TOKENS)
    assert [seen[i] for i in range(3)] == list(seen.values())
    assert seen[-1] is seen["decoder.blocks.2.attention"]
    for wrong in (3, -4):
        with pytest.raises(IndexError, match=rf"seen\[{wrong}\] is out of range: .* layers 0 to 2"):
            seen[wrong]


def test_each_call_of_a_module_has_a_name() -> None:
    layer, x = MultiHeadAttention(12, 3), torch.randn(5, 12)
    with regard.watch(nn.Sequential(layer)) as seen:
        for n in (2, 3, 5):
            layer(x[:n])
    assert list(seen) == ["0", "0@2", "0@3"]
    assert [weights.shape[-1] for weights in seen.calls("0")] == [2, 3, 5]
    assert seen.calls("0")[1] is seen["0@2"] is seen[1]


def test_each_step_of_decoding_is_a_call() -> None:
    model = Transformer(23, CONFIG).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        state = model.start(Packed.of([[5, 6, 7], [8]]))
        for token in (1, 5, 6):
            model.step(torch.tensor([token, token]), state)
        model(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 5, 6]]))
    steps = seen.calls("decoder.blocks.0.attention")
    assert [tuple(weights.shape[-2:]) for weights in steps] == [(1, 1), (1, 2), (1, 3), (3, 3)]
    for i in range(3):
        torch.testing.assert_close(steps[i][0, :, 0], steps[3][0, :, i, : i + 1])
    assert len(seen.calls("encoder.blocks.0.attention")) == 2


def test_the_model_itself_has_no_name() -> None:
    layer = SelfAttention()
    with regard.watch(layer) as seen:
        layer(torch.eye(3))
    assert list(seen) == [""]
    assert repr(seen) == "Seen((the model): Weights(1 × 3 × 3))"


def test_a_shared_module_is_recorded_once_per_call() -> None:
    layer = SelfAttention()
    with regard.watch(nn.Sequential(layer, nn.Identity(), layer)) as seen:
        nn.Sequential(layer, layer)(torch.eye(3))
    assert list(seen) == ["0", "0@2"]


def test_errors_for_unknown_names() -> None:
    model = language_model()
    with regard.watch(model) as seen:
        with pytest.raises(KeyError, match=r"nothing yet\. Call the model inside the with block"):
            seen["decoder"]
        model(TOKENS)
    for access in (seen.__getitem__, seen.calls):
        with pytest.raises(
            KeyError, match=r"'decoder' was not recorded. Recorded: decoder.blocks.0.attention, "
        ):
            access("decoder")
    assert "decoder" not in seen
    assert seen.get("decoder") is None


def test_repr() -> None:
    model = language_model()
    with regard.watch(model) as seen:
        assert repr(seen) == "Seen()"
        model(TOKENS)
    assert repr(seen).splitlines() == [
        "Seen(",
        "  decoder.blocks.0.attention: Weights(2 × 3 × 5 × 5),",
        "  decoder.blocks.1.attention: Weights(2 × 3 × 5 × 5),",
        ")",
    ]


# Values


@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sparsemax(), regard.Entmax15()])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_sum_to_one(layout: str, normalize: regard.Normalizer) -> None:
    model, batch = (
        MaskedLanguageModel(23, TransformerConfig(width=12, heads=3, normalize=normalize)),
        Packed.of([[5, 6, 7], [8]]),
    )
    with regard.watch(model.eval()) as seen:
        model(batch) if layout == "packed" else model(batch.pad(batch.tokens), batch.lengths)
    assert len(seen) == 3
    for weights in seen.values():
        dense = weights.dense()
        torch.testing.assert_close(dense.sum(-1), torch.ones(dense.shape[:-1]))


def test_weights_are_those_that_made_the_output() -> None:
    layer, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    with regard.watch(layer) as seen:
        output = layer(x, mask=regard.Causal())
    value = layer.project_source(x).value
    torch.testing.assert_close(layer.out_proj((seen[0] @ value).transpose(1, 2).flatten(-2)), output)


def test_packed_weights_stay_inside_their_sentences() -> None:
    model, batch = language_model(), Packed.of([[5, 6, 7], [8, 9]])
    with regard.watch(model) as seen:
        model(batch)
    mask = batch.mask(regard.Causal()).dense(5, 5)
    for weights in seen.values():
        assert torch.equal(weights.dense() != 0, mask.expand(3, 5, 5))


@pytest.mark.parametrize("kind", ["sinusoidal", "rotary", "t5"])
@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Entmax15(), regard.Sigmoid(), regard.Sink(3)])
def test_watching_does_not_change_outputs(kind: str, normalize: Any) -> None:
    model = language_model(width=24, normalize=normalize, positions=kind)
    before = model(TOKENS)
    with regard.watch(model) as seen:
        during = model(TOKENS)
    after = model(TOKENS)
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert len(seen) == 2


def test_watching_does_not_change_dropout() -> None:
    model = language_model(dropout=0.3)
    outputs = []
    for watched in (False, True):
        torch.manual_seed(1)
        if watched:
            with regard.watch(model):
                outputs.append(model(TOKENS))
        else:
            outputs.append(model(TOKENS))
    assert torch.equal(*outputs)


def test_watching_does_not_change_gradients() -> None:
    model = language_model()
    result = []
    for watched in (False, True):
        if watched:
            with regard.watch(model):
                loss = model(TOKENS).square().mean()
        else:
            loss = model(TOKENS).square().mean()
        result.append(torch.autograd.grad(loss, list(model.parameters())))
    for one, other in zip(*result, strict=True):
        assert torch.equal(one, other)


# Scope of the block


def test_nothing_is_recorded_outside_the_block() -> None:
    model = language_model()
    model(TOKENS)
    with regard.watch(model) as seen:
        pass
    model(TOKENS)
    assert not seen
    assert unwatched(model)


def test_an_exception_ends_the_watch() -> None:
    model = language_model()
    with pytest.raises(Failure), regard.watch(model):
        raise Failure
    assert unwatched(model)
    with pytest.raises(regard.ArgumentError), regard.watch(model) as seen:
        model(torch.tensor([[99]]))
    assert unwatched(model)
    model(TOKENS)
    assert not seen


def test_a_recording_before_an_exception_stays() -> None:
    model = language_model()
    with suppress(Failure), regard.watch(model) as seen:
        model(TOKENS)
        raise Failure
    assert len(seen) == 2
    assert seen[0].dense().shape == (2, 3, 5, 5)


def test_nested_watches() -> None:
    model = language_model()
    with regard.watch(model) as outer:
        model(TOKENS)
        with regard.watch(model.decoder.blocks[1]) as inner:
            model(TOKENS)
        model(TOKENS)
    model(TOKENS)
    assert list(inner) == ["attention"]
    assert len(outer) == 6
    assert torch.equal(inner["attention"].dense(), outer.calls("decoder.blocks.1.attention")[1].dense())
    assert unwatched(model)


def test_watches_that_end_in_any_order() -> None:
    model = language_model()
    watches = [regard.watch(model), regard.watch(model)]
    first, second = (watch.__enter__() for watch in watches)
    watches[0].__exit__(None, None, None)
    model(TOKENS)
    watches[1].__exit__(None, None, None)
    model(TOKENS)
    assert (len(first), len(second)) == (0, 2)
    assert unwatched(model)


def test_a_submodule_can_be_watched() -> None:
    model = language_model()
    with regard.watch(model.decoder.blocks[0]) as seen:
        model(TOKENS)
    assert list(seen) == ["attention"]


def test_a_model_can_be_watched_again() -> None:
    model = language_model()
    with regard.watch(model) as first:
        model(TOKENS)
    with regard.watch(model) as second:
        model(TOKENS)
    assert list(first) == list(second)
    assert first[0] is not second[0]
    assert torch.equal(first[0].dense(), second[0].dense())


def test_no_references_remain() -> None:
    model = language_model()
    with regard.watch(model) as seen:
        model(TOKENS)
    gone = weakref.ref(seen[0])
    del seen
    gc.collect()
    assert gone() is None


def test_state_dicts_and_copies_are_unaffected() -> None:
    model = language_model()
    with regard.watch(model):
        assert not any("watch" in name for name in model.state_dict())
    assert unwatched(copy.deepcopy(model))


# Custom layers


class Twice(Attends):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, self.attention(x, x, x, mask=regard.Causal()))


def test_custom_layers_are_recorded() -> None:
    layer = Twice()
    with regard.watch(nn.Sequential(nn.Linear(3, 3), layer)) as seen:
        layer(torch.randn(2, 5, 3))
    assert list(seen) == ["1", "1@2"]
    assert not seen["1"].dense().triu(1).any()
    assert seen["1@2"].dense().all()


def test_weights_of_a_cache_are_those_of_their_step() -> None:
    layer, cache = MultiHeadAttention(12, 3), KVCache()
    with torch.no_grad(), regard.watch(layer) as seen:
        for _ in range(40):
            layer(torch.randn(1, 12), cache=cache)
    assert [weights.shape[-1] for weights in seen.values()] == list(range(1, 41))
    for weights in seen.values():
        torch.testing.assert_close(weights.dense().sum(-1), torch.ones(3, 1))


# Errors


def test_models_without_attention_raise() -> None:
    with (
        pytest.raises(regard.ArgumentError, match="got a Linear without attention layers"),
        regard.watch(nn.Linear(3, 4)),
    ):
        pass


def test_other_objects_raise() -> None:
    with (
        pytest.raises(regard.DTypeError, match=r"watch\(\) got a function"),
        regard.watch(
            lambda x: x  # type: ignore[arg-type]
        ),
    ):
        pass


def test_threads_record_only_their_own_calls() -> None:
    layer = MultiHeadAttention(8, 2)
    sizes: dict[int, set[int]] = {}

    def record(size: int) -> None:
        x, result = torch.randn(size, 8), sizes.setdefault(size, set())
        for _ in range(50):
            with regard.watch(layer) as seen:
                layer(x)
            result.update(weights.shape[-1] for weights in seen.values())
            result.add(-len(seen))

    with ThreadPoolExecutor() as pool:
        list(pool.map(record, (3, 5, 7)))
    assert sizes == {size: {size, -1} for size in (3, 5, 7)}
    assert "watchers" not in vars(layer)


def test_a_watch_that_ends_hides_no_other_for_a_moment() -> None:
    watched: list[bool] = []

    class Layer(SelfAttention):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "watchers":
                watched.append("watchers" in vars(self))
            super().__setattr__(name, value)

    layer = Layer()
    with regard.watch(layer), regard.watch(layer):
        pass
    assert watched == [False, True, True]  # one watch begins, another begins, the first ends


def test_copies_are_not_watched() -> None:
    layer = MultiHeadAttention(8, 2)
    with regard.watch(layer) as seen:
        copied = copy.deepcopy(layer)
        copied(torch.randn(3, 8))
    assert not seen
    assert not copied.watchers


def test_steps_are_joined() -> None:
    layer, cache, x = MultiHeadAttention(8, 2), KVCache(), torch.randn(1, 4, 8)
    with torch.no_grad(), regard.watch(layer) as seen:
        for i in range(4):
            layer(x[:, i : i + 1], mask=regard.Causal(), cache=cache)
    with torch.no_grad(), regard.watch(layer) as at_once:
        layer(x, mask=regard.Causal())
    torch.testing.assert_close(seen.joined(""), at_once[0].dense())


def test_masks_have_the_lengths_of_their_call() -> None:
    layer, lengths, x = MultiHeadAttention(8, 2), torch.tensor([4, 2]), torch.randn(2, 4, 8)
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(x, mask=regard.Padding(lengths))
    lengths.fill_(4)
    assert not seen[0].dense()[1, ..., 2:].any()


def test_recordings_of_own_layers_do_not_keep_the_graph() -> None:
    layer, x = regard.models.MultiHeadAttention(8, 2), torch.randn(5, 8, requires_grad=True)
    with regard.watch(layer) as seen:
        layer(x)
    assert not seen[0].requires_grad
    with regard.watch(layer, gradients=True) as seen:
        layer(x)
    assert seen[0].requires_grad


# regard's functions in other modules


class OwnModule(nn.Module):
    def __init__(self, function: Any = regard.attention, **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = self.function(query, key, value, **self.options)
        return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize("function", [regard.attention, regard.attend, regard.flex_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [5, 700])  # 700 queries take several tiles in float64
def test_functions_are_recorded_once_per_call(function: Any, dtype: torch.dtype, n: int) -> None:
    query, key, value = torch.randn(3, 1, 2, n, 8, dtype=dtype)
    model = nn.Sequential()
    model.attention = OwnModule(function)  # called directly below
    expected = model.attention(query, key, value)
    for _ in range(2):  # the second call is cached
        with regard.watch(model) as seen:
            output = model.attention(query, key, value)
        assert torch.equal(output, expected)
        assert list(seen) == ["attention"]
        weights = torch.softmax(query @ key.mT / 8**0.5, -1)
        torch.testing.assert_close(seen[0].dense(), weights, rtol=0, atol=1e-6)


def test_functions_record_masks_normalizers_values_and_gradients() -> None:
    model = OwnModule(mask=regard.Causal(), normalize=regard.Sparsemax())
    query, key, value = torch.randn(3, 1, 2, 6, 8).unbind()
    with regard.watch(model, values=True, gradients=True) as seen:
        model(query.requires_grad_(), key, value).square().sum().backward()
    expected, weights = regard.attend(query, key, value, **model.options)
    torch.testing.assert_close(seen[0].dense(), weights.dense())
    torch.testing.assert_close(
        seen.norms(project=False)[""].dense(), weights.dense() * value.norm(dim=-1)[:, :, None]
    )
    torch.testing.assert_close(seen.gradients()[""].dense(), 2 * expected @ value.mT)


def test_functions_outside_the_watched_model_are_not_recorded() -> None:
    query, key, value = torch.randn(3, 2, 5, 8).unbind()
    model = OwnModule()
    with regard.watch(model) as seen:
        model(query, key, value)
        regard.attention(query, key, value)
        ThreadPoolExecutor().submit(regard.attention, query, key, value).result()
    assert len(seen) == 1


def test_recordings_of_functions_do_not_change_with_the_inputs() -> None:
    class Overwrites(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            output = regard.attention(x, x, x)
            x.mul_(3)
            return output

    with torch.inference_mode():
        x = torch.randn(1, 2, 3, 4)
        expected = torch.softmax(x @ x.mT / 2, -1)
        model = Overwrites()
        with regard.watch(model) as seen:
            model(x)
    torch.testing.assert_close(seen[0].dense(), expected)


def test_a_recording_that_fails_does_not_stop_the_model() -> None:
    model, query, shared = OwnModule(), torch.randn(2, 3, 4, 8), torch.randn(4, 8)
    with regard.watch(model, values=True, heads=[2]) as seen:
        model(query, shared, shared)
    torch.testing.assert_close(seen[0].dense()[:, 0], torch.softmax(query @ shared.T / 8**0.5, -1)[:, 2])
    with regard.watch(model, heads=[1]) as seen:
        output = model(shared, shared, shared)
    assert torch.equal(output, regard.attention(shared, shared, shared))
    with pytest.raises(regard.errors.ArgumentError, match="could not be read"):
        seen[0].dense()
