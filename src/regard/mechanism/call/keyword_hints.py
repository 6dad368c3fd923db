"""Error messages that suggest regard's equivalent of another library's argument."""

import difflib
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch import Tensor

from regard._util.name_hints import as_sentence
from regard.mechanism.normalizers import BUILT_IN

# Names used by torch, flash-attn, x-transformers and Hugging Face transformers.
_EQUIVALENTS = {
    "is_causal": 'mask=regard.Causal(), or Causal(align="start") for torch\'s top-left alignment',
    "causal": "mask=regard.Causal()",
    "attn_mask": "mask= for a boolean tensor (True = may attend), bias= for values added to the scores",
    "attention_mask": "mask=regard.Padding(lengths), or mask=attention_mask[:, None, None, :].bool()",
    "attn_bias": "bias=",
    "position_bias": "bias=",
    "mask_mod": "mask=, with masks combined by & and |",
    **dict.fromkeys(
        ("context_mask", "input_mask"), "mask=regard.Padding(lengths), or a mask of shape (batch, 1, 1, keys)"
    ),
    "key_padding_mask": "mask=regard.Padding(lengths), or mask=~key_padding_mask[:, None, None, :]",
    "dropout_p": "dropout=",
    "attn_dropout": "dropout=",
    "scale": "score=regard.ScaledDot(scale)",
    "scaling": "score=regard.ScaledDot(scaling)",
    "softmax_scale": "score=regard.ScaledDot(softmax_scale)",
    "scale_factor": "score=regard.ScaledDot(scale_factor)",
    **dict.fromkeys(
        ("softcap", "logits_soft_cap", "logit_softcap", "softclamp_value"),
        "score=regard.ScaledDot(softcap=softcap)",
    ),
    "qk_norm": "score=regard.Cosine(scale)",
    **dict.fromkeys(
        ("rotary_emb", "rotary_pos_emb", "rotary", "cos", "sin"),
        "regard.models.RotaryPositions to rotate query and key before the call",
    ),
    "temperature": "normalize=regard.Softmax(temperature)",
    "window_size": "mask=regard.Window(left=left, right=right)",
    "sliding_window": "mask=regard.Window(sliding_window)",
    "local_window_size": "mask=regard.Window(local_window_size)",
    "alibi_slopes": "bias=regard.ALiBi(heads)",
    "score_mod": "regard.flex_attention(query, key, value, score_mod=score_mod), or bias= for an added term",
    "block_mask": "regard.flex_attention(query, key, value, block_mask=block_mask)",
    "need_weights": "output, weights = regard.attend(query, key, value)",
    "return_attn_probs": "output, weights = regard.attend(query, key, value)",
    "output_attentions": "output, weights = regard.attend(query, key, value)",
    "average_attn_weights": 'output, weights = regard.attend(query, key, value); weights.mean("heads")',
    "enable_gqa": "Omit it: the number of query heads may be a multiple of the number of key heads",
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"),
        "mask=regard.Documents(lengths), with lengths = torch.diff(cu_seqlens)",
    ),
    **dict.fromkeys(
        ("max_seqlen", "max_seqlen_q", "max_seqlen_k"), "Omit it: regard.Documents(lengths) is enough"
    ),
    **dict.fromkeys(
        ("lengths", "seqlens", "seq_lens", "cache_seqlens", "kv_lens", "key_lengths"),
        "mask=regard.Padding(lengths)",
    ),
    "window": "mask=regard.Window(window)",
    "head_mask": "with regard.edit(model, layer, heads, regard.ZeroAblation()) to switch off heads",
    **dict.fromkeys(
        ("rel_pos_bias", "rel_pos", "relative_position", "relative_position_bias"),
        "bias=, e.g. regard.T5Bias(heads)",
    ),
    **dict.fromkeys(
        ("past_key_value", "past_key_values", "layer_past", "use_cache", "kv_cache"),
        "regard.models.MultiHeadAttention, called with cache=KVCache()",
    ),
    "alpha": "normalize=regard.Entmax(alpha)",
    "topk": "normalize=regard.Sparsemax() for sparse weights, or weights.topk(k) to read the largest weights",
    "sparse_topk": "normalize=regard.Sparsemax()",
    "sinks": "normalize=regard.Softmax1(sinks)",
    "s_aux": "normalize=regard.Softmax1(s_aux)",
    "p": "dropout=",
    "training": "dropout=0.0 for evaluation",
    **dict.fromkeys(("num_heads", "heads", "n_heads"), "Omit it: heads are axis -3 of the tensors"),
    **dict.fromkeys(("dim_head", "head_dim", "d_k"), "Omit it: the width of a head is the last axis"),
    **dict.fromkeys(
        ("return_weights", "return_attention", "return_attn", "return_attn_weights", "return_lse"),
        "output, weights = regard.attend(query, key, value)",
    ),
    **dict.fromkeys(("activation", "attn_fn", "normalizer"), "normalize="),
    **dict.fromkeys(("flash", "deterministic"), "Omit it: regard.explain names the implementation"),
    **dict.fromkeys(("device", "dtype"), "Omit it, and convert query, key and value with .to()"),
    "backend": "implementation=",
}

