"""Which tokens the queries and the keys of a recording stand for."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError


class Pair(NamedTuple):
    """The token numbers of one call: of what is read, and of what a decoder writes; each (b, n)."""

    source: Tensor | None
    target: Tensor | None = None


def of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pair:
    """The token numbers among the arguments of a model's call, as far as they can be told."""
    found = [arg for arg in args if _is_ids(arg)][:2]
    source = kwargs.get("input_ids", found.pop(0) if found else None)
    target = kwargs.get("decoder_input_ids", found.pop(0) if found else None)
    return Pair(_kept(source), _kept(target))


def _is_ids(x: Any) -> bool:
    whole = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype is not torch.bool
    return whole and x.dim() in (1, 2)


def _kept(x: Any) -> Tensor | None:
    return torch.atleast_2d(x.detach().cpu()).clone() if _is_ids(x) else None


class Texts:
    """The tokens of each call of a model, in words if there is a tokenizer.

    tokenizer: anything with `convert_ids_to_tokens`, or a function from a list of numbers to a list of words.
    tokens: the words themselves, of one text or of each one in the batch.
    """

    def __init__(self, tokenizer: Any = None, tokens: Sequence[Any] | None = None) -> None:
        words = getattr(tokenizer, "convert_ids_to_tokens", tokenizer)
        if words is not None and not callable(words):
            raise ArgumentError(
                f"watch got a tokenizer of type {type(tokenizer).__name__}; it needs a method "
                "convert_ids_to_tokens, or to be a function from a list of numbers to a list of words."
            )
        self._words = words
        self._given: list[list[str]] | None = None
        if tokens is not None:
            several = bool(tokens) and not isinstance(tokens[0], str)
            self._given = [[str(t) for t in text] for text in (tokens if several else [tokens])]
        self.calls: list[Pair] = []
        self.spelled: list[dict[str, list[list[str]]]] = []  # of a recording that was loaded

    def ids(self, call: int, side: str) -> Tensor | None:
        """The token numbers of one side, "source" or "target", of one call."""
        if not self.calls:
            return None
        return getattr(self.calls[min(call, len(self.calls) - 1)], side)

    def words(self, call: int, side: str, row: int) -> list[str] | None:
        """The tokens in words."""
        if self.spelled:
            rows = self.spelled[min(call, len(self.spelled) - 1)].get(side)
            return rows[row % len(rows)] if rows else None
        if self._given is not None and side == "source":
            return self._given[row % len(self._given)]
        ids = self.ids(call, side)
        if ids is None or self._words is None:
            return None
        return [str(word) for word in self._words(ids[row % len(ids)].tolist())]
