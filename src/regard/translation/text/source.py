"""Read a line for a translator: remove tags, split it into sentences, protect spans, normalize letter case.

line → text without tags → words and spans → sentences → parts, each with the tokens that the model reads
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from regard.translation.long_lines import Part, split_tokens
from regard.translation.text.profile import TextProfile
from regard.translation.text.protected_spans import Span, find_spans, merge_spans, split_words, word_core
from regard.translation.text.sentence_splitter import group_sentences, sentence_ends
from regard.translation.text.source_part import SourceLine, SourcePart, cut_spans, segment_words
from regard.translation.text.tags import Tag, strip_tags
from regard.translation.text.terms import Terms
from regard.translation.tokens import Tokenizer

_BRACKETS = {"(": ")", "[": "]", "{": "}", "„": "“", "“": "”", '"': '"', "'": "'", "«": "»", "»": "«"}
# soft hyphens, byte order marks and direction marks, which have no translation
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u180e\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ufff9-\ufffb]"
)
# marks a list item, such as "-" or "a)", or a heading; [ ] is a checkbox
_MARKER = re.compile(
    r"\s*(?:(?:#{1,6}|[-–—*+•>])\s+)*"
    r"(?:#{1,6}|[-–—*+•>](?: \[[ xX]\])?|\(?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{2,4})\))(?=\s+[^\w\s]{0,2}[^\W\d_])"
)
# separates the cells or items in a line
_SEPARATOR = re.compile(r"\t|(?<!\S)[|¦•‣▪●·](?!\S)")
# such as terminal colors
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_JOINER = re.compile(r"(?<![\u0590-\U0010ffff])[\u200c\u200d]|[\u200c\u200d](?![\u0590-\U0010ffff])")
# how to write punctuation that the vocabulary lacks
_SIMILAR = (
    dict.fromkeys("„“”«»‟〝〞", "\"'")
    | dict.fromkeys("‚‘’‹›‛", "'\"")
    | dict.fromkeys("‐‑‒–—−―", "-")
    | {"…": "."}
)
_MAX_ACRONYM = 5  # maximum number of letters
_MIN_NAME = 3  # minimum number of letters in an unknown name
_NAME_TOKENS = 0.5  # a name's tokens are shorter than this fraction of the mean token length


class SourceReader:
    """Reads lines for a model.

    tokenizer: the source tokenizer. max_tokens: maximum number of tokens that the model reads at once.
    profile: statistics of the training text.
    copies: whether the model has learned to copy the unknown token; if so, it replaces each span to copy,
        such as a number or a URL.

    >>> from regard.translation import Tokenizer
    >>> from regard.translation.text.profile import TextProfile
    >>> from regard.translation.text.source import SourceReader
    >>> tokenizer = Tokenizer.learn(["Ein Hund bellt um 3.", "Eine Frau lacht."] * 9, kind="bpe", size=60)
    >>> reader = SourceReader(tokenizer, TextProfile(), max_tokens=40)
    >>> line = reader.read("Ein Hund bellt um 15:30. Eine Frau lacht.")
    >>> [part.segmentation.text for part in line.parts], line.parts[0].copies
    (['Ein Hund bellt um 15:30.', 'Eine Frau lacht.'], {4: ['15:30']})
    """

    def __init__(
        self, tokenizer: Tokenizer, profile: TextProfile, *, max_tokens: int, copies: bool = True
    ) -> None:
        self._tokenizer, self._profile, self.copies = tokenizer, profile, copies
        self.max_tokens = min(max_tokens, profile.max_tokens or max_tokens)
        # for each punctuation mark, whether the vocabulary lacks it
        self._unknown_marks: dict[str, bool] = {}

    def read(self, text: str, terms: Terms | None = None) -> SourceLine:
        """Split a line into parts and protect text to copy.

        terms: source terms and their required translations.
        """
        plain, tags = strip_tags(_remove_controls(text))
        spans = find_spans(plain, self._profile.unprotected)
        starts, markers, sentences = self._split_line(plain, spans, tags)
        spans = merge_spans([*spans, *markers]) if markers else spans
        ranges = split_words(plain, spans)
        words = [plain[start:stop] for start, stop in ranges]
        parts = [
            part
            for words_of_part in self._parts(plain, spans, ranges, starts)
            for part in self._sentence(plain, *words_of_part, terms)
        ]
        return SourceLine(text, words, ranges, tags, parts, sentences)

    def read_whole(self, text: str) -> SourceLine:
        """Read a line of any length as one part, for simultaneous translation.

        A line without words has no parts.
        """
        plain, tags = strip_tags(_remove_controls(text))
        spans = find_spans(plain, self._profile.unprotected)
        ranges = split_words(plain, spans)
        words = [plain[start:stop] for start, stop in ranges]
        parts = [self._whole(plain, ranges, spans, 0, "", None)[0]] if ranges else []
        return SourceLine(text, words, ranges, tags, parts, 1)

    def _split_line(
        self, text: str, spans: Sequence[Span], tags: Sequence[Tag]
    ) -> tuple[list[int], list[Span], int]:
        """Return the start of each part of a line, the list markers, and the number of sentences.

        Cells, list items and block elements are separate parts. Each separator or marker is also a part, to
        be copied.
        """
        bounds = _segment_bounds(text, spans, tags)
        markers: list[Span] = []
        starts, sentences = [0], 0
        for start, stop in zip([0, *bounds], [*bounds, len(text)], strict=True):
            segment = text[start:stop]
            inside = [
                span._replace(start=span.start - start, stop=span.stop - start)
                for span in spans
                if start <= span.start < stop
            ]
            ends = [start + end for end in sentence_ends(segment, inside)]
            starts += self._part_starts(text, start, ends)
            sentences += len(ends)
            if marker := _MARKER.match(segment):
                first = start + len(segment) - len(segment.lstrip())
                starts.append(start + marker.end())
                markers.append(Span(first, start + marker.end(), "marker"))
                sentences += 1
        return sorted(set(starts)), markers, sentences

    def _part_starts(self, text: str, start: int, ends: Sequence[int]) -> list[int]:
        """Return the start of each part of a segment; none has more sentences or tokens than a training line.

        start: where the segment begins. ends: where its sentences end.
        """
        if len(ends) <= self._profile.max_sentences and (len(ends) <= 1 or not self._profile.max_tokens):
            return [start]
        sentence_starts = [start, *ends[:-1]]
        sentences = [text[first:stop] for first, stop in zip(sentence_starts, ends, strict=True)]
        lengths = [len(ids) for ids in self._tokenizer.encode_batch(sentences)]
        starts, sentence = [], 0
        for count in group_sentences(lengths, self._profile.max_sentences, self.max_tokens):
            starts.append(sentence_starts[sentence])
            sentence += count
        return starts

    def _parts(
        self, text: str, spans: list[Span], ranges: list[tuple[int, int]], starts: list[int]
    ) -> Iterator[tuple[list[tuple[int, int]], list[Span], int, str]]:
        """Yield the word ranges, spans and first word of each part, and the whitespace before it."""
        word = 0
        for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
            while word < len(ranges) and ranges[word][1] <= start:
                word += 1
            last = word
            while last < len(ranges) and ranges[last][0] < stop:
                last += 1
            if last > word:
                inside = [(max(a, start), min(b, stop)) for a, b in ranges[word:last]]
                part_spans = [span for span in spans if start <= span.start < stop]
                separator = text[start : inside[0][0]] if start else ""
                yield inside, part_spans, word, separator

    def _sentence(
        self,
        text: str,
        ranges: list[tuple[int, int]],
        spans: list[Span],
        first_word: int,
        separator: str,
        terms: Terms | None,
    ) -> list[SourcePart]:
        """Return the parts of a sentence: one, unless it is too long for the model."""
        whole, by_word, found_terms = self._whole(text, ranges, spans, first_word, separator, terms)
        if len(whole.ids) <= self.max_tokens or not whole.has_text:
            return [whole]
        if self.copies:
            return _split(whole, self.max_tokens)
        # each span is one token here, so none is split
        segmentation = segment_words(self._tokenizer, whole.normalized, by_word)
        segmentation = segmentation._replace(words=whole.segmentation.words)
        parts = _split(replace(whole, segmentation=segmentation), self.max_tokens)
        return _divide_terms([self._read_spans(part) for part in parts], first_word, found_terms)

    def _whole(
        self,
        text: str,
        ranges: list[tuple[int, int]],
        spans: list[Span],
        first_word: int,
        separator: str,
        terms: Terms | None,
    ) -> tuple[SourcePart, dict[int, list[tuple[int, int, str]]], list[tuple[int, int, str]]]:
        """Return a sentence as one part, its spans by word, and the terms in it."""
        words = [text[start:stop] for start, stop in ranges]
        by_word = _spans_by_word(words, ranges, spans)
        normalized, was_upper = self._normalize(words, by_word)
        normalized = [self._simplify(word, by_word.get(i, ())) for i, word in enumerate(normalized)]
        found_terms = terms.find(words) if terms is not None else []
        if self.copies:
            _insert_terms(normalized, by_word, found_terms)
        self._protect_unknown(words, normalized, by_word)
        copies = {
            word: [normalized[word][start:stop] for start, stop, _ in word_spans]
            for word, word_spans in by_word.items()
        }
        as_unknown = by_word if self.copies else {}
        segmentation = segment_words(self._tokenizer, normalized, as_unknown)._replace(words=words)
        unknown = [word for word, word_spans in by_word.items() if word_spans[0][2] == "unknown"]
        whole = SourcePart(
            first_word,
            segmentation,
            normalized,
            copies,
            frozenset(unknown),
            was_upper,
            separator,
            [] if self.copies else [target for *_, target in found_terms],
            frozenset(i for first, stop, _ in found_terms for i in range(first, stop) if self.copies),
        )
        return whole, by_word, found_terms

    def _read_spans(self, part: SourcePart) -> SourcePart:
        """Tokenize the spans of a part like other text; remove them if the part is then too long."""
        segmentation = segment_words(self._tokenizer, part.normalized, {})
        if len(segmentation.ids) > self.max_tokens:
            return cut_spans(part, self._tokenizer)
        return replace(part, segmentation=segmentation._replace(words=part.segmentation.words))

    def _normalize(
        self, words: list[str], by_word: dict[int, list[tuple[int, int, str]]]
    ) -> tuple[list[str], list[bool]]:
        """Normalize the letter case of all words without spans."""
        if not self._profile.lines:
            return list(words), [False] * len(words)
        free = [number for number in range(len(words)) if number not in by_word]
        rewritten, upper = self._profile.casing.normalize(
            [words[number] for number in free], 0 not in by_word
        )
        result, was_upper = list(words), [False] * len(words)
        for number, word, is_upper in zip(free, rewritten, upper, strict=True):
            result[number], was_upper[number] = word, is_upper
        return result, was_upper

    def _simplify(self, word: str, spans: Sequence[tuple[int, int, str]]) -> str:
        """Rewrite punctuation that the vocabulary lacks, so that it does not make a known word unknown.

        Quotes, dashes and ellipses are replaced by similar marks. Without spans, other unknown punctuation
        around the word is removed.
        """
        if word.isalnum() or self._tokenizer.kind == "words":
            return word
        inside = {at for start, stop, _ in spans for at in range(start, stop)}
        letters = [
            letter if at in inside or not self._is_unknown(letter) else self._similar(letter)
            for at, letter in enumerate(word)
        ]
        start, stop = word_core(word)
        if not spans and any(map(str.isalnum, word[start:stop])):
            letters[:start] = [letter for letter in letters[:start] if not self._is_unknown(letter)]
            letters = letters[: len(letters) - len(word) + stop] + [
                letter
                for letter in letters[len(letters) - len(word) + stop :]
                if not self._is_unknown(letter)
            ]
        return "".join(letters)

    def _similar(self, mark: str) -> str:
        """Return a similar punctuation mark that the vocabulary contains, or the mark itself."""
        return next((other for other in _SIMILAR.get(mark, "") if not self._is_unknown(other)), mark)

    def _is_unknown(self, character: str) -> bool:
        """Return whether the vocabulary lacks a character that is not a letter or digit."""
        if character.isalnum():
            return False
        if character not in self._unknown_marks:
            self._unknown_marks[character] = self._tokenizer.special.unknown in self._tokenizer.encode(
                character
            )
        return self._unknown_marks[character]

    def _join_spans(self, word: str, spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
        """Extend a word's spans over symbols that the vocabulary lacks: from "1" to "x=1" if it lacks "="."""
        inside = {at for start, stop, _ in spans for at in range(start, stop)}
        unknown = [at for at, symbol in enumerate(word) if at not in inside and self._is_unknown(symbol)]
        if not unknown or any(kind == "term" for *_, kind in spans):
            return spans
        start, stop = min(unknown[0], spans[0][0]), max(unknown[-1] + 1, spans[-1][1])
        while start and word[start - 1].isalnum():
            start -= 1
        while stop < len(word) and word[stop].isalnum():
            stop += 1
        return [(start, stop, spans[0][2])]

    def _protect_unknown(
        self, written: Sequence[str], words: list[str], by_word: dict[int, list[tuple[int, int, str]]]
    ) -> None:
        """Protect words that the model cannot know: they have unknown tokens, or look like names.

        written: the words as in the source, before their letter case was normalized.
        """
        if not self.copies or self._tokenizer.kind == "words":
            return
        for number, spans in by_word.items():
            by_word[number] = self._join_spans(words[number], spans)
        free = [number for number in range(len(words)) if number not in by_word]
        ids = self._tokenizer.encode_words([words[number] for number in free])
        unknown = self._tokenizer.special.unknown
        for number, tokens in zip(free, ids, strict=True):
            start, stop = word_core(words[number])
            if (
                unknown in tokens
                or self._is_name(words[number][start:stop], len(tokens))
                or self._is_name_in_capitals(written[number])
            ):
                words[number] = written[number]
                core = _with_brackets(written[number], *word_core(written[number]))
                by_word[number] = [(*core, "unknown")]

    def _is_name_in_capitals(self, word: str) -> bool:
        """Return whether a long uppercase word would look like an unknown name in normal letter case."""
        core = word[slice(*word_core(word))]
        if len(core) <= _MAX_ACRONYM or not core.isupper() or not self._profile.words:
            return False
        name = core.capitalize()
        return self._is_name(name, len(self._tokenizer.encode_words([name])[0]))

    def _is_name(self, word: str, tokens: int) -> bool:
        """Return whether a word looks like an unknown name.

        It has foreign letters, is an acronym, or begins with an uppercase letter and has many tokens.
        """
        word = unicodedata.normalize("NFKC", word)  # as the tokenizer does: ｆｌａｃｈ is flach
        profile = self._profile
        if (
            len(word) < _MIN_NAME
            or not profile.words
            or not word[0].isalpha()
            or word.lower() in profile.known
        ):
            return False
        if profile.letters and any(
            letter.isalpha() and letter not in profile.letters for letter in word.lower()
        ):
            return True
        if word.isupper():  # in a line that is not all-caps
            return word.isalpha() and len(word) <= _MAX_ACRONYM
        return word[0].isupper() and len(word) < _NAME_TOKENS * profile.characters_per_token * tokens