# Suggestions for layers in regard.models, where they differ from the suggestions for `attention`.
_WATCH = "with regard.watch(layer) as seen: layer(x); then seen[0]"
_LAYER_EQUIVALENTS = {
    **dict.fromkeys(("need_weights", "output_attentions", "return_attn", "average_attn_weights"), _WATCH),
    **dict.fromkeys(
        ("dropout_p", "dropout", "scale", "softmax_scale"), "dropout= or score= in the constructor"
    ),
    **dict.fromkeys(("past_key_value", "past_key_values", "layer_past", "use_cache"), "cache=KVCache()"),
    **dict.fromkeys(("context", "encoder_hidden_states", "memory"), "the second argument: layer(x, context)"),
}
_NORMALIZERS = {name.lower(): f"{name}()" for name in BUILT_IN}
_MASKS = {
    "causal": "Causal()",
    "padding": "Padding(lengths)",
    "window": "Window(keys)",
    "prefix": "Prefix(length)",
    "documents": "Documents(lengths)",
}


_SCORES = {
    "scaled_dot": "ScaledDot()",
    "cosine": "Cosine()",
    "additive": "Additive(query_width, key_width)",
    "bahdanau": "Additive(query_width, key_width)",
    "general": "General(query_width, key_width)",
    "luong": "General(query_width, key_width)",
    "gaussian": "Gaussian()",
}


def suggest_score(name: object) -> str:
    """Return the code for the score with the given name, or "Dot()" if the name is unknown."""
    return _SCORES.get(name.lower() if isinstance(name, str) else "", "Dot()")


def suggest_normalizer(name: object) -> str:
    """Return the code for the normalizer with the given name, or "Softmax()" if the name is unknown."""
    return _NORMALIZERS.get(name.lower() if isinstance(name, str) else "", "Softmax()")


def suggest_mask(name: object) -> str:
    """Return the code for the mask with the given name, or "Causal()" if the name is unknown."""
    return _MASKS.get(name.lower() if isinstance(name, str) else "", "Causal()")


def raise_unexpected(
    function: str,
    positional: Sequence[object],
    unknown: Mapping[str, object],
    known: Sequence[str] = ("score", "mask", "bias", "normalize", "dropout", "generator", "implementation"),
) -> NoReturn:
    """Raise a TypeError for unexpected arguments.

    known: the keywords that the function accepts.
    """
    if positional:
        mask = "mask=mask" if isinstance(positional[0], Tensor) else "mask=Causal()"
        raise TypeError(
            f"{function} takes query, key and value as positional arguments, but got "
            f"{len(positional)} more ({', '.join(type(x).__name__ for x in positional)}). Pass options by "
            f"name: {mask}."
        )
    name = next(iter(unknown))
    hint = _LAYER_EQUIVALENTS.get(name) if "rotation" in known else None
    hint = hint or _EQUIVALENTS.get(name)
    if hint is None:
        similar = difflib.get_close_matches(name, known, 1)
        hint = f"{similar[0]}=" if similar else f"one of {', '.join(f'{other}=' for other in known)}"
    raise TypeError(f"{function} got an unexpected keyword argument {name!r}. {as_sentence(hint)}")
