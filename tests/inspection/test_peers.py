"""Other tools given lazy weights, or run inside `watch`. Tests are skipped if a package is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from tests.lazy import lazy_import

transformers = lazy_import("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # the other packages' own warnings

IDS = torch.tensor([[4, 5, 6, 7, 8, 5, 6]])
TOKENS = [f"word {i}" for i in IDS[0].tolist()]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 19, "n_positions": 32}
    config = transformers.GPT2Config(
        **sizes, bos_token_id=0, eos_token_id=1, pad_token_id=2, architectures=["GPT2LMHeadModel"]
    )
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = "<s> </s> <pad> <unk> the cat sat on a mat and dog ran off to see it now then".split()  # noqa: SIM905
    level = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(level)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


@pytest.fixture
def seen(model: Any) -> regard.Seen:
    with torch.no_grad(), regard.watch(model) as seen:
        model(IDS)
    return seen


def eager(model: Any) -> tuple[Tensor, ...]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(IDS, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return weights


def hosted(model: Any) -> tuple[regard.Weights, ...]:
    regard.huggingface.enable()
    model.set_attn_implementation("regard")
    with torch.no_grad():
        return model(IDS, output_attentions=True).attentions


@pytest.mark.parametrize("view", ["head_view", "model_view"])
@pytest.mark.parametrize("source", ["watched", "hosted"])
def test_bertviz_draws_lazy_weights(view, source, model, seen):
    bertviz = pytest.importorskip("bertviz")
    from bertviz.util import format_attention

    weights = list(seen.values()) if source == "watched" else hosted(model)
    stacked = format_attention(weights)
    torch.testing.assert_close(stacked, torch.cat(eager(model)), rtol=0, atol=1e-6)
    page = getattr(bertviz, view)(attention=weights, tokens=TOKENS, html_action="return").data
    assert json.dumps(stacked.tolist()) in page
    part = getattr(bertviz, view)(weights, TOKENS, html_action="return", include_layers=[1]).data
    assert json.dumps(stacked[1:].tolist()) in part


def test_circuitsvis_draws_dense_weights(seen):
    circuitsvis = pytest.importorskip("circuitsvis")
    weights = seen[1].batch(0)
    for draw in (circuitsvis.attention.attention_heads, circuitsvis.attention.attention_patterns):
        page = str(draw(attention=weights.dense(), tokens=TOKENS))
        assert json.dumps(weights.tolist()) in page


def test_inseq_attributes_with_the_weights_of_a_hosted_model(model, tokenizer):
    inseq = pytest.importorskip("inseq")
    regard.huggingface.enable()
    scores = {}
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        attribution = inseq.load_model(model, "attention", tokenizer=tokenizer)
        result = attribution.attribute("the cat sat on", "the cat sat on a mat", show_progress=False)
        scores[implementation] = result.sequence_attributions[0].target_attributions
    assert scores["regard"].nan_to_num().sum() > 1
    torch.testing.assert_close(scores["regard"], scores["eager"], rtol=0, atol=1e-6, equal_nan=True)


def test_nnsight_traces_are_watched(model, seen):
    nnsight = pytest.importorskip("nnsight")
    network = nnsight.NNsight(model)
    with torch.no_grad(), regard.watch(model) as traced, network.trace(IDS):
        hidden = nnsight.save(network.transformer.h[0].output)
    assert len(hidden)
    assert list(traced) == list(seen)
    assert torch.equal(traced[1].dense(), seen[1].dense())


def test_transformer_lens_bridges_are_watched(model, tokenizer, tmp_path):
    pytest.importorskip("transformer_lens")
    from transformer_lens.model_bridge import TransformerBridge

    model.save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(
        str(tmp_path), device="cpu", hf_model=model, tokenizer=tokenizer
    )
    with torch.no_grad(), regard.watch(bridge) as seen:
        _, cache = bridge.run_with_cache(IDS)
    assert len(seen) == 2
    for layer in range(2):
        torch.testing.assert_close(seen[layer].dense(), cache["pattern", layer], rtol=0, atol=1e-6)


def test_kvpress_scores_keys_by_observed_attention(model, seen):
    presses = pytest.importorskip("kvpress.presses.observed_attention_press")
    press, module = presses.ObservedAttentionPress(0.5), model.transformer.h[0].attn
    keys = torch.zeros(1, 4, IDS.shape[1], 8)
    scores = press.score(module, None, keys, keys, seen[0], {})
    torch.testing.assert_close(scores, press.score(module, None, keys, keys, eager(model)[0], {}))
