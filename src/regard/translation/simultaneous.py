"""Simultaneous translation guided by attention: target words are emitted while the source is still arriving.

AlignAtt (Papi et al. 2023): after each source word, the sentence so far is encoded again and its translation
is continued greedily. A token is emitted unless it attends most to one of the last `lag` source words,
because later words may still change it. Any model with cross-attention works, without special training.

source words   Zwei  Hunde  spielen  im  Schnee
emitted                     Two      dogs …          lag = 2
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard._util.checks import check_number
from regard._util.text import pluralize
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import watch_layers
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed
from regard.translation.alignment.cross_attention import layer_name
from regard.translation.decoding.strategies import Greedy
from regard.translation.text.casing import capitals
from regard.translation.text.protected_spans import CONTINUED, find_spans
from regard.translation.text.source_part import SourceLine, SourcePart, cut_spans
from regard.translation.text.tags import words_before, write_tags
from regard.translation.text.target import copied_text
from regard.translation.tokens import Segmentation
from regard.translation.translator import Translator
from regard.translation.unknown_words import next_copy, printable_text

# a tag, an element in brackets, a placeholder with spaces, code or Markdown that has not ended
_OPEN = re.compile(
    r"[(\[„“‚‘«»‹›\"'](?:<[^<>]*>|&lt;[^<>&]*&gt;)*"
    r"(?:<|&lt;)([A-Za-z][\w:.-]*)[^<>]*(?<!/)(?:>|&gt;)(?:(?!/\1\b).)*$"
    r"|(?:<|&lt;)([A-Za-z][\w:.-]*)[^<>]*(?<!/)(?:>|&gt;)[(\[„“‚‘«»‹›\"'](?:(?!/\2\b).)*$"
    r"|<[/!]?[A-Za-z][^<>]*$|\{\{[^{}]*$|\{\w+,$|(?<![\w`])`[^`\s][^`]*$"
    r"|\[[^\[\]]*$|\[[^\[\]]+\]\([^()]*$|(?<![^\s(\[])(\*{1,3}|__?|~~)(?=[^\s*_~])(?:(?!\3).)*$"
)


class Emission(NamedTuple):
    """Target words that were emitted together.

    text: the words, separated by spaces. words_read: number of source words read so far.

    >>> from regard.translation import Emission
    >>> Emission("two dogs", words_read=4).text.split()
    ['two', 'dogs']
    """

    text: str
    words_read: int


def translate_simultaneously(
    translator: Translator, words: Iterable[str], *, lag: float = 2
) -> Iterator[Emission]:
    """Translate a sentence as its words arrive; yield target words as early as `lag` allows.

    words: the words of one sentence, such as `"Zwei Hunde spielen.".split()` or a generator.
    lag: a token is held back if it attends most to one of the last `lag` words, as are all tokens after it.
        With 0, the first token that attends most to the last word is emitted, and the tokens after it are
        held back. Larger values increase delay and quality; `math.inf` waits for the whole sentence, which is
        equivalent to greedy decoding.

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
    decoder, read = _PrefixDecoder(translator), list[str]()
    unprotected = translator.profile.unprotected
    for word in words:
        for part in str(word).split():
            read.append(part)
            text = " ".join(read)
            if lag < len(read) and not _is_incomplete(text, unprotected) and (new := decoder.read(text, lag)):
                yield Emission(" ".join(new), len(read))
    if read and (new := decoder.read(" ".join(read), None)):
        yield Emission(" ".join(new), len(read))


def average_lagging(words_read: Sequence[int], source_words: int) -> float:
    """Return the average lagging in source words (Ma et al. 2019, eq. 8).

    words_read: for each target word, the number of source words read before it was emitted: g(t).

    The result is `source_words` for a translation that starts after the whole sentence has been read, and 0
    for an ideal translation without delay.

    >>> from regard.translation.simultaneous import average_lagging
    >>> average_lagging([3, 3, 3], 3), average_lagging([1, 2, 3], 3)
    (3.0, 1.0)
    """
    if not words_read or source_words < 1:
        raise ArgumentError(
            f"average_lagging got {pluralize(len(words_read), 'target word')} and "
            f"{pluralize(source_words, 'source word')}; it needs at least one of each."
        )
    ratio = len(words_read) / source_words
    # τ: count words only up to the first one emitted after the whole sentence was read
    counted = next((t for t, read in enumerate(words_read, 1) if read >= source_words), len(words_read))
    return sum(read - t / ratio for t, read in enumerate(words_read[:counted])) / counted


def _is_incomplete(text: str, unprotected: Collection[str] = ()) -> bool:
    """Return whether the next word may belong to the same tag or span: `<a …`, `{{ …`, `3,5 …`, `3 x …`.

    unprotected: see `find_spans`.
    """
    if _OPEN.search(text):
        return True
    if "number" not in unprotected and re.search(CONTINUED, text):
        return True
    spans = find_spans(text, unprotected)
    return bool(spans) and spans[-1].stop == len(text) and spans[-1].kind in ("number", "phone", "code")


