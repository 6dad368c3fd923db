"""Capture attention in regard's layers, `nn.MultiheadAttention` and torch's Transformer encoder layers."""

import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.inspection.calls.capture import AttentionKind, CapturedCall
from regard.inspection.calls.mask_reading import RowMask, row_mask
from regard.inspection.hooks.interception import (
    THREAD,
    Function,
    Patch,
    inside_attention,
    is_observed,
    observed_module,
    records_values,
    report,
    without_tracer,
)
from regard.inspection.measures.call_record import AttentionOutput
from regard.mechanism.operator import Options, attend
from regard.mechanism.quantized import dequantize
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import Attends


def patches() -> list[Patch]:
    """Patch torch's attention modules and regard's layers, and return the patches."""
    return [
        Patch(nn.MultiheadAttention, "forward", _multihead),
        Patch(nn.TransformerEncoderLayer, "forward", _encoder_layer),
        Patch(nn.TransformerEncoder, "forward", _encoder),
        Patch(Attends, "attention", _own),
    ]


# regard's layers, which report their weights themselves, and its operator in other modules


def _own(original: Function) -> Function:
    def attention(self: Attends, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        with inside_attention():
            output: Tensor = original(self, query, key, value, **options)
        if is_observed() and records_values():
            for observer in THREAD.observers:
                if self in observer.names:
                    observer.on_own_values(self, value.detach(), AttentionOutput.of_heads(output))
        return output

    return attention


def run_observed(query: Tensor, key: Any, value: Any, options: Options) -> tuple[Tensor, Weights] | None:
    """Run a call to `regard.attention` or `regard.attend` in an observed module, and report it.

    Returns None if the call is not observed.
    """
    module = observed_module()[0] if is_observed() else None
    if module is None:
        return None
    with inside_attention():
        output, weights = attend(_unchanging(query), _unchanging(key), value, **options)
    for observer in THREAD.observers:
        if module not in observer.names:
            continue
        try:
            observer.on_own_attention(observer.names[module], weights)
            if records_values():
                values = _unchanging(dequantize(value).detach())
                values = values[(None,) * (3 - values.dim())] if values.dim() < 3 else values
                observer.on_own_values(module, values, AttentionOutput.of_heads(output))
        except Exception as error:  # watching must not stop the model
            observer.on_error(module, f"its call could not be read: {type(error).__name__}: {error}")
    return output, weights


def _unchanging(x: Any) -> Any:
    """Copy a tensor that the model may overwrite unnoticed, as in a static cache."""
    return x.clone() if isinstance(x, Tensor) and (x.is_inference() or x._version > 0) else x


# nn.MultiheadAttention


def _multihead(original: Function) -> Function:
    def forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if not is_observed():
            return original(self, *args, **kwargs)
        with inside_attention():
            output = original(self, *args, **kwargs)
        THREAD.reported.add(self)
        report(self, lambda: _with_values(self, output[0], *args, **kwargs))
        return output

    return forward


def _capture_multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> CapturedCall:
    kind: AttentionKind = "self" if query is key else "cross"
    lengths = None
    if query.is_nested:
        lengths = torch.tensor([sequence.shape[0] for sequence in query.unbind()])
        query = key = query.to_padded_tensor(0.0)  # b n m
    if query.dim() == 3 and not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    query, key = _project(module, query, key)
    mask = _multihead_mask(query, key, key_padding_mask, attn_mask)
    if lengths is not None:
        stop = lengths.to(query.device)[:, None, None, None]
        mask = RowMask(torch.zeros_like(stop), stop).intersect(mask)
    return CapturedCall(query, key, mask=mask, kind=kind)


def _with_values(
    module: nn.MultiheadAttention, output: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any,
    **kwargs: Any,
) -> CapturedCall:  # fmt: skip
    """Capture a call with its values and output, if an observer records them."""
    call = _capture_multihead(module, query, key, value, *args, **kwargs)
    if not records_values():
        return call
    if value.is_nested:
        value = value.to_padded_tensor(0.0)  # only on the fast path, which has no gradients
    batched = query.dim() == 3 and not module.batch_first

    def heads(gradient: Tensor) -> Tensor:  # the output is a linear function of the merged heads
        gradient = (gradient.transpose(0, 1) if batched else gradient) @ module.out_proj.weight.detach()
        return gradient.unflatten(-1, (module.num_heads, -1)).transpose(-3, -2)

    value = _project_value(module, value.transpose(0, 1) if batched else value)
    return replace(call, value=value, output=AttentionOutput(output, heads, module.embed_dim))


def _project_value(module: nn.MultiheadAttention, value: Tensor) -> Tensor:
    """Apply the module's input projection to the value: (…, n, m) -> (…, h, n, e)."""
    width = module.embed_dim
    bias = None if module.in_proj_bias is None else module.in_proj_bias[2 * width :]
    weight = module.v_proj_weight if module.in_proj_weight is None else module.in_proj_weight[2 * width :]
    value = F.linear(value, weight, bias)
    if module.bias_v is not None:
        value = torch.cat([value, module.bias_v.reshape(1, width).expand(*value.shape[:-2], 1, width)], -2)
    if module.add_zero_attn:
        value = F.pad(value, (0, 0, 0, 1))
    return value.unflatten(-1, (module.num_heads, -1)).transpose(-3, -2)


def capture_multihead_function(output: tuple[Tensor, Any], *args: Any, **kwargs: Any) -> CapturedCall:
    """Capture a call to torch.nn.functional.multi_head_attention_forward."""
    call = _MULTIHEAD_FUNCTION.bind(*args, **kwargs)
    call.apply_defaults()
    weights = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    names = ("num_heads", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn", *weights)
    options = {name: call.arguments[name] for name in names}
    options["out_proj"] = SimpleNamespace(weight=call.arguments["out_proj_weight"])
    separate = call.arguments["use_separate_proj_weight"]
    weight = None if separate else call.arguments["in_proj_weight"]
    width = call.arguments["embed_dim_to_check"]
    module: Any = SimpleNamespace(embed_dim=width, in_proj_weight=weight, batch_first=False, **options)
    query, key, value, padding = (
        call.arguments[name] for name in ("query", "key", "value", "key_padding_mask")
    )
    mask = call.arguments["attn_mask"]
    return _with_values(module, output[0], query, key, value, padding, attn_mask=mask)


_MULTIHEAD_FUNCTION = inspect.signature(F.multi_head_attention_forward)


def _project(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the module's input projection: (…, n, m) -> (…, h, n, d)."""
    width, heads = module.embed_dim, module.num_heads
    bias = [None, None] if module.in_proj_bias is None else module.in_proj_bias.split(width)[:2]
    if module.in_proj_weight is not None:
        weights: Iterable[Tensor] = module.in_proj_weight.split(width)[:2]
    else:
        weights = (module.q_proj_weight, module.k_proj_weight)
    query, key = (F.linear(x, w, b) for x, w, b in zip((query, key), weights, bias, strict=True))
    if module.bias_k is not None:
        extra = module.bias_k.reshape(1, width).expand(*key.shape[:-2], 1, width)
        key = torch.cat([key, extra], -2)
    if module.add_zero_attn:
        key = F.pad(key, (0, 0, 0, 1))
    query, key = (x.unflatten(-1, (heads, -1)).transpose(-3, -2) for x in (query, key))
    return query, key


def _multihead_mask(
    query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None
) -> RowMask | None:
    """Convert torch's two masks, in which True hides a key. Keys added by the module are visible."""
    masks = []
    if mask is not None:
        masks.append(mask.unflatten(0, (-1, key.shape[-3])) if mask.dim() == 3 and key.dim() == 4 else mask)
    if padding is not None:
        masks.append(padding[:, None, None, :] if padding.dim() == 2 else padding[None, :])
    result = None
    for mask in masks:
        boolean, added = mask.dtype is torch.bool, key.shape[-2] - mask.shape[-1]
        allowed = ~mask if boolean else mask
        rows = row_mask(F.pad(allowed, (0, added), value=boolean) if added else allowed, query, key)
        assert rows is not None  # it is None only without a mask
        result = rows.intersect(result)
    return result


# nn.TransformerEncoderLayer, whose fast path does not call nn.MultiheadAttention


def _encoder_layer(original: Function) -> Function:
    def forward(self: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any) -> Any:
        if not is_observed():
            return original(self, *args, **kwargs)
        THREAD.reported.discard(self.self_attn)
        with without_tracer() if isinstance(self.self_attn, nn.MultiheadAttention) else nullcontext():
            output = original(self, *args, **kwargs)
        if self.self_attn not in THREAD.reported:
            report(self.self_attn, lambda: _capture_encoder_layer(self, *args, **kwargs))
        return output

    return forward


def _encoder(original: Function) -> Function:
    def forward(self: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Any:
        attentions = [getattr(layer, "self_attn", None) for layer in self.layers]
        own = not all(isinstance(attention, nn.MultiheadAttention) for attention in attentions)
        with nullcontext() if own else without_tracer():
            return original(self, *args, **kwargs)

    return forward


def _capture_encoder_layer(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> CapturedCall:
    x = layer.norm1(src) if layer.norm_first else src
    return _with_values(layer.self_attn, x, x, x, x, src_key_padding_mask, attn_mask=src_mask)
