"""Check `regard.watch` and the regard backend on small random models of Hugging Face architectures.

    python -m benchmarks.architectures [name …]

Compares watched weights with eager's `output_attentions`, and outputs on regard with eager's outputs. Without
names, checks all architectures and writes docs/reference/architectures.md.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from regard._util.files import write_atomic


def _sizes(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# Sizes of the small models; each config uses those that it defines.
SMALL = {
    **_sizes("hidden_size d_model n_embd dim embedding_size word_embed_proj_dim projection_dim", 32),
    **_sizes("intermediate_size d_ff ffn_dim hidden_dim encoder_ffn_dim decoder_ffn_dim", 48),
    **_sizes("n_inner moe_intermediate_size shared_expert_intermediate_size", 24),
    **_sizes("num_hidden_layers n_layer n_layers num_layers num_decoder_layers", 2),
    **_sizes("encoder_layers decoder_layers num_key_value_heads num_experts_per_tok", 2),
    **_sizes("num_attention_heads n_head n_heads num_heads", 4),
    **_sizes("encoder_attention_heads decoder_attention_heads", 4),
    **_sizes("num_local_experts num_experts n_routed_experts", 4),
    **_sizes("head_dim d_kv patch_size", 8),
    **_sizes("vocab_size max_position_embeddings n_positions", 64),
    "image_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SPEECH = {
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
DEEPSEEK = {
    "topk_method": "greedy", "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip


class Case(NamedTuple):
    """An architecture: its model type in transformers, further config options, and its kind of input."""

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012 (never modified)
    modality: str = "text"  # or "pairs", "images", "audio", "spectrogram"


WINDOW = {"sliding_window": 4}
ROTARY = {"rotary_dim": 8}


def cases(names: str, options: dict[str, Any] | None = None, modality: str = "text") -> list[Case]:
    """Create several cases with the same options."""
    return [Case(name, options or {}, modality) for name in names.split()]


CASES = [
    *cases("bert roberta distilbert albert electra camembert xlm-roberta ernie roberta-prelayernorm"),
    *cases("data2vec-text splinter convbert"),
    *cases("modernbert", {"local_attention": 4}),
    *cases("gpt2 gpt_neox opt gpt_bigcode llama qwen2 qwen3 qwen2_moe qwen3_moe"),
    *cases("mistral mixtral gemma3_text gpt_oss", WINDOW),
    *cases("ministral", {**WINDOW, "head_dim": 8}),
    *cases("gemma2", {**WINDOW, "attn_logit_softcapping": 5.0}),
    *cases("gemma phi phi3 cohere cohere2 olmo olmo2 olmoe starcoder2 granite granitemoe glm glm4"),
    *cases("deepseek_v2 deepseek_v3", DEEPSEEK),
    *cases("stablelm smollm3 helium exaone4 arcee biogpt ctrl"),
    *cases("nemotron", {"num_key_value_heads": 2}),
    *cases("t5 mt5", {"is_encoder_decoder": True}, "pairs"),
    *cases("bart marian m2m_100 mbart pegasus blenderbot plbart", {}, "pairs"),
    *cases(
        "whisper", {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}, "spectrogram"
    ),
    *cases("vit deit dinov2 beit ijepa vit_mae clip_vision_model siglip_vision_model", {}, "images"),
    *cases("aimv2_vision_model metaclip_2_vision_model", {}, "images"),
    *cases("clip_text_model aimv2_text_model metaclip_2_text_model"),
    *cases("wav2vec2 hubert", SPEECH, "audio"),
    *cases("falcon bloom mpt xlnet xlm deberta-v2 mpnet xglm"),
    *cases("gptj codegen", ROTARY),
    *cases("gpt_neo", {"attention_types": [[["global"], 2]]}),
]


def build(case: Case, implementation: str | None = None) -> Any:
    """Build the model with fixed random parameters, large enough for clearly non-uniform weights."""
    import transformers
    from transformers import AutoConfig

    default = AutoConfig.for_model(case.name)
    options = {name: value for name, value in SMALL.items() if _settable(default, name)} | case.options
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.name, **options)
    auto: Any = transformers.AutoModel
    if type(config) in auto._model_mapping:
        model = auto.from_config(config, attn_implementation=implementation).eval()
    else:  # the text part of a text-image model
        name = type(config).__name__.removesuffix("Config") + "Model"
        model = getattr(transformers, name)._from_config(config, attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


def _settable(config: Any, name: str) -> bool:
    """Return whether a config has this value as an attribute of its own, not as a derived property."""
    return getattr(config, name, None) is not None and not isinstance(
        getattr(type(config), name, None), property
    )


def inputs(case: Case, model: Any) -> dict[str, Tensor]:
    """Create a batch of two sequences; the first text is padded."""
    torch.manual_seed(1)
    if case.modality == "images":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if case.modality == "audio":
        return {"input_values": torch.randn(2, 400)}
    ids = torch.randint(3, 60, (2, 9))
    target = torch.randint(3, 60, (2, 6))
    if case.modality == "spectrogram":
        return {"input_features": torch.randn(2, 8, 24), "decoder_input_ids": target}
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    return {**batch, "decoder_input_ids": target} if case.modality == "pairs" else batch


def eager_attentions(output: Any) -> dict[str, list[Tensor]]:
    """Return the attentions in an eager output, by their field name."""
    attentions = {}
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        layers = [layer for layer in (getattr(output, name, None) or ()) if isinstance(layer, Tensor)]
        if layers:
            attentions[name] = layers
    return attentions


def watched_attentions(seen: regard.Seen, expected: dict[str, list[Tensor]]) -> dict[str, list[Any]]:
    """Group the watched weights by the same field names."""
    attentions: dict[str, list[Any]] = {name: [] for name in expected}
    for name, weights in seen.items():
        field = "cross_attentions" if seen.kind(name) == "cross" else "attentions"
        if field == "attentions" and "encoder_attentions" in expected:
            field = "decoder_attentions" if "decoder" in name else "encoder_attentions"
        attentions.setdefault(field, []).append(weights)
    return attentions


class Result(NamedTuple):
    """A row of the table."""

    name: str
    kernel: str = ""
    attentions: int = 0
    weights: float | None = None  # largest difference from eager
    same: bool | None = None  # whether watching leaves the output bit-identical
    on_regard: float | None = None  # largest difference from eager's output
    note: str = ""


@torch.no_grad()
def check(case: Case) -> Result:
    """Check one architecture."""
    model = build(case)
    batch = inputs(case, model)
    kernel = model.config._attn_implementation
    torch.manual_seed(2)  # some models mask randomly
    before = model(**batch)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(2)
        with regard.watch(model) as seen:
            during = model(**batch)[0]
    same = bool(torch.equal(before, during))
    if not seen:
        message = next(str(w.message) for w in caught if "although the model ran" in str(w.message))
        classes = message.partition("ran: ")[2].partition(" computes")[0]
        return Result(case.name, kernel, same=same, note=classes)
    eager = build(case, "eager")
    torch.manual_seed(2)
    output = eager(**batch, output_attentions=True)
    expected = eager_attentions(output)
    watched = watched_attentions(seen, expected)
    worst, note = 0.0, ""
    for field, layers in expected.items():
        if len(layers) != len(watched[field]):
            note = f"{len(watched[field])} of {len(layers)} {field}"
        for eager_weights, weights in zip(layers, watched[field], strict=False):
            dense = weights.dense()
            if dense.shape != eager_weights.shape:
                note = f"{field}: shape {tuple(dense.shape)} instead of {tuple(eager_weights.shape)}"
                continue
            worst = max(
                worst, float(_without_padding((dense - eager_weights).abs().amax((1, 3)), batch).max())
            )
    return Result(case.name, kernel, len(seen), worst, same, _on_regard(model, batch, output[0]), note)


def _without_padding(x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Remove padding from (b, n): implementations differ there, without effect on the result."""
    mask = batch.get("attention_mask")
    return x[mask.bool()] if mask is not None and mask.shape == x.shape else x


