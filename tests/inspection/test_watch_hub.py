"""Watched Hugging Face models: outputs do not change, and the weights equal those of eager attention."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.inspection.calls.generation import Generation
from regard.inspection.calls.mask_reading import row_mask
from regard.inspection.hooks.interface_call import parse
from tests.lazy import lazy_import

lazy_import("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {
    **SIZES,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
T5Bias = {
    "vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip


def build(name: str, seed: int = 0) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    window = {**GROUPED, "sliding_window": 4}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "bert": (AutoModel, {**SIZES, "vocab_size": 40}),
        "albert": (AutoModel, {**SIZES, "vocab_size": 40, "embedding_size": 8}),
        "gpt2": (AutoModelForCausalLM, GPT2),
        "llama": (AutoModelForCausalLM, GROUPED),
        "mistral": (AutoModelForCausalLM, window),
        "gemma2": (AutoModelForCausalLM, {**window, "head_dim": 8, "attn_logit_softcapping": 5.0}),
        "gpt_oss": (AutoModelForCausalLM, {**window, "head_dim": 8, **EXPERTS}),
        "t5": (AutoModelForSeq2SeqLM, T5Bias),
        "bart": (AutoModelForSeq2SeqLM, SEQ2SEQ),
        "marian": (AutoModelForSeq2SeqLM, SEQ2SEQ),
    }
    auto, options = kinds[name]
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.for_model(name, **options)).eval()
    for parameter in model.parameters():  # makes the weights far from uniform
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def inputs(model: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 40, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    result = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        result["decoder_input_ids"] = torch.randint(3, 40, (2, 5))
    return result


def attentions(output: Any) -> list[Tensor]:
    if getattr(output, "cross_attentions", None) and getattr(output, "encoder_attentions", None):
        pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
        return [
            *output.encoder_attentions,
            *(weights for pair in pairs for weights in pair),
        ]
    return list(output.attentions)


def generate(model: Any, ids: Tensor, tokens: int, **options: Any) -> Tensor:
    """Generate exactly this many tokens, greedily or with beams."""
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options)


@torch.no_grad()
def assert_eager(model: Any, seen: regard.Seen, min_rows: int | None = None, **full: Tensor) -> None:
    """Check that the weights equal the last rows of one call with eager attention.

    min_rows: compare only the rows that both have, at least this many; the last draft may be longer.
    """
    model.set_attn_implementation("eager")
    expected = attentions(model(**full, output_attentions=True))
    for weights, right in zip(seen.values(), expected, strict=True):
        dense = weights.dense()
        if min_rows is None:
            right = right[..., -dense.shape[-2] :, :]
        else:
            rows = min(dense.shape[-2], right.shape[-2])
            assert rows >= min_rows
            dense, right = (x[..., :rows, :rows] for x in (dense, right))
        torch.testing.assert_close(dense, right, rtol=0, atol=1e-5)


def implementations(model: Any) -> list[str]:
    return ["eager", *(["sdpa"] if model._supports_sdpa else [])]


ALL = ["bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "bart", "marian"]


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_weights_equal_eager_attention(name: str) -> None:
    model = build(name)
    arguments = inputs(model)
    for implementation in implementations(model):
        model.set_attn_implementation(implementation)
        before = model(**arguments)[0]
        with regard.watch(model) as seen:
            during = model(**arguments)[0]
        assert torch.equal(before, during)
        assert_eager(model, seen, **arguments)


def test_self_and_cross_attention_are_distinguished() -> None:
    model = build("bart")
    with torch.no_grad(), regard.watch(model, tokenizer=lambda ids: [f"w{i}" for i in ids]) as seen:
        model(**inputs(model))
    assert [(name.partition(".")[2], seen.kind(name)) for name in seen][:3] == [
        ("encoder.layers.0.self_attn", "self"),
        ("decoder.layers.0.self_attn", "self"),
        ("decoder.layers.0.encoder_attn", "cross"),
    ]
    assert [seen.causal(name) for name in seen][:3] == [False, True, False]
    arguments = inputs(model)
    queries, keys = seen.texts(2, row=1)
    assert queries == [f"w{i}" for i in arguments["decoder_input_ids"][1]]
    assert keys == [f"w{i}" for i in arguments["input_ids"][1]]
    assert seen.texts(0)[0] == seen.tokens == [f"w{i}" for i in arguments["input_ids"][0]]


def test_long_masks_are_stored_as_intervals() -> None:
    model = build("llama")
    ids = torch.randint(3, 40, (2, 64))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad(), regard.watch(model) as seen:
        model(input_ids=ids, attention_mask=mask)
    names = set(seen[0].problem.tensors)
    assert not names & {"allowed0", "bias0"}
    assert {"start0", "stop0"} <= names
    starts = [weights.problem["start0"].data_ptr() for weights in seen.values()]
    assert starts[0] == starts[1]  # read once


def test_layers_are_numbered() -> None:
    model = build("llama")
    cases: list[tuple[Any, list[int]]] = [(0, [0]), ([0, -1], [0, 1]), ("model.layers.1.*", [1])]
    for layers, expected in cases:
        with torch.no_grad(), regard.watch(model, layers=layers) as seen:
            model(**inputs(model))
        assert list(seen) == [f"model.layers.{number}.self_attn" for number in expected]


# Generation


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_oss", "t5", "bart"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.sampled(2)
def test_generation_is_one_map(name: str, cache: str) -> None:
    model = build(name)
    arguments = inputs(model)
    if not model.config.is_encoder_decoder:
        arguments["attention_mask"] = arguments["attention_mask"].flip(-1)  # left padding
    arguments.pop("decoder_input_ids", None)
    options = {
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    for implementation in implementations(model):
        model.set_attn_implementation(implementation)
        before = model.generate(**arguments, **options)
        with regard.watch(model) as seen:
            during = model.generate(**arguments, **options)
        assert torch.equal(before, during)
        full = {"input_ids": during[:, :-1]}
        if model.config.is_encoder_decoder:
            full = {**arguments, "decoder_input_ids": during[:, :-1]}
        else:
            extra = torch.ones(2, 5, dtype=torch.long)
            full["attention_mask"] = torch.cat([arguments["attention_mask"], extra], -1)
            full["position_ids"] = (full["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        model.set_attn_implementation("eager")
        expected = attentions(model(**full, output_attentions=True))
        assert len(seen) == len(expected)
        by_name = sorted(seen, key=lambda n: ("decoder" in n, list(seen).index(n)))
        real = full["attention_mask"].bool() if not model.config.is_encoder_decoder else None
        for entry, right in zip(by_name, expected, strict=True):
            result = seen[entry].dense()
            if real is not None:  # ignore rows of padded queries
                result, right = (w.transpose(1, 2)[real] for w in (result, right))
            torch.testing.assert_close(result, right, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart", "t5"])
@pytest.mark.parametrize("returned", [1, 2])
@pytest.mark.sampled(2)
def test_beam_search_joins_the_rows_of_each_sequence(name: str, returned: int) -> None:
    for seed in range(2):
        model = build(name, seed)
        arguments = inputs(model)
        arguments.pop("decoder_input_ids", None)
        if not model.config.is_encoder_decoder:
            arguments.pop("attention_mask")
        options = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": returned, "do_sample": False}
        model.set_attn_implementation("sdpa")
        before = model.generate(**arguments, **options)
        with regard.watch(model) as seen:
            during = model.generate(**arguments, **options)
        assert torch.equal(before, during)
        model.set_attn_implementation("eager")
        decoder = model.config.is_encoder_decoder
        for number, sequence in enumerate(during):
            ended = [
                i
                for i, token in enumerate(sequence.tolist())
                if token == model.config.eos_token_id and i > 6 * (not decoder)
            ]
            length = ended[0] if ended else len(sequence) - 1
            full: dict[str, Tensor] = {"input_ids": sequence[None, :length]}
            if decoder:
                item = slice(number // returned, number // returned + 1)
                full = {
                    **{k: v[item] for k, v in arguments.items()},
                    "decoder_input_ids": sequence[None, :length],
                }
            expected = attentions(model(**full, output_attentions=True))
            layers = [
                entry
                for entry in seen
                if not ((decoder and "encoder.layers" in entry) or "encoder.block" in entry)
            ]
            rights = expected[-len(layers) :]
            for entry, right in zip(layers, rights, strict=True):
                result = seen[entry][number, :, :length, : right.shape[-1]]
                torch.testing.assert_close(result, right[0], rtol=0, atol=1e-5)


def test_two_reorderings_before_a_step_are_composed() -> None:
    generation = Generation()
    for rows in ([1, 2, 0], [2, 0, 0]):
        generation.on_reorder(torch.tensor(rows))
    generation.on_forward(None)
    (parents,) = generation.parents
    assert parents is not None
    assert parents.tolist() == [0, 1, 1]


@torch.no_grad()
def test_tokens_and_head_table_of_a_generation() -> None:
    model = build("llama")
    ids = torch.tensor([[5, 6, 7, 5, 6, 7]])
    with regard.watch(model, layers=-1, tokenizer=lambda ids: [str(i) for i in ids]) as seen:
        output = generate(model, ids, 4)
    assert seen.texts(0)[0] == [str(i) for i in output[0, :-1].tolist()]
    rows = seen.heads(frame=False)
    assert [(row["layer"], row["head"]) for row in rows] == [
        ("model.layers.1.self_attn", head) for head in range(4)
    ]
    assert all(0 < row["induction"] < 1 for row in rows)
    columns = "layer head label entropy distance first previous same next induction duplicate copying"
    assert list(seen.heads().columns) == [*columns.split(), "retrieval", "sink", "dormant", "streaming"]


@torch.no_grad()
def test_generation_without_a_cache() -> None:
    model = build("llama")
    with regard.watch(model) as seen:
        output = generate(model, torch.tensor([[5, 6, 7]]), 4, use_cache=False)
    assert_eager(model, seen, input_ids=output[:, :-1])


@pytest.mark.parametrize("name", ["bloom", "gptj", "gpt_neo"])
def test_custom_attention_is_seen(name: str) -> None:
    from transformers import AutoConfig, AutoModel

    auto: Any = AutoModel
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "num_layers": 1, "num_heads": 2}
    options = {"attention_types": [[["global"], 1]]} if name == "gpt_neo" else {"n_embd": 16, "rotary_dim": 8}
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(name, **sizes, **options)).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        output = model(torch.tensor([[5, 6, 7]]), output_attentions=True)
    assert [seen.storage(layer) for layer in seen] == ["lazy"] * len(output.attentions)
    for weights, right in zip(seen.values(), output.attentions, strict=True):
        torch.testing.assert_close(weights.dense(), right, rtol=0, atol=1e-6)


def test_everything_is_restored() -> None:
    from transformers.cache_utils import Cache
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    def state() -> list[Any]:
        functions = [
            AttentionInterface.__dict__.get("__getitem__"),
            AttentionInterface.get_interface,
            Cache.update,
        ]
        return [*functions, Cache.reorder_cache, *ALL_ATTENTION_FUNCTIONS.values()]

    before, model = state(), build("llama")
    with pytest.raises(IndexError), regard.watch(model):
        model(torch.tensor([[99]]))
    assert state() == before
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [1, 4, 6])
def test_masks_of_flash_kernels(causal: bool, window: int | None, queries: int) -> None:
    """Causality is aligned to the end, windows are symmetric, and padding has two axes."""
    query, key = torch.randn(2, 1, queries, 4), torch.randn(2, 1, 6, 4)
    padding = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    call = parse(
        "flash_attention_2",
        torch.nn.Identity(),
        query,
        key,
        key,
        padding,
        is_causal=causal,
        sliding_window=window,
    )
    mask = row_mask(call.mask, query, key)
    position, number = torch.arange(queries)[:, None] + 6 - queries, torch.arange(6)
    expected = padding.bool()[:, None, None].expand(2, 1, queries, 6)
    if causal:
        expected = expected & (number <= position)
    if window:
        expected = expected & ((number - position).abs() < window)
    assert mask is not None
    result = (number >= mask.start) & (number < mask.stop)
    assert torch.equal(result.expand_as(expected), expected)


def test_packed_sequences_of_flash_kernels() -> None:
    x, boundaries = torch.randn(1, 1, 5, 4), torch.tensor([0, 2, 5], dtype=torch.int32)
    call = parse("flash_attention_2", torch.nn.Identity(), x, x, x, is_causal=True, cu_seq_lens_k=boundaries)
    mask = row_mask(call.mask, x, x)
    assert mask is not None
    result = (torch.arange(5) >= mask.start) & (torch.arange(5) < mask.stop)
    assert torch.equal(result, regard.Documents([2, 3], within=regard.Causal()).dense(5))


def test_an_assistant_model_has_its_own_cache() -> None:
    model, assistant = build("llama"), build("llama", seed=1)
    ids = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), regard.watch(model) as seen:
        output = generate(model, ids, 7, assistant_model=assistant, eos_token_id=None, pad_token_id=0)
    assert_eager(model, seen, input_ids=output[:, :-1])


def test_modified_sinks_raise() -> None:
    model = build("gpt_oss")
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.tensor([[5, 6, 7]]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.add_(5)
    with pytest.raises(regard.StaleError, match="sink"):
        seen[0].dense()


def test_inference_tensors_are_copied() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)

    model, everything = Model(), torch.ones(4, 4, dtype=torch.bool)
    with torch.inference_mode(), regard.watch(model) as seen:
        x, mask = torch.randn(1, 2, 4, 8) * 1, everything & True
        expected = regard.attend(x.clone(), x.clone(), x)[1].dense()
        model(x, mask)
        model(x, mask.tril_())
        x.mul_(3)
    assert torch.allclose(seen[0].dense(), expected, atol=1e-6)
    assert seen[1].dense().triu(1).abs().max() == 0


def test_rollout_of_a_module_shared_by_all_layers() -> None:
    model = build("albert")
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.tensor([[5, 6, 7, 8]]))
    assert len(seen) > 1
    assert torch.allclose(seen.rollout(), regard.rollout(list(seen.values())), atol=1e-6)


def test_beams_after_a_prompt_of_embeddings() -> None:
    model = build("llama")
    embed = model.get_input_embeddings()
    prompt = embed(torch.randint(3, 40, (2, 5))).detach()
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    with torch.no_grad(), regard.watch(model) as seen:
        generated = model.generate(inputs_embeds=prompt, pad_token_id=0, **options)
    assert_eager(model, seen, inputs_embeds=torch.cat([prompt, embed(generated[:, :-1])], 1))


# Generation with changing keys


def written_with(change: Any, **options: Any) -> tuple[Any, Any, Tensor]:
    """Record a generation that changes its cache after each forward pass."""
    model = build("llama")

    def changed(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        for layer in output.past_key_values.layers:
            change(layer)

    hook = model.register_forward_hook(changed, with_kwargs=True)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    with torch.no_grad(), regard.watch(model) as seen:
        output = generate(model, ids, 5, **options)
    hook.remove()
    return model, seen, output


def prune(layer: Any) -> None:
    if layer.keys.shape[-2] == 8:
        layer.keys, layer.values = (x[..., [0, 2, 4, 6], :] for x in (layer.keys, layer.values))


def change_one_number(layer: Any) -> None:
    layer.keys = layer.keys.clone()
    layer.keys[..., 1, 3] += 1.0


def change_all(layer: Any) -> None:
    layer.keys = (layer.keys * 16).round() / 16


@pytest.mark.parametrize("change", [prune, change_one_number, change_all])
def test_steps_whose_keys_change_are_not_joined(change: Any) -> None:
    _, seen, _ = written_with(change)
    assert len(seen) == 2
    for name in seen:
        with pytest.raises(
            regard.ArgumentError, match=r"cannot join the steps of generate, because .* default cache, or"
        ):
            _ = seen[name]
    assert "model.layers.0.self_attn: not available" in repr(seen)
    with pytest.raises(regard.ArgumentError, match="cannot join the steps"):
        seen.heads()


def test_a_sliding_cache_is_joined() -> None:
    """The keys do not change, so the map is correct: each step attends to four cached keys and its own."""

    def keep_the_last(layer: Any) -> None:
        layer.keys, layer.values = (x[..., -4:, :] for x in (layer.keys, layer.values))

    _, seen, _ = written_with(keep_the_last)
    dense = seen[0].dense()
    assert dense.shape[-2:] == (12, 12)
    torch.testing.assert_close(dense.sum(-1), torch.ones(1, 4, 12))
    for row in range(8, 12):
        assert (dense[..., row, : row - 4] == 0).all()


def test_a_copied_cache_is_joined() -> None:
    def copy(layer: Any) -> None:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    model, seen, output = written_with(copy)
    assert_eager(model, seen, input_ids=output[:, :-1])


def test_quantized_caches_are_not_joined() -> None:
    from transformers import cache_utils

    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version of transformers quantizes caches only with other packages")
    quantized = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    _, seen, _ = written_with(lambda layer: None, **quantized)
    with pytest.raises(regard.ArgumentError, match="the keys of earlier tokens changed before step 2"):
        _ = seen[0]


def test_single_steps_with_a_changing_cache_are_recorded() -> None:
    """As the error message advises, a call outside generate is recorded with the keys it attended to."""
    model = build("llama")
    model.set_attn_implementation("eager")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        for layer in cache.layers:
            change_all(layer)
        with regard.watch(model) as seen:
            output = model(ids[:, 4:], past_key_values=cache, output_attentions=True)
    for weights, right in zip(seen.values(), output.attentions, strict=True):
        torch.testing.assert_close(weights.dense(), right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["falcon", "bloom"])
def test_generation_of_models_with_custom_attention(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    sizes |= {"n_layer": 1, "n_head": 2} if name == "bloom" else {}
    model = auto.from_config(AutoConfig.for_model(name, **sizes, bos_token_id=1, eos_token_id=2)).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        output = generate(model, torch.tensor([[5, 6, 7]]), 4)
    with torch.no_grad(), regard.watch(model) as full:
        model(output[:, :-1])
    assert list(seen) == list(full)
    torch.testing.assert_close(seen[0].dense(), full[0].dense(), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize(
    "options",
    [{"assistant_early_exit": 1}, {"prefill_chunk_size": 3}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
@pytest.mark.sampled(2)
def test_drafts_and_chunks_give_one_map(name: str, options: dict[str, Any]) -> None:
    model = build(name)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    with regard.watch(model) as seen:
        output = generate(model, ids, 8, **options)
    assert_eager(model, seen, min_rows=14, input_ids=output[:, :-1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_cross_attention_alone_joins_the_rows_of_each_sequence(name: str) -> None:
    model = build(name)
    arguments = inputs(model)
    arguments.pop("decoder_input_ids")
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": 3, "do_sample": False}
    alone = "*EncDecAttention" if name == "t5" else "*encoder_attn"
    with regard.watch(model) as full:
        generated = model.generate(**arguments, **options)
    with regard.watch(model, layers=alone) as seen:
        assert torch.equal(model.generate(**arguments, **options), generated)
    assert len(seen) == 2
    for entry in seen:
        assert torch.equal(seen[entry].dense(), full[entry].dense())
        assert len(seen[entry]) == 2


@torch.no_grad()
def test_a_generation_continues_from_a_cache() -> None:
    model = build("llama")
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    cache = model(ids[:, :5], use_cache=True).past_key_values
    with regard.watch(model) as seen:
        output = generate(model, ids, 5, past_key_values=cache)
    assert seen[0].shape[-2:] == (7, 12)
    assert_eager(model, seen, input_ids=output[:, :-1])


@torch.no_grad()
def test_calls_in_other_threads_are_not_steps() -> None:
    model = build("llama")
    ids = torch.tensor([[5, 6, 7]])

    def call_in_thread(input_ids: Tensor, scores: Tensor) -> Tensor:
        with ThreadPoolExecutor() as pool:
            pool.submit(model, torch.tensor([[8, 9]])).result()
        return scores

    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 2}
    with regard.watch(model) as alone:
        generated = model.generate(ids, **options)
    with regard.watch(model) as seen:
        assert torch.equal(model.generate(ids, logits_processor=[call_in_thread], **options), generated)
    assert list(seen) == list(alone)
    for name in seen:
        assert torch.equal(seen[name].dense(), alone[name].dense())
