"""Convert the arguments of SDPA and FlexAttention to captured calls, including nested and jagged tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.inspection.calls.capture import AttentionKind, CapturedCall, dense_call
from regard.inspection.calls.mask_reading import RowMask, row_mask
from regard.inspection.hooks.interception import records_values
from regard.inspection.measures.call_record import AttentionOutput
from regard.mechanism.sdpa import SDPACall


def capture_sdpa(output: Tensor, *args: Any, **kwargs: Any) -> CapturedCall | None:
    """Capture a call to torch's scaled_dot_product_attention."""
    call = SDPACall(*args, **kwargs)
    query, key, value = call[:3]
    if query.is_nested or key.is_nested:
        return _capture_nested(call, output)
    if query.dim() < 2:
        return None
    kind: AttentionKind = "self" if query.shape[-2] == key.shape[-2] else "cross"
    mask, bias = call.mask_and_bias()
    rows = row_mask(bias if mask is None else mask, query, key)
    heads = AttentionOutput.of_heads(output)
    return CapturedCall(
        query.detach(), key.detach(), call.scale, mask=rows, kind=kind, value=value.detach(), output=heads
    )


def _capture_nested(call: SDPACall, output: Tensor) -> CapturedCall:
    """Pad nested queries and keys (b, h, n, d), whose lengths n differ. Padded queries have zero weights."""
    query, query_lengths = _padded(call.query)
    key, key_lengths = _padded(call.key)
    rows = torch.arange(query.shape[-2], device=query.device)[:, None]
    stop = key_lengths[:, None, None, None].expand(-1, -1, len(rows), -1)
    if call.is_causal:
        stop = stop.minimum(rows + 1)
    stop = stop.masked_fill(rows >= query_lengths[:, None, None, None], 0)
    kind: AttentionKind = "self" if torch.equal(query_lengths, key_lengths) else "cross"
    captured = CapturedCall(query, key, call.scale, mask=RowMask(torch.zeros_like(stop), stop), kind=kind)
    if not records_values():
        return captured
    value, _ = _padded(call.value)
    width = query.shape[-3] * value.shape[-1]
    heads = AttentionOutput(output, lambda gradient: _padded(gradient)[0], width)
    return replace(captured, value=value, output=heads)


def _padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a padded tensor (b, h, n, d) and the lengths of its sequences."""
    x = x.detach()
    parts = [part.transpose(0, 1) for part in x.unbind()]  # each n h d
    lengths = torch.tensor([len(part) for part in parts], device=x.device)
    return pad_sequence(parts, batch_first=True).transpose(1, 2), lengths


def capture_flex(
    outputs: tuple[Tensor, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any = None,
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> CapturedCall:
    """Capture a call to FlexAttention's operator. The weights are dense if it has a score_mod, else lazy.

    score_mod_other_buffers, mask_mod_other_buffers: the tensors that score_mod and mask_mod use, if
        torch.compile has traced these functions.
    """
    from torch.nn.attention.flex_attention import _identity, noop_mask

    size = (query.shape[-2], key.shape[-2])
    kind: AttentionKind = "self" if size[0] == size[1] else "cross"
    mask, mask_mod = None, block_mask[-1]
    if mask_mod is not noop_mask:
        indices = _indices((*query.shape[:2], *size), query.device)
        mask = _vmapped(mask_mod, mask_mod_other_buffers)(*indices)
    query, key, value = query.detach(), key.detach(), value.detach()
    output = AttentionOutput.of_heads(outputs[0])
    if score_mod is _identity:
        rows = row_mask(mask, query, key)
        return CapturedCall(query, key, scale, mask=rows, kind=kind, value=value, output=output)
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    indices = _indices(scores.shape, scores.device)
    scores = _vmapped(score_mod, score_mod_other_buffers, scores=1)(scores, *indices)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    dense = dense_call(scores.float().softmax(-1).nan_to_num(0.0), kind)
    return replace(dense, value=value, output=output)


def _indices(size: Sequence[int], device: torch.device) -> list[Tensor]:
    return [torch.arange(n, device=device) for n in size]


def _vmapped(
    function: Callable[..., Tensor], buffers: tuple[Any, ...], scores: int = 0
) -> Callable[..., Tensor]:
    """Vectorize a function of the indices batch, head, query and key.

    buffers: passed after the indices. scores: number of score tensors passed before the indices.
    """

    def called(*args: Any) -> Tensor:
        return function(*args, *buffers)

    mapped = called
    for axis in reversed(range(4)):
        in_dims = (0,) * scores + tuple(0 if position == axis else None for position in range(4))
        mapped = torch.vmap(mapped, in_dims=in_dims)
    return mapped
