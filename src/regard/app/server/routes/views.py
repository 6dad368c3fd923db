"""What there is to see in a model at work: exhibits of texts, of their translations, and of long texts."""

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from regard._util.text import shorten
from regard.app.server.registry import Entry
from regard.app.view_model import InputView, LayerView, TextView, ViewModel, look_at_text, look_at_translation
from regard.errors import ArgumentError
from regard.inspection.capture import CapturedCall
from regard.mechanism.operator import attend
from regard.mechanism.scores import ScaledDot
from regard.mechanism.weights.matrix import Weights
from regard.models.encoders.static import StaticEncoder
from regard.models.encoders.words import split_words
from regard.translation.decoding.search import Beam
from regard.translation.translator import Translator

PIECES = 40_000  # of a request: pieces of its sentences × the beam
WORDS = 40_000  # of a long text
_WIDTH, _HEADS = 64, 8  # of the words of a long text


def too_much(translator: Translator, sentences: Sequence[str], beam: int) -> ArgumentError | None:
    """What to say to sentences that would keep all others waiting."""
    pieces = sum(len(translator.tokens.source.cut(sentence).ids) for sentence in sentences)
    if pieces * beam <= PIECES:
        return None
    return ArgumentError(
        f"the sentences have {pieces:,} pieces and the beam is {beam}, together {pieces * beam:,}; at most "
        f"{PIECES:,} are translated at once: send fewer sentences, or a smaller beam."
    )


def of_texts(entry: Entry, texts: Sequence[str]) -> ViewModel:
    """Texts as an encoder reads them, or as a translator reads them and its translations."""
    if not entry.attends:
        raise ArgumentError(
            f"there is no attention in {entry.name!r}, and nothing to look at; name another model."
        )
    if isinstance(entry.model, Translator):
        if wrong := too_much(entry.model, texts, Beam().size):
            raise wrong
        return look_at_translation(entry.model, texts, title=entry.name)
    return look_at_text(entry.model, texts, title=entry.name)


def of_long(entry: Entry, text: str) -> ViewModel:
    """One text through a model, as long as the model takes it at once."""
    if isinstance(entry.model, Translator):
        pieces = len(entry.model.tokens.source.cut(text).ids)
        if pieces > entry.model.longest:
            raise ArgumentError(
                f"the text has {pieces:,} pieces and {entry.name!r} reads {entry.model.longest} at once; "
                'shorten it, or look at it with the model "words", which takes any length.'
            )
    return of_texts(entry, [text])


def of_words(text: str) -> ViewModel:
    """Self-attention without parameters over a text's words, with vectors that are learned from it alone.

    >>> from regard.app.server.routes.views import of_words
    >>> exhibit = of_words("the dog barks and the dog sleeps and the cat sleeps")
    >>> [(layer["label"], layer["heads"]) for layer in exhibit.describe()["inputs"][0]["layers"]]
    [('whole words', 1), ('words in 8 parts', 8)]
    """
    words = [word.text for word in split_words(text)]
    if not 2 <= len(words) <= WORDS:
        raise ArgumentError(f"the text has {len(words):,} words and marks; give 2 to {WORDS:,} of them.")
    vectors = _vectors(text)
    parts = vectors.unflatten(1, (_HEADS, -1)).transpose(0, 1)  # n (h d) -> h n d
    sharp = 2 * math.log(len(words))  # the longer the text, the more words share the weight
    layers = [
        LayerView("whole", "whole words", "self", _lazy(vectors[None], sharp)),
        LayerView("parts", f"words in {_HEADS} parts", "self", _lazy(parts, sharp)),
    ]
    note = f"{len(words):,} words; each attends to words that occur beside the same words as it does."
    return ViewModel("words", [InputView(shorten(text), [TextView(tuple(words))], layers, note)])


def _vectors(text: str) -> Tensor:
    """A vector for each word of a text (n, m), learned by counting which words stand beside which."""
    encoder = StaticEncoder.learn([text], width=_WIDTH)
    (tokens,) = encoder.token_vectors([text])
    return tokens.vectors[0].detach()


def _lazy(x: Tensor, scale: float) -> Weights:
    """scale · cosine of each pair, normalized: of the attention itself only τ is computed, row by row.

    With it, what is looked at costs no more than its own pairs.
    """
    directions = F.normalize(x, dim=-1).contiguous()
    weights = CapturedCall(directions, directions, scale=scale).weights()
    weights._settle()
    problem, _, fitted = weights._now()
    if not fitted:  # without kernels
        return attend(directions, directions, directions[..., :1], score=ScaledDot(scale))[1]
    return Weights(problem, None, x.shape[:-2], fitted=True)
