"""Attention in plain torch: calls of SDPA, `nn.MultiheadAttention`, and encoder layers on their fast path."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.inspection.capture import CapturedCall, Kind, Rows, causal_rows, meet
from regard.inspection.hooks.interception import THREAD, Function, Place, innermost, report, watched, within


def places() -> list[Place]:
    """Where the stand-ins go."""
    return [
        Place(F, "scaled_dot_product_attention", _sdpa),
        Place(nn.MultiheadAttention, "forward", _multihead),
        Place(nn.TransformerEncoderLayer, "forward", _encoder_layer),
    ]


# Calls of SDPA


def _sdpa(original: Function) -> Function:
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if not watched():
            return original(*args, **kwargs)
        with within():  # it may be one that calls torch's in turn
            output = original(*args, **kwargs)
        module = innermost()
        if module is not None:
            report(module, lambda: _kept_sdpa(*args, **kwargs))
        return output

    return scaled_dot_product_attention


def _kept_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> CapturedCall | None:
    if query.is_nested or query.dim() < 2:
        return None
    kind: Kind = "self" if query.shape[-2] == key.shape[-2] else "cross"
    rows = sdpa_rows(query, key, attn_mask, is_causal)
    return CapturedCall(query.detach(), key.detach(), scale, rows=rows, kind=kind)


def sdpa_rows(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Rows | None:
    """The rows of torch's mask, whose causality counts from the top left."""
    queries, keys = query.shape[-2], key.shape[-2]
    if attn_mask is not None and type(attn_mask) not in (Tensor, nn.Parameter):
        from torch.nn.attention.bias import CausalBias, CausalVariant

        if isinstance(attn_mask, CausalBias):
            align = "end" if attn_mask.variant is CausalVariant.LOWER_RIGHT else "start"
            return causal_rows(queries, keys, query.device, align)
    rows = None if attn_mask is None else THREAD.reader.read(attn_mask)
    return meet(rows, causal_rows(queries, keys, query.device)) if is_causal else rows


# nn.MultiheadAttention


def _multihead(original: Function) -> Function:
    def forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if not watched():
            return original(self, *args, **kwargs)
        with within():
            output = original(self, *args, **kwargs)
        THREAD.told.add(self)
        report(self, lambda: _kept_multihead(self, *args, **kwargs))
        return output

    return forward


def _kept_multihead(
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
    kind: Kind = "self" if query is key else "cross"
    lengths = None
    if query.is_nested:
        query, lengths = _padded(query)
        key = query
    if query.dim() == 3 and not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    queries, keys = _heads(module, query, key)
    rows = _multihead_rows(module, keys, key_padding_mask, attn_mask)
    if lengths is not None:
        stop = lengths.to(queries.device)[:, None, None, None]
        rows = meet(rows, Rows(torch.zeros_like(stop), stop))
    return CapturedCall(queries, keys, rows=rows, kind=kind)


def _padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A nested tensor, (b, n, m), with zeros where a sequence is shorter; and the lengths."""
    return x.to_padded_tensor(0.0), torch.tensor([part.shape[0] for part in x.unbind()])


def _heads(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key as the module projects them: (…, n, m) -> (…, h, n, d)."""
    width, heads = module.embed_dim, module.num_heads
    bias = [None, None] if module.in_proj_bias is None else module.in_proj_bias.split(width)[:2]
    if module.in_proj_weight is not None:
        weights: Iterable[Tensor] = module.in_proj_weight.split(width)[:2]
    else:
        weights = (module.q_proj_weight, module.k_proj_weight)
    projected = [F.linear(x, w, b) for x, w, b in zip((query, key), weights, bias, strict=True)]
    if module.bias_k is not None:
        more = module.bias_k.reshape(1, width).expand(*projected[1].shape[:-2], 1, width)
        projected[1] = torch.cat([projected[1], more], -2)
    if module.add_zero_attn:
        projected[1] = F.pad(projected[1], (0, 0, 0, 1))
    first, second = (x.unflatten(-1, (heads, -1)).transpose(-3, -2) for x in projected)
    return first, second


def _multihead_rows(
    module: nn.MultiheadAttention, key: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Rows | None:
    """torch's two masks, in which True hides a key; keys that the module adds itself are always seen."""
    found = None
    if mask is not None:
        mask = mask.unflatten(0, (-1, module.num_heads)) if mask.dim() == 3 and key.dim() == 4 else mask
        found = _hidden(mask, key.shape[-2])
    if padding is not None:
        spread = padding[:, None, None, :] if padding.dim() == 2 else padding[None, :]
        found = meet(found, _hidden(spread, key.shape[-2]))
    return found


def _hidden(mask: Tensor, keys: int) -> Rows:
    added = keys - mask.shape[-1]
    if not added:
        return THREAD.reader.read(~mask if mask.dtype is torch.bool else mask)
    return THREAD.reader.read(
        F.pad(~mask, (0, added), value=True) if mask.dtype is torch.bool else F.pad(mask, (0, added))
    )


# nn.TransformerEncoderLayer, whose fast path calls no nn.MultiheadAttention


def _encoder_layer(original: Function) -> Function:
    def forward(self: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any) -> Any:
        if not watched():
            return original(self, *args, **kwargs)
        THREAD.told.discard(self.self_attn)
        output = original(self, *args, **kwargs)
        if self.self_attn not in THREAD.told:
            report(self.self_attn, lambda: _kept_layer(self, *args, **kwargs))
        return output

    return forward


def _kept_layer(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> CapturedCall:
    x = layer.norm1(src) if layer.norm_first else src
    return _kept_multihead(layer.self_attn, x, x, x, src_key_padding_mask, attn_mask=src_mask)
