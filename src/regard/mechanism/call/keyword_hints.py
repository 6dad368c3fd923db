"""Arguments as other libraries spell them: errors that name the spelling of regard."""

import difflib
from collections.abc import Mapping, Sequence
from typing import NoReturn

# As in torch, flash-attn, x-transformers and Hugging Face transformers.
_ELSEWHERE = {
    "is_causal": 'mask=regard.Causal(), or Causal(align="start") for torch\'s top-left rule',
    "causal": "mask=regard.Causal()",
    "attn_mask": "mask= for a boolean tensor (True = may look), bias= for numbers added to the scores",
    "attention_mask": "mask=regard.Padding(lengths), or mask=attention_mask[:, None, None, :].bool()",
    "attn_bias": "bias=",
    "position_bias": "bias=",
    "block_mask": "mask=, with masks combined by & and |",
    "mask_mod": "mask=, with masks combined by & and |",
    "key_padding_mask": "mask=regard.Padding(lengths), or mask=~key_padding_mask[:, None, None, :]",
    "dropout_p": "dropout=",
    "attn_dropout": "dropout=",
    "scale": "score=regard.ScaledDot(scale)",
    "scaling": "score=regard.ScaledDot(scaling)",
    "softmax_scale": "score=regard.ScaledDot(softmax_scale)",
    "softcap": "score=regard.ScaledDot(softcap=softcap)",
    "temperature": "normalize=regard.Softmax(temperature)",
    "window_size": "mask=regard.Window(left=left, right=right)",
    "sliding_window": "mask=regard.Window(sliding_window)",
    "alibi_slopes": "bias=regard.ALiBi(heads)",
    "score_mod": "score= for a function of (query, key), or bias= for what is added to the scores",
    "need_weights": "output, weights = regard.attend(query, key, value)",
    "return_attn_probs": "output, weights = regard.attend(query, key, value)",
    "output_attentions": "output, weights = regard.attend(query, key, value)",
    "average_attn_weights": 'output, weights = regard.attend(query, key, value); weights.mean("heads")',
    "enable_gqa": "nothing: the query may have a multiple of the key's heads",
    "cu_seqlens": "mask=regard.Documents(lengths)",
    "normalizer": "normalize=",
    "backend": "implementation=",
}

_NORMALIZERS = {
    name.lower(): f"{name}()"
    for name in ("Softmax", "Softmax1", "Entmax", "Entmax15", "Sparsemax", "Mean", "Relu", "Sigmoid", "Hard")
}
_MASKS = {
    "causal": "Causal()",
    "padding": "Padding(lengths)",
    "window": "Window(keys)",
    "prefix": "Prefix(length)",
    "documents": "Documents(lengths)",
}


def normalizer(normalize: object) -> str:
    """The normalizer that a name stands for, as code; Softmax() if none is known."""
    known = _NORMALIZERS.get(normalize.lower()) if isinstance(normalize, str) else None
    return known or "Softmax()"


def mask(given: object) -> str:
    """The mask that a name stands for, as code; Causal() if none is known."""
    known = _MASKS.get(given.lower()) if isinstance(given, str) else None
    return known or "Causal()"


def refuse(function: str, positional: Sequence[object], unknown: Mapping[str, object]) -> NoReturn:
    """Raise a TypeError for arguments that a function does not take."""
    if positional:
        raise TypeError(
            f"{function} takes query, key and value by position and got {len(positional)} more "
            f"({', '.join(type(x).__name__ for x in positional)}). Name the others: mask=regard.Causal()."
        )
    name = next(iter(unknown))
    spelled = _ELSEWHERE.get(name)
    if spelled is None:
        known = ("score", "mask", "bias", "normalize", "dropout", "generator", "implementation")
        near = difflib.get_close_matches(name, known, 1)
        spelled = f"{near[0]}=" if near else f"one of {', '.join(f'{other}=' for other in known)}"
    raise TypeError(f"{function} got an unexpected keyword argument {name!r}. Use {spelled}.")
