"""Who listens while a model is watched: from calls of its attentions to a recording."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.inspection import texts
from regard.inspection.capture import CapturedCall
from regard.inspection.generation import Generation
from regard.inspection.hooks.interception import THREAD, Function, observing
from regard.inspection.layers import LayerSelection, clean
from regard.mechanism.weights.matrix import Weights

if TYPE_CHECKING:
    from regard.inspection.watch import Seen


_ONE_MAP = (
    "{name}: the steps of generate cannot be joined to one map, because {refusal}. This happens if the cache "
    "quantizes or prunes its keys, if a hook changes them, or if the model calls SDPA itself with cached "
    "keys. Generate with the default cache, or look at single steps: call the model itself inside the block, "
    "model(ids, past_key_values=cache)."
)


class Recorder:
    """Adds to a `Seen` what the modules of a model do."""

    def __init__(
        self, model: nn.Module, seen: "Seen", choice: LayerSelection, heads: Sequence[int] | None
    ) -> None:
        self.model, self.seen, self.choice, self.heads = model, seen, choice, heads
        found = ((module, clean(name)) for name, module in model.named_modules())
        self.names: dict[nn.Module, str] = {module: name for module, name in found if choice(name)}
        self.ran = False
        self.ran_elsewhere = False  # in another thread
        self._generation: Generation | None = None
        self._drafting = 0  # generations inside a generation, whose tokens may be taken or not

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, this thread's calls are added."""
        hooks = []
        if not isinstance(
            self.model, nn.TransformerEncoderLayer | nn.MultiheadAttention
        ):  # whose fast path it ends
            hooks.append(self.model.register_forward_pre_hook(_Hook(self), with_kwargs=True))
        try:
            with observing(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model itself is called."""
        self.ran = True
        if self._generation is None:
            self.seen._texts.calls.append(texts.of_call(args, kwargs))

    def see_own(self, name: str, weights: Weights) -> None:
        """An attention of regard's."""
        if self.choice(name):
            self.seen.add(name, weights if self.heads is None else weights.heads(list(self.heads)))

    def see(self, module: nn.Module, kept: CapturedCall) -> None:
        """An attention of somebody else's."""
        if self.heads is not None:
            kept = kept.some(self.heads)
        if self._drafting:
            return
        if self._generation is not None:
            if kept.cached and THREAD.updated is not None:
                self._generation.caches.add(THREAD.updated[2])
            self._generation.add(self.names[module], kept)
        else:
            self._add(self.names[module], kept.owned())

    def _add(self, name: str, kept: CapturedCall) -> None:
        self.seen.add(name, kept.weights(), kept.kind)

    # Generation

    def reordered(self, cache: Any, rows: Tensor) -> None:
        if self._generation is not None and self._holds(cache):
            self._generation.reordered(rows)

    def cropped(self, cache: Any, tokens: int) -> None:
        if self._generation is not None and self._holds(cache):
            self._generation.cropped(tokens)

    def _holds(self, cache: Any) -> bool:
        """Whether a cache holds the keys of the generation, and not of an assistant's drafts."""
        assert self._generation is not None
        parts = (getattr(cache, name, cache) for name in ("self_attention_cache", "cross_attention_cache"))
        return not self._drafting and any(one in self._generation.caches for one in (cache, *parts))

    def generating(self, model: nn.Module, generate: Function, *args: Any, **kwargs: Any) -> Any:
        """A whole generation, whose steps are joined at its end."""
        mine = any(module in self.names for module in model.modules())
        if not mine:
            return generate(model, *args, **kwargs)
        if self._generation is not None:
            self._drafting += 1
            try:
                return generate(model, *args, **kwargs)
            finally:
                self._drafting -= 1
        generation = self._generation = Generation()
        hook = model.register_forward_pre_hook(_Forward(self, generation), with_kwargs=True)
        try:
            output = generate(model, *args, **kwargs)
        finally:
            self._generation = None
            hook.remove()
        with torch.no_grad():
            self._join(generation, (args, kwargs), output)
        return output

    def _join(self, generation: Generation, call: tuple[Any, Any], output: Any) -> None:
        given = texts.of_call(*call)
        sequences = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
        sequences = sequences if isinstance(sequences, Tensor) and sequences.dim() == 2 else None
        tensors = (t for t in (*call[0], *call[1].values()) if isinstance(t, Tensor) and t.dim() > 1)
        paths = generation.paths(sequences, next((len(t) for t in tensors), 1))
        for name, kept in generation.plain:
            self._add(name, kept)
        for name, layer in generation.layers.items():
            whole = None if layer.refusal is not None else generation.joined(name, paths)
            refusal = layer.refusal if whole is None else generation.refusal(name, whole)
            if whole is not None and refusal is None:
                self._add(name, whole)
            else:
                self.seen.refuse(
                    name, _ONE_MAP.format(name=name or "the model", refusal=refusal), layer.rules.kind
                )
        if sequences is not None:
            length = max((layer.count for layer in generation.layers.values()), default=0)
            written = sequences[:, :length].detach().cpu().clone()
            cross = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
            self.seen._texts.calls.append(texts.Pair(given.source, written) if cross else texts.Pair(written))


class _Hook:
    """Notes that the model is called; a copy of the model is not watched."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder: Recorder | None = recorder

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch notes a hook first, then that it takes kwargs: another thread may call it without them
        if self.recorder is None:
            return
        if self.recorder not in THREAD.observers:
            self.recorder.ran_elsewhere = True
        elif kwargs is not None:
            self.recorder.called(args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_Hook":
        copied = _Hook.__new__(_Hook)
        copied.recorder = None
        return copied


class _Forward:
    """Notes each forward pass of a generation, the tokens that it is given and the cache that it uses."""

    def __init__(self, recorder: Recorder, generation: Generation) -> None:
        self.recorder, self.generation = recorder, generation

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if kwargs is None or self.recorder not in THREAD.observers or self.recorder._drafting:
            return
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        self.generation.forward(ids if isinstance(ids, Tensor) else None)
        if (cache := kwargs.get("past_key_values")) is not None:
            with suppress(TypeError):  # tuples of tensors, which nothing is done to behind our back
                self.generation.caches.add(cache)
