"""Capture attention in Hugging Face transformers: its attention interface, its caches and `generate`.

A model asks the interface for the function of its implementation, "sdpa", "flash_attention_2", …. While it is
watched, it gets that function in a wrapper that also reports the call. The implementation does not change.
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.inspection.capture import CapturedCall, RowMask, causal_mask, intersect
from regard.inspection.hooks.interception import (
    THREAD,
    CacheUpdate,
    Function,
    Patch,
    inside_attention,
    is_observed,
    report,
)
from regard.inspection.layers import is_cross_attention
from regard.mechanism.mask_algebra import CallShape, Mask, union

_CROSS_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


class ScoreKeywords(NamedTuple):
    """The keywords of transformers' attention functions that change the scores."""

    softcap: float | None
    s_aux: Tensor | None  # the sink
    position_bias: Tensor | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ScoreKeywords":
        """Select them from all keywords."""
        return cls(options.get("softcap"), options.get("s_aux"), options.get("position_bias"))


def patches() -> list[Patch]:
    """Patch the functions of transformers."""
    from transformers.cache_utils import Cache, EncoderDecoderCache
    from transformers.generation.utils import GenerationMixin
    from transformers.modeling_utils import AttentionInterface

    return [
        Patch(AttentionInterface, "get_interface", _get_interface),
        Patch(AttentionInterface, "__getitem__", _get_item),
        Patch(Cache, "update", _update),
        *(Patch(cache, "reorder_cache", _reorder) for cache in (Cache, EncoderDecoderCache)),
        *(Patch(cache, "crop", _crop) for cache in (Cache, EncoderDecoderCache)),
        Patch(GenerationMixin, "generate", _generate),
    ]


# The interface


def _get_interface(original: Function) -> Function:
    def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
        with inside_attention():  # it calls __getitem__, which would wrap the function too
            function: Function = original(self, attn_implementation, default)
        if not is_observed():
            return function
        return _reporting(function, "eager" if function is default else attn_implementation)

    return get_interface


def _get_item(original: Function) -> Function:
    def get_item(self: Any, key: str) -> Function:
        function: Function = original(self, key)
        return _reporting(function, key) if is_observed() else function

    return get_item


