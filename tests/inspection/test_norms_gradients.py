"""Norms and gradients of watched weights, compared with dense eager computations and torch's autograd."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError, StaleError
from regard.inspection.measures.lazy_products import LowRank, WeightProduct
from regard.models import LanguageModel, MultiHeadAttention, TransformerConfig
from tests.inspection import hosts
from tests.inspection.memory import SQUARE, peak_at_16384_tokens


@pytest.fixture(autouse=True)
def quiet(one_thread):
    torch.manual_seed(0)


class Direct(nn.Module):
    """Calls SDPA directly, with an output projection, like timm's attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))


def contributions(model, layer, weights, heads, inputs):
    """Compute the vector that each key adds in each head, from the definition: (b, h, q, k, m)."""
    width = model.proj.in_features // heads
    value = model.qkv(inputs).unflatten(-1, (3, heads, width))[:, :, 2].transpose(1, 2)
    projected = torch.einsum("bhke,mhe->bhkm", value, model.proj.weight.unflatten(-1, (heads, width)))
    return weights[..., None] * projected[:, :, None]


def test_norms_equal_the_norms_of_the_vectors():
    model, x = Direct(), torch.randn(2, 5, 12)
    with torch.no_grad(), regard.watch(model, values=True) as seen:
        output = model(x)
        vectors = contributions(model, "", seen[0].dense(), 3, x)
        torch.testing.assert_close(vectors.sum((1, 3)) + model.proj.bias, output)  # they sum to the output
        norms = seen.norms()[""]
        torch.testing.assert_close(norms.dense(), vectors.norm(dim=-1))
        torch.testing.assert_close(norms.summed(), vectors.sum(1).norm(dim=-1))
        torch.testing.assert_close(norms.summed_rows(slice(1, 3)), vectors.sum(1).norm(dim=-1)[:, 1:3])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "deepseek", "t5", "bart", "gpt-oss"])
@pytest.mark.sampled(2)
def test_norms_of_hosts_use_their_output_projection(name):
    """With one key, ‖Σ_j α f(x_j)‖ is the norm of the attention module's own output."""
    model, inputs = hosts.make(name, "sdpa" if name != "gpt-oss" else "eager"), hosts.batch(name, "right")
    with torch.no_grad(), regard.watch(model, values=True) as seen:
        model(**inputs)
    for layer, norms in seen.norms().items():
        value = seen._records[layer].value
        weight = seen._records[layer].projection.weight
        heads = norms.shape[1]
        value = value.repeat_interleave(heads // value.shape[1], 1)
        width = value.shape[-1]
        parts = torch.einsum("bhke,mhe->bhkm", value, weight.unflatten(-1, (heads, width)))
        torch.testing.assert_close(norms.dense(), seen[layer].dense() * parts.norm(dim=-1)[:, :, None])


@pytest.mark.parametrize("batch_first", [True, False])
def test_norms_of_torch_and_regard_agree(batch_first):
    theirs = nn.MultiheadAttention(12, 3, batch_first=batch_first).eval()
    ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 12)
    y = x if batch_first else x.transpose(0, 1)
    with torch.no_grad(), regard.watch(theirs, values=True) as torchs:
        theirs(y, y, y)
    with torch.no_grad(), regard.watch(ours, values=True) as own:
        ours(x)
    torch.testing.assert_close(torchs.norms()[""].dense(), own.norms()[""].dense(), atol=1e-6, rtol=1e-5)


def test_norms_of_some_heads():
    model, x = Direct(), torch.randn(2, 5, 12)
    with (
        torch.no_grad(),
        regard.watch(model, values=True) as seen,
        regard.watch(model, values=True, heads=[2, 0]) as some,
    ):
        model(x)
    torch.testing.assert_close(some.norms()[""].dense(), seen.norms()[""].dense()[:, [2, 0]])


