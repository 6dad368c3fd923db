"""Quantize weight matrices to int8, in the layout that the kernels read. Does not import torch."""

from typing import Any

import numpy as np

from regard.errors import ArgumentError

Array = np.ndarray[Any, Any]
COLUMNS = 16  # columns per block: see kernels/linear.h


def pack_int8(weight: Array) -> tuple[Array, Array]:
    """Quantize a float32 matrix (n, m); return blocks [n / 16][m / 2][16][2] of int8, and the padded scales.

    Each row has its own scale, which makes its largest magnitude 127.

    >>> import numpy as np
    >>> from regard.models.layers.int8_packing import pack_int8
    >>> packed, scales = pack_int8(np.array([[127, -2, 3]], np.float32))
    >>> packed.shape, packed[0, :, 0].tolist(), float(scales[0])
    ((1, 2, 16, 2), [[127, -2], [3, 0]], 1.0)
    """
    if not np.isfinite(weight).all():
        raise ArgumentError(
            "A weight matrix has NaN or infinite values, so it cannot be quantized to int8. Use an earlier "
            "checkpoint."
        )
    rows, width = weight.shape
    scales = np.abs(weight).max(1, initial=0) / np.float32(127)
    quantized = np.rint(weight / np.maximum(scales, np.finfo(np.float32).tiny)[:, None])
    padded = np.zeros((-(-rows // COLUMNS) * COLUMNS, width + width % 2), np.int8)
    padded[:rows, :width] = quantized
    blocks = padded.reshape(-1, COLUMNS, padded.shape[1] // 2, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks), pad_columns(scales)


def pad_columns(values: Array) -> Array:
    """Append zeros to a vector, up to a multiple of the block size."""
    return np.pad(values, (0, -len(values) % COLUMNS))
