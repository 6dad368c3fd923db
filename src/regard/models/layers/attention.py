"""Multi-head attention, and the base class for layers that `regard.watch` can observe.

query = x Wq, key = y Wk, value = y Wv          … n m -> … h n d
output = concatenate(heads of attention) Wo     … h n e -> … n m
(Vaswani et al. 2017, section 3.2.2)
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock, get_ident
from typing import Any, Never, TypedDict, Unpack

import torch
from torch import Tensor, nn

from regard._util.checks import check_int, check_number
from regard._util.name_hints import hint_arguments
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.call import keyword_hints
from regard.mechanism.call.arguments import Bias
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.normalizers import Normalizer, Sink, Softmax
from regard.mechanism.operator import Options, attend, attention
from regard.mechanism.scores import ScaledDot, Score, ScoreFunction
from regard.mechanism.weights.weights import Weights
from regard.models.layers.kv_cache import KeyValues, KVCache
from regard.models.layers.linear import Int8Linear, project
from regard.models.layers.positions.rotary import Rotation

Watcher = Callable[[Weights], None]
_WATCHERS_LOCK = Lock()
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec", re.IGNORECASE)


def is_cross_attention(name: str) -> bool:
    """Return whether a module or class with this name is a cross-attention layer.

    >>> from regard.models.layers.attention import is_cross_attention
    >>> names = ("decoder.blocks.0.cross", "decoder.blocks.0.attention", "decoder.layers.0.multihead_attn")
    >>> [is_cross_attention(name) for name in names]
    [True, False, True]
    """
    parts = name.partition("@")[0].split(".")
    in_decoder = parts[-2:] == ["decoder", "attention"] or (  # in a recurrent model
        parts[-1] == "multihead_attn" and "decoder" in parts  # in nn.TransformerDecoder
    )
    return in_decoder or _CROSS.search(parts[-1]) is not None


class Attends(nn.Module):
    """Base class for attention layers. `regard.watch` observes every call to `self.attention`.

    >>> import torch, regard
    >>> class Twice(regard.models.Attends):
    ...     def forward(self, x):
    ...         return self.attention(x, x, self.attention(x, x, x))
    >>> layer = Twice()
    >>> with regard.watch(layer) as seen:
    ...     output = layer(torch.eye(3))
    >>> len(seen)
    2
    """

    watchers: tuple[Watcher, ...] = ()  # set by `watch_layers`

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[Options]) -> Tensor:
        """Call `regard.attention` and pass the weights to any watchers."""
        watchers = self.watchers
        if not watchers:
            return attention(query, key, value, **options)
        output, weights = attend(query, key, value, **options)
        for watcher in watchers:
            watcher(weights)
        return output

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without watchers, because a copy of the layer is not watched."""
        return {name: value for name, value in list(vars(self).items()) if name != "watchers"}


@contextmanager
def watch_layers(model: nn.Module, report: Callable[[str, Weights], None]) -> Iterator[int]:
    """Call `report(name, weights)` for each attention call in a model.

    The context manager yields the number of attention layers.

    Only calls on this thread are reported, so several threads can watch the same model.

    >>> import torch, regard
    >>> from regard.models.layers.attention import watch_layers
    >>> layer, seen = regard.models.SelfAttention(), []
    >>> with watch_layers(
    ...     torch.nn.Sequential(layer), lambda name, weights: seen.append((name, weights.shape))
    ... ):
    ...     output = layer(torch.eye(3))
    >>> seen
    [('0', torch.Size([1, 3, 3]))]
    """
    owner = get_ident()

    def watcher(name: str, weights: Weights) -> None:
        if get_ident() == owner:
            report(name, weights)

    added = [
        (module, partial(watcher, name.replace("_orig_mod.", "")))  # prefix added by torch.compile
        for name, module in model.named_modules()
        if isinstance(module, Attends)
    ]
    with _WATCHERS_LOCK:
        for module, own in added:
            module.watchers = (*module.watchers, own)
    try:
        yield len(added)
    finally:
        with _WATCHERS_LOCK:
            for module, own in added:  # remove only this watcher: watches may end in any order
                others = tuple(other for other in module.watchers if other is not own)
                if others:  # assign only once: another thread may be calling the module
                    module.watchers = others
                else:
                    vars(module).pop("watchers", None)


class SelfAttention(Attends):
    """Self-attention without parameters, for teaching: query, key and value are all x.

    >>> import torch, regard
    >>> regard.models.SelfAttention()(torch.eye(3)).diagonal()
    tensor([0.4711, 0.4711, 0.4711])
    """

    def forward(self, x: Tensor, **options: Unpack[Options]) -> Tensor:
        """Apply self-attention: (…, n, m) → (…, n, m)."""
        return self.attention(x.unsqueeze(-3), x.unsqueeze(-3), x.unsqueeze(-3), **options).squeeze(-3)