def test_lazy_products_equal_dense_ones():
    model, x = Direct(), torch.randn(2, 7, 12)
    with torch.no_grad(), regard.watch(model, values=True) as seen:
        model(x)
    norms = seen.norms()[""]
    dense, y = norms.dense(), torch.randn(7, 2)
    torch.testing.assert_close(norms @ y, dense @ y)
    torch.testing.assert_close(norms.T @ y, dense.mT @ y)
    torch.testing.assert_close(norms @ y[:, 0], dense @ y[:, 0])
    torch.testing.assert_close(norms.received(), dense.sum(-2))
    torch.testing.assert_close(norms.topk(3).values, dense.topk(3).values)
    torch.testing.assert_close(norms[1, 2, 3], dense[1, 2, 3])
    torch.testing.assert_close(norms[:, 1, 2:5, :4], dense[:, 1, 2:5, :4])
    torch.testing.assert_close(norms.rows(slice(2, 4)).dense(), dense[..., 2:4, :])


def test_topk_of_products_counts_masked_pairs_as_zero():
    query, key = torch.randn(2, 6, 7, 3), torch.randn(2, 2, 7, 3)
    weights = regard.attend(query, key, key, mask=regard.Causal())[1]
    products = WeightProduct(weights, -query.abs(), query.abs()), LowRank(query, -query)
    for product in products:
        dense = product.dense()
        for k, dim in itertools.product((1, 3, 7), (-1, -2)):
            values, indices = product.topk(k, dim)
            torch.testing.assert_close(values, dense.topk(k, dim).values)
            torch.testing.assert_close(dense.gather(dim, indices), values)


def test_products_are_tensor_like():
    x = torch.randn(2, 5, 3)
    product = WeightProduct(regard.attend(x, x, x)[1], x, x)
    dense, y = product.dense(), torch.randn(3, 5)
    torch.testing.assert_close(torch.matmul(y, product), y @ dense)
    torch.testing.assert_close(y[0] @ product, y[0] @ dense)
    torch.testing.assert_close(torch.stack([product, product])[1], dense)
    torch.testing.assert_close(torch.matmul(product.T, y.mT), dense.mT @ y.mT)
    assert product.shape == product.numpy().shape == (2, 5, 5)


def test_norms_without_values_raise():
    model, x = Direct(), torch.randn(2, 5, 12)
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
    with pytest.raises(ArgumentError, match="values=True"):
        seen.norms()
    layer = regard.models.SelfAttention()
    with regard.watch(layer, values=True) as seen:
        layer(torch.eye(3))
    with pytest.raises(ArgumentError, match="project=False"):
        seen.norms()


def test_norms_of_changed_parameters_raise():
    model, x = Direct(), torch.randn(2, 5, 12)
    with torch.no_grad(), regard.watch(model, values=True) as seen:
        model(x)
        model.proj.weight.add_(1)
    with pytest.raises(StaleError, match="output projection"):
        seen.norms()


def test_watching_values_changes_no_output():
    model, x = Direct(), torch.randn(2, 5, 12)
    before = model(x)
    with regard.watch(model, values=True, gradients=True):
        assert torch.equal(model(x), before)


# Gradients


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "t5", "bart", "gpt-oss"])
@pytest.mark.sampled(2)
def test_gradients_equal_those_of_eager(name):
    """transformers' eager attention returns the weights, so autograd computes their gradient densely."""
    model, inputs = hosts.make(name, "eager"), hosts.batch(name, "right")
    with regard.watch(model, gradients=True) as seen:
        output = model(**inputs, output_attentions=True)
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    dense = [w for key in names for w in getattr(output, key, None) or ()]
    for weights in dense:
        weights.retain_grad()
    output.logits.square().sum().backward()
    gradients = list(seen.gradients().values())
    assert len(gradients) == len(dense)
    for weights in dense:
        close = [
            g for g in gradients if g.shape == weights.shape and _relative(g.dense(), weights.grad) < 1e-5
        ]
        assert len(close) == 1
        product = close[0].times_weights()
        assert _relative(product.dense(), weights.grad * weights.detach()) < 1e-5