def _split(whole: SourcePart, max_tokens: int) -> list[SourcePart]:
    """Split a sentence that is too long for the model."""
    pieces = split_tokens(whole.segmentation, max_tokens)
    return [_cut(whole, part, whole.separator if part is pieces[0] else " ") for part in pieces]


def _cut(whole: SourcePart, part: Part, separator: str) -> SourcePart:
    """Return one part of a sentence that is too long for the model."""
    first, stop = part.first_word, part.first_word + len(part.segmentation.words)
    copies: dict[int, list[str]] = {}
    for at, text in sorted(part.segmentation.unknown.items()):
        word = part.segmentation.word_of[at]
        if text in whole.copies.get(first + word, ()):
            copies.setdefault(word, []).append(text)
    words = zip(part.segmentation.words, whole.segmentation.words[first:stop], strict=True)
    return SourcePart(
        whole.first_word + first,
        part.segmentation,
        [
            normalized if fragment == word else fragment
            for (fragment, word), normalized in zip(words, whole.normalized[first:stop], strict=True)
        ],
        copies,
        frozenset(word - first for word in whole.unknown if first <= word < stop),
        whole.was_upper[first:stop],
        separator,
        replaced=frozenset(word - first for word in whole.replaced if first <= word < stop),
    )


def _divide_terms(
    parts: Sequence[SourcePart], first_word: int, terms: Sequence[tuple[int, int, str]]
) -> list[SourcePart]:
    """Assign each term to the part with its first source word; if parts share that word, to the last of them.

    first_word: the index of the sentence's first word. terms: result of `Terms.find`.
    """
    starts = [part.first_word - first_word for part in parts]
    by_part: list[list[str]] = [[] for _ in parts]
    for word, _, target in terms:
        by_part[bisect_right(starts, word) - 1].append(target)
    return [replace(part, terms=targets) for part, targets in zip(parts, by_part, strict=True)]


