"""Attention in Hugging Face transformers: calls that go through its attention interface, and its caches.

A model asks the interface for a function by the name of its implementation, "sdpa", "flash_attention_2", …;
what it gets while somebody watches is that function, which also tells. Nothing is switched.
"""

import re
import sys
from typing import Any

import torch
from torch import Tensor, nn

from regard.inspection.capture import CapturedCall, Rows, causal_rows, meet
from regard.inspection.hooks.interception import THREAD, Function, Place, report, watched, within
from regard.mechanism.mask_algebra import CallShape, Mask, union

_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec", re.IGNORECASE)
_CROSS_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


def places() -> list[Place]:
    """Where the stand-ins go."""
    from transformers.cache_utils import Cache, EncoderDecoderCache
    from transformers.generation.utils import GenerationMixin
    from transformers.modeling_utils import AttentionInterface

    return [
        Place(AttentionInterface, "get_interface", _get_interface),
        Place(AttentionInterface, "__getitem__", _get_item),
        Place(Cache, "update", _update),
        *(Place(kind, "reorder_cache", _reorder) for kind in (Cache, EncoderDecoderCache)),
        *(Place(kind, "crop", _crop) for kind in (Cache, EncoderDecoderCache)),
        Place(GenerationMixin, "generate", _generate),
    ]


# The interface


def _get_interface(original: Function) -> Function:
    def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
        with within():  # the function itself is told once
            found = original(self, attn_implementation, default)
        return _telling(found, "eager" if found is default else attn_implementation) if watched() else found

    return get_interface


def _get_item(original: Function) -> Function:
    def get_item(self: Any, key: str) -> Function:
        found: Function = original(self, key)
        return _telling(found, key) if watched() else found

    return get_item


def _telling(function: Function, name: str) -> Function:
    """An attention function that also tells who watches."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not watched():
            return function(module, query, key, value, *args, **kwargs)
        frame = sys._getframe(1)
        cross = is_cross(module, frame.f_locals)
        with within():
            output = function(module, query, key, value, *args, **kwargs)
        report(module, lambda: _kept(name, cross, module, query, key, *args, **kwargs))
        THREAD.updated = None
        return output

    return attention


def is_cross(module: nn.Module, around: dict[str, Any]) -> bool:
    """Whether a module reads another sequence, by its class, its names or what it was called with."""
    if _CROSS.search(type(module).__name__):
        return True
    if "is_cross_attention" in around:
        return bool(around["is_cross_attention"])
    return any(around.get(name) is not None for name in _CROSS_ARGUMENTS)


def _kept(
    name: str,
    cross: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Any = None,
    *args: Any,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> CapturedCall | None:
    if query.dim() != 4 or query.is_nested:
        return None
    new, cached = _new_keys(key)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if "flash" in name:
        rows = _flash_rows(query, key, attention_mask, causal, sliding_window, others)
    else:
        causal = causal and name != "eager" and attention_mask is None and query.shape[-2] > 1
        if causal and key.shape[-2] > query.shape[-2]:  # a static cache that was empty
            key = key[..., : query.shape[-2], :]
            position_bias = None if position_bias is None else position_bias[..., : query.shape[-2]]
        if causal:
            rows = causal_rows(query.shape[-2], key.shape[-2], query.device)
        else:
            rows = _rows(query, key, attention_mask)
    sinks = getattr(module, "sinks", None) if s_aux is None and name == "eager" else s_aux
    return CapturedCall(
        query.detach(),
        key.detach(),
        None if scaling is None else float(scaling),
        softcap,
        sinks.detach() if isinstance(sinks, Tensor) else None,
        rows,
        () if position_bias is None else (position_bias.detach(),),
        "cross" if cross else "self",
        new,
        cached,
    )


def _rows(query: Tensor, key: Tensor, mask: Any) -> Rows | None:
    """The rows of a mask as the implementations get it: a tensor, regard's own, or one for flex."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        return THREAD.reader.read(mask, key.shape[-2])
    size = (query.shape[-2], key.shape[-2])
    if isinstance(mask, Mask):
        terms = mask.terms(CallShape(tuple(query.shape[:-2]), *size, query.device))
        if len(terms) == 1 and terms[0].allowed is None:
            zero = torch.zeros(1, 1, dtype=torch.long, device=query.device)
            start, stop, _ = terms[0]
            return Rows(zero if start is None else start, zero + size[1] if stop is None else stop)
        dense = union(terms, torch.arange(size[1], device=query.device))
        return None if dense is None else THREAD.reader.read(dense)
    if hasattr(mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask

        dense = create_mask(mask.mask_mod, query.shape[0], None, *size, device=str(query.device))
        return THREAD.reader.read(dense)
    return None


def _flash_rows(
    query: Tensor, key: Tensor, mask: Any, causal: bool, window: int | None, others: dict[str, Any]
) -> Rows | None:
    """The rows of a flash kernel, which hides padding, the future and what is far away by itself.

    Its causality counts from the end, and several sequences may stand one after the other.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    rows = None
    if causal:
        rows = causal_rows(queries, keys, query.device, "end")
    if window is not None:
        place = torch.arange(queries, device=query.device)[:, None] + keys - queries
        rows = meet(rows, Rows((place - window + 1).clamp(min=0), (place + window).clamp(max=keys)))
    if isinstance(mask, Tensor) and mask.dim() == 2:
        rows = meet(rows, THREAD.reader.read(mask[:, None, None, :] != 0))
    ends = others.get("cu_seq_lens_k")
    if isinstance(ends, Tensor) and queries == keys:
        ends = ends.long().to(query.device)
        place = torch.arange(queries, device=query.device)
        document = torch.searchsorted(ends, place, right=True)
        rows = meet(rows, Rows(ends[document - 1][:, None], ends[document][:, None]))
    return rows


# Caches


def _new_keys(key: Tensor) -> tuple[Tensor | None, bool]:
    """The keys that a cache got in this call, if it has just given back these."""
    if THREAD.updated is None or THREAD.updated[0] is not key:
        return None, False
    return THREAD.updated[1].detach(), True


def _update(original: Function) -> Function:
    def update(self: Any, key_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, key_states, *args, **kwargs)
        if watched():
            THREAD.updated = (found[0], key_states, self)
        return found

    return update


def _reorder(original: Function) -> Function:
    def reorder_cache(self: Any, beam_idx: Tensor) -> Any:
        THREAD.reordering += 1  # a cache of caches reorders each of them
        try:
            found = original(self, beam_idx)
        finally:
            THREAD.reordering -= 1
        if not THREAD.reordering:
            for observer in THREAD.observers:
                observer.reordered(self, beam_idx)
        return found

    return reorder_cache


def _crop(original: Function) -> Function:
    def crop(self: Any, tokens_to_remove: int) -> Any:
        THREAD.reordering += 1
        try:
            found = original(self, tokens_to_remove)
        finally:
            THREAD.reordering -= 1
        if not THREAD.reordering and tokens_to_remove:
            for observer in THREAD.observers:
                observer.cropped(self, abs(tokens_to_remove))
        return found

    return crop


def _generate(original: Function) -> Function:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not watched():
            return original(self, *args, **kwargs)
        call = original
        for observer in THREAD.observers:
            call = _through(observer, call)
        return call(self, *args, **kwargs)

    return generate


def _through(observer: Any, call: Function) -> Function:
    return lambda model, *args, **kwargs: observer.generating(model, call, *args, **kwargs)
