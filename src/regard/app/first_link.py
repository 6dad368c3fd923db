"""The link that a view shows first: from a pronoun to the word it attends to most, or another strong link."""

import re
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from regard.inspection.layer_view import Floats, InputView, TextView

_MAX_TOKENS = 128  # only the first tokens are searched: a pass over all weights takes too long
_MIN_DISTANCE = 2  # links between neighbors are uninformative: some heads have them in every text
_PRONOUN = re.compile("it|he|she|they|him|her|them|its|his|their", re.IGNORECASE)
_FUNCTION_WORD = re.compile(
    f"{_PRONOUN.pattern}|a|an|the|this|that|these|those|i|you|we|me|us|my|your|our|who|which|what|and|or|but|if|"
    "because|so|as|than|of|in|on|at|to|from|by|for|with|about|into|over|after|before|is|are|was|were|be|been|"
    "am|has|have|had|do|does|did|didn|don|doesn|isn|wasn|not|no|t|s|too|very|may|can|could|will|would|should|"
    "must|there|here|when|while",
    re.IGNORECASE,
)


class Link(NamedTuple):
    """An attention weight, and the indices of its layer, head, query and key.

    >>> from regard.app.first_link import Link
    >>> Link(layer=5, head=11, query=9, key=2, weight=0.65).head
    11
    """

    layer: int
    head: int
    query: int
    key: int
    weight: float


def first_link(view: InputView) -> Link | None:
    """Return the strongest link from the first pronoun to an earlier content word, over all layers and heads.

    In a text without a pronoun, return the strongest link between two content words. The two words of a link
    are not neighbors. Only the beginning of a long text is searched. Return None if there is no such link, or
    if a layer is cross-attention.

    >>> import torch
    >>> from regard.app.first_link import first_link
    >>> from regard.app.view_model import ViewModel
    >>> weights = torch.eye(4).expand(2, 4, 4).clone()
    >>> weights[1, 3] = torch.tensor([0.6, 0.0, 0.3, 0.1])  # in head 1, "it" attends to "dogs"
    >>> first_link(ViewModel.of(weights, queries=["dogs", "bark", "when", "it"]).inputs[0])[:4]
    (0, 1, 3, 0)
    """
    layers = view.layers
    if not layers or any(layer.kind != "self" or layer.queries != layer.keys for layer in layers):
        return None
    text = view.texts[layers[0].queries]
    allowed = _allowed_links(text)
    if not allowed.any():
        return None
    link = max(_strongest(view, allowed), key=lambda link: link.weight, default=None)
    return link if link and link.weight > 0 else None


def _strongest(view: InputView, allowed: "np.ndarray") -> Iterator[Link]:
    """Yield the strongest allowed link in each layer."""
    n, start = len(allowed), slice(len(allowed))
    for number, layer in enumerate(view.layers):
        if min(layer.size) >= n:
            weights: Floats = np.where(allowed, layer.tile(start, start, n, n), -1.0)
            head, query, key = np.unravel_index(int(weights.argmax()), weights.shape)
            yield Link(number, int(head), int(query), int(key), float(weights[head, query, key]))


def _allowed_links(text: TextView) -> "np.ndarray":
    """Return which links may be shown first, as a boolean matrix (queries, keys)."""
    tokens = text.tokens[:_MAX_TOKENS]
    allowed = np.zeros((len(tokens), len(tokens)), bool)
    words = _content_words(tokens, set(text.special))
    for position, token in enumerate(tokens):
        if not _PRONOUN.fullmatch(token):
            continue
        if earlier := [word for word in words if word <= position - _MIN_DISTANCE]:
            allowed[position, earlier] = True
            return allowed
    for query in words:
        allowed[query, [key for key in words if abs(query - key) >= _MIN_DISTANCE]] = True
    return allowed


def _content_words(tokens: Sequence[str], special: Container[int]) -> Sequence[int]:
    return [
        position
        for position, token in enumerate(tokens)
        if position not in special and token.isalpha() and not _FUNCTION_WORD.fullmatch(token)
    ]