def _remove_controls(text: str) -> str:
    """Remove control characters and invisible marks, which have no translation; keep whitespace.

    Joiners remain only between characters that they can join: emoji, and letters in Persian, Hindi, …
    """
    if text.isprintable():
        return text
    text = _JOINER.sub("", _INVISIBLE.sub("", _ESCAPE.sub("", text)))
    return "".join(
        " " if character == "\u200b" else character
        for character in text
        if character.isspace() or unicodedata.category(character) != "Cc"
    )


def _insert_terms(
    words: list[str],
    by_word: dict[int, list[tuple[int, int, str]]],
    terms: Sequence[tuple[int, int, str]],
) -> None:
    """Replace each source term with its target term, as a span to copy."""
    for first, stop, target in terms:
        lead = words[first][: word_core(words[first])[0]]
        trail = words[stop - 1][word_core(words[stop - 1])[1] :]
        words[first:stop] = [lead + target + trail, *[""] * (stop - first - 1)]
        for word in range(first, stop):
            by_word.pop(word, None)
        by_word[first] = [(len(lead), len(lead) + len(target), "term")]


def _spans_by_word(
    words: Sequence[str], ranges: Sequence[tuple[int, int]], spans: Sequence[Span]
) -> dict[int, list[tuple[int, int, str]]]:
    """Return the spans in each word, relative to its start; brackets around a span belong to it."""
    result: dict[int, list[tuple[int, int, str]]] = {}
    word = 0
    for start, stop, kind in merge_spans(spans):
        while ranges[word][1] <= start:
            word += 1
        first, last = start - ranges[word][0], min(stop, ranges[word][1]) - ranges[word][0]
        result.setdefault(word, []).append((*_with_brackets(words[word], first, last), kind))
    return result


def _with_brackets(word: str, first: int, last: int) -> tuple[int, int]:
    """Extend a range of characters of a word by the brackets or quotes around it, if there are any."""
    if first and _BRACKETS.get(word[first - 1]) == word[last : last + 1]:
        return first - 1, last + 1
    return first, last


def _segment_bounds(text: str, spans: Sequence[Span], tags: Sequence[Tag]) -> list[int]:
    """Return the positions between cells, list items and block elements, and around separators."""
    separators = [
        match
        for match in _SEPARATOR.finditer(text)
        if not any(span.start <= match.start() < span.stop for span in spans)
    ]
    bounds = {tag.position for tag in tags if tag.separates}
    bounds.update(match.start() for match in separators)
    bounds.update(match.end() for match in separators if match[0] != "\t")
    return sorted(at for at in bounds if 0 < at < len(text))
