"""Change head outputs before they are merged, by wrapping the functions that compute them.

The wrappers are installed when the first thread starts editing and removed when the last one stops. They
affect only edited modules, and only in the threads that edit them.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, overrides
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard.errors import ArgumentError
from regard.inspection.calls.mask_reading import as_boolean
from regard.inspection.editing.replacements import AttentionCall, Inputs, Intervention, intervene
from regard.inspection.hooks.handwritten.calls import HandwrittenCall
from regard.inspection.hooks.handwritten.chains import Chains
from regard.inspection.hooks.handwritten.operations import Operation, Softmaxed
from regard.inspection.hooks.interception import (
    EDIT,
    Function,
    Patch,
    PatchSet,
    calling_module,
    inside_attention,
    remove_mode,
)
from regard.inspection.hooks.interface_call import InterfaceCall, check_keywords, parse
from regard.inspection.hooks.tracing import function_name
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.normalizers import Softmax, Softmax1
from regard.mechanism.operator import OBSERVER, Options, attend
from regard.mechanism.quantized import dequantize
from regard.mechanism.scores import ScaledDot
from regard.mechanism.sdpa import SDPACall
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import Attends, is_cross_attention

_HIDES = -1e4  # biases of at most this value hide keys; position biases have a smaller magnitude


class Edit(NamedTuple):
    """An intervention, the heads that it changes (None for all), and the name of the edited module."""

    heads: tuple[int, ...] | None
    intervention: Intervention
    layer: str = ""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.edits: list[Mapping[nn.Module, Edit]] = []
        self.multihead: list[nn.MultiheadAttention] = []  # edited torch modules that are running
        self.depth = 0  # number of running attention functions; SDPA calls inside them are not edited again
        self.slow_path_depth = 0  # number of running torch layers that must not take their fast path
        self.positions = (0, 0)  # first query and number of queries of the last self-attention call
        self.cache_update: _CacheUpdate | None = None
        self.edited: set[nn.Module] = set()  # modules whose calls were edited
        self.mode: _EditMode | None = None  # None unless modules of other libraries are edited


class _CacheUpdate(NamedTuple):
    """The last update of a key-value cache: its keys, and the number of tokens so far."""

    keys: Tensor
    length: int


_THREAD = _Thread()


@contextmanager
def editing(edits: Mapping[nn.Module, Edit]) -> Iterator[set[nn.Module]]:
    """Edit calls to the given modules in this thread; yield the set of modules edited so far."""
    with _PATCHES.installed():
        _THREAD.edits.append(edits)
        outer, _THREAD.edited = _THREAD.edited, set()
        edited = _THREAD.edited
        _update_mode()
        try:
            yield edited
        finally:
            _THREAD.edits[:] = [other for other in _THREAD.edits if other is not edits]
            _update_mode()
            outer |= edited
            _THREAD.edited = outer
            if not _THREAD.edits:
                _THREAD.cache_update, _THREAD.edited = None, set()


def is_edited() -> bool:
    """Return whether calls in this thread are currently edited."""
    return bool(_THREAD.edits)


def _edits(module: nn.Module) -> list[Edit]:
    return [edits[module] for edits in _THREAD.edits if module in edits]


def _apply(
    module: nn.Module, output: Tensor, value: Tensor, inputs: Callable[[], Inputs], positions: tuple[int, int]
) -> Tensor:
    edits = _edits(module)
    _THREAD.edited.add(module)
    call = AttentionCall(output, value, inputs, edits[0].layer, *positions)
    with _inside(), inside_attention():  # calls made by interventions are neither edited nor recorded
        for edit in edits:  # the innermost block is applied last
            call = intervene(call, edit.heads, edit.intervention)
    return call.output


def _self_positions(query: Tensor, key: Tensor, length: int | None = None) -> tuple[int, int]:
    """Return the positions of the first query and key. length: number of tokens in the cache, if any."""
    queries, keys = query.shape[-2], key.shape[-2]
    length = max(keys, queries) if length is None else length
    _THREAD.positions = length - queries, queries
    return length - queries, max(length - keys, 0)


def _cross_positions(query: Tensor) -> tuple[int, int]:
    """Return the positions of the first query and the first key.

    If there are as many queries as in the last self-attention call, they have the same positions.
    """
    first, queries = _THREAD.positions
    return (first if queries == query.shape[-2] else 0), 0


@contextmanager
def _inside() -> Iterator[None]:
    _THREAD.depth += 1
    try:
        yield
    finally:
        _THREAD.depth -= 1


# regard's layers


def _own(original: Function) -> Function:
    def attention_(self: Attends, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if not _THREAD.edits:
            return original(self, query, key, value, **options)
        with _inside():
            output: Tensor = original(self, query, key, value, **options)
        edits = _edits(self)
        cross = bool(edits) and is_cross_attention(edits[0].layer)
        positions = _cross_positions(query) if cross else _self_positions(query, key)
        if not edits:
            return output

        def inputs() -> Inputs:
            repeated: Any = {**options, "dropout": 0.0}
            return Inputs(query, key, value, repeated)

        return _apply(self, output, value, inputs, positions)

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
    with _inside():
        output, weights = function(module, query, key, value, *args, **keywords)
    update = _THREAD.cache_update
    length = update.length if update is not None and update.keys is key else None
    edits = _edits(module)
    cross = is_cross_attention(type(module).__name__) or (bool(edits) and is_cross_attention(edits[0].layer))
    cross = cross or (length is None and key.shape[-2] != query.shape[-2])
    positions = _cross_positions(query) if cross else _self_positions(query, key, length)
    if not edits:
        return output, weights
    key, value = dequantize(key), dequantize(value)

    def inputs() -> Inputs:
        check_keywords(function, keywords)
        return _interface_inputs(parse(name, module, query, key, value, *args, **keywords))

    heads = output.transpose(1, 2)  # b q h e -> b h q e
    return _apply(module, heads, value, inputs, positions).transpose(1, 2).contiguous(), weights


def _interface_inputs(call: InterfaceCall) -> Inputs:
    """Convert a parsed call to the arguments of `regard.attention`."""
    from regard.inspection.huggingface.attention import visible_keys

    dense = isinstance(call.mask, Tensor) and call.mask.dim() > 2
    if not (dense or call.mask is None or isinstance(call.mask, Mask)):
        raise ArgumentError(
            f"edit cannot recompute weights with a mask of type {type(call.mask).__name__}. Use another "
            'attention implementation: model.set_attn_implementation("sdpa").'
        )
    queries, key, value = call.query.shape[2], call.key, call.value
    if call.causal and key.shape[2] > queries:  # a static cache that was empty before this call
        bias = None if call.bias is None else call.bias[..., :queries]
        call = call._replace(key=key[:, :, :queries], value=value[:, :, :queries], bias=bias)
    visible = visible_keys(call)
    normalize = Softmax() if call.sink is None else Softmax1(call.sink)
    score = ScaledDot(call.scale, call.softcap)
    options = Options(score=score, mask=visible.mask, bias=visible.bias, normalize=normalize, dropout=0.0)
    mask_bias = visible_keys(call._replace(bias=None)).bias
    return Inputs(call.query, call.key, call.value, options, mask_bias)


def _update(original: Function) -> Function:
    """Count the tokens in a cache, to determine the positions of queries and keys."""

    def update(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        states = original(self, key_states, value_states, layer_idx, *args, **kw)
        if _THREAD.edits:
            layer = self.layers[layer_idx]
            count = getattr(layer, "cumulative_length_int", getattr(layer, "cumulative_length", None))
            _THREAD.cache_update = _CacheUpdate(
                states[0], int(layer.get_seq_length() if count is None else count)
            )
        return states

    return update


# torch's layers and other code, through SDPA


def _sdpa(original: Function) -> Function:
    def scaled_dot_product_attention(*args: Any, **options: Any) -> Tensor:
        if not _THREAD.edits or _THREAD.depth:
            return original(*args, **options)
        with _inside():
            output: Tensor = original(*args, **options)
        call = SDPACall(*args, **options)
        if _THREAD.multihead:
            module: nn.Module | None = _THREAD.multihead[-1]
            positions = 0, 0
        else:
            module = calling_module(lambda module: bool(_edits(module)))
            if module is None or output.dim() < 3:
                return output
            cross = is_cross_attention(_edits(module)[0].layer)
            positions = _cross_positions(call.query) if cross else _self_positions(call.query, call.key)
        assert module is not None

        def inputs() -> Inputs:
            mask, bias = call.mask_and_bias()
            boolean = None if bias is None or bias.requires_grad else as_boolean(bias)
            mask, bias = (mask, bias) if boolean is None else (boolean, None)
            options = Options(score=ScaledDot(call.scale), mask=mask, bias=bias, dropout=0.0)
            return Inputs(*call[:3], options, None if bias is None else _hiding_part(bias))

        return _apply(module, output, call.value, inputs, positions)

    return scaled_dot_product_attention


def _hiding_part(bias: Tensor) -> Tensor | None:
    """Return the mask in a bias that combines a mask with position biases, or None if it hides no key."""
    hidden = bias <= _HIDES
    return torch.zeros_like(bias).masked_fill(hidden, -torch.inf) if bool(hidden.any()) else None


class _EditMode(TorchFunctionMode):
    """Edits calls to SDPA, no matter under which name it was imported, and handwritten attention."""

    def __init__(self) -> None:
        super().__init__()
        self._chains = Chains(edit_product)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function_name(func), kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return _sdpa(func)(*args, **kwargs)
        if _THREAD.depth or _THREAD.multihead:
            return func(*args, **kwargs)
        return self._chains.call(name, func, args, kwargs)


def edit_product(operation: Operation, node: Softmaxed) -> Any:
    """Edit a product of weights and values written in plain tensor operations; return the new output."""
    module = calling_module(lambda module: bool(_edits(module)))
    if module is None:
        return operation.output
    layer = _edits(module)[0].layer
    with torch.enable_grad() if operation.output.requires_grad else nullcontext():
        call = HandwrittenCall.of(operation, node, module, layer)
        cross = is_cross_attention(layer)
        positions = (
            _cross_positions(call.weights) if cross else _self_positions(call.weights, call.weights.mT)
        )
        return call.merge(_apply(module, call.output, call.value, call.inputs, positions))


def run_edited(query: Tensor, key: Any, value: Any, options: Options) -> tuple[Tensor, Weights] | None:
    """Run a call to `regard.attention` or `regard.attend` in an edited module, and edit its output.

    Returns None if the call is not edited. The weights are those before the intervention.
    """
    if _THREAD.depth or torch.compiler.is_compiling():
        return None
    module = calling_module(lambda module: bool(_edits(module)))
    if module is None:
        return None
    with _inside():
        output, weights = attend(query, key, value, **options)
    if output.dim() < 3:
        raise ArgumentError(
            f"edit cannot change {_edits(module)[0].layer!r}: its query has shape {tuple(query.shape)}, "
            "without an axis for heads. Add one: query.unsqueeze(-3)."
        )
    key, value = dequantize(key), dequantize(value)
    cross = is_cross_attention(_edits(module)[0].layer)
    positions = _cross_positions(query) if cross else _self_positions(query, key)

    def inputs() -> Inputs:
        repeated: Any = {**options, "dropout": 0.0}
        return Inputs(query, key, value, repeated)

    return _apply(module, output, value, inputs, positions), weights


def _update_mode() -> None:
    """Activate the mode only while modules of other libraries are edited: it disables fast paths."""
    own = Attends | nn.MultiheadAttention
    needed = any(not isinstance(module, own) for edits in _THREAD.edits for module in edits)
    if needed and _THREAD.mode is None:
        _THREAD.mode = _EditMode()
        overrides._push_mode(_THREAD.mode)
        OBSERVER.functions = (run_edited, *OBSERVER.functions)
    elif not needed and _THREAD.mode is not None:
        remove_mode(_THREAD.mode)
        OBSERVER.functions = tuple(run for run in OBSERVER.functions if run is not run_edited)
        _THREAD.mode = None


def _multihead(original: Function) -> Function:
    signature = inspect.signature(original)

    def forward(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        if not _edits(self):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        need_weights = bound.arguments["need_weights"]
        bound.arguments["need_weights"] = False  # only this path calls SDPA
        _THREAD.multihead.append(self)
        try:
            with _without_fast_path():
                output, _ = original(*bound.args, **bound.kwargs)
        finally:
            _THREAD.multihead.pop()
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
    """Report the fast path as disabled while this thread edits a torch layer."""

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
    from transformers.cache_utils import Cache
    from transformers.modeling_utils import AttentionInterface

    return [
        Patch(AttentionInterface, "get_interface", _interface, rank=EDIT),
        Patch(Cache, "update", _update, rank=EDIT),
    ]


_PATCHES = PatchSet(_patch_torch, _patch_transformers)
