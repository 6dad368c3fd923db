"""Record the attention calls of a model in a `Seen`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.inspection.capture import CapturedCall
from regard.inspection.generation import Generation
from regard.inspection.hooks.interception import THREAD, Function, observing
from regard.inspection.layers import LayerSelection, clean
from regard.inspection.texts import CallTokens, call_tokens
from regard.mechanism.weights.matrix import Weights

if TYPE_CHECKING:
    from regard.inspection.watch import Seen


_NOT_JOINED = (
    "{name}: cannot join the steps of generate, because {reason}. This happens if the cache quantizes or "
    "prunes its keys, if a hook changes them, or if the model calls SDPA itself with cached keys. Use the "
    "default cache, or watch single steps: model(ids, past_key_values=cache)."
)


class Recorder:
    """Adds the attention calls of a model to a `Seen`."""

    def __init__(
        self, model: nn.Module, seen: "Seen", selection: LayerSelection, heads: Sequence[int] | None
    ) -> None:
        self.model, self.seen, self.selection, self.heads = model, seen, selection, heads
        modules = ((module, clean(name)) for name, module in model.named_modules())
        self.names: dict[nn.Module, str] = {module: name for module, name in modules if selection(name)}
        self.ran = False
        self.ran_elsewhere = False  # in another thread
        self._generation: Generation | None = None
        self._nested_generations = 0  # of an assistant model, whose tokens may be rejected

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of this thread."""
        hooks = []
        # a hook would disable the fast path of these
        if not isinstance(self.model, nn.TransformerEncoderLayer | nn.MultiheadAttention):
            hooks.append(self.model.register_forward_pre_hook(_CallHook(self), with_kwargs=True))
        try:
            with observing(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def on_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model itself is called."""
        self.ran = True
        if self._generation is None:
            self.seen._texts.calls.append(call_tokens(args, kwargs))

    def on_own_attention(self, name: str, weights: Weights) -> None:
        """A layer of regard attended."""
        if self.selection(name):
            self.seen.add(name, weights if self.heads is None else weights.heads(list(self.heads)))

    def on_attention(self, module: nn.Module, call: CapturedCall) -> None:
        """A layer of another library attended."""
        if self.heads is not None:
            call = call.select_heads(self.heads)
        if self._nested_generations:
            return
        if self._generation is not None:
            if call.cached and THREAD.cache_update is not None:
                self._generation.caches.add(THREAD.cache_update.cache)
            self._generation.add(self.names[module], call)
        else:
            self._add(self.names[module], call.detached())

    def _add(self, name: str, call: CapturedCall) -> None:
        self.seen.add(name, call.weights(), call.kind)

    # Generation

    def on_reorder(self, cache: Any, rows: Tensor) -> None:
        if self._generation is not None and self._is_of_generation(cache):
            self._generation.on_reorder(rows)

    def on_crop(self, cache: Any, tokens: int) -> None:
        if self._generation is not None and self._is_of_generation(cache):
            self._generation.on_crop(tokens)

    def _is_of_generation(self, cache: Any) -> bool:
        """Return whether a cache holds the keys of the generation, not those of an assistant model."""
        assert self._generation is not None
        parts = (getattr(cache, name, cache) for name in ("self_attention_cache", "cross_attention_cache"))
        caches = self._generation.caches
        return not self._nested_generations and any(part in caches for part in (cache, *parts))

    def on_generate(self, model: nn.Module, generate: Function, *args: Any, **kwargs: Any) -> Any:
        """Run a generation, and join its steps at the end."""
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
        with torch.no_grad():
            self._join(generation, args, kwargs, output)
        return output

    def _join(self, generation: Generation, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
        sequences = sequences if isinstance(sequences, Tensor) and sequences.dim() == 2 else None
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1)
        paths = generation.paths(sequences, next((len(x) for x in tensors), 1))
        for name, call in generation.single_calls:
            self._add(name, call)
        for name, layer in generation.layers.items():
            joined = generation.joined(name, paths) if layer.error is None else None
            error = layer.error if joined is None else generation.error(name, joined)
            if joined is not None and error is None:
                self._add(name, joined)
            else:
                reason = _NOT_JOINED.format(name=name or "the model", reason=error)
                self.seen.add_error(name, reason, layer.first_call.kind)
        if sequences is not None:
            length = max((layer.count for layer in generation.layers.values()), default=0)
            written = sequences[:, :length].detach().cpu().clone()
            has_source = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
            source = call_tokens(args, kwargs).source
            tokens = CallTokens(source, written) if has_source else CallTokens(written)
            self.seen._texts.calls.append(tokens)


class _CallHook:
    """Reports calls of the model; a copy of the model is not watched."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder: Recorder | None = recorder

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch registers a hook before it registers with_kwargs: another thread may call it without kwargs
        if self.recorder is None:
            return
        if self.recorder not in THREAD.observers:
            self.recorder.ran_elsewhere = True
        elif kwargs is not None:
            self.recorder.on_call(args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_CallHook":
        copied = _CallHook.__new__(_CallHook)
        copied.recorder = None
        return copied


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
            with suppress(TypeError):  # tuples of tensors, which are not reordered in place
                self.generation.caches.add(cache)
