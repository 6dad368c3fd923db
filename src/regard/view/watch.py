"""Look into a model while it runs: the weights of every attention inside, by the name of its module."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DTypeError
from regard.mechanism.weights import Weights
from regard.models.heads import watching


class Seen(Mapping[str, Weights]):
    """What was seen, in order: a mapping from names to weights, which also counts: seen[0] is the first.

    A module that attends several times has a name for each: "decoder.attention", "decoder.attention@2", …

    >>> import torch, regard
    >>> layer = regard.models.MultiHeadAttention(16, 4)
    >>> with regard.watch(torch.nn.Sequential(layer)) as seen:
    ...     output = layer(torch.randn(5, 16))
    >>> seen
    Seen(0: Weights(4 × 5 × 5))
    >>> seen["0"] is seen[0] is seen[-1]
    True
    """

    def __init__(self) -> None:
        self._weights: dict[str, Weights] = {}
        self._calls: dict[str, list[Weights]] = {}

    def add(self, name: str, weights: Weights) -> None:
        """Keep what the module of this name has just done."""
        calls = self._calls.setdefault(name, [])
        calls.append(weights)
        self._weights[name if len(calls) == 1 else f"{name}@{len(calls)}"] = weights

    def calls(self, name: str) -> list[Weights]:
        """All that the module of this name did, call by call."""
        if name not in self._calls:
            raise KeyError(self._missing(name))
        return list(self._calls[name])

    def joined(self, name: str) -> Tensor:
        """All that the module of this name did, one call below the other, dense: (…, q, k).

        That is how a decoder that goes step by step looked at its source. Steps with caches, which see more
        keys each time, are filled up with zeros.
        """
        calls = [weights.dense() for weights in self.calls(name)]
        keys = max(weights.shape[-1] for weights in calls)
        return torch.cat([nn.functional.pad(w, (0, keys - w.shape[-1])) for w in calls], -2)

    def __getitem__(self, name: str | int) -> Weights:
        if isinstance(name, int):
            if not -len(self) <= name < len(self):
                raise IndexError(f"seen[{name}] of {len(self)} attentions; they count from 0.")
            return list(self._weights.values())[name]
        if name not in self._weights:
            raise KeyError(self._missing(name))
        return self._weights[name]

    def _missing(self, name: str) -> str:
        names = ", ".join(self._weights) or "nothing yet: call the model inside the with block"
        return f"{name!r} was not seen; seen were {names}."

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        lines = [
            f"{name or '(the model)'}: Weights({' × '.join(map(str, weights.shape))})"
            for name, weights in self._weights.items()
        ]
        return f"Seen({', '.join(lines)})" if len(lines) < 2 else "Seen(\n  " + ",\n  ".join(lines) + ",\n)"


@contextmanager
def watch(model: nn.Module) -> Iterator[Seen]:
    """Collect the lazy weights of each attention inside a model, for as long as the block lasts.

    Nothing is kept, and nothing slows down, outside the block.

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(100, regard.models.Recipe(width=16, heads=2, layers=2))
    >>> with regard.watch(model) as seen:
    ...     logits = model(torch.tensor([[5, 6, 7]]))
    >>> list(seen)
    ['decoder.blocks.0.attention', 'decoder.blocks.1.attention']
    >>> seen["decoder.blocks.1.attention"].shape
    torch.Size([1, 2, 3, 3])
    """
    if not isinstance(model, nn.Module):
        raise DTypeError(f"watch got a {type(model).__name__}; it looks into a torch.nn.Module.")
    seen = Seen()
    with watching(model, seen.add) as attentions:
        if not attentions:
            raise ArgumentError(
                f"watch got a {type(model).__name__} in which no module attends; it sees regard's own "
                "layers, those that derive from regard.models.Attends."
            )
        yield seen
