"""A key-value cache for transformers that stores int8 values, read in place by the attention kernels.

Every query attends to the stored keys and values, including those of its own forward pass. The
result therefore does not depend on how a text is divided into forward passes, and `watch` can join the steps
of `generate`. Imports transformers: see `regard.huggingface.quantized_cache`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from regard.errors import ArgumentError
from regard.mechanism.quantized import Quantized, quantize

_MIN_SPARE = 64  # minimum spare capacity of a buffer, in tokens


class QuantizedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """The int8 keys and values of a layer with full attention."""

    keys: Any  # Quantized
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (quantize(x[..., :0, :]) for x in (key_states, value_states))
        self._buffers: dict[str, Quantized] = {}
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantize the states of new tokens, append them, and return the states of all tokens."""
        _check_no_grad(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", quantize(key_states))
        self.values = self._append("values", quantize(value_states))
        return self.keys, self.values

    def _append(self, name: str, new: Quantized) -> Quantized:
        old: Quantized = getattr(self, name)
        buffer, start, stop = self._buffers.get(name), old.shape[-2], old.shape[-2] + new.shape[-2]
        if buffer is None or not _is_start(old, buffer) or buffer.shape[-2] < stop:
            capacity = stop + max(stop // 8, _MIN_SPARE)
            buffer = old.map(lambda x: x.new_empty(*x.shape[:-2], capacity, x.shape[-1]))
            _copy(old, buffer[..., :start, :])
            self._buffers[name] = buffer
        _copy(new, buffer[..., start:stop, :])
        return buffer[..., :stop, :]

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self._buffers = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search."""
        if self.get_seq_length() > 0:
            self.batch_select_indices(beam_idx.to(self.keys.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        if self.get_seq_length() > 0:
            self.keys, self.values = (
                x.map(lambda part: part.repeat_interleave(repeats, dim=0)) for x in (self.keys, self.values)
            )


class QuantizedSlidingWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """The int8 keys and values of a layer with a sliding window, which stores only the window."""

    keys: Any  # Quantized
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (quantize(x[..., :0, :]) for x in (key_states, value_states))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantize the states of new tokens, append them, and return the states that they attend to."""
        _check_no_grad(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, before = key_states.shape[-2], self.sliding_window - 1
        self.cumulative_length += new
        full = _concatenate(self.keys, key_states), _concatenate(self.values, value_states)
        # with `record_past`, `crop` restores earlier tokens and then restricts them to the window
        stored = full if getattr(self, "record_past", False) else tuple(_last(x, before) for x in full)
        self.keys, self.values = stored
        return _last(full[0], before + new), _last(full[1], before + new)

    reorder_cache = QuantizedLayer.reorder_cache
    batch_repeat_interleave = QuantizedLayer.batch_repeat_interleave


def _check_no_grad(*states: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        raise ArgumentError(
            "A quantized cache does not support gradients, but the keys or values require them. Run the "
            "model under torch.no_grad(), or use the model's own cache."
        )


def _is_start(x: Quantized, buffer: Quantized) -> bool:
    """Return whether `x` is a view of the first tokens of a buffer."""
    return all(
        part.data_ptr() == whole.data_ptr()
        and part.stride() == whole.stride()
        and (part.shape[:-2], part.shape[-1]) == (whole.shape[:-2], whole.shape[-1])
        for part, whole in ((x.values, buffer.values), (x.scale, buffer.scale))
    )


def _concatenate(old: Quantized, states: Tensor) -> Quantized:
    new = quantize(states)
    values, scale = torch.cat([old.values, new.values], -2), torch.cat([old.scale, new.scale], -2)
    return Quantized(values, scale, old.dtype)


def _last(x: Quantized, count: int) -> Quantized:
    return x[..., max(x.shape[-2] - count, 0) :, :]


def _copy(source: Quantized, target: Quantized) -> None:
    target.values.copy_(source.values)
    target.scale.copy_(source.scale)


def create_cache(config: Any) -> DynamicCache:
    """Create an empty cache for a model with this configuration."""
    cache = DynamicCache(config=config)
    cache.layers = [_quantized_layer(layer, number) for number, layer in enumerate(cache.layers)]
    return cache


def _quantized_layer(layer: Any, number: int) -> DynamicLayer:
    if type(layer) is DynamicLayer:
        return QuantizedLayer()  # type: ignore[no-untyped-call]
    if type(layer) is DynamicSlidingWindowLayer:
        return QuantizedSlidingWindowLayer(sliding_window=layer.sliding_window)
    raise ArgumentError(
        f"Layer {number} of this model has a cache of type {type(layer).__name__}, which cannot be "
        "quantized; only layers with full attention or a sliding window can. Omit past_key_values=."
    )
