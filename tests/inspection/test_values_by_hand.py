"""Norms and gradients of attention that is handwritten, imported by name, nested, or FlexAttention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

import regard
from regard.errors import ArgumentError

B, H, Q, K, D, E = 2, 3, 5, 7, 11, 13
Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor]]


class Projected(nn.Module):
    """Attention as a function of query, key and value, each (b, h, n, d), and an output projection."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.num_heads = function, H
        self.out_proj = nn.Linear(H * E, 17)
        self.weights: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.weights, output = self.function(query, key, value)  # output: b h q e
        if self.weights is not None and self.weights.requires_grad:
            self.weights.retain_grad()
        merged = output.transpose(1, 2).reshape(B, Q, H * E)
        return self.out_proj(merged)


def softmax(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-1, -2) * D**-0.5).softmax(-1)


def by_matmul(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(query, key)
    return weights, weights @ value


def by_bmm(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, flat = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    weights = torch.softmax(torch.bmm(query, key.transpose(1, 2)) * D**-0.5, -1)
    return weights, torch.bmm(weights, flat).unflatten(0, (B, H))


def by_einsum(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (torch.einsum("bhqd,bhkd->bhqk", query, key) * D**-0.5).softmax(-1)
    output = torch.einsum("bhqk,bkhe->bqhe", weights, value.transpose(1, 2))
    return weights, output.transpose(1, 2)


def by_einsum_of_values_and_weights(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(query, key)
    return weights, torch.einsum("bhke,bhqk->bhqe", value, weights)


def by_transposed_product(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(query, key)
    return weights, (value.transpose(-1, -2) @ weights.permute(0, 1, 3, 2)).transpose(-1, -2)


def after_a_cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(query, key)
    return weights, weights.double().to(value.dtype).contiguous() @ value.type_as(weights)


def with_shared_values(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(query, key)
    return weights, weights @ value[:, :1]


def by_dense_weights(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return gated weights, which do not follow from query and key; the gate is not traced."""
    weights = softmax(query, key) * torch.linspace(0.5, 1, H)[:, None, None]
    return weights, weights @ value


def by_bmm_of_heads_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value = (x.transpose(0, 1).reshape(H * B, *x.shape[2:]) for x in (query, key, value))
    weights = torch.softmax(torch.bmm(query, key.transpose(1, 2)) * D**-0.5, -1)
    return weights, torch.bmm(weights, value).unflatten(0, (H, B)).transpose(0, 1)


BY_HAND: dict[str, Function] = {
    "matmul": by_matmul,
    "bmm of merged heads": by_bmm,
    "einsum": by_einsum,
    "einsum, values first": by_einsum_of_values_and_weights,
    "transposed product": by_transposed_product,
    "cast": after_a_cast,
    "shared values": with_shared_values,
    "dense weights": by_dense_weights,
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, Q, D), (B, H, K, D), (B, H, K, E)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def watch_and_differentiate(model: nn.Module, *tensors: Tensor, **options: Any) -> regard.Seen:
    with regard.watch(model, gradients=True, **options) as seen:
        loss = model(*(x.requires_grad_() for x in tensors)).square().sum()
    loss.backward()
    return seen


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_equal_those_of_autograd(name: str) -> None:
    model = Projected(BY_HAND[name])
    seen = watch_and_differentiate(model, *inputs())
    assert model.weights is not None
    assert model.weights.grad is not None
    expected = model.weights.grad.reshape(B, H, Q, K)
    torch.testing.assert_close(seen.gradients()[""].dense(), expected)
    products = seen.gradients()[""].times_weights().dense()
    torch.testing.assert_close(products, expected * model.weights.detach().reshape(B, H, Q, K))
    assert seen.storage(0) == ("dense" if name == "dense weights" else "lazy")


@pytest.mark.parametrize("name", BY_HAND)
def test_norms_equal_the_norms_of_the_vectors(name: str) -> None:
    model, (query, key, value) = Projected(BY_HAND[name]), inputs()
    with torch.no_grad(), regard.watch(model, values=True) as seen:
        output = model(query, key, value)
    assert model.weights is not None
    value = value[:, :1].expand(-1, H, -1, -1) if name == "shared values" else value
    weight = model.out_proj.weight.unflatten(-1, (H, E))
    vectors = torch.einsum("bhke,mhe->bhkm", value, weight)[:, :, None]
    vectors = model.weights.reshape(B, H, Q, K, 1) * vectors
    torch.testing.assert_close(vectors.sum((1, 3)) + model.out_proj.bias, output)
    torch.testing.assert_close(seen.norms()[""].dense(), vectors.norm(dim=-1))


def test_heads_before_the_batch_keep_their_values() -> None:
    measured = []
    for function in (by_matmul, by_bmm_of_heads_first):
        torch.manual_seed(0)
        seen = watch_and_differentiate(Projected(function), *inputs())
        measured.append((seen.gradients()[""].dense(), seen.norms()[""].dense()))
    torch.testing.assert_close(*measured)


@pytest.mark.parametrize("name", ["matmul", "shared values", "dense weights", "by name"])
def test_selected_heads_keep_their_values(name: str) -> None:
    def by_name(*tensors: Tensor) -> tuple[None, Tensor]:
        return None, imported_by_name(*tensors)

    model = Projected(BY_HAND.get(name, by_name))
    torch.manual_seed(0)
    whole, part = (watch_and_differentiate(model, *inputs(), heads=heads) for heads in (None, [2, 0]))
    torch.testing.assert_close(part.gradients()[""].dense(), whole.gradients()[""].dense()[:, [2, 0]])
    torch.testing.assert_close(part.norms()[""].dense(), whole.norms()[""].dense()[:, [2, 0]])


def test_sdpa_imported_by_name_equals_attention_by_hand() -> None:
    by_hand = Projected(by_matmul)
    by_name = Projected(lambda *tensors: (None, imported_by_name(*tensors)))
    by_name.load_state_dict(by_hand.state_dict())
    ours, expected = (watch_and_differentiate(model, *inputs()) for model in (by_name, by_hand))
    torch.testing.assert_close(ours.gradients()[""].dense(), expected.gradients()[""].dense())
    torch.testing.assert_close(ours.norms()[""].dense(), expected.norms()[""].dense())


class MultiheadFunction(nn.Module):
    """Calls the functional form of nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(12, 3)
        self.num_heads, self.out_proj = 3, self.mha.out_proj

    def forward(self, x: Tensor) -> Tensor:
        mha = self.mha
        weights, biases = (mha.in_proj_weight, mha.in_proj_bias), (mha.bias_k, mha.bias_v)
        output = (mha.out_proj.weight, mha.out_proj.bias)
        return F.multi_head_attention_forward(
            x, x, x, 12, 3, *weights, *biases, False, 0.0, *output, need_weights=False
        )[0]


def test_functional_multihead_attention_equals_the_module() -> None:
    function, x = MultiheadFunction(), torch.randn(5, 2, 12)
    seen = watch_and_differentiate(function, x)
    with regard.watch(function.mha, gradients=True) as module:
        function.mha(x, x, x)[0].square().sum().backward()
    torch.testing.assert_close(seen.gradients()[""].dense(), module.gradients()[""].dense())
    torch.testing.assert_close(seen.norms()[""].dense(), module.norms()[""].dense())


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_nested_sequences_equal_single_ones() -> None:
    model = Projected(by_matmul)
    model.forward = lambda x: imported_by_name(x, x, x)  # type: ignore[method-assign]
    parts = [torch.randn(H, n, E) for n in (5, 3)]
    x = torch.nested.nested_tensor([part.transpose(0, 1) for part in parts], layout=torch.jagged)
    with torch.no_grad(), regard.watch(model, values=True) as seen:
        model(x.transpose(1, 2))
    norms = seen.norms()[""].dense()
    for row, part in enumerate(parts):
        with torch.no_grad(), regard.watch(model, values=True) as single:
            model(part[None])
        n = part.shape[1]
        torch.testing.assert_close(norms[row, :, :n, :n], single.norms()[""].dense()[0])
        assert not norms[row, :, n:].any()


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
@pytest.mark.parametrize("modified", [False, True])
def test_flex_attention_equals_attention_by_hand(modified: bool) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def shift(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score - 0.1 * (q - k).abs()

    def by_flex(*tensors: Tensor) -> tuple[None, Tensor]:
        return None, flex_attention(*tensors, score_mod=shift if modified else None)

    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        distance = (torch.arange(Q)[:, None] - torch.arange(K)).abs() if modified else torch.zeros(Q, K)
        weights = (query @ key.mT * D**-0.5 - 0.1 * distance).softmax(-1)
        return weights, weights @ value

    expected_model, model = Projected(by_hand), Projected(by_flex)
    model.load_state_dict(expected_model.state_dict())
    norms = []
    for watched in (model, expected_model):
        with torch.no_grad(), regard.watch(watched, values=True) as seen:  # torch has no CPU backward
            watched(*inputs())
        norms.append(seen.norms()[""].dense())
    torch.testing.assert_close(*norms)


def test_values_that_cannot_be_followed_raise() -> None:
    def rearranged(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        weights = softmax(query, key)
        return weights, (weights.permute(1, 0, 2, 3) @ value.transpose(0, 1)).transpose(0, 1)

    model = nn.Sequential()
    model.add_module("strange", Projected(rearranged))
    model.forward = model.strange.forward  # type: ignore[method-assign, union-attr, assignment]
    seen = watch_and_differentiate(model, *inputs())
    for function in (seen.norms, seen.gradients):
        with pytest.raises(ArgumentError, match="'strange' could not be traced"):
            function()


def test_repeated_calls_keep_their_own_values() -> None:
    model, (query, key, value) = Projected(by_matmul), inputs()
    with torch.no_grad(), regard.watch(model, values=True) as seen:
        for factor in (1, 2, 3):
            model(query, key, factor * value)
    norms = seen.norms()
    assert list(norms) == ["", "@2", "@3"]
    for factor, name in enumerate(norms, 1):
        torch.testing.assert_close(norms[name].dense(), factor * norms[""].dense())
        torch.testing.assert_close(seen.to("cpu").norms()[name].dense(), norms[name].dense())