def _relative(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_gradients_through_sdpa_equal_those_of_eager(name):
    results = []
    for implementation in ("eager", "sdpa"):
        torch.manual_seed(0)
        model, inputs = hosts.make(name, implementation), hosts.batch(name, "right")
        with regard.watch(model, gradients=True) as seen:
            model(**inputs).logits.square().sum().backward()
        results.append({layer: gradient.dense() for layer, gradient in seen.gradients().items()})
    for layer, expected in results[0].items():
        assert _relative(results[1][layer], expected) < 1e-5


def own_models():
    yield "regard", LanguageModel(20, TransformerConfig(width=12, heads=3, layers=2, dropout=0.0))
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
    yield (
        "torch",
        nn.Sequential(nn.Embedding(20, 12), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)),
    )
    yield "torch, last", nn.Sequential(nn.Embedding(20, 12), nn.TransformerEncoderLayer(12, 3, 24, 0.0))


@pytest.mark.parametrize(("kind", "model"), list(own_models()))
def test_gradients_predict_the_change_of_the_loss(kind, model):
    """d loss = Σ dA ∘ ΔA, for a small change ΔA of the weights through `edit`."""
    model, ids = model.double(), torch.randint(0, 20, (2, 6))
    with regard.watch(model, gradients=True) as seen:
        loss = model(ids).square().sum()
    loss.backward()
    gradient = seen.gradients()[seen.name(-1)].dense()
    direction, small = torch.randn_like(gradient) * 1e-6, []
    for sign in (1, -1):
        change = regard.ReplaceWeights(lambda weights, sign=sign: weights + sign * direction)
        with torch.no_grad(), regard.edit(model, -1, None, change):
            small.append(float(model(ids).square().sum()))
    torch.testing.assert_close(
        torch.tensor((small[0] - small[1]) / 2).double(), (gradient * direction).sum(), rtol=1e-4, atol=1e-12
    )


def test_gradients_add_up_and_are_low_rank():
    model, x = Direct(), torch.randn(2, 5, 12)
    with regard.watch(model, gradients=True) as seen:
        loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    once = seen.gradients()[""].dense()
    loss.backward()
    gradients = seen.gradients()[""]
    torch.testing.assert_close(gradients.dense(), 2 * once)
    y = torch.randn(5)
    torch.testing.assert_close(gradients @ y, gradients.dense() @ y, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients.T @ y, gradients.dense().mT @ y, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients[1, 2, 3], gradients.dense()[1, 2, 3])


def test_gradients_without_a_backward_pass_raise():
    model, x = Direct(), torch.randn(2, 5, 12)
    with regard.watch(model, gradients=True) as seen:
        model(x)
    with pytest.raises(ArgumentError, match=r"Call loss\.backward"):
        seen.gradients()
    with torch.no_grad(), regard.watch(model, gradients=True) as seen:
        model(x)
    with pytest.raises(ArgumentError, match="without no_grad"):
        seen.gradients()
    with regard.watch(model, values=True) as seen:
        model(x).sum().backward()
    with pytest.raises(ArgumentError, match="gradients=True"):
        seen.gradients()


def test_relevance_equals_the_dense_product():
    model, ids = hosts.make("bert", "sdpa"), torch.randint(3, 50, (2, 7))
    with regard.watch(model, gradients=True) as seen:
        model(input_ids=ids).logits[:, 0].square().sum().backward()
    expected = torch.eye(7).expand(2, 7, 7)
    for name in seen:
        update = (seen.gradients()[name].dense() * seen[name].dense()).clamp(min=0).mean(1)
        expected = expected + update @ expected
    for queries, rows in ((None, expected.mean(-2)), (3, expected[:, 3]), ([0, -1], expected[:, [0, -1]])):
        torch.testing.assert_close(seen.relevance(queries), rows)
    with pytest.raises(ArgumentError, match="query 7"):
        seen.relevance(7)


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["norms", "relevance", "dense"])
def test_measures_of_16384_tokens_need_no_square_memory(measure):
    lines = """
layer, x = regard.models.MultiHeadAttention(16, 1), torch.randn(1, n, 16)
with regard.watch(layer, gradients=True) as seen:
    layer(x, mask=regard.Causal()).square().sum().backward()
"""
    lines += {
        "norms": "m = seen.norms()['']; m.received(), m.rows(slice(9)).topk(3), m.summed_rows(slice(5))",
        "relevance": "seen.relevance(queries=[-1]), seen.gradients()[''] @ x[0]",
        "dense": "seen.norms()[''].dense()",
    }[measure]
    assert (peak_at_16384_tokens(lines) < SQUARE) == (measure != "dense")
