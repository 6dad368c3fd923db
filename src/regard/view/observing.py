"""Who listens while a model is watched: from calls of its attentions to a recording."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.mechanism.weights import Weights
from regard.view import texts
from regard.view.generation import Generation
from regard.view.interception import Function, observing
from regard.view.keeping import Kept
from regard.view.layers import Choice, clean

if TYPE_CHECKING:
    from regard.view.watch import Seen


class Recorder:
    """Adds to a `Seen` what the modules of a model do."""

    def __init__(self, model: nn.Module, seen: "Seen", choice: Choice, heads: Sequence[int] | None) -> None:
        self.model, self.seen, self.choice, self.heads = model, seen, choice, heads
        found = ((module, clean(name)) for name, module in model.named_modules())
        self.names: dict[nn.Module, str] = {module: name for module, name in found if choice(name)}
        self.ran = False
        self._generation: Generation | None = None

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

    def see(self, module: nn.Module, kept: Kept) -> None:
        """An attention of somebody else's."""
        if self.heads is not None:
            kept = kept.some(self.heads)
        if self._generation is not None:
            self._generation.add(self.names[module], kept)
        else:
            self._add(self.names[module], kept.owned())

    def _add(self, name: str, kept: Kept) -> None:
        self.seen.add(name, kept.weights(), kept.kind)

    # Generation

    def reordered(self, rows: Tensor) -> None:
        if self._generation is not None:
            self._generation.reordered(rows)

    def cropped(self, tokens: int) -> None:
        if self._generation is not None:
            self._generation.cropped(tokens)

    def generating(self, model: nn.Module, generate: Function, *args: Any, **kwargs: Any) -> Any:
        """A whole generation, whose steps are joined at its end."""
        mine = any(module in self.names for module in model.modules())
        if not mine or self._generation is not None:
            return generate(model, *args, **kwargs)
        generation = self._generation = Generation()
        hook = model.register_forward_pre_hook(_Forward(generation), with_kwargs=True)
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
        for name in generation.layers:
            self._add(name, generation.joined(name, paths))
        if sequences is not None:
            length = max((layer.count for layer in generation.layers.values()), default=0)
            written = sequences[:, :length].detach().cpu().clone()
            cross = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
            self.seen._texts.calls.append(texts.Pair(given.source, written) if cross else texts.Pair(written))


class _Hook:
    """Notes that the model is called; a copy of the model is not watched."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder: Recorder | None = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from regard.view.interception import THREAD

        if self.recorder is not None and self.recorder in THREAD.observers:
            self.recorder.called(args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_Hook":
        copied = _Hook.__new__(_Hook)
        copied.recorder = None
        return copied


class _Forward:
    """Notes each forward pass of a generation, and the tokens that it is given."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        self.generation.forward(ids if isinstance(ids, Tensor) else None)