def _on_regard(model: Any, batch: dict[str, Tensor], expected: Tensor) -> float | None:
    try:
        regard.huggingface.enable()
        model.set_attn_implementation("regard")
        if model.config._attn_implementation != "regard":
            return None
        torch.manual_seed(2)
        return float(_without_padding((model(**batch)[0] - expected).abs().flatten(2).amax(-1), batch).max())
    except (AttributeError, ValueError) as error:
        print(f"  on regard: {str(error)[:150]}", file=sys.stderr)
        return None


def try_check(check: Callable[[Case], Result], case: Case) -> Result:
    """Return the result, or the exception as a note."""
    try:
        return check(case)
    except Exception as error:
        return Result(case.name, note=f"failed: {type(error).__name__}: {str(error)[:120]}")


def render_page(results: list[Result]) -> str:
    """Render docs/reference/architectures.md."""
    import transformers

    watchable = [r for r in results if r.weights is not None]
    own = [r for r in results if r.weights is None and not r.note.startswith("failed")]
    lines = [
        "# Hugging Face architectures",
        "",
        f"Generated by `python -m benchmarks.architectures` with transformers {transformers.__version__} and "
        f"torch {torch.__version__}: small models with random parameters, float32, a padded batch of two "
        "sequences; padding is not compared.",
        "",
        "*weights*: largest difference between the weights recorded by `regard.watch`, while the model runs "
        "its own kernel, and eager's `output_attentions`. *output unchanged*: whether the watched output is "
        'bit-identical. *on regard*: largest difference between outputs of `attn_implementation="regard"` '
        "and of eager; empty for models that call SDPA directly (use `regard.patch()`).",
        "",
        f"{len(watchable)} architectures can be watched:",
        "",
        "| architecture | watched on | attentions | weights | output unchanged | on regard |",
        "|---|---|---:|---:|---|---:|",
    ]
    for r in watchable:
        on_regard = "" if r.on_regard is None else f"{r.on_regard:.0e}"
        same = "yes" if r.same else "no"
        note = f" ({r.note})" if r.note else ""
        lines.append(
            f"| {r.name}{note} | {r.kernel} | {r.attentions} | {r.weights:.0e} | {same} | {on_regard} |"
        )
    lines += [
        "",
        "These implement attention in their own code and cannot be watched; `watch` warns about them:",
        "",
    ]
    lines += [f"- {r.name}: {r.note}" for r in own]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="architectures", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model types [default: all]")
    names = parser.parse_args().names
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    results = []
    for case in CASES:
        if not names or case.name in names:
            results.append(try_check(check, case))
            print(*results[-1], sep="\t", flush=True)
    wrong = [
        r
        for r in results
        if r.weights is not None and (r.weights > 1e-5 or not r.same or (r.on_regard or 0) > 1e-4)
    ]
    failed = [r for r in results if r.note.startswith("failed")]
    if not names:
        print(write_atomic("docs/reference/architectures.md", render_page(results).encode()))
    if wrong or failed:
        sys.exit(f"wrong: {', '.join(r.name for r in wrong)}; failed: {', '.join(r.name for r in failed)}")


if __name__ == "__main__":
    main()
