"""The token ids of a model's calls, and the corresponding tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._util.text import type_name
from regard.errors import ArgumentError


class CallTokens(NamedTuple):
    """The token ids of one call, each (b, n): the model's input, and the decoder's input, if separate."""

    source: Tensor | None
    target: Tensor | None = None


def call_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallTokens:
    """Find the token ids among the arguments of a model."""
    positional = [arg for arg in args if _is_ids(arg)][:2]
    source = kwargs.get("input_ids", positional.pop(0) if positional else None)
    target = kwargs.get("decoder_input_ids", positional.pop(0) if positional else None)
    return CallTokens(_copy(source), _copy(target))


def _is_ids(x: Any) -> bool:
    integer = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype is not torch.bool
    return integer and x.dim() in (1, 2)


def _copy(x: Any) -> Tensor | None:
    return torch.atleast_2d(x.detach().cpu()).clone() if _is_ids(x) else None


class RecordedTexts:
    """The token ids of each call, and the tokens if known.

    tokenizer: an object with `convert_ids_to_tokens`, or a function from a list of ids to a list of tokens.
    tokens: the tokens of one text, or of each text in the batch.
    """

    def __init__(self, tokenizer: Any = None, tokens: Sequence[Any] | None = None) -> None:
        convert = getattr(tokenizer, "convert_ids_to_tokens", tokenizer)
        if convert is not None and not callable(convert):
            raise ArgumentError(
                f"watch(tokenizer=…) got {type_name(tokenizer)}; pass an object with a method "
                "convert_ids_to_tokens, or a function from a list of ids to a list of tokens."
            )
        self._convert = convert
        self._tokens: list[list[str]] | None = None
        if tokens is not None:
            is_batch = bool(tokens) and not isinstance(tokens[0], str)
            self._tokens = [[str(token) for token in text] for text in (tokens if is_batch else [tokens])]
        self.calls: list[CallTokens] = []
        self.loaded: list[dict[str, list[list[str]]]] = []  # tokens of a loaded recording, by call and side

    def ids(self, call: int, side: str) -> Tensor | None:
        """Return the token ids of the "source" or "target" side of one call."""
        if not self.calls:
            return None
        return getattr(self.calls[min(call, len(self.calls) - 1)], side)

    def tokens(self, call: int, side: str, row: int) -> list[str] | None:
        """Return the tokens of one row of the batch."""
        if self.loaded:
            rows = self.loaded[min(call, len(self.loaded) - 1)].get(side)
            return rows[row % len(rows)] if rows else None
        if self._tokens is not None and side == "source":
            return self._tokens[row % len(self._tokens)]
        ids = self.ids(call, side)
        if ids is None or self._convert is None:
            return None
        return [str(token) for token in self._convert(ids[row % len(ids)].tolist())]
