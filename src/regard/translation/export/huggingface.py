"""Export to Hugging Face format: config.json, model.safetensors, generation_config.json and a tokenizer.

A model trained by regard becomes a Marian model (post-norm) or a Pegasus model (pre-norm), both with
MarianTokenizer. Unlike regard, both order sinusoidal features as all sines, then all cosines. The model
dimension is permuted accordingly, which does not change the output. A pretrained model keeps its format.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from regard._util.extras import installed_version
from regard._util.files import read_regular, write_atomic
from regard.translation.export.plan import MAX_POSITIONS, SUPPRESSED, Plan, write_json
from regard.translation.pretrained.families.bart import SHARED, SOURCE, TARGET, map_stacks
from regard.translation.pretrained.layout import Layout
from regard.translation.pretrained.loader import PretrainedFolder
from regard.translation.pretrained.settings import CONFIG, GENERATION

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
_MAX_FILE_BYTES = 1 << 28
MODEL = "model.safetensors"


def export_huggingface(plan: Plan, folder: Path, origin: PretrainedFolder | None) -> None:
    """Write a folder that `AutoModelForSeq2SeqLM.from_pretrained` can load.

    origin: the pretrained folder that the model comes from, if any.
    """
    if origin is None:
        _export_own(plan, folder)
    else:
        _export_pretrained(plan, folder, origin)


def _export_pretrained(plan: Plan, folder: Path, origin: PretrainedFolder) -> None:
    """Write a pretrained model with its original tensor names and files."""
    layout, state = origin.layout, plan.model.state_dict()
    tensors: dict[str, Tensor] = {}
    for ours, theirs, shape in layout.parameters():
        tensor = state[ours]
        if ours.endswith(".positions.vectors"):
            tensor = torch.cat([tensor.new_zeros(layout.position_offset, tensor.shape[1]), tensor])
        parts = tensor.reshape(len(theirs) * shape[0], *shape[1:]).split(shape[0])
        tensors |= dict(zip(theirs, parts, strict=True))
    for path in origin.files():
        write_atomic(folder / path.name, read_regular(path, _MAX_FILE_BYTES))
    names = layout.embeddings
    if names.shared and not (layout.share and layout.tie_output):  # transformers then reads every matrix
        tensors |= {name: tensors[found].clone() for name, found in names.find(tensors).items()}
        write_json(folder / CONFIG, {**origin.choice.config.values, **_untied(layout)})
    _write_tensors(folder, tensors)
    generation = dict(origin.choice.generation.values)
    write_json(folder / GENERATION, generation | _alignment(plan))


def _untied(layout: Layout) -> dict[str, Any]:
    """Return the settings with which every version of transformers reads separate embedding matrices."""
    scale = {"scale_decoder_outputs": layout.output_scale != 1} if layout.family == "t5" else {}
    return {"tie_word_embeddings": False, **scale}


def _export_own(plan: Plan, folder: Path) -> None:
    _check(plan)
    config, decoder = plan.configs
    marian = not config.norm_first
    special, size = plan.tokens.special, len(plan.model.output_weight)
    shared = plan.model.source_embedding is None
    if not marian:
        plan.require("tokens.shared", shared, True)
    settings: dict[str, Any] = {
        "architectures": ["MarianMTModel" if marian else "PegasusForConditionalGeneration"],
        "model_type": "marian" if marian else "pegasus",
        "tokenizer_class": "MarianTokenizer",
        "is_encoder_decoder": True,
        "vocab_size": len(plan.tokens.source),
        "d_model": config.width,
        "max_position_embeddings": MAX_POSITIONS,
        "activation_function": _ACTIVATIONS[config.activation],
        "dropout": config.dropout,
        "attention_dropout": config.resolved_attention_dropout,
        "activation_dropout": config.resolved_activation_dropout,
        "scale_embedding": config.scale_embedding,
        "pad_token_id": special.padding,
        "bos_token_id": special.start,
        "eos_token_id": special.end,
        "decoder_start_token_id": special.start,
        "forced_eos_token_id": None,
        "tie_word_embeddings": plan.model.matrix is None,
        "dtype": "float32",
    }
    if marian:
        settings |= {"decoder_vocab_size": size, "share_encoder_decoder_embeddings": shared}
    for side, part in (("encoder", config), ("decoder", decoder)):
        settings |= {
            f"{side}_layers": part.layers,
            f"{side}_attention_heads": part.heads,
            f"{side}_ffn_dim": part.resolved_ffn_dim,
        }
    write_json(folder / CONFIG, settings)
    write_json(
        folder / GENERATION,
        {
            "pad_token_id": special.padding,
            "bos_token_id": special.start,
            "eos_token_id": special.end,
            "decoder_start_token_id": special.start,
            "bad_words_ids": [[token] for token in special.never_generated],
            "max_length": MAX_POSITIONS // 4,
            "num_beams": 5,
            **_alignment(plan),
        },
    )
    _write_tokenizer(plan, folder)
    _write_tensors(folder, dict(_own_tensors(plan)))


def _check(plan: Plan) -> None:
    for config in plan.configs:
        plan.require("positions", config.positions, "sinusoidal")
        plan.require("sinusoids", config.sinusoids, "interleaved", "concatenated")
        plan.require("norm", config.norm, "layer")
        plan.require("eps", config.eps, 1e-5)
        plan.require("activation", config.activation, *_ACTIVATIONS)
        plan.require("linear_bias", config.linear_bias, True)
        plan.require("embedding_norm", config.embedding_norm, False)
        plan.require("scale_scores", config.scale_scores, True)
        plan.require("heads * head_width", config.resolved_head_width * config.heads, config.width)
        plan.require("width % 2", config.width % 2, 0)


def _own_tensors(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under Marian's names, with the features in Marian's order."""
    model, config = plan.model, plan.configs[0]
    state = model.state_dict()
    width = config.width
    order = torch.arange(width)
    if config.sinusoids == "interleaved":
        order = torch.cat([order[0::2], order[1::2]])
    for ours, theirs, shape in map_stacks(*plan.configs):
        tensor = _permute(ours, state[ours], order)
        for name, part in zip(theirs, tensor.split(shape[0]), strict=True):
            yield name, part.contiguous()
    shared = model.source_embedding is None
    if shared:
        # without tied output, transformers reads a separate copy for each side
        for name in [SHARED] if model.matrix is None else [SHARED, SOURCE, TARGET]:
            yield name, state["embedding.weight"][:, order].contiguous()
    else:
        yield SOURCE, state["source_embedding.weight"][:, order].contiguous()
        yield TARGET, state["embedding.weight"][:, order].contiguous()
    if model.matrix is not None:
        yield "lm_head.weight", state["matrix"][:, order].contiguous()
    for side in ("encoder", "decoder"):
        table = torch.from_numpy(plan.positions(side))
        yield f"model.{side}.embed_positions.weight", table[:, order].contiguous()
    bias = torch.from_numpy(plan.output_bias())
    yield "final_logits_bias", torch.where(bias <= SUPPRESSED, 0.0, bias)[None]


def _permute(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """Reorder the model dimension of a parameter, such as the input of in_proj or the output of out_proj."""
    if ".in_proj." in name:
        return tensor[:, order] if tensor.dim() == 2 else tensor
    return tensor[order]


def _alignment(plan: Plan) -> dict[str, Any]:
    layer, heads = plan.alignment()
    return {"alignment_heads": [[layer, head] for head in heads]}


def _write_tokenizer(plan: Plan, folder: Path) -> None:
    """Write the MarianTokenizer files."""
    for side in ("source", "target"):
        write_atomic(folder / f"{side}.spm", getattr(plan.tokens, side).content)
    separate = not plan.tokens.shared
    vocabularies = {"vocab.json": "source"} | ({"target_vocab.json": "target"} if separate else {})
    for name, side in vocabularies.items():
        write_json(folder / name, {piece: i for i, piece in enumerate(plan.pieces(side))})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "MarianTokenizer",
            "separate_vocabs": separate,
            "unk_token": "<unk>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": MAX_POSITIONS,
        },
    )


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    content = {name: tensor.float().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(folder / MODEL, save(content, metadata={"format": "pt", "regard": installed_version()}))
