"""Masks by sequence length: `Padding` and `Documents`."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from regard._util.checks import check_dense
from regard._util.name_hints import hint_arguments
from regard._util.text import pluralize
from regard.errors import ArgumentError, DeviceError, DTypeError, MaskError
from regard.mechanism.masks.algebra import BUILT_IN, CHECKED, CallShape, MaskTerm, broadcasts
from regard.mechanism.masks.by_position import Immutable, Rule, ranges_of
from regard.mechanism.torch_state import concrete

_MAX_COMPARED = 4096  # masks with more lengths are compared by identity


class _LengthMask(Immutable):
    """A mask defined by lengths, which are copied from the caller's tensor.

    Masks with equal lengths are equal. Masks with more than 4,096 lengths, and all masks while tracing, are
    compared by identity.
    """

    cache_key: Hashable | None  # equal for equal masks; None if masks are compared by identity

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        return self.cache_key is not None and self.cache_key == other.cache_key

    def __hash__(self) -> int:
        return id(self) if self.cache_key is None else hash(self.cache_key)


@hint_arguments
class Padding(_LengthMask):
    """Padding mask: sequence i attends only to its first `lengths[i]` keys, or its last ones if side="left".

    lengths: one length per sequence, along the first leading axes of the call, e.g. (b,) for a batch.
    side: "right" or "left", the side of the padding.
    `Padding` masks are immutable; `lengths` is a copy.

    >>> import torch, regard
    >>> regard.Padding([1, 3]).dense(1, 4, lead=[2])
    tensor([[[ True, False, False, False]],
    <BLANKLINE>
            [[ True,  True,  True, False]]])
    >>> regard.Padding([1, 3]) == regard.Padding(torch.tensor([1, 3]))
    True
    """

    _lengths: Tensor
    side: Literal["right", "left"]

    def __init__(
        self, lengths: Sequence[int] | Tensor | int, *, side: Literal["right", "left"] = "right"
    ) -> None:
        if side not in ("right", "left"):
            raise ArgumentError(f"Padding got side={side!r}; use 'right' or 'left'.")
        lengths = _as_lengths("Padding", lengths)
        key = _length_key(lengths)
        vars(self).update(_lengths=lengths, side=side, cache_key=None if key is None else (side, key))

    @property
    def lengths(self) -> Tensor:
        """A copy of the lengths."""
        return self._lengths.clone()

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        lengths = _lengths_on(self._lengths, call_shape.device)
        if not broadcasts(lengths.shape, call_shape.lead[: lengths.dim()]) or lengths.dim() > len(
            call_shape.lead
        ):
            raise MaskError(
                f"Padding has lengths of shape {tuple(lengths.shape)} and the call has leading axes "
                f"{call_shape.lead}; pass one length per sequence, along the first axes."
            )
        lengths = lengths.reshape(*lengths.shape, *[1] * (len(call_shape.lead) - lengths.dim() + 2))
        if self.side == "left":
            return (MaskTerm(start=call_shape.keys - lengths),)
        return (MaskTerm(stop=lengths.clone()),)  # a copy: the caller may modify it

    def default_size(self) -> tuple[int, int] | None:
        longest = int(self._lengths.max()) if concrete(self._lengths) and self._lengths.numel() else 0
        return None if longest <= 8 else (8, longest)

    def __repr__(self) -> str:
        side = "" if self.side == "right" else ", side='left'"
        return f"Padding({_summarize_lengths(self._lengths)}{side})"


@hint_arguments
class Documents(_LengthMask):
    """Mask for packed sequences: each query attends only to the keys in its own sequence.

    Use `Documents(lengths)` for self-attention, and `Documents(queries, keys)`, with separate key lengths,
    for cross-attention.

    within: a rule applied inside each sequence, with positions relative to the start of the sequence.
    `Documents` masks are immutable; `queries` and `keys` are copies.

    >>> import regard
    >>> print(regard.Documents([2, 3], within=regard.Causal()).draw())
    ■····
    ■■···
    ··■··
    ··■■·
    ··■■■
    >>> print(regard.Documents([1, 2], [3, 2]).draw())
    ■■■··
    ···■■
    ···■■
    """

    _queries: Tensor
    _keys: Tensor
    within: Rule | None

    def __init__(
        self,
        queries: Sequence[int] | Tensor,
        keys: Sequence[int] | Tensor | None = None,
        *,
        within: Rule | None = None,
    ) -> None:
        query_lengths = _as_lengths("Documents", queries)
        key_lengths = query_lengths if keys is None else _as_lengths("Documents", keys)
        if query_lengths.dim() != 1 or query_lengths.shape != key_lengths.shape:
            raise MaskError(
                f"Documents got query lengths of shape {tuple(query_lengths.shape)} and key lengths of shape "
                f"{tuple(key_lengths.shape)}; pass one list of lengths for each, with one number per "
                "document."
            )
        if within is not None and not isinstance(within, Rule):
            name = f"the class {within.__name__}" if isinstance(within, type) else repr(within)
            raise MaskError(
                f"Documents got within={name}; pass a Rule, such as Causal() or Window(4). Combine other "
                "masks with &."
            )
        query_key, key_key = _length_key(query_lengths), _length_key(key_lengths)
        fixed = within is None or type(within) in BUILT_IN  # custom rules may be mutable
        cache_key = (query_key, key_key, within) if fixed and query_key and key_key else None
        vars(self).update(_queries=query_lengths, _keys=key_lengths, within=within, cache_key=cache_key)

    @property
    def queries(self) -> Tensor:
        """The number of queries in each document, as a copy."""
        return self._queries.clone()

    @property
    def keys(self) -> Tensor:
        """The number of keys in each document, as a copy."""
        return self._keys.clone()

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        queries, keys = (
            _lengths_on(self._queries, call_shape.device),
            _lengths_on(self._keys, call_shape.device),
        )
        self._check(call_shape)
        row = torch.arange(call_shape.queries, device=call_shape.device)
        ends = queries.cumsum(0)
        document = torch.searchsorted(ends, row, right=True).clamp(max=max(len(ends) - 1, 0))
        if not len(ends):
            return (MaskTerm(start=row[:, None] * 0, stop=row[:, None] * 0),)
        length = keys[document][:, None]
        start = (keys.cumsum(0) - keys)[document][:, None]
        stop = start + length
        if self.within is not None:
            local = (row - (ends - queries)[document])[:, None]
            position = self.within.positions(local, queries[document][:, None], length)
            low, high = ranges_of(self.within, position, length, call_shape)
            stop = stop if high is None else torch.minimum(stop, start + high)
            start = start if low is None else torch.maximum(start, start + low)
        return (MaskTerm(start, stop),)

    def _check(self, call_shape: CallShape) -> None:
        if not concrete(self._queries, self._keys):
            return
        for what, lengths, size in (
            ("query", self._queries, call_shape.queries),
            ("key", self._keys, call_shape.keys),
        ):
            total = int(lengths.sum())
            if total != size or (len(lengths) and int(lengths.max()) > size):
                raise MaskError(
                    f"Documents has {pluralize(sum(lengths.tolist()), what)} in total and the call has "
                    f"{size}; the lengths must sum to the packed length. To convert document ids to lengths, "
                    "use torch.unique_consecutive(ids, return_counts=True)[1]."
                )

    def default_size(self) -> tuple[int, int] | None:
        if not concrete(self._queries, self._keys):
            return None
        return int(self._queries.sum()), int(self._keys.sum())

    def __repr__(self) -> str:
        keys = "" if self._keys is self._queries else f", {_summarize_lengths(self._keys)}"
        within = "" if self.within is None else f", within={self.within!r}"
        return f"Documents({_summarize_lengths(self._queries)}{keys}{within})"


def _as_lengths(mask: str, lengths: Sequence[int] | Tensor | int) -> Tensor:
    """Copy the lengths to a regular tensor, because autograd cannot save inference tensors for backward."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inference else nullcontext():
        try:
            tensor = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            raise DTypeError(
                f"{mask} got lengths {lengths!r}; pass integers, in a list or a tensor."
            ) from None
        check_dense("lengths", tensor)
        if tensor.numel() and (
            tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
        ):  # an empty list becomes a float tensor
            cure = f": {mask}(mask.sum(-1)), or (~mask).sum(-1) if True marks padding, as in torch"
            cure = cure if tensor.dtype is torch.bool else ""
            raise DTypeError(f"{mask} got lengths of dtype {tensor.dtype}; they must be integers{cure}.")
        tensor = tensor.to(torch.int64, copy=True)
    if concrete(tensor) and tensor.numel() and int(tensor.min()) < 0:
        raise MaskError(f"{mask} got a length of {int(tensor.min())}; lengths must be at least 0.")
    return tensor


def _length_key(lengths: Tensor) -> Hashable | None:
    """Return the lengths as a hashable value, or None if there are too many or they cannot be read."""
    if not concrete(lengths) or lengths.device.type != "cpu" or lengths.numel() > _MAX_COMPARED:
        return None
    return tuple(lengths.shape), lengths.numpy().tobytes()


def _lengths_on(lengths: Tensor, device: torch.device) -> Tensor:
    """Return the lengths on a device; raise DeviceError if they have no values there."""
    if lengths.is_meta and device.type != "meta":
        raise DeviceError(
            f"query is on {device} and the mask's lengths are on meta, where they have no values; pass "
            "lengths with values."
        )
    return lengths.to(device)


def _summarize_lengths(lengths: Tensor) -> str:
    """Return a short description of the lengths for a mask's repr."""
    if not concrete(lengths) or lengths.numel() > 8:
        return f"<{' × '.join(map(str, lengths.shape))} lengths>"
    return str(lengths.tolist())


BUILT_IN |= {Padding, Documents}
CHECKED |= {Documents.terms}
