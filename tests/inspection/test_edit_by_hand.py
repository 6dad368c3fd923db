"""`edit` changes handwritten attention in the same way as SDPA."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError
from tests.cases import looped

B, H, N, K, D = 2, 3, 5, 7, 4


def masked(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(torch.ones(N, K, dtype=torch.bool).triu(3), -torch.inf)


def with_matmul(query, key, value):
    return masked(query @ key.mT * D**-0.5).softmax(-1) @ value


def with_bmm(query, key, value):
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    scores = masked(torch.bmm(query, key.mT) / D**0.5)
    return torch.bmm(scores.softmax(-1), value).unflatten(0, (B, H))


def with_heads_first(query, key, value):
    query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    weights = masked(torch.bmm(query, key.mT) / D**0.5).softmax(-1)
    return torch.bmm(weights, value).unflatten(0, (H, B)).transpose(0, 1)


def with_einsum(query, key, value):
    scores = masked(torch.einsum("bhid,bhjd->bhij", query, key) / D**0.5)
    return torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), value).transpose(1, 2)


def with_transposes(query, key, value):
    weights = masked(query @ key.mT / D**0.5).softmax(-1)
    return (value.mT @ weights.mT).mT


def with_sdpa(query, key, value):
    mask = torch.ones(N, K, dtype=torch.bool).tril(2)
    return F.scaled_dot_product_attention(query, key, value, mask)


class HandAttention(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.num_heads = function, H

    def forward(self, query, key, value):
        return self.function(query, key, value)

    def softmax(self, x):  # `edit` recognizes handwritten attention by the module's name and code
        return F.softmax(x, -1)


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.attention = HandAttention(function)

    def forward(self, query, key, value):
        return self.attention(query, key, value)


def tensors(requires_grad: bool = False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, N, D), (B, H, K, D), (B, H, K, 6))
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes]


INTERVENTIONS = (
    regard.ZeroAblation(),
    regard.MeanAblation(),
    regard.UniformAttention(),
    regard.Block(queries=4, keys=[0, 2]),
    regard.ZeroValues([1]),
    regard.ReplaceOutput(lambda output: output * 2),
    regard.ReplaceWeights(lambda weights: weights.flip(-1)),
)


@looped("function", [with_matmul, with_bmm, with_heads_first, with_einsum, with_transposes])
@looped("intervention", INTERVENTIONS, ids=lambda x: type(x).__name__)
@looped("heads", [None, [0, 2]])
def test_edits_by_hand_equal_edits_of_sdpa(function, intervention, heads) -> None:
    outputs = []
    for model, layer in ((Model(function), "attention"), (Model(with_sdpa), "attention")):
        before = model(*tensors())
        with regard.edit(model, layer, heads, intervention):
            outputs.append(model(*tensors()))
        assert torch.equal(model(*tensors()), before)
        assert not torch.allclose(outputs[-1], before)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)


def test_gradients_flow_through_edited_attention() -> None:
    gradients = []
    for function in (with_matmul, with_sdpa):
        inputs = tensors(requires_grad=True)
        model = Model(function)
        with regard.edit(model, "attention", None, regard.Block(queries=4, keys=[0])):
            model(*inputs).square().sum().backward()
        gradients.append([x.grad for x in inputs])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_weights_that_are_changed_after_the_softmax_are_refused() -> None:
    model = Model(lambda query, key, value: ((query @ key.mT).softmax(-1) * 0.5) @ value)
    with (
        pytest.raises(ArgumentError, match=r"attention: its weights .* row sums are 0.5 to 0.5"),
        regard.edit(model, "attention", None, regard.ZeroAblation()),
    ):
        model(*tensors())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["bloom", "gptj", "deberta", "xlnet"])
def test_heads_of_models_that_write_attention_by_hand(name: str) -> None:
    """Ablating all heads sets the attention output to zero; ablating no head changes nothing."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "n_embd": 16, "num_attention_heads": 2, "n_head": 2, "n_layer": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 40, "intermediate_size": 16, "rotary_dim": 4}
    if name == "xlnet":
        sizes |= {"d_model": 16, "d_inner": 16, "d_head": 8}
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, **sizes)).eval()
    ids = torch.tensor([[3, 5, 7, 11, 13]])
    with torch.no_grad():
        before = model(ids)[0]
        with regard.edit(model, None, None, regard.ReplaceWeights(lambda weights: weights)):
            same = model(ids)[0]
        with regard.edit(model, None, [1], regard.ZeroAblation()):
            after = model(ids)[0]
    torch.testing.assert_close(same, before, atol=1e-5, rtol=0)
    assert not torch.allclose(after, before, atol=1e-4)