class SelfAttentionOptions(TypedDict, total=False):
    """Options for self-attention: see `MultiHeadAttention.forward`."""

    mask: Mask | Tensor | None
    bias: Bias | None
    rotation: Rotation | None
    cache: KVCache | None


@hint_arguments
class MultiHeadAttention(Attends):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2).

    width: dimension of the input and the output.
    heads: number of attention heads. key_heads: number of key and value heads (Ainslie et al. 2023); default:
        heads.
    source_width: dimension of the key and value inputs, or a pair (key, value); default: width.
    head_width: dimension of each head, or a pair (query and key, value); default: width / heads.
    linear_bias: whether the projections have a bias.
    score, normalize: see `regard.attention`. All heads share the parameters of the score.
    dropout: dropout probability for the weights.

    >>> import torch, regard
    >>> layer = regard.models.MultiHeadAttention(16, 4, key_heads=2, normalize=regard.Entmax15())
    >>> x, source = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    >>> layer(x, mask=regard.Causal()).shape  # self-attention
    torch.Size([3, 5, 16])
    >>> layer(x, source).shape  # cross-attention
    torch.Size([3, 5, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_heads: int | None = None,
        source_width: int | tuple[int, int] | None = None,
        head_width: int | tuple[int, int] | None = None,
        linear_bias: bool = True,
        score: Score | ScoreFunction = ScaledDot(),  # noqa: B008 (a frozen value)
        normalize: Normalizer | Sink = Softmax(),  # noqa: B008
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_int("MultiHeadAttention got width", width, min=1)
        check_int("MultiHeadAttention got heads", heads, min=1)
        key_heads = heads if key_heads is None else key_heads
        check_int("MultiHeadAttention got key_heads", key_heads, min=1)
        check_number("MultiHeadAttention got dropout", dropout, min=0, below=1)
        if heads % key_heads:
            raise ArgumentError(
                f"MultiHeadAttention got heads={heads} and key_heads={key_heads}; heads must be a multiple "
                "of key_heads."
            )
        if head_width is None and width % heads:
            raise ArgumentError(
                f"MultiHeadAttention got width={width} and heads={heads}; width must be a multiple of heads, "
                "unless you pass head_width."
            )
        self.width, self.heads, self.key_heads = width, heads, key_heads
        self.key_width, self.value_width = _pair("source_width", source_width, width)
        self.head_width, self.head_value_width = _pair("head_width", head_width, width // heads)
        self.score, self.normalize, self.dropout = score, normalize, dropout
        sizes = heads * self.head_width, key_heads * self.head_width, key_heads * self.head_value_width
        self._sizes = sizes
        self.in_proj: nn.Linear | Int8Linear | nn.ModuleList
        if self.key_width == self.value_width == width:
            # one matrix product for query, key and value
            self.in_proj = _linear(width, sum(sizes), linear_bias, parts=sizes)
        else:
            self.in_proj = nn.ModuleList(
                _linear(inputs, size, linear_bias)
                for inputs, size in zip((width, self.key_width, self.value_width), sizes, strict=True)
            )
        self.out_proj = _linear(heads * self.head_value_width, width, linear_bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | KeyValues | None = None,
        value: Tensor | None = None,
        *positional: Never,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Apply attention: (…, q, m) → (…, q, m).

        key: (…, k, ·), or the result of `project_source`; default: query. value: (…, k, ·); default: key.
        mask, bias: see `regard.attention`.
        rotation: rotation of queries and keys, from `RotaryPositions`.
        cache: keys and values from previous calls, to which this call appends its own.
        """
        if unknown or positional:
            keyword_hints.raise_unexpected(
                "MultiHeadAttention", positional, unknown, ("mask", "bias", "rotation", "cache")
            )
        self._check("query", query, self.width)
        if isinstance(key, KeyValues) and (value is not None or cache is not None):
            raise ArgumentError(
                "MultiHeadAttention got KeyValues as key and also a "
                f"{'cache' if value is None else 'value'}; omit the latter, or pass the unprojected "
                "source as key."
            )
        if key is None:
            if value is not None:
                raise ArgumentError(
                    f"MultiHeadAttention got a value of shape {tuple(value.shape)} and no key; pass both, or "
                    "neither for self-attention."
                )
            queries, projected = self._project_self(query)
        else:
            queries = self._split(self._project(query, 0), self.heads)
            projected = key if isinstance(key, KeyValues) else self.project_source(key, value)
        if rotation is not None:
            queries = rotation(queries)
            if projected is not key:
                projected = KeyValues(rotation(projected.key), projected.value)
        extended = (
            nullcontext(projected) if cache is None else cache.extending(projected.key, projected.value)
        )
        with extended as held:
            output = self.attention(
                held.group(queries),
                held.key,
                held.value,
                score=self.score,
                mask=mask,
                bias=bias,
                normalize=self.normalize,
                dropout=self.dropout if self.training else 0.0,
            )
        return self.out_proj(held.ungroup(output).transpose(-3, -2).flatten(-2))  # … h q e -> … q (h e)

    def project_source(self, key: Tensor, value: Tensor | None = None) -> KeyValues:
        """Project a source (…, k, m) to keys and values (…, g, k, ·) that can be reused in many calls."""
        value = key if value is None else value
        self._check("key", key, self.key_width)
        self._check("value", value, self.value_width)
        if value is key and not isinstance(self.in_proj, nn.ModuleList):
            both = project(key, self.in_proj, self._sizes[0], sum(self._sizes))
            keys, values = both.split(self._sizes[1:], -1)
        else:
            keys, values = self._project(key, 1), self._project(value, 2)
        return KeyValues(self._split(keys, self.key_heads), self._split(values, self.key_heads))

    def _project_self(self, x: Tensor) -> tuple[Tensor, KeyValues]:
        if isinstance(self.in_proj, nn.ModuleList):
            return self._split(self._project(x, 0), self.heads), self.project_source(x)
        queries, keys, values = self.in_proj(x).split(self._sizes, -1)
        projected = KeyValues(self._split(keys, self.key_heads), self._split(values, self.key_heads))
        return self._split(queries, self.heads), projected

    def _project(self, x: Tensor, which: int) -> Tensor:
        """Project to queries (0), keys (1) or values (2)."""
        if isinstance(self.in_proj, nn.ModuleList):
            projected: Tensor = self.in_proj[which](x)
            return projected
        start = sum(self._sizes[:which])
        return project(x, self.in_proj, start, start + self._sizes[which])

    def projection(self, which: int) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of the projection for queries (0), keys (1) or values (2)."""
        if isinstance(self.in_proj, nn.ModuleList):
            linear = self.in_proj[which]
            assert isinstance(linear, nn.Linear | Int8Linear)
            return linear.weight, linear.bias
        start = sum(self._sizes[:which])
        rows = slice(start, start + self._sizes[which])
        return self.in_proj.weight[rows], None if self.in_proj.bias is None else self.in_proj.bias[rows]

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(-3, -2)  # … n (h d) -> … h n d

    @staticmethod
    def _check(name: str, x: Tensor, width: int) -> None:
        if not isinstance(x, Tensor):
            raise DTypeError(f"MultiHeadAttention got a {name} of type {type(x).__name__}; pass a tensor.")
        if x.dim() < 2 or x.shape[-1] != width:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}; this MultiHeadAttention needs shape (…, n, {width})."
            )

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """Convert an `nn.MultiheadAttention` to an equivalent layer, which takes batch-first inputs.

        >>> import torch, regard
        >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> ours, x = regard.models.MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 16)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        from regard.models.layers.conversion import from_torch

        return from_torch(module)

    def to_torch(self) -> nn.MultiheadAttention:
        """Convert to an `nn.MultiheadAttention` with batch_first=True. Raises an error if that is impossible.

        >>> import regard
        >>> regard.models.MultiHeadAttention(16, 4).to_torch().num_heads
        4
        """
        from regard.models.layers.conversion import to_torch

        return to_torch(self)

    def extra_repr(self) -> str:
        grouped = "" if self.key_heads == self.heads else f", key_heads={self.key_heads}"
        normalize = "" if self.normalize == Softmax() else f", normalize={self.normalize!r}"
        score = "" if self.score == ScaledDot() else f", score={self.score!r}"
        return f"{self.width}, {self.heads}{grouped}{score}{normalize}"


def _linear(width: int, size: int, linear_bias: bool, parts: tuple[int, ...] = ()) -> nn.Linear:
    """Create a linear layer whose parts are initialized independently (Glorot and Bengio 2010)."""
    linear = nn.Linear(width, size, bias=linear_bias)
    with torch.no_grad():
        for part in linear.weight.split(parts or (size,)):
            nn.init.xavier_uniform_(part)
        if linear_bias:
            linear.bias.zero_()
    return linear


def _pair(name: str, value: int | tuple[int, int] | None, default: int) -> tuple[int, int]:
    pair = value if isinstance(value, tuple) else (value, value)
    first, second = (default if size is None else size for size in pair)
    check_int(f"MultiHeadAttention got {name}", first, min=1)
    check_int(f"MultiHeadAttention got {name}", second, min=1)
    return first, second
