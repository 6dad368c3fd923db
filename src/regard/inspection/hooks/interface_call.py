"""Parse calls to the attention interface of transformers.

Used by `watch`, `edit` and attn_implementation="regard". An attention function has this signature:

    function(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **keywords)

Each model passes the keywords it needs and forwards those of its caller; functions ignore keywords that they
do not use. To support a new keyword, add a field to `InterfaceCall`.
"""

import inspect
import sys
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard._util.text import type_name
from regard.errors import ArgumentError
from regard.inspection.calls.mask_reading import compact
from regard.mechanism.masks.algebra import Mask, as_mask
from regard.mechanism.masks.by_length import Documents
from regard.mechanism.masks.by_position import Causal, Rule, Window

_PARSED = """
    module query key value attention_mask dropout scaling is_causal softcap s_aux position_bias sliding_window
    cu_seq_lens_q cu_seq_lens_k indices block_indices position_ids output_attentions cache
"""
_WITHOUT_EFFECT = """
    max_length_q max_length_k deterministic kernel_options use_cache training cache_position target_dtype
    args kwargs options keywords
"""
_KNOWN = frozenset(f"{_PARSED} {_WITHOUT_EFFECT}".split())


class InterfaceCall(NamedTuple):
    """The arguments of a call, as interpreted by the implementation that runs it."""

    query: Tensor  # b h q d
    key: Any  # b g k d; a tensor, or Quantized
    value: Any  # b g k e
    mask: Any = None  # a boolean or additive tensor, a regard mask, or a FlexAttention BlockMask
    causal: bool = False  # whether a call without a mask is causal, aligned to the first key
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0


def parse(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> InterfaceCall:
    """Parse the arguments of an attention function.

    implementation: "sdpa", "flash_attention_2", …, or "eager" for the model's own function.

    >>> import torch
    >>> from regard.inspection.hooks.interface_call import parse
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> parse("sdpa", torch.nn.Identity(), x, x, x, scaling=0.5, is_causal=True).causal
    True
    """
    causal, mask = _is_causal(module, is_causal), attention_mask
    if "flash" in implementation:
        causal, mask = False, _flash_mask(mask, causal, keywords)
    else:
        # eager attention is causal only through its mask
        causal = implementation != "eager" and query.shape[2] > 1 and causal and mask is None
        # for eager and sdpa, the model's mask already includes these restrictions
        if keywords and implementation not in ("eager", "sdpa"):
            mask = _indexed_mask(module, query, key, mask, causal, keywords)
            causal = causal and mask is None
    if isinstance(scaling, Tensor):  # a learned scale
        query, scaling = query * scaling, 1.0
    sink = keywords.get("s_aux")
    if sink is None and implementation == "eager":
        sink = getattr(module, "sinks", None)
    return InterfaceCall(
        query,
        key,
        value,
        mask,
        causal,
        scaling,
        keywords.get("softcap"),
        sink if isinstance(sink, Tensor) else None,
        keywords.get("position_bias"),
        dropout,
    )


def check_keywords(function: Any, keywords: Mapping[str, Any]) -> None:
    """Raise an ArgumentError for unknown keywords that can change the result of an attention function.

    Only keywords that the function declares as parameters are checked. The function ignores all others, which
    come from the model's caller.
    """
    unknown = [name for name in _unknown_keywords(function) if keywords.get(name) is not None]
    if unknown:
        name = getattr(function, "__name__", function)
        raise ArgumentError(
            f"{name} takes {unknown[0]}=…, which regard does not support. Use another attention "
            "implementation, or a newer version of regard."
        )
    if keywords.get("cache") is not None:
        raise ArgumentError(
            "the keys are in the paged cache of continuous batching, which regard cannot read. Use generate."
        )


@lru_cache(maxsize=256)
def _unknown_keywords(function: Hashable) -> frozenset[str]:
    parameters = inspect.signature(function).parameters if callable(function) else ()
    return frozenset(parameters) - _KNOWN


def eager_function(module: nn.Module) -> Any:
    """Return the eager attention function from a module's model file, if the function has its usual name."""
    return vars(sys.modules.get(type(module).__module__, object)).get("eager_attention_forward")


# Causality


def _is_causal(module: nn.Module, is_causal: bool | None) -> bool:
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    return _causal_by_default(type(module)) if is_causal is None else bool(is_causal)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _causal_by_default(cls: Hashable) -> bool:
    """Return whether layers with neither `is_causal` nor a mask are causal.

    They are causal if the model supports SDPA.
    """
    from transformers import PreTrainedModel

    assert isinstance(cls, type)
    namespace = vars(sys.modules.get(cls.__module__, object))
    models = [
        model
        for model in namespace.values()
        if isinstance(model, type)
        and issubclass(model, PreTrainedModel)
        and model.__module__ == cls.__module__
    ]
    return not models or any(model._supports_sdpa for model in models)


# Masks


def _flash_mask(padding: Any, causal: bool, keywords: Mapping[str, Any]) -> Any:
    """Build the mask for a flash kernel from its padding mask (b, k), causal flag, window and packing.

    Causal and window rules are aligned to the last key.
    """
    window = keywords.get("sliding_window")
    rule: Rule | None = Causal() if causal else None
    if window is not None:
        rule = Window(left=window - 1, right=0 if causal else window - 1)
    mask: Mask | None = rule
    queries, keys = keywords.get("cu_seq_lens_q"), keywords.get("cu_seq_lens_k")
    if isinstance(keys, Tensor):  # packed sequences
        queries = keys if queries is None else queries
        mask = Documents(queries.diff().cpu(), keys.diff().cpu(), within=rule)
    if padding is None:
        return mask
    if not isinstance(padding, Tensor) or padding.dim() != 2:
        actual = f"shape {tuple(padding.shape)}" if isinstance(padding, Tensor) else type_name(padding)
        raise ArgumentError(f"flash attention needs a padding mask (b, k), got {actual}")
    visible = compact(padding[:, None, None, :] != 0)[0]
    return mask if visible is None else as_mask(visible) if mask is None else mask & visible


def _indexed_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, causal: bool, keywords: Mapping[str, Any]
) -> Any:
    """Restrict a mask to the keys that an indexer selected for each query."""
    if keywords.get("block_indices") is not None:
        positions = keywords.get("position_ids")
        if positions is None:
            positions = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
        positions = torch.atleast_2d(positions).expand(query.shape[0], -1)
        return module.indexer.build_block_mask(  # type: ignore[union-attr, operator]
            keywords["block_indices"], mask, key.shape[2], query.dtype, query.device, positions
        )
    if keywords.get("indices") is None:
        return mask
    indices = keywords["indices"].long()  # b q n
    size = (*indices.shape[:2], key.shape[2])
    selected = indices.new_zeros(*size, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    if causal:
        first = Causal(align="start").dense(query.shape[2], key.shape[2])
        return selected & first.to(selected.device)
    if mask is None:
        return selected
    if mask.dtype is torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)