def _reporting(function: Function, name: str) -> Function:
    """Wrap an attention function to report its calls."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_observed():
            return function(module, query, key, value, *args, **kwargs)
        cross = _is_cross_call(module, sys._getframe(1).f_locals)
        with inside_attention():
            output = function(module, query, key, value, *args, **kwargs)
        report(module, lambda: _capture(name, cross, module, query, key, *args, **kwargs))
        THREAD.cache_update = None
        return output

    return attention


def _is_cross_call(module: nn.Module, caller_locals: dict[str, Any]) -> bool:
    """Return whether a call is cross-attention, from the module's class and the caller's variables."""
    if is_cross_attention(type(module).__name__):
        return True
    if "is_cross_attention" in caller_locals:
        return bool(caller_locals["is_cross_attention"])
    return any(caller_locals.get(name) is not None for name in _CROSS_ARGUMENTS)


def _capture(
    name: str,
    cross: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Any = None,
    *args: Any,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> CapturedCall | None:
    if query.dim() != 4 or query.is_nested:
        return None
    update = THREAD.cache_update
    update = update if update is not None and update.keys is key else None
    softcap, sink, bias = ScoreKeywords.of(options)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if "flash" in name:
        mask = _flash_mask(query, key, attention_mask, causal, options)
    else:
        causal = causal and name != "eager" and attention_mask is None and query.shape[-2] > 1
        if causal and key.shape[-2] > query.shape[-2]:  # a static cache that was empty
            key = key[..., : query.shape[-2], :]
            bias = None if bias is None else bias[..., : query.shape[-2]]
        if causal:
            mask = causal_mask(query.shape[-2], key.shape[-2], query.device)
        else:
            mask = _mask(query, key, attention_mask)
    if sink is None and name == "eager":
        sink = getattr(module, "sinks", None)
    return CapturedCall(
        query.detach(),
        key.detach(),
        None if scaling is None else float(scaling),
        softcap,
        sink.detach() if isinstance(sink, Tensor) else None,
        mask,
        () if bias is None else (bias.detach(),),
        "cross" if cross else "self",
        None if update is None else update.new_keys.detach(),
        cached=update is not None,
    )


def _mask(query: Tensor, key: Tensor, mask: Any) -> RowMask | None:
    """Convert an implementation's mask: a tensor, a mask of regard, or a BlockMask of FlexAttention."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        return THREAD.mask_reader.read(mask, key.shape[-2])
    size = (query.shape[-2], key.shape[-2])
    if isinstance(mask, Mask):
        terms = mask.terms(CallShape(tuple(query.shape[:-2]), *size, query.device))
        if len(terms) == 1 and terms[0].allowed is None:
            zero = torch.zeros(1, 1, dtype=torch.long, device=query.device)
            start, stop, _ = terms[0]
            return RowMask(zero if start is None else start, zero + size[1] if stop is None else stop)
        dense = union(terms, torch.arange(size[1], device=query.device))
        return None if dense is None else THREAD.mask_reader.read(dense)
    if hasattr(mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask

        dense = create_mask(mask.mask_mod, query.shape[0], None, *size, device=str(query.device))
        return THREAD.mask_reader.read(dense)
    return None


def _flash_mask(
    query: Tensor, key: Tensor, mask: Any, causal: bool, options: Mapping[str, Any]
) -> RowMask | None:
    """Return the mask of a flash kernel, which gets padding, causality, window and packing as options.

    Its causality is aligned to the end of the keys.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    position = torch.arange(queries, device=query.device)
    result = causal_mask(queries, keys, query.device, "end") if causal else None
    window = options.get("sliding_window")
    if window is not None:
        end = position[:, None] + keys - queries
        result = intersect(result, RowMask((end - window + 1).clamp(min=0), (end + window).clamp(max=keys)))
    if isinstance(mask, Tensor) and mask.dim() == 2:
        result = intersect(result, THREAD.mask_reader.read(mask[:, None, None, :] != 0))
    boundaries = options.get("cu_seq_lens_k")  # of packed sequences
    if isinstance(boundaries, Tensor) and queries == keys:
        boundaries = boundaries.long().to(query.device)
        sequence = torch.searchsorted(boundaries, position, right=True)
        packed = RowMask(boundaries[sequence - 1][:, None], boundaries[sequence][:, None])
        result = intersect(result, packed)
    return result


# Caches


def _update(original: Function) -> Function:
    def update(self: Any, key_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = original(self, key_states, *args, **kwargs)
        if is_observed():
            THREAD.cache_update = CacheUpdate(states[0], key_states, self)
        return states

    return update


def _reorder(original: Function) -> Function:
    def reorder_cache(self: Any, beam_idx: Tensor) -> Any:
        return _outermost(original, "on_reorder", self, beam_idx, beam_idx)

    return reorder_cache


def _crop(original: Function) -> Function:
    def crop(self: Any, tokens_to_remove: int) -> Any:
        return _outermost(original, "on_crop", self, tokens_to_remove, abs(tokens_to_remove) or None)

    return crop


def _outermost(original: Function, event: str, cache: Any, argument: Any, reported: Any) -> Any:
    """Call a cache's method and report it once: a cache of caches calls the method of each of them."""
    THREAD.reorder_depth += 1
    try:
        result = original(cache, argument)
    finally:
        THREAD.reorder_depth -= 1
    if not THREAD.reorder_depth and reported is not None:
        for observer in THREAD.observers:
            getattr(observer, event)(cache, reported)
    return result


def _generate(original: Function) -> Function:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_observed():
            return original(self, *args, **kwargs)
        call = original
        for observer in THREAD.observers:
            call = _through(observer, call)
        return call(self, *args, **kwargs)

    return generate


def _through(observer: Any, call: Function) -> Function:
    return lambda model, *args, **kwargs: observer.on_generate(model, call, *args, **kwargs)
