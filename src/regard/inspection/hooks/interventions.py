"""Change head outputs before they are merged, by wrapping the functions that compute them.

The wrappers are installed when the first thread starts editing and removed when the last one stops. They
affect only edited modules, and only in the threads that edit them.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ArgumentError
from regard.inspection.hooks.interception import EDIT, Function, Patch, PatchSet
from regard.inspection.hooks.interface_call import InterfaceCall, check_keywords, parse
from regard.inspection.replacements import AttentionCall, Intervention, intervene
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.operator import attend, attention
from regard.mechanism.scores import Dot, ScaledDot
from regard.mechanism.sdpa import SDPACall
from regard.models.layers.attention import Attends


class Edit(NamedTuple):
    """An intervention and its heads; None for all heads."""

    heads: tuple[int, ...] | None
    intervention: Intervention


class _Thread(threading.local):
    def __init__(self) -> None:
        self.edits: list[Mapping[nn.Module, Edit]] = []
        self.sdpa_callers: list[nn.Module] = []  # running edited modules that compute attention with SDPA
        self.slow_path_depth = 0  # running torch layers that must not take their fast path


_THREAD = _Thread()


@contextmanager
def editing(edits: Mapping[nn.Module, Edit]) -> Iterator[None]:
    """Apply edits to the calls of these modules in this thread."""
    with _PATCHES.installed():
        _THREAD.edits.append(edits)
        try:
            yield
        finally:
            _THREAD.edits[:] = [other for other in _THREAD.edits if other is not edits]


def _edits(module: nn.Module) -> list[Edit]:
    return [edits[module] for edits in _THREAD.edits if module in edits]


def _apply(module: nn.Module, call: AttentionCall) -> Tensor:
    for heads, intervention in _edits(module):  # the innermost block last
        call = intervene(call, heads, intervention)
    return call.output


# regard's layers


def _own(original: Function) -> Function:
    def attention_(self: Attends, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output: Tensor = original(self, query, key, value, **options)
        if not _edits(self):
            return output

        def weights() -> Tensor:
            return attend(query, key, value, **{**options, "dropout": 0.0})[1].dense()

        def uniform() -> Tensor:
            zero_query, zero_key = (x.new_zeros(*x.shape[:-1], 1) for x in (query, key))
            return attention(zero_query, zero_key, value, score=Dot(), mask=options.get("mask"))

        return _apply(self, AttentionCall(output, value, weights, uniform))

    return attention_


# Hugging Face's attention interface


def _interface(original: Function) -> Function:
    def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
        function: Function = original(self, attn_implementation, default)
        name = "eager" if function is default else attn_implementation
        return partial(_hosted, function, name) if _THREAD.edits else function

    return get_interface


def _hosted(
    function: Function, name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    *args: Any, **keywords: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    output, weights = function(module, query, key, value, *args, **keywords)
    if not _edits(module):
        return output, weights
    from regard.inspection.huggingface import compute

    def parsed() -> InterfaceCall:
        check_keywords(function, keywords)
        call = parse(name, module, query, key, value, *args, **keywords)
        dense = isinstance(call.mask, Tensor) and call.mask.dim() > 2
        if not (dense or call.mask is None or isinstance(call.mask, Mask)):
            raise ArgumentError(
                f"edit cannot recompute weights with a mask of type {type(call.mask).__name__}. Use another "
                'attention implementation: model.set_attn_implementation("sdpa").'
            )
        return call._replace(dropout=0.0)

    def dense_weights() -> Tensor:
        weights = compute(parsed(), need_weights=True)[1]
        assert weights is not None
        return weights.dense()

    def uniform() -> Tensor:
        zeros = [x.new_zeros(*x.shape[:-1], 1) for x in (query, key)]
        call = parsed()._replace(query=zeros[0], key=zeros[1], softcap=None, sink=None, bias=None)
        return compute(call)[0].transpose(1, 2)

    call = AttentionCall(output.transpose(1, 2), value, dense_weights, uniform)  # b q h e -> b h q e
    return _apply(module, call).transpose(1, 2).contiguous(), weights


# torch's layers, through SDPA


def _sdpa(original: Function) -> Function:
    def scaled_dot_product_attention(*args: Any, **options: Any) -> Tensor:
        output: Tensor = original(*args, **options)
        if not _THREAD.sdpa_callers:
            return output
        call = SDPACall(*args, **options)

        def weights() -> Tensor:
            mask, bias = call.mask_and_bias()
            score = ScaledDot(call.scale)
            return attend(*call[:3], score=score, mask=mask, bias=bias)[1].dense()

        def uniform() -> Tensor:
            rest = {name: x for name, x in call._asdict().items() if name not in ("query", "key")}
            return original(call.query * 0, call.key * 0, **rest)

        return _apply(_THREAD.sdpa_callers[-1], AttentionCall(output, call.value, weights, uniform))

    return scaled_dot_product_attention


def _multihead(original: Function) -> Function:
    signature = inspect.signature(original)

    def forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if not _edits(self):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        need_weights = bound.arguments["need_weights"]
        bound.arguments["need_weights"] = False  # only this path calls SDPA
        _THREAD.sdpa_callers.append(self)
        try:
            with _without_fast_path():
                output, _ = original(*bound.args, **bound.kwargs)
        finally:
            _THREAD.sdpa_callers.pop()
        return output, original(self, *args, **kwargs)[1] if need_weights else None

    return forward


def _slow_path(original: Function) -> Function:
    """Disable the fast path, which cannot be edited, in torch layers that contain an edited module."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        edited = bool(_THREAD.edits) and any(_edits(module) for module in self.modules())
        with _without_fast_path() if edited else nullcontext():
            return original(self, *args, **kwargs)

    return forward


def _fast_path_enabled(original: Function) -> Function:
    """Report the fast path as disabled in this thread only."""

    def get_fastpath_enabled() -> bool:
        if torch.compiler.is_compiling():
            return bool(original())
        return not _THREAD.slow_path_depth and bool(original())

    return get_fastpath_enabled


@contextmanager
def _without_fast_path() -> Iterator[None]:
    _THREAD.slow_path_depth += 1
    try:
        yield
    finally:
        _THREAD.slow_path_depth -= 1


def _patch_torch() -> list[Patch]:
    return [
        Patch(Attends, "attention", _own, rank=EDIT),
        Patch(F, "scaled_dot_product_attention", _sdpa, rank=EDIT),
        Patch(nn.MultiheadAttention, "forward", _multihead, rank=EDIT),
        Patch(nn.TransformerEncoderLayer, "forward", _slow_path, rank=EDIT),
        Patch(nn.TransformerEncoder, "forward", _slow_path, rank=EDIT),
        Patch(torch.backends.mha, "get_fastpath_enabled", _fast_path_enabled, rank=EDIT),
    ]


def _patch_transformers() -> list[Patch]:
    from transformers.modeling_utils import AttentionInterface

    return [Patch(AttentionInterface, "get_interface", _interface, rank=EDIT)]


_PATCHES = PatchSet(_patch_torch, _patch_transformers)
