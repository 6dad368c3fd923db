"""Lexically constrained search: phrases that a translation must contain, and a limit on unknown tokens.

Dynamic beam allocation (Post and Vilar 2018): in addition to its best extensions, every hypothesis is
extended by the next tokens of its missing phrases. The beam is divided into banks by the number of phrase
tokens that a hypothesis contains, so hypotheses with and without phrases survive side by side. A hypothesis
can end only when it contains all its phrases.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard._util.text import pluralize
from regard.errors import ArgumentError, ShapeError
from regard.translation.decoding.strategies import Beam, Greedy, Sample, Strategy
from regard.translation.tokens import END

_MIN_BEAM = 5  # minimum beam size for sentences with phrases, to try several positions for each phrase


class Constraints(NamedTuple):
    """Constraints for each sentence in a batch.

    phrases: token sequences that the translation must contain; a phrase may be listed several times.
    max_unknown: maximum number of unknown tokens in the translation; None for no limit.
    inner: tokens that continue a word; they may follow a phrase only as part of a longer phrase.

    >>> from regard.models import Packed, TransformerConfig, Transformer
    >>> from regard.translation.decoding.constraints import Constraints
    >>> from regard.translation.decoding.search import search
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=1))
    >>> constraints = Constraints([[[8, 9]]], max_unknown=[0])
    >>> source = Packed.of([[5, 6, 2]])
    >>> best = search(model, source, max_new_tokens=9, constraints=constraints)[0][0].tokens
    >>> (8, 9) in zip(best, best[1:])
    True
    """

    phrases: Sequence[Sequence[Sequence[int]]]
    max_unknown: Sequence[int] | None = None
    inner: Sequence[int] = ()

    def check(self, strategy: Strategy, limits: Sequence[int]) -> None:
        """Raise unless the constraints fit the batch and can be met."""
        if len(self.phrases) != len(limits):
            raise ShapeError(
                f"search got {pluralize(len(limits), 'sentence')} and constraints for {len(self.phrases):,}; "
                "pass one list of phrases per sentence."
            )
        if isinstance(strategy, Sample) and any(self.phrases):
            raise ArgumentError("Phrases cannot be forced when sampling; use Beam() or Greedy().")
        for phrases, limit in zip(self.phrases, limits, strict=True):
            needed = sum(map(len, phrases)) + 1
            if phrases and needed > limit:
                raise ArgumentError(
                    f"The phrases for a sentence have {pluralize(needed - 1, 'token')}, but its translation "
                    f"can have at most {limit - 1:,}. Use fewer or shorter phrases."
                )

    def take(self, sentences: Sequence[int]) -> "Constraints":
        """Select the constraints for the given sentences."""
        unknown = None if self.max_unknown is None else [self.max_unknown[i] for i in sentences]
        return Constraints([self.phrases[i] for i in sentences], unknown, self.inner)

    def beam_sizes(self, strategy: Greedy | Beam) -> list[int]:
        """Return the beam size for each sentence, which is at least 5 for sentences with phrases."""
        size = strategy.size if isinstance(strategy, Beam) else 1
        return [max(size, _MIN_BEAM) if phrases else size for phrases in self.phrases]


def count_phrases(tokens: Sequence[int], phrases: Sequence[Sequence[int]]) -> tuple[int, set[int]]:
    """Return how many phrase tokens a hypothesis contains, and the tokens that would continue its phrases.

    Phrases are matched from left to right without overlap, the longest first. An incomplete phrase
    counts only if the hypothesis ends with it.

    >>> from regard.translation.decoding.constraints import count_phrases
    >>> count_phrases([4, 8, 9, 7, 5], [[8, 9], [5, 6]])
    (3, {5, 6})
    """
    open_phrases = sorted((list(phrase) for phrase in phrases), key=len, reverse=True)
    met = position = 0
    while position < len(tokens) and open_phrases:
        match = next((p for p in open_phrases if list(tokens[position : position + len(p)]) == p), None)
        if match is None:
            position += 1
        else:
            open_phrases.remove(match)
            met += len(match)
            position += len(match)
            matched_until = position
    begun, following = 0, {phrase[0] for phrase in open_phrases}
    start = matched_until if met else 0
    for phrase in open_phrases:
        for length in range(min(len(phrase) - 1, len(tokens) - start), 0, -1):
            if list(tokens[len(tokens) - length :]) == phrase[:length]:
                following.add(phrase[length])
                begun = max(begun, length)
                break
    return met + begun, following


def _ends_with(tokens: Sequence[int], phrase: Sequence[int]) -> bool:
    return list(tokens[-len(phrase) :]) == list(phrase)


def allocate(banks: Sequence[int], slots: int) -> list[int]:
    """Choose candidates for the beam.

    banks: the bank of each candidate, best candidate first. slots: number of candidates to choose.

    Each bank receives an equal share of the slots; slots that a bank cannot fill go to the best remaining
    candidates.

    >>> from regard.translation.decoding.constraints import allocate
    >>> allocate([0, 0, 0, 0, 1, 2], slots=4)
    [0, 1, 4, 5]
    """
    if len(banks) <= slots:
        return list(range(len(banks)))
    members: dict[int, list[int]] = {}
    for candidate, bank in enumerate(banks):
        members.setdefault(bank, []).append(candidate)
    share = max(slots // len(members), 1)
    # banks with the most phrase tokens come first: with few slots, progress matters more than probability
    chosen = [candidate for bank in sorted(members, reverse=True) for candidate in members[bank][:share]]
    chosen = chosen[:slots]
    rest = [candidate for candidate in range(len(banks)) if candidate not in set(chosen)]
    return sorted([*chosen, *rest[: slots - len(chosen)]])


def extend_constrained(
    tokens: Sequence[Sequence[int]],
    totals: Tensor,
    log_probabilities: Tensor,
    phrases: Sequence[Sequence[int]],
    slots: int,
    limit: int,
    inner: Sequence[int] = (),
    *,
    end: int = END,
) -> tuple[list[int], list[int], list[float]]:
    """Extend the hypotheses of one sentence; return parents, tokens and log probabilities, best first.

    tokens: token ids of each hypothesis, excluding the start token. totals: their log probabilities, (n).
    log_probabilities: log probabilities of the next token, (n, V).
    limit: maximum length including the end token. Near it, only the missing phrase tokens are added.
    inner: tokens that may not follow a phrase. end: the end token.
    """
    needed = sum(map(len, phrases))
    candidates: dict[tuple[int, int], float] = {}
    scores = (totals[:, None] + log_probabilities).double()
    whole = [any(_ends_with(prefix, phrase) for phrase in phrases) for prefix in tokens]
    continuations = [count_phrases(prefix, phrases)[1] for prefix in tokens]
    _forbid(scores, inner, whole, continuations)
    best, at = scores.flatten().topk(min(2 * slots, scores.numel()))
    for value, flat in zip(best.tolist(), at.tolist(), strict=True):
        candidates[divmod(flat, scores.shape[1])] = value
    for row, following in enumerate(continuations):
        for token in (*following, int(scores[row].argmax())):
            candidates[row, token] = float(scores[row, token])
    ranked = []
    for (row, token), value in sorted(candidates.items(), key=lambda item: -item[1]):
        met, _ = count_phrases([*tokens[row], token] if token != end else tokens[row], phrases)
        fits = len(tokens[row]) + 2 + needed - met <= limit
        if value > -math.inf and (met == needed if token == end else fits or met == needed):
            ranked.append((row, token, value, met))
    kept = [ranked[i] for i in allocate([met for *_, met in ranked], slots)]
    return [row for row, *_ in kept], [token for _, token, *_ in kept], [value for _, _, value, _ in kept]


def _forbid(
    scores: Tensor, inner: Sequence[int], whole: Sequence[bool], continuations: Sequence[set[int]]
) -> None:
    """Set the scores of `inner` tokens to −∞ after a whole phrase, unless they continue another phrase.

    For example, "fire" may not become "fires", but it may become "firefighter" if that is a phrase.
    """
    if not inner:
        return
    for row in (row for row, is_whole in enumerate(whole) if is_whole):
        following = torch.tensor(sorted(continuations[row]), dtype=torch.long, device=scores.device)
        allowed = scores[row, following]
        scores[row, torch.tensor(inner, device=scores.device)] = -math.inf
        scores[row, following] = allowed
