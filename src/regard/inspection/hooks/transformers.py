"""Capture attention in Hugging Face transformers: its attention interface, its caches and `generate`.

A model looks up the function of its implementation ("sdpa", "flash_attention_2", …) in the interface. While
the model is watched, the interface returns a wrapper that also reports each call. The implementation itself
does not change.
"""

import sys
from typing import Any

from torch import Tensor, nn

from regard.inspection.calls.capture import CapturedCall
from regard.inspection.calls.mask_reading import row_mask
from regard.inspection.calls.windows import add_window_positions
from regard.inspection.hooks.interception import (
    THREAD,
    CacheUpdate,
    Function,
    Patch,
    inside_attention,
    is_cross_call,
    is_observed,
    report,
)
from regard.inspection.hooks.interface_call import check_keywords, parse
from regard.inspection.measures.call_record import AttentionOutput
from regard.mechanism.masks.by_position import Causal
from regard.mechanism.quantized import Quantized, dequantize


def patches() -> list[Patch]:
    """Patch the functions of transformers, and return the patches."""
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
        with inside_attention():  # original calls __getitem__, which would also wrap the function
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
        cross = is_cross_call(module, sys._getframe(1).f_locals)
        with inside_attention():
            output = function(module, query, key, value, *args, **kwargs)
        tensors = (query, key, value)
        if THREAD.tracer is not None and (tracker := THREAD.tracer.tokens) is not None:
            tracker.set_output(output[0], query, -2)  # b q h e
        report(module, lambda: _capture(function, name, cross, output[0], module, *tensors, *args, **kwargs))
        THREAD.cache_update = None
        return output

    return attention


def _capture(
    function: Function, name: str, cross: bool, output: Tensor, module: nn.Module, query: Tensor, *args: Any,
    **kwargs: Any,
) -> CapturedCall | None:  # fmt: skip
    if query.dim() != 4 or query.is_nested:
        return None
    check_keywords(function, kwargs)
    call = parse(name, module, query, *args, **kwargs)
    key, value, bias = call.key, call.value, call.bias
    update = THREAD.cache_update
    update = update if update is not None and update.keys is key else None
    quantized = isinstance(key, Quantized)
    key, value = dequantize(key), dequantize(value)
    if call.causal and key.shape[-2] > query.shape[-2]:  # a static cache that was empty before this call
        key, value = key[..., : query.shape[-2], :], value[..., : query.shape[-2], :]
        bias = None if bias is None else bias[..., : query.shape[-2]]
    tracker = None if THREAD.tracer is None else THREAD.tracer.tokens
    captured = CapturedCall(
        call.query.detach(),
        key.detach(),
        call.scale,
        call.softcap,
        None if call.sink is None else call.sink.detach(),
        row_mask(Causal(align="start") if call.causal else call.mask, query, key),
        () if bias is None else (bias.detach(),),
        "cross" if cross else "self",
        None if update is None or quantized else update.new_keys.detach(),
        cached=update is not None,
        value=value.detach(),
        output=AttentionOutput(  # b q h e -> b h q e
            output, lambda gradient: gradient.transpose(1, 2), output.shape[-2] * output.shape[-1]
        ),
    )
    return captured if tracker is None else add_window_positions(captured, tracker.pair(query, call.key))


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
    """Call a cache method and report it once, even if a composite cache calls it on each of its caches."""
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
