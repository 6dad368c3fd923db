"""Where the outputs of heads can be changed before they are merged: stand-ins for functions that others call.

They are put in place while somebody edits, in any thread, and act only for the thread and the modules that
are edited; all else passes through them as it came.
"""

import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ArgumentError
from regard.inspection.hooks.interception import EDITS, Function, Place
from regard.inspection.replacements import AttentionCall, Intervention, changed
from regard.mechanism.operator import attend, attention
from regard.mechanism.scores import Dot
from regard.models.layers.attention import Attends


class Edit(NamedTuple):
    """What is done to which heads; None for all."""

    heads: tuple[int, ...] | None
    change: Intervention


class _Thread(threading.local):
    def __init__(self) -> None:
        self.edits: list[Mapping[nn.Module, Edit]] = []
        self.running: list[nn.Module] = []  # edited modules whose attention is a call of SDPA
        self.slow = 0  # calls of torch's layers that must not take their fast path


_THREAD = _Thread()
_LOCK = threading.RLock()
_PLACES: list[Place] = []
_Place = partial(Place, rank=EDITS)
_count = 0


@contextmanager
def editing(edits: Mapping[nn.Module, Edit]) -> Iterator[None]:
    """Edit what this thread computes with these modules, for as long as the block lasts."""
    _install()
    _THREAD.edits.append(edits)
    try:
        yield
    finally:
        _THREAD.edits[:] = [one for one in _THREAD.edits if one is not edits]
        _uninstall()


def _install() -> None:
    global _count
    with _LOCK:
        _count += 1
        if _count == 1:
            _PLACES.append(_Place(Attends, "attention", _own))
            _PLACES.append(_Place(F, "scaled_dot_product_attention", _sdpa))
            _PLACES.append(_Place(nn.MultiheadAttention, "forward", _multihead))
            _PLACES.append(_Place(nn.TransformerEncoderLayer, "forward", _slowly))
            _PLACES.append(_Place(nn.TransformerEncoder, "forward", _slowly))
            _PLACES.append(_Place(torch.backends.mha, "get_fastpath_enabled", _fast_path))
        # whoever has a model of theirs has loaded them
        hub = sys.modules.get("transformers.modeling_utils")
        if hub is not None and all(place.owner is not hub.AttentionInterface for place in _PLACES):
            _PLACES.append(_Place(hub.AttentionInterface, "get_interface", _interface))


def _uninstall() -> None:
    global _count
    with _LOCK:
        _count -= 1
        while not _count and _PLACES:
            _PLACES.pop().restore()


def _edits(module: nn.Module) -> list[Edit]:
    return [edits[module] for edits in _THREAD.edits if module in edits]


def _apply(module: nn.Module, call: AttentionCall) -> Tensor:
    for heads, change in _edits(module):  # the innermost block comes last
        call = changed(call, heads, change)
    return call.output


# regard's own layers


def _own(original: Function) -> Function:
    def attention_(self: Attends, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output: Tensor = original(self, query, key, value, **options)
        if not _edits(self):
            return output
        plain = {**options, "dropout": 0.0}

        def equally() -> Tensor:
            first, second = (x.new_zeros(*x.shape[:-1], 1) for x in (query, key))
            return attention(first, second, value, score=Dot(), mask=options.get("mask"))

        return _apply(
            self,
            AttentionCall(output, value, lambda: attend(query, key, value, **plain)[1].dense(), equally),
        )

    return attention_


# Hugging Face's attention interface


def _interface(original: Function) -> Function:
    def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
        found: Function = original(self, attn_implementation, default)
        if not _THREAD.edits:
            return found
        return partial(_hosted, found, found is default)

    return get_interface


def _hosted(
    function: Function,
    eager: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **more: Any,
) -> tuple[Tensor, Any]:
    output, weights = function(module, query, key, value, attention_mask, **more)
    if not _edits(module):
        return output, weights
    from regard.inspection.huggingface import hosted_attention

    if eager and attention_mask is None:
        more = {**more, "is_causal": False}  # eager looks back only where a mask says so
    again = partial(hosted_attention, module, attention_mask=attention_mask)
    options = {name: option for name, option in more.items() if name not in ("dropout", "cache")}

    def weigh() -> Tensor:
        _needs_tensor(attention_mask)
        found = again(query, key, value, **{**options, "output_attentions": True})[1]
        return found.dense()  # type: ignore[union-attr]

    def equally() -> Tensor:
        _needs_tensor(attention_mask)
        first, second = (x.new_zeros(*x.shape[:-1], 1) for x in (query, key))
        plain = {
            name: option
            for name, option in options.items()
            if name not in ("position_bias", "s_aux", "softcap")
        }
        return again(first, second, value, **{**plain, "output_attentions": False})[0].transpose(1, 2)

    call = AttentionCall(output.transpose(1, 2), value, weigh, equally)  # b q h e -> b h q e
    return _apply(module, call).transpose(1, 2).contiguous(), weights


def _needs_tensor(mask: Any) -> None:
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() < 3):
        raise ArgumentError(
            "edit needs the weights, and this model's attention implementation has masks of its own kind; "
            'choose another for the time: model.set_attn_implementation("sdpa").'
        )


# torch's own layers, and whatever calls its SDPA


def _sdpa(original: Function) -> Function:
    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> Tensor:
        output: Tensor = original(query, key, value, *args, **options)
        if not _THREAD.running:
            return output
        module = _THREAD.running[-1]
        weights = partial(_weights_of_sdpa, query, key, value, *args, **options)

        def equally() -> Tensor:
            return original(query * 0, key * 0, value, *args, **options)

        return _apply(module, AttentionCall(output, value, weights, equally))

    return scaled_dot_product_attention


def _weights_of_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    from regard.mechanism.scores import ScaledDot
    from regard.mechanism.sdpa import _mask_and_bias

    mask, bias = _mask_and_bias(attn_mask, is_causal)
    return attend(query, key, value, score=ScaledDot(scale), mask=mask, bias=bias)[1].dense()


@contextmanager
def running(module: nn.Module) -> Iterator[None]:
    """While a module runs, the calls of SDPA are its attention."""
    _THREAD.running.append(module)
    try:
        yield
    finally:
        _THREAD.running.pop()


def _multihead(original: Function) -> Function:
    names = inspect.signature(original)

    def forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if not _edits(self):
            return original(self, *args, **kwargs)
        given = names.bind(self, *args, **kwargs)
        given.apply_defaults()
        wanted = given.arguments["need_weights"]
        given.arguments["need_weights"] = False  # which goes through SDPA
        with running(self), _without_fast_path():
            output, _ = original(*given.args, **given.kwargs)
        return output, original(self, *args, **kwargs)[1] if wanted else None

    return forward


def _slowly(original: Function) -> Function:
    """torch's layers on the way that can be edited, if anything in them is."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        edited = bool(_THREAD.edits) and any(_edits(module) for module in self.modules())
        with _without_fast_path() if edited else nullcontext():
            return original(self, *args, **kwargs)

    return forward


def _fast_path(original: Function) -> Function:
    """torch's switch, off for the edited modules of this thread alone: other threads keep their fast path."""

    def get_fastpath_enabled() -> bool:
        if torch.compiler.is_compiling():
            return bool(original())
        return not _THREAD.slow and bool(original())

    return get_fastpath_enabled


@contextmanager
def _without_fast_path() -> Iterator[None]:
    _THREAD.slow += 1
    try:
        yield
    finally:
        _THREAD.slow -= 1
