"""Spans, key scores and value zeroing, compared with dense computations."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError
from regard.inspection import key_scores, value_zeroing
from regard.models import LanguageModel, Transformer, TransformerConfig
from tests.cases import looped
from tests.inspection import hosts
from tests.inspection.memory import SQUARE, peak_at_16384_tokens

SPANS = {"question": (0, 2), "document": slice(2, None)}


@pytest.fixture(autouse=True)
def quiet(one_thread):
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# Spans


def test_spans_equal_sums_of_dense_weights():
    model, ids = hosts.make("llama", "sdpa"), torch.randint(3, 50, (2, 7))
    with regard.watch(model) as seen:
        model(input_ids=ids)
    table = seen.spans(SPANS, frame=False)
    assert len(table) == len(seen) * 4 * 4
    for row in table:
        dense = seen[row["layer"]].dense()[:, row["head"]]
        chosen = (SPANS[row[side]] for side in ("queries", "keys"))
        rows, keys = (slice(*span) if isinstance(span, tuple) else span for span in chosen)
        expected = float(dense[:, rows, keys].sum(-1).mean())
        assert row["weight"] == pytest.approx(expected, abs=1e-6)


def test_spans_that_cover_everything_sum_to_one():
    model, ids = hosts.make("bert", "sdpa"), torch.randint(3, 50, (1, 7))
    with regard.watch(model) as seen:
        model(input_ids=ids)
    totals = {}
    for row in seen.spans(SPANS, frame=False):
        key = row["layer"], row["head"], row["queries"]
        totals[key] = totals.get(key, 0) + row["weight"]
    assert list(totals.values()) == pytest.approx([1.0] * len(totals))


def test_spans_of_cross_attention_select_keys():
    model = Transformer(50, TransformerConfig(width=16, heads=4, layers=1), share=True).eval()
    with regard.watch(model, layers="decoder.blocks.0.cross") as seen:
        model(torch.randint(3, 50, (1, 7)), torch.randint(3, 50, (1, 3)))
    rows = seen.spans(SPANS, frame=False)
    assert {row["queries"] for row in rows} == {"(all)"}
    expected = seen[0].dense()[0, 1, :, :2].sum(-1).mean()
    assert rows[2]["weight"] == pytest.approx(float(expected))


def test_spans_of_cached_queries():
    """The queries are the last tokens: a span before them contains none."""
    x = torch.randn(2, 5, 4)
    weights = regard.attend(x[:, 3:], x, x, mask=regard.Causal())[1]
    rows = list(regard.inspection.measures.spans.span_rows(weights, {"old": (0, 3), "new": (3, 5)}))
    assert {row["queries"] for row in rows} == {"new"}
    assert rows[0]["weight"] == pytest.approx(float(weights.dense()[0, :, :3].sum(-1).mean()))


@pytest.mark.parametrize("span", [(0, 9), (3, 3), (-1, 2), slice(0, 4, 2)])
def test_wrong_spans_raise(span):
    layer = regard.models.SelfAttention()
    with regard.watch(layer) as seen:
        layer(torch.eye(4))
    with pytest.raises(ArgumentError, match="spans: 'a'"):
        seen.spans({"a": span})


# Key scores


def grouped(heads=4, groups=2, n=40):
    query, key = torch.randn(3, heads, n, 8), torch.randn(3, groups, n, 8)
    weights = regard.attend(query, key, key, mask=regard.Causal())[1]
    return weights, weights.dense()


def test_h2o_is_the_accumulated_weight():
    weights, dense = grouped()
    expected = dense.sum(-2).unflatten(1, (2, 2)).mean(2)
    torch.testing.assert_close(key_scores(weights, "h2o"), expected)


def test_tova_is_the_last_row_averaged_over_heads():
    weights, dense = grouped()
    expected = dense[:, :, -1].mean(1, keepdim=True).expand(3, 2, 40)
    torch.testing.assert_close(key_scores(weights, "tova"), expected)


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_snapkv_pools_the_observation_window(pooling):
    weights, dense = grouped()
    received = dense[:, :, -8:, :-8].mean(-2).flatten(0, 1)
    pool = F.avg_pool1d if pooling == "mean" else F.max_pool1d
    expected = pool(received[:, None], 3, stride=1, padding=1).reshape(3, 2, 2, 32).mean(2)
    scores = key_scores(weights, "snapkv", window=8, kernel_size=3, pooling=pooling)
    torch.testing.assert_close(scores[..., :-8], expected)
    assert bool(scores[..., -8:].isinf().all())


def test_keys_of_a_watched_model_are_scored():
    model, ids = hosts.make("llama", "sdpa"), torch.randint(3, 50, (2, 9))
    with regard.watch(model) as seen:
        model(input_ids=ids)
    for name, scores in seen.key_scores("h2o").items():
        torch.testing.assert_close(scores, seen[name].dense().sum(-2).unflatten(1, (2, 2)).mean(2))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lru"},
        {"method": "snapkv", "window": 40},
        {"method": "snapkv", "window": 8, "kernel_size": 4},
        {"method": "snapkv", "window": 8, "pooling": "sum"},
    ],
)
def test_wrong_options_of_key_scores_raise(options):
    with pytest.raises(ArgumentError, match="key_scores got"):
        key_scores(grouped()[0], **options)


# Value zeroing


def test_value_zeroing_equals_zeroed_values():
    """Value zeroing equals replacing one value by zero through a hook on the layer's projection."""
    model, ids = hosts.make("bert", "eager"), torch.randint(3, 50, (2, 5))
    changes = value_zeroing(model, {"input_ids": ids})
    blocks = [m for name, m in model.named_modules() if name.endswith(("layer.0", "layer.1"))]
    assert len(changes) == len(blocks) == 2
    for block, change in zip(blocks, changes.values(), strict=True):
        outputs = {}
        for key in (None, *range(5)):

            def zero(module, args, output, key=key):
                output = output.clone()
                if key is not None:
                    output[:, key] = 0.0
                return output

            # only the output of this layer is used, so later layers do not matter
            hooks = [
                block.attention.self.value.register_forward_hook(zero),
                block.register_forward_hook(
                    lambda m, a, out, key=key, into=outputs: into.__setitem__(key, out)
                ),
            ]
            model(input_ids=ids)
            for hook in hooks:
                hook.remove()
        hidden = {k: out[0] if isinstance(out, tuple) else out for k, out in outputs.items()}
        expected = [1 - F.cosine_similarity(hidden[None], hidden[key], dim=-1) for key in range(5)]
        torch.testing.assert_close(change, torch.stack(expected, -1), atol=1e-6, rtol=1e-4)


