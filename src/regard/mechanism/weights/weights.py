"""Lazy attention weights (…, q, k) in linear memory.

`Weights` stores query, key, score, mask and the row statistic τ, and recomputes any part of the matrix
exactly, on demand. It is also a linear operator: `weights @ value` is the attention output.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._util.name_hints import hint_arguments
from regard._util.text import format_bytes
from regard.errors import ArgumentError
from regard.mechanism import reference, tiled
from regard.mechanism.autocast import in_own_dtype
from regard.mechanism.call.problem import Problem, tiles
from regard.mechanism.normalizers import Softmax1
from regard.mechanism.weights import display, io, regions
from regard.mechanism.weights.reductions import ReducibleMatrix
from regard.mechanism.weights.tensor_like import Index, split_index
from regard.mechanism.weights.transpose import TransposedWeights


class Weights(ReducibleMatrix):
    """Attention weights (…, q, k), computed on demand in linear memory.

    Returned by `attend`, `watch` and `Weights.load`.

    >>> import torch, regard
    >>> x = torch.eye(4)
    >>> output, weights = regard.attend(x, x, x, mask=regard.Causal())
    >>> weights
    Weights(4 × 4, float32: ScaledDot, Softmax(temperature=1.0); holds 0.2 kB, dense 0.1 kB)
    >>> weights[1]
    tensor([0.3775, 0.6225, 0.0000, 0.0000])
    >>> weights.topk(1).indices.squeeze(-1)
    tensor([0, 1, 2, 3])
    """

    # Memory

    @property
    def held(self) -> int:
        """Memory used by query, key, mask and τ, in bytes. It is linear in the sequence length.

        The autograd graph of query and key is not counted; value is not stored.

        >>> import torch, regard
        >>> x = torch.randn(1000, 16)
        >>> regard.attend(x, x, x)[1].held  # dense: 4,000,000
        72000
        """
        storages = {t.untyped_storage()._cdata: t for t in self.problem.tensors.values()}
        return sum(t.untyped_storage().nbytes() for t in storages.values())

    def __repr__(self) -> str:
        dense = self.numel() * self.dtype.itemsize
        mean = ", mean over heads" if self.is_head_mean else ""
        config = self.problem.config
        normalize = "Softmax1" if isinstance(config.normalize, Softmax1) else repr(config.normalize)
        return (
            f"Weights({' × '.join(map(str, self.shape))}, {str(self.dtype).removeprefix('torch.')}: "
            f"{config.score}, {normalize}{mean}; holds {format_bytes(self.held)}, "
            f"dense {format_bytes(dense)})"
        )

    # Reading parts

    @in_own_dtype
    def __getitem__(self, index: Index) -> Tensor:
        """Return part of the matrix as a dense tensor. Supports the same indices as a tensor."""
        split = split_index(index, self.shape)
        if split is None:
            return regions.read_elements(self, index)
        return regions.read_columns(self.part(split.lead, split.rows), split.columns)[split.dropped]

    @in_own_dtype
    def dense(self) -> Tensor:
        """Return the full matrix as a dense tensor, with q × k entries per head."""
        return regions.read_columns(self, slice(None))

    @in_own_dtype
    def scores(self) -> Tensor:
        """Return the scores as a dense tensor, including biases, with −inf for masked keys.

        >>> import torch, regard
        >>> x = torch.eye(2)
        >>> regard.attend(x, x, x, score=regard.Dot(), mask=regard.Causal())[1].scores()
        tensor([[1., -inf],
                [0., 1.]])
        """
        self.check_inputs()
        if self.is_head_mean:
            raise ArgumentError("a mean over heads has no scores; call scores() before mean('heads').")
        scores = self._scores(self.problem)
        return self._merge_heads(scores.expand(*self.problem.lead(), *scores.shape[-2:]))

    @property
    @in_own_dtype
    def tau(self) -> Tensor:
        """The row statistic τ in weights = φ(scores − τ): (…, q). For `Softmax`, τ = log Σ exp(scores).

        >>> import torch, regard
        >>> weights = regard.attend(torch.eye(2), torch.eye(2), torch.eye(2))[1]
        >>> torch.allclose(weights.tau, weights.scores().logsumexp(-1))
        True
        """
        if self.is_head_mean:
            raise ArgumentError("a mean over heads has no τ; read tau before mean('heads').")
        reader = self.reader()
        if reader is not None:
            return self._merge_heads(reader.problem["tau"].sum(-1))
        result, problem = self._new(self.shape[-2], 1), self.problem.nan_checked()
        for tile in tiles(problem, tiled.budget(problem)):
            part = problem.part(tile)
            result[tile.rows_index] = reference.tau(part, self._scores(part)).sum(-1, keepdim=True)
        return self._merge_heads(result)[..., 0]

    # Transposes

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Swap two axes. Swapping queries and keys is lazy."""
        axes = {dim0 % self.ndim, dim1 % self.ndim}
        return self.T if axes == {self.ndim - 2, self.ndim - 1} else self.to_dense().transpose(dim0, dim1)

    def adjoint(self) -> TransposedWeights:
        """Return the transpose, `weights.T`."""
        return self.T

    # Display

    @hint_arguments
    def show(
        self, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None, title: str = ""
    ) -> Any:
        """Show an interactive view as a widget in a notebook, or otherwise as a page in the browser.

        queries, keys: token labels. If keys is None, queries labels both axes (self-attention).
        Returns the widget, or the path of the page.

        >>> def look(weights, words):
        ...     return weights.show(queries=words)
        """
        return display.show(self, queries, keys, title)

    @hint_arguments
    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        title: str = "",
    ) -> Path:
        """Write the interactive view as one HTML file. Large matrices are average-pooled.

        >>> import torch, regard, tempfile
        >>> x = torch.eye(3)
        >>> regard.attend(x, x, x)[1].to_html(tempfile.mkdtemp() + "/dogs.html", queries=list("abc")).name
        'dogs.html'
        """
        return display.to_html(self, path, queries, keys, title)

    @hint_arguments
    def to_png(
        self,
        path: str | os.PathLike[str],
        *,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        title: str | None = None,
        dark: bool = False,
    ) -> Path:
        """Draw a heatmap with token labels. The extension of `path` must be .png, .svg or .pdf.

        >>> import torch, regard, tempfile
        >>> x = torch.eye(3)
        >>> regard.attend(x, x, x)[1].to_png(tempfile.mkdtemp() + "/dogs.png", title="Dogs").name
        'dogs.png'
        """
        if keys is None and self.shape[-1] == self.shape[-2]:
            keys = queries  # self-attention
        return display.to_png(self, path, queries, keys, title, dark)

    # Saving, moving and converting

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the lazy weights to a safetensors file, atomically.

        >>> import torch, regard, tempfile
        >>> x = torch.eye(3)
        >>> weights = regard.attend(x, x, x)[1]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = regard.Weights.load(weights.save(f"{folder}/weights.safetensors"))
        >>> torch.equal(loaded.dense(), weights.dense())
        True
        """
        self.check_inputs()
        return io.write(path, self.problem, self._lead, self._heads, self._rows_per_key_head())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Weights":
        """Load weights from a file written by `save`."""
        problem, lead, heads, rows = io.read(path)
        return cls(problem, None, lead, heads, rows_per_key_head=rows)

    def detach(self) -> "Weights":
        """Return these weights, detached from the autograd graph of query and key."""
        return self._map(Tensor.detach)

    @property
    def data(self) -> "Weights":
        """These weights, detached from the autograd graph."""
        return self.detach()

    @property
    def real(self) -> "Weights":
        """These weights, unchanged because they are real."""
        return self

    def clone(self) -> "Weights":
        """Return a copy with its own query, key and mask. The originals can then be modified in place."""
        return self._map(Tensor.clone)

    def contiguous(self) -> "Weights":
        """Return these weights unchanged."""
        return self

    def cpu(self) -> "Weights":
        """Return these weights on the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = "cuda") -> "Weights":
        """Return these weights on a GPU."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device)

    def float(self) -> Any:
        """Return these weights in float32."""
        return self.to(torch.float32)

    def double(self) -> Any:
        """Return these weights in float64."""
        return self.to(torch.float64)

    def to(self, *args: Any, **options: Any) -> Any:
        """Return these weights on another device or in another dtype, as `Tensor.to` does.

        Another dtype needs the dense matrix, because weights are computed in the dtype of query and key.
        """
        self.check_inputs()
        target = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **options)
        moved = self if target.device == self.device else self._map(lambda x: x.to(target.device))
        return moved if target.dtype == self.dtype else moved.to_dense().to(target.dtype)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        return self._like(self.problem.map(lambda _, tensor: change(tensor)), self._lead)

    def __copy__(self) -> "Weights":
        return self._like(self.problem, self._lead)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (
            type(self),
            self.detach().problem,
            self._lead,
            self._heads,
            self._rows_per_key_head(),
        )


def _restore(
    cls: type[Weights], problem: Problem, lead: Sequence[int], heads: io.Heads, rows_per_key_head: int
) -> Weights:
    """Unpickle weights. τ may come from different kernels and is therefore recomputed on first use."""
    return cls(problem, None, lead, heads, rows_per_key_head=rows_per_key_head)