class _Word(NamedTuple):
    """A target word, the source word that it translates or copies, and whether the model generated it."""

    text: str
    source: int
    generated: bool = True


class _PrefixDecoder:
    """Greedy decoding of a growing source; emitted words are never changed.

    Protected spans appear exactly once, unchanged. The model reads them in one of three ways:
    unknown: as an unknown token, which the model has learned to copy.
    text: as ordinary text, until the model generates a span that is not in the source, or a span twice.
    cut: removed from the source, and inserted before the first word that translates a later source word.
    """

    def __init__(self, translator: Translator) -> None:
        self._translator, self._reader = translator, translator.reader
        self._head = translator.alignment_head
        self._layer = layer_name(translator.model, self._head)
        self._spans: Literal["unknown", "text", "cut"] = "unknown" if self._reader.copies else "text"
        self._tokens: list[int] = []
        self._aligned: list[int] = []  # the source word of each token
        self._copies: dict[int, str] = {}  # the text of unknown tokens, by position
        self._copied_tokens: dict[int, tuple[int, str]] = {}  # source word and text, by position
        self._copied_spans: Counter[tuple[int, str]] = Counter()  # other copies, by source word and text
        self._words_shown = self._tags_shown = 0

    def read(self, text: str, lag: float | None) -> list[str]:
        """Read the source so far; return the new target words. At the end of the source, `lag` is None."""
        line, final = self._reader.read_whole(text), lag is None
        if not line.parts:
            return [tag.text for tag in line.tags] if final else []
        if final and not self._words_shown:
            (translation,) = self._translator.translate(text, strategy=Greedy())
            return [translation.text] if translation.text else []
        part = line.parts[0]
        words = self._continue(part, lag, len(line.words))
        if self._spans == "text" and not self._count_spans(part, words):
            self._spans = "cut"
            self._drop_hidden_tokens()
            words = self._continue(part, lag, len(line.words))
        self._words_shown += sum(word.generated for word in words)
        if final:
            words = _insert(words, [*self._missing(part), *self._untranslated(part)])
        return self._with_tags(line, words, final)

    def _continue(self, part: SourcePart, lag: float | None, words_read: int) -> list[_Word]:
        """Continue decoding; return the complete words that have not been emitted yet."""
        final = lag is None
        # without any limit (lag 0), the model would complete the translation after the first word
        max_word = math.inf if lag is None else words_read - max(lag, 1)
        source = cut_spans(part, self._translator.tokens.source) if self._spans == "cut" else part
        self._extend(source.segmentation, max_word, one_more=lag is not None and lag < 1)
        output = self._translator.tokens.target.decode(self._tokens, self._copies)
        stop = len(output.words) - (not final)  # the next token may continue the last word
        words: list[_Word] = []
        for number in range(self._words_shown, stop):
            tokens = [at for at, word in enumerate(output.word_of) if word == number]
            aligned = Counter(self._aligned[at] for at in tokens).most_common(1)
            word = _Word(output.words[number], aligned[0][0] if aligned else 0)
            if part.was_upper[word.source] and not any(at in self._copies for at in tokens):
                word = word._replace(text=capitals(word.text, self._translator.profile.target_turkish))
            if self._spans == "cut":
                earlier = [span for span in self._missing(part) if span.source < word.source]
                self._copied_spans.update((span.source, span.text) for span in earlier)
                words += earlier
            words.append(word)
        return words

    @property
    def _copied(self) -> Counter[tuple[int, str]]:
        """Number of copies of each protected span or unknown token, by source word and text."""
        return self._copied_spans + Counter(self._copied_tokens.values())

    def _missing(self, part: SourcePart) -> list[_Word]:
        """Return the protected spans that have not been copied yet."""
        copied, missing = self._copied, list[_Word]()
        for word, texts in part.copies.items():
            for text in texts:
                if copied[word, text]:
                    copied[word, text] -= 1
                else:
                    missing.append(_Word(text, word, generated=False))
        return missing

    def _untranslated(self, part: SourcePart) -> list[_Word]:
        """Return the words whose unknown tokens were not copied."""
        source = part.segmentation
        words = {source.word_of[at] for at, text in source.unknown.items() if printable_text(text)}
        words -= part.copies.keys() | {word for word, _ in self._copied}
        return [_Word(printable_text(source.words[word]), word, generated=False) for word in sorted(words)]

    def _count_spans(self, part: SourcePart, words: Sequence[_Word]) -> bool:
        """Count spans in the output as copied; return False if one of them does not occur in the source."""
        missing, copied = self._missing(part), []
        text = " ".join(word.text for word in words)
        for span in find_spans(text, self._translator.profile.unprotected):
            match = next((word for word in missing if span.of(text) in word.text), None)
            if match is None:
                return False
            missing.remove(match)
            copied.append((match.source, match.text))
        self._copied_spans.update(copied)
        return True

    def _drop_hidden_tokens(self) -> None:
        """Drop the tokens of words that have not been emitted."""
        word_of = self._translator.tokens.target.decode(self._tokens, self._copies).word_of
        kept = sum(word < self._words_shown for word in word_of)
        del self._tokens[kept:], self._aligned[kept:]
        for copies in (self._copies, self._copied_tokens):
            for at in [at for at in copies if at >= kept]:
                del copies[at]

    def _with_tags(self, line: SourceLine, words: Sequence[_Word], final: bool) -> list[str]:
        """Attach each tag to the first target word whose source word follows the tag."""
        tags, positions, last = line.tags[self._tags_shown :], list[int](), -1
        for number, word in enumerate(words):
            last = max(last, word.source)
            while len(positions) < len(tags) and words_before(tags[len(positions)], line.ranges) <= last:
                positions.append(number)
        for tag in tags[len(positions) :]:
            ends_here = bool(words) and tag.closes and words_before(tag, line.ranges) == last + 1
            if not final and not ends_here:
                break
            positions.append(len(words))
        self._tags_shown += len(positions)
        return write_tags(tags[: len(positions)], positions, [word.text for word in words])

    @torch.inference_mode()
    def _extend(self, source: Segmentation, max_word: float, *, one_more: bool = False) -> None:
        """Append tokens as long as they attend to source words with an index below `max_word`.

        one_more: also append the first token that attends to a later word.
        """
        model, special = self._translator.model, self._translator.tokens.special
        max_unknown = math.inf if self._translator.tokens.target.kind == "words" else len(source.unknown)
        recorded: list[Weights] = []

        def record(name: str, weights: Weights) -> None:
            if name == self._layer:
                recorded.append(weights)

        def step(token: int) -> tuple[Tensor, Weights]:
            """Feed a token; return the logits for the next token, and the weights of the alignment layer."""
            recorded.clear()
            logits = model.step(torch.tensor([token], device=model.output_weight.device), state)[0]
            logits[list(special.never_generated)] = -math.inf
            return logits, recorded[0]

        with eval_mode(model), watch_layers(model, record):
            state = model.start(Packed.of([special.source(source.ids)], model.output_weight.device))
            for token in special.target_inputs(self._tokens):
                logits, weights = step(token)
            limit = min(self._translator.max_new_tokens(len(source.ids)), model.max_length or sys.maxsize)
            limit -= len(special.target_prefix)
            if model.decoding is not None and model.decoding.forced_end:
                limit -= 1  # the last token is the end token
            while source.ids and len(self._tokens) < limit:
                if self._tokens.count(special.unknown) >= max_unknown:
                    logits[special.unknown] = -math.inf
                token, before = int(logits.argmax()), weights
                if token == special.end:
                    return
                logits, weights = step(token)
                attention = self._attention(before if self._head.shift == "output" else weights, source)
                held = source.word_of[int(attention.argmax())] >= max_word
                if not held or one_more:
                    self._append(token, attention, source)
                if held:
                    return

    def _attention(self, weights: Weights, source: Segmentation) -> Tensor:
        """Return the attention of the last step over the source tokens, excluding special tokens."""
        heads, first = self._head.heads, len(self._translator.tokens.special.source_prefix)
        selected = weights if heads is None else weights.heads(list(heads))
        row = selected.mean("heads").dense().reshape(-1, selected.shape[-1])[-1]
        return row[first : first + len(source.ids)]

    def _append(self, token: int, attention: Tensor, source: Segmentation) -> None:
        """Append a token; an unknown token copies an unused unknown source token: see `next_copy`."""
        at = int(attention.argmax())
        if token == self._translator.tokens.special.unknown:
            by_word = self._translator.tokens.target.kind == "words"
            remaining = self._copied
            free = []
            for position, text in source.unknown.items():
                key = source.word_of[position], text
                remaining[key] -= 1
                if remaining[key] < 0:
                    free.append(position)
            if free:
                at = next_copy(free, attention.tolist())
                self._copied_tokens[len(self._tokens)] = source.word_of[at], source.unknown[at]
                text = source.unknown[at] if by_word else copied_text(source, at)
            else:
                text = source.words[source.word_of[at]] if by_word else ""
            self._copies[len(self._tokens)] = printable_text(text)
        self._tokens.append(token)
        self._aligned.append(source.word_of[at])


def _insert(words: Sequence[_Word], missing: Sequence[_Word]) -> list[_Word]:
    """Insert the missing spans before the first word that translates a later source word, or at the end."""
    result = list(words)
    for span in missing:
        at = next((i for i, word in enumerate(result) if word.source > span.source), len(result))
        result.insert(at, span)
    return result