def test_value_zeroing_of_causal_models_is_triangular():
    model = LanguageModel(50, TransformerConfig(width=16, heads=4, layers=2)).eval()
    for change in value_zeroing(model, torch.randint(3, 50, (2, 6))).values():
        assert change.shape == (2, 6, 6)
        assert bool((change.triu(1).abs() < 1e-6).all())
        assert bool((change.diagonal(dim1=-2, dim2=-1) > 1e-6).all())


def test_value_zeroing_of_some_keys_and_layers():
    model = LanguageModel(50, TransformerConfig(width=16, heads=4, layers=2)).eval()
    ids = torch.randint(3, 50, (2, 6))
    whole, part = value_zeroing(model, ids), value_zeroing(model, ids, -1, keys=[4, 1])
    assert list(part) == list(whole)[-1:]
    torch.testing.assert_close(part[next(iter(part))], whole[next(iter(part))][..., [4, 1]])


def test_value_zeroing_of_direct_calls():
    class Direct(nn.Module):
        def forward(self, x):
            return x + F.scaled_dot_product_attention(x, x, x)

    changes = value_zeroing(nn.Sequential(Direct(), Direct()), torch.randn(1, 2, 5, 4))
    assert [change.shape for change in changes.values()] == [(1, 2, 5, 5)] * 2


@looped("name", ["gpt2", "t5"])
def test_value_zeroing_reads_whole_layers_without_caches(name):
    """Compared with a run on zeroed values. GPT-2 passes its cache by position; T5 nests layers in lists."""
    model, inputs = hosts.make(name, "eager"), hosts.batch(name, size=2, length=6)
    changes = value_zeroing(model, inputs)
    assert len(changes) == {"gpt2": 2, "t5": 6}[name]
    for layer, change in changes.items():
        block = model.get_submodule(".".join(layer.split(".")[:3]))
        keys = (
            inputs["input_ids"]
            if "decoder" not in layer or "EncDec" in layer
            else inputs["decoder_input_ids"]
        )
        before = _output(model, inputs, block)
        for key in range(keys.shape[1]):
            with regard.edit(model, layer, None, regard.ZeroValues(key)):
                after = _output(model, inputs, block)
            torch.testing.assert_close(change[..., key], 1 - F.cosine_similarity(before, after, dim=-1))
        assert change.shape[-1] == keys.shape[1]


def _output(model, inputs, block):
    outputs = []
    hook = block.register_forward_hook(lambda _, args, output: outputs.append(output))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]


def test_value_zeroing_of_windows_and_caches_raises():
    class Windows(nn.Module):
        def forward(self, x):
            windows = x.unflatten(1, (2, -1)).flatten(0, 1).unsqueeze(1)
            return F.scaled_dot_product_attention(windows, windows, windows).reshape(x.shape)

    with pytest.raises(ArgumentError, match="has 3 queries per call, but its layer returns 6 tokens"):
        value_zeroing(nn.Sequential(Windows()), torch.randn(2, 6, 4))
    model = hosts.make("gpt2", "sdpa")
    cache = model(torch.tensor([[5, 6]]), use_cache=True).past_key_values
    with pytest.raises(ArgumentError, match="'past_key_values'"):
        value_zeroing(model, {"input_ids": torch.tensor([[7]]), "past_key_values": cache})


@pytest.mark.slow
def test_tables_of_16384_tokens_need_no_square_memory():
    lines = """
query, key = torch.randn(1, 1, n, 16), torch.randn(1, 1, n, 16)
layer = torch.nn.Identity()
seen = regard.Seen()
seen.add("layer", regard.attend(query, key, key, mask=regard.Causal())[1])
seen._texts.calls.append(regard.inspection.recordings.texts.CallTokens(torch.randint(0, 500, (1, n))))
seen.heads(frame=False), seen.spans({"all": (0, n)}, frame=False)
[seen.key_scores(method) for method in ("h2o", "snapkv", "tova")]
"""
    assert peak_at_16384_tokens(lines) < SQUARE / 2


def test_value_zeroing_requires_batch_first() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False).eval()
    with pytest.raises(ArgumentError, match="Create the model with batch_first=True"):
        value_zeroing(model, torch.randn(4, 4, 8))
