"""Simultaneous translation by attention: target words are emitted while the source is still arriving.

AlignAtt (Papi et al. 2023): after each source word, the sentence so far is encoded again and its translation
is continued greedily. A token is emitted unless it attends most to one of the last `lag` source words,
because the words to come may still change it. Any model with cross-attention works, without special training.

source words   Zwei  Hunde  spielen  im  Schnee
emitted                     Two      dogs …          lag = 2
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard._util.checks import check_number
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.weights.matrix import Weights
from regard.models.layers.attention import watch_layers
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed
from regard.translation.alignment.cross_attention import layer_name
from regard.translation.tokens import Segmentation
from regard.translation.translator import Translator


class Emission(NamedTuple):
    """Target words that were emitted together.

    text: the words, separated by spaces. words_read: number of source words read before.

    >>> from regard.translation import Emission
    >>> Emission("two dogs", words_read=4).text.split()
    ['two', 'dogs']
    """

    text: str
    words_read: int


def translate_simultaneously(
    translator: Translator, words: Iterable[str], *, lag: float = 2
) -> Iterator[Emission]:
    """Translate a sentence as its words arrive; yield target words as soon as the model is confident enough.

    words: the words of one sentence, such as `"Zwei Hunde spielen.".split()` or a generator.
    lag: a token is held back if it attends most to one of the last `lag` words. More is slower and better;
        `math.inf` waits for the whole sentence, and then equals greedy decoding.

    >>> import math, torch
    >>> from regard.models import Transformer, TransformerConfig
    >>> from regard.translation import Greedy, Tokenizer, TokenizerPair, Translator, translate_simultaneously
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    >>> translator = Translator(model, TokenizerPair(tokens, tokens))
    >>> emissions = list(translate_simultaneously(translator, "ein Hund bellt".split(), lag=math.inf))
    >>> (offline,) = translator.translate("ein Hund bellt", strategy=Greedy())
    >>> " ".join(emission.text for emission in emissions) == offline.text
    True
    """
    if isinstance(words, str):
        raise DTypeError("translate_simultaneously got a string; pass its words: text.split().")
    if lag != math.inf:
        check_number("translate_simultaneously got lag", lag, min=0)
    decoder, read, shown = _PrefixDecoder(translator), list[str](), 0
    for word in words:
        for part in str(word).split():
            read.append(part)
            if lag < len(read):
                decoder.extend(read, len(read) - lag)
                for emission in _emissions(decoder.words(final=False), shown, len(read)):
                    shown += len(emission.text.split())
                    yield emission
    if read:
        decoder.extend(read, None)
        yield from _emissions(decoder.words(final=True), shown, len(read))


def average_lagging(words_read: Sequence[int], source_words: int) -> float:
    """Return the average lagging in source words (Ma et al. 2019, eq. 8).

    words_read: for each target word, the number of source words read before it was emitted: g(t).

    A translation that starts after the whole sentence has its length; an ideal one that starts at once has 0.

    >>> from regard.translation.simultaneous import average_lagging
    >>> average_lagging([3, 3, 3], 3), average_lagging([1, 2, 3], 3)
    (3.0, 1.0)
    """
    if not words_read or source_words < 1:
        raise ArgumentError(
            f"average_lagging got {len(words_read)} target words and {source_words} source words; it needs "
            "at least one of each."
        )
    ratio = len(words_read) / source_words
    # τ: only words up to the first one that was emitted after the whole sentence count
    counted = next((t for t, read in enumerate(words_read, 1) if read >= source_words), len(words_read))
    return sum(read - t / ratio for t, read in enumerate(words_read[:counted])) / counted


def _emissions(words: Sequence[str], shown: int, read: int) -> list[Emission]:
    """Return the words that were not shown yet as an emission, if there are any."""
    return [Emission(" ".join(words[shown:]), read)] if len(words) > shown else []


class _PrefixDecoder:
    """Greedy decoding of a growing source; tokens that were emitted are never changed."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._head = translator.alignment_head
        self._layer = layer_name(translator.model, self._head)
        self._tokens: list[int] = []  # emitted
        self._copies: dict[int, str] = {}  # the text of unknown tokens, by position

    def words(self, *, final: bool) -> list[str]:
        """Return the complete target words."""
        words = self._translator.tokens.target.decode(self._tokens, self._copies).words
        return words if final else words[:-1]  # the next token may continue the last word

    @torch.inference_mode()
    def extend(self, words: Sequence[str], max_word: float | None) -> None:
        """Emit tokens that attend to source words below `max_word`; all tokens if it is None."""
        model, special = self._translator.model, self._translator.tokens.special
        source = self._translator.tokens.source.segment(" ".join(words))
        recorded: list[Weights] = []

        def record(name: str, weights: Weights) -> None:
            if name == self._layer:
                recorded.append(weights)

        def step(token: int) -> tuple[int, Weights]:
            """Feed a token; return the next one, and the weights of the alignment layer."""
            recorded.clear()
            logits = model.step(torch.tensor([token], device=model.output_weight.device), state)[0]
            logits[list(special.never_generated)] = -math.inf
            return int(logits.argmax()), recorded[0]

        with eval_mode(model), watch_layers(model, record):
            state = model.start(Packed.of([special.source(source.ids)], model.output_weight.device))
            for token in special.target_inputs(self._tokens):
                following, weights = step(token)
            limit = min(self._translator.max_new_tokens(len(source.ids)), model.max_length or sys.maxsize)
            limit -= len(special.target_prefix)
            if model.decoding is not None and model.decoding.forced_end:
                limit -= 1  # the last token is the end token
            while following != special.end and len(self._tokens) < limit:
                token, before = following, weights
                following, weights = step(token)
                aligned = before if self._head.shift == "output" else weights
                word = source.word_of[int(self._attention(aligned, len(source.ids)).argmax())]
                if max_word is not None and word >= max_word:
                    return
                self._append(token, word, source)

    def _attention(self, weights: Weights, tokens: int) -> Tensor:
        """Return the attention of the last step over the source tokens, without special tokens."""
        heads, first = self._head.heads, len(self._translator.tokens.special.source_prefix)
        selected = weights if heads is None else weights.heads(list(heads))
        return selected.mean("heads").dense().reshape(-1, selected.shape[-1])[-1, first : first + tokens]

    def _append(self, token: int, word: int, source: Segmentation) -> None:
        """Emit a token; an unknown one copies the source word that it attends to."""
        if token == self._translator.tokens.special.unknown:
            unknown = [
                source.unknown[i] for i, w in enumerate(source.word_of) if w == word and i in source.unknown
            ]
            self._copies[len(self._tokens)] = unknown[0] if unknown else source.words[word]
        self._tokens.append(token)
