"""Watch a model while it runs: record the attention calls of its layers in a `Seen`."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._util.name_hints import hint_arguments
from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError
from regard.inspection.calls.capture import CapturedCall
from regard.inspection.calls.generation import Generation
from regard.inspection.calls.windows import WindowedLayer
from regard.inspection.hooks.interception import THREAD, TRANSFORMED, Function, observing
from regard.inspection.layers import Layers, LayerSelection, clean, has_no_attention, has_windows
from regard.inspection.measures.call_record import AttentionOutput, CallRecord, NoValues, output_projection
from regard.inspection.recordings.recording import Seen
from regard.inspection.recordings.texts import CallTokens, RecordedTexts, call_tokens
from regard.inspection.unrecorded import OTHER_THREAD, CallHook, UnrecordedModules, nothing_recorded
from regard.mechanism.torch_state import transformed
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import watch_layers

_NOT_JOINED = (
    "{name}: cannot join the steps of generate, because {reason}. This happens if the cache quantizes or "
    "prunes its keys, if a hook changes them, or if the model calls SDPA directly with cached keys. Use the "
    "default cache, or watch single steps: model(ids, past_key_values=cache)."
)


@hint_arguments
def watch(
    model: nn.Module,
    layers: Layers | None = None,
    *,
    heads: Sequence[int] | None = None,
    tokenizer: Any = None,
    tokens: Sequence[Any] | None = None,
    values: bool = False,
    gradients: bool = False,
) -> "Watch":
    """Record the weights of every attention layer of a model inside a `with` block.

    Supports regard's layers and functions, torch's `nn.MultiheadAttention` and Transformer layers, SDPA,
    FlexAttention, the attention interface of Hugging Face transformers with any kernel, and attention in
    plain tensor operations: a softmax of query · keyᵀ, times values. The weights are stored as query, key and
    mask, in memory linear in the sequence length, or densely if these do not determine the weights
    (`Seen.storage`). They are recorded before dropout (after dropout in regard's layers and functions),
    before layers that mix heads, and before factors that make them negative. Windows of tokens (Swin,
    Qwen2.5-VL) become one map per image; `Seen.windows` returns the weights of each window.

    The model's outputs are bit-identical to those without `watch`, except that compiled models run uncompiled
    inside the block. Only calls inside the block and in the same thread are recorded; a warning and
    `Seen.unseen` name attention that ran but was not recorded. Reading weights raises an error if query or
    key was modified in place after the call. Modifications through `.data` are not detected.

    layers: record only these layers, by number (0 is the first, -1 the last), name or pattern: [0, -1],
        "decoder.*".
    heads: record only these heads of each layer.
    tokenizer: converts token ids to tokens, for `Seen.texts` and the views.
    tokens: the tokens, if the model is not called with token ids.
    values: also record the values, for `Seen.norms`.
    gradients: also record the gradient of each layer's heads in backward passes, for `Seen.gradients` and
        `Seen.relevance`.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoder(
    ...     torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 3
    ... ).eval()
    >>> with torch.no_grad(), regard.watch(model, layers=[0, -1]) as seen:
    ...     output = model(torch.randn(1, 5, 16))
    >>> list(seen)
    ['layers.0.self_attn', 'layers.2.self_attn']
    >>> seen[-1].shape
    torch.Size([1, 2, 5, 5])
    """
    if not isinstance(model, nn.Module):
        raise DTypeError(
            f'watch() got {type_name(model)}; pass a torch.nn.Module, such as regard.load_encoder("minilm").'
        )
    if has_no_attention(model):
        raise ArgumentError(
            f"watch() got {type_name(model)} without attention layers: it consists only of torch and "
            "regard layers, none of which computes attention."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError(
            f"watch() got {model.original_name} as TorchScript, which runs outside Python. Watch the "
            "module that was passed to torch.jit.script or torch.jit.trace."
        )
    selection, seen = LayerSelection(model, layers), Seen(RecordedTexts(tokenizer, tokens))
    recorder = Recorder(model, seen, selection, heads, values=values or gradients, gradients=gradients)
    return Watch(recorder, layers)


class Watch(AbstractContextManager["Seen"]):
    """The context manager that `watch` returns.

    >>> import torch, regard
    >>> layer = regard.models.SelfAttention()
    >>> with regard.watch(layer) as seen:
    ...     output = layer(torch.eye(3))
    >>> len(seen)
    1
    """

    def __init__(self, recorder: "Recorder", layers: Layers | None) -> None:
        self._recorder, self._layers, self._stack = recorder, layers, ExitStack()
        self._entered = False

    def __enter__(self) -> Seen:
        if self._entered:
            raise ArgumentError("This watch has already been entered; call regard.watch(model) again.")
        self._entered = True
        recorder = self._recorder
        with ExitStack() as stack:
            stack.enter_context(recorder.recording())
            stack.enter_context(watch_layers(recorder.model, recorder.on_own_attention))
            self._stack = stack.pop_all()
        return recorder.seen

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._stack.__exit__(kind, error, traceback)
        if kind is None:
            self._warn_about_unrecorded()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"watch(model) has no attribute {name!r}. {_WITH}")

    def __getitem__(self, name: Any) -> Any:
        raise ArgumentError(f"watch(model) cannot be indexed. {_WITH}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise ArgumentError(f"watch(model) cannot be called; call the model. {_WITH}")

    def __del__(self) -> None:
        if not self.__dict__.get("_entered", True):
            warnings.warn(f"regard.watch(model) was not entered and recorded nothing. {_WITH}", stacklevel=2)

    def _warn_about_unrecorded(self) -> None:
        """Store and warn about the attention that ran without being recorded."""
        recorder, seen = self._recorder, self._recorder.seen
        unseen = recorder.unrecorded.describe(name for name, _ in seen._modules.values())
        if not unseen and not seen:
            if recorder.ran:
                unseen = nothing_recorded(recorder.model, self._layers)
            elif recorder.ran_elsewhere:
                unseen = OTHER_THREAD
        if not unseen:
            return
        seen._unseen = unseen
        seen._empty = f"nothing, although the model ran: {unseen}" if recorder.ran else f"nothing: {unseen}"
        message = f"watch did not record: {unseen}" if seen else f"watch recorded {seen._empty}"
        warnings.warn(f"{type(recorder.model).__name__}: {message}.", stacklevel=3)


_WITH = "Use it in a with statement: with regard.watch(model) as seen: …"


# Recording


class Recorder:
    """Adds the attention calls of a model to a `Seen`."""

    def __init__(
        self,
        model: nn.Module,
        seen: Seen,
        selection: LayerSelection,
        heads: Sequence[int] | None,
        *,
        values: bool = False,
        gradients: bool = False,
    ) -> None:
        self.model, self.seen, self.selection, self.heads = model, seen, selection, heads
        self.values, self.gradients = values, gradients
        modules = ((module, clean(name)) for name, module in model.named_modules())
        self.names: dict[nn.Module, str] = {module: name for module, name in modules if selection(name)}
        self.ran = False
        self.ran_elsewhere = False  # whether the model ran in another thread
        self.unrecorded = UnrecordedModules(model, selection)
        self.has_windows = has_windows(model)
        self._windowed: dict[str, WindowedLayer] = {}  # the last call to each layer with windows
        self._generation: Generation | None = None
        self._joining = False  # True while the steps of a generation are joined
        self._nested_generations = 0  # running generations of assistant models, whose tokens may be rejected

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls made in this thread."""
        hooks = self.unrecorded.hooks(self)
        # a hook would disable the fast path of these modules
        if not isinstance(self.model, nn.TransformerEncoderLayer | nn.MultiheadAttention):
            hook = CallHook(self, self._on_call)
            hooks.append(self.model.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            with observing(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _on_call(self, observed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the tokens of a call to the model itself, or note that the call is in another thread."""
        if not observed:
            self.ran_elsewhere = True
            return
        self.ran = True
        if self._generation is None:
            self.seen._texts.calls.append(call_tokens(args, kwargs))

    def on_own_attention(self, name: str, weights: Weights) -> None:
        """Record an attention call of a regard layer."""
        if self.selection(name):
            if transformed():
                return self.seen.add_error(name, f"{name or 'the model'}: {TRANSFORMED}", run=self._run)
            if not self.gradients and weights.requires_grad:
                weights = weights.detach()  # otherwise the recording would keep the autograd graph alive
            weights = weights if self.heads is None else weights.heads(list(self.heads))
            self.seen.add(name, weights, run=self._run)

    def on_attention(self, module: nn.Module, call: CapturedCall) -> None:
        """Record an attention call of another library's layer."""
        if not self.values:
            call = replace(call, value=None, output=None)
        elif self._generation is not None and call.output is not None:  # generate computes no gradients
            call = replace(call, output=call.output._replace(tensor=call.query.new_empty(0)))
        if self.heads is not None:
            call = call.select_heads(self.heads)
        if self._nested_generations:
            return
        if self._generation is not None:
            if call.cached and THREAD.cache_update is not None:
                self._generation.caches.add(THREAD.cache_update.cache)
            self._generation.add(self.names[module], call)
        else:
            name = self.names[module]
            self._add(name, call.detached())
            if self.values and call.value is None:
                self.seen.add_record(name, NoValues(name))

    def on_error(self, module: nn.Module, reason: str) -> None:
        """Record an attention call of another library's layer that cannot be read."""
        name = self.names[module]
        reason = f"{name or 'the model'}: {reason}"
        if self._generation is None:
            if not self.seen.ends_with_error(name, reason, self._run):  # one error for all parts of a call
                self.seen.add_error(name, reason, run=self._run)
        elif not self._nested_generations:
            self._generation.unreadable.setdefault(name, reason)

    def on_softmax(self, module: nn.Module, pools: bool) -> None:
        """Note that a module computed a softmax that could not be traced."""
        (self.unrecorded.pooled if pools else self.unrecorded.softmaxes).add(module)

    def on_own_values(self, module: nn.Module, value: Tensor, output: AttentionOutput) -> None:
        """Record the value and output of the last attention call of a regard layer."""
        name = self.names[module]
        if self.values and self.selection(name):
            if self.heads is not None:
                per_group = output.tensor.shape[-3] // value.shape[-3]
                value = value[..., [head // per_group for head in self.heads], :, :]
            self._add_record(name, value, output)

    def _add(self, name: str, call: CapturedCall) -> None:
        if call.windows is not None:
            return self._add_windows(name, call)
        self._windowed.pop(name, None)
        self.seen.add(name, call.weights(), call.kind, self._run)
        if call.value is not None and call.output is not None:
            self._add_record(name, call.value, call.output)

    def _add_windows(self, name: str, call: CapturedCall) -> None:
        """Record the windows of a layer as one map; a model may call the layer once per window size."""
        layer, positions = self._windowed.get(name), call.windows
        assert positions is not None
        if layer is not None and layer.run == self._run and layer.accepts(call):
            layer.calls.append(call)
            self.seen.replace_windows(name, layer)
            if self.values:
                self.seen.add_record(name, NoValues(name))
            return
        layer = self._windowed[name] = WindowedLayer([call], self._run)
        self.seen.add_windows(name, layer)
        if call.value is not None and call.output is not None:
            heads, output = call.output.heads, call.output

            def gradient_of_tokens(gradient: Tensor) -> Tensor:
                return positions.scatter_queries(heads(gradient))

            value = positions.scatter_keys(call.value)
            self._add_record(name, value, output._replace(heads=gradient_of_tokens))

    def _add_record(self, name: str, value: Tensor, output: AttentionOutput) -> None:
        projection = output_projection(self.model, name, output.width)
        record = CallRecord(value, name, self.heads, projection, generated=self._joining)
        if self.gradients:
            record.watch(output)
        self.seen.add_record(name, record)

    @property
    def _run(self) -> int:
        """The number of the model's current call."""
        return max(len(self.seen._texts.calls) - 1, 0)

    # Generation

    def on_reorder(self, cache: Any, rows: Tensor) -> None:
        if self._generation is not None and self._belongs_to_generation(cache):
            self._generation.on_reorder(rows)

    def on_crop(self, cache: Any, tokens: int) -> None:
        if self._generation is not None and self._belongs_to_generation(cache):
            self._generation.on_crop(tokens)

    def _belongs_to_generation(self, cache: Any) -> bool:
        """Return whether a cache belongs to the generation itself, not to an assistant model."""
        assert self._generation is not None
        parts = (getattr(cache, name, cache) for name in ("self_attention_cache", "cross_attention_cache"))
        caches = self._generation.caches
        return not self._nested_generations and any(part in caches for part in (cache, *parts))

    def on_generate(self, model: nn.Module, generate: Function, *args: Any, **kwargs: Any) -> Any:
        """Run `generate`, then record its steps as one call per layer."""
        if not any(module in self.names for module in model.modules()):
            return generate(model, *args, **kwargs)
        if self._generation is not None:
            self._nested_generations += 1
            try:
                return generate(model, *args, **kwargs)
            finally:
                self._nested_generations -= 1
        generation = self._generation = Generation()
        hook = model.register_forward_pre_hook(_ForwardHook(self, generation), with_kwargs=True)
        try:
            output = generate(model, *args, **kwargs)
        finally:
            self._generation = None
            hook.remove()
        self._joining = True
        try:
            with torch.no_grad():
                self._join(generation, args, kwargs, output)
        finally:
            self._joining = False
        return output

    def _join(self, generation: Generation, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
        sequences = sequences if isinstance(sequences, Tensor) and sequences.dim() == 2 else None
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1)
        paths = generation.paths(sequences, next((len(x) for x in tensors), 1))
        self._add_tokens(generation, args, kwargs, sequences)
        for name, call in generation.single_calls:
            self._add(name, call)
        for name, reason in generation.unreadable.items():
            self.seen.add_error(name, reason, run=self._run)
        for name, layer in generation.layers.items():
            if name in generation.unreadable:
                continue
            joined = generation.joined(name, paths) if layer.error is None else None
            error = layer.error if joined is None else generation.error(name, joined)
            if joined is not None and error is None:
                self._add(name, joined)
                if self.values and joined.value is None:
                    self.seen.add_record(name, NoValues(name))
            else:
                reason = _NOT_JOINED.format(name=name or "the model", reason=error)
                self.seen.add_error(name, reason, layer.first_call.kind, self._run)

    def _add_tokens(
        self, generation: Generation, args: Sequence[Any], kwargs: dict[str, Any], sequences: Tensor | None
    ) -> None:
        """Record the tokens of a generation."""
        tokens = CallTokens(None)
        if sequences is not None:
            length = max((layer.count for layer in generation.layers.values()), default=0)
            written = sequences[:, :length].detach().cpu().clone()
            has_source = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
            source = call_tokens(args, kwargs).source
            tokens = CallTokens(source, written) if has_source else CallTokens(written)
        self.seen._texts.calls.append(tokens)


class _ForwardHook:
    """Reports each forward pass of a generation: its new tokens and its cache."""

    def __init__(self, recorder: Recorder, generation: Generation) -> None:
        self.recorder, self.generation = recorder, generation

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if kwargs is None or self.recorder not in THREAD.observers or self.recorder._nested_generations:
            return
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        self.generation.on_forward(ids if isinstance(ids, Tensor) else None)
        if (cache := kwargs.get("past_key_values")) is not None:
            with suppress(TypeError):  # the cache is a tuple of tensors, which is not reordered in place
                self.generation.caches.add(cache)
