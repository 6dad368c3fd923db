"""Inline tags such as <b> and Markdown: removed before translation, then placed around the target words."""
# ruff: noqa: SIM905 (words are easier to read without quotes)

import re
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from regard.translation.alignment.alignment import Array

OPAQUE = (
    "code",
    "kbd",
    "samp",
    "script",
    "style",
    "svg",
    "math",
    "textarea",
    "template",
    "pre",
)  # elements whose content is not translated
# elements with translate="no" or the class notranslate, up to the first end tag
EXCLUDED = (
    r"<(?P<excluded>[A-Za-z][\w:-]*)(?=\s)[^<>]*?\s(?:translate\s*=\s*[\"']?no\b|class\s*=\s*[\"']?[^\"'<>]*?\bnotranslate\b)"
    r"[^<>]*(?<!/)>.*?</(?P=excluded)\s*>"
)
_TAG = re.compile(
    rf"<!--.*?-->|{EXCLUDED}|<(?P<opaque>{'|'.join(OPAQUE)})\b[^<>]*(?<!/)>.*?</(?P=opaque)\s*>"
    # keys pressed together: <kbd>Alt</kbd>+<kbd>F4</kbd>
    r"(?:[^\w\s<>&]{1,3}<(?P=opaque)\b[^<>]*(?<!/)>.*?</(?P=opaque)\s*>)*|"
    r"(?<!<)</?[A-Za-z][\w:.-]*(?:\s+[^\s<>\"'/=]+(?:\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s\"'<>]+))?)*\s*/?>|"
    # an escaped tag, such as &lt;b&gt;; attributes need a value, because "x &lt;y und z&gt;" is a comparison
    r"&lt;/?[A-Za-z][\w:.-]*(?:\s+[^\s<>&\"'/=]+\s*=\s*(?:\"[^\"<>]*\"|'[^'<>]*'|(?:[^\s<>&\"']|&(?!lt;|gt;))+))*\s*/?&gt;",
    re.S,
)
_BEFORE, _AFTER = r"(?<![^\s(\[{\"'„“«»>*_~])", r"(?![^\s.,;:!?…)\]}\"'“”«»<*_~])"
_CODE = re.compile(r"(?<![\w`])`[^`\n]+`(?![\w`])")
_URL = re.compile(r"(?:[a-z][a-z0-9+.-]{1,15}://|www\.)[^\s<>\"()]+", re.IGNORECASE)
_MARKDOWN = (  # groups: start tag, content, end tag
    # [text](address "title") or ![text](address)
    re.compile(r"(!?\[)([^\[\]\n]+)(\]\((?:[^()\s]|\([^()\s]*\))+(?:\s+\"[^\"\n]*\")?\))"),
    re.compile(rf"{_BEFORE}(?<!\*)(\*\*\*)(?=[^\s*])([^*\n]*)(?<=\S)(\*\*\*)(?!\*){_AFTER}"),
    re.compile(rf"{_BEFORE}(?<!\*)(\*\*)(?=[^\s*])((?:[^*\n]|\*(?!\*))*)(?<=\S)(\*\*)(?!\*){_AFTER}"),
    re.compile(rf"{_BEFORE}(?<!\*)(\*)(?=[^\s*])([^*\n]*)(?<=\S)(\*)(?!\*){_AFTER}"),
    re.compile(rf"{_BEFORE}(?<!_)(_)(?=[^\s_])([^_\n]*)(?<=\S)(_)(?!_){_AFTER}"),
    re.compile(rf"{_BEFORE}(__)(?=[^\s_])([^_\n]*\s[^_\n]*)(?<=\S)(__){_AFTER}"),  # __name__ is a placeholder
    re.compile(rf"{_BEFORE}(~~)(?=[^\s~])([^~\n]*)(?<=\S)(~~){_AFTER}"),
)
_NAME = re.compile(r"(?:<|&lt;)/?([A-Za-z][\w:.-]*)")
_PUNCTUATION = ".,;:!?…。！？"  # stays outside an end tag
# brackets and quotes that may enclose a word, with the closing marks of each
_BRACKETS = {
    "(": ")",
    "[": "]",
    "„": '“”"',
    "“": "”",
    "‚": "‘’",
    "‘": "’",
    "«": "»",
    "»": "«",
    "‹": "›",
    "›": "‹",
}
_BRACKETS |= {mark: mark for mark in "\"'"}
_OPENING, _CLOSING = "".join(_BRACKETS), "".join(_BRACKETS.values())
# elements that separate words even without whitespace: "Hund<br>bellt"
_SEPARATORS = frozenset(
    "address article aside blockquote br caption dd details div dl dt figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hr legend li main nav ol option p section summary table tbody td tfoot "
    "th thead title tr ul".split()
)
_EMPTY = frozenset("area base br col embed hr img input link meta param source track wbr".split())


class Tag(NamedTuple):
    """A tag in a line: its text, and its position in the text without tags.

    space_before, space_after: whether the tag follows or precedes whitespace.
    encloses_punctuation: whether punctuation before it stays before it: it follows punctuation, no text
        follows it, or it `separates` and no punctuation follows it.
    pair: n for the start tag and −n for the end tag of the nth Markdown element; 0 for other tags. Brackets
        and quotes directly around an element or its content, as in (<b>Mann</b>), are also such a pair.
    in_brackets: whether it directly follows an opening bracket; for an end tag, whether it precedes a closing
        bracket, perhaps with punctuation in between. False if the element starts or ends inside a word.
    """

    text: str
    position: int
    space_before: bool = False
    space_after: bool = False
    encloses_punctuation: bool = False
    pair: int = 0
    in_brackets: bool = False

    @property
    def name(self) -> str:
        """The element's name, in lowercase; empty for a comment."""
        if self.pair:
            return f"markdown {abs(self.pair)}"
        match = _NAME.match(self.text)
        return match[1].lower() if match else ""

    @property
    def opens(self) -> bool:
        """Whether this is a start tag that needs an end tag."""
        return bool(self.name) and not self.closes and not self.stands_alone

    @property
    def closes(self) -> bool:
        """Whether this is an end tag."""
        return self.pair < 0 or (not self.pair and self.text.startswith(("</", "&lt;/")))

    @property
    def separates(self) -> bool:
        """Whether this is a tag between paragraphs, cells, list items or lines."""
        return self.name in _SEPARATORS

    @property
    def stands_alone(self) -> bool:
        """Whether this is neither a start nor an end tag: <br>, a comment, or a whole <code>…</code>."""
        if self.pair:
            return False
        has_content = self.text.count("<") > 1  # includes the end tag
        return not self.name or self.text.endswith(("/>", "/&gt;")) or self.name in _EMPTY or has_content


def strip_tags(text: str) -> tuple[str, list[Tag]]:
    """Remove the tags from a text; return the text and the tags.

    >>> from regard.translation.text.tags import strip_tags
    >>> text, tags = strip_tags("Ein <b>Mann</b>.")
    >>> text, [(tag.text, tag.position) for tag in tags]
    ('Ein Mann.', [('<b>', 4), ('</b>', 8)])
    >>> text, tags = strip_tags("Ein (<b>Mann</b>).")
    >>> text, [tag.text for tag in tags]
    ('Ein Mann.', ['(', '<b>', '</b>', ')'])
    """
    found = _find_tags(text)
    if not found:
        return text, []
    plain, tags, last, size, previous = [], [], 0, 0, " "
    for start, stop, pair in found:
        before = text[last:start]
        plain.append(before)
        size += len(before)
        previous = before[-1:] or previous
        last = stop
        tag = Tag(
            text[start:stop],
            size,
            text[max(start - 1, 0) : start].isspace(),
            text[last : last + 1].isspace(),
            before.endswith(tuple(_PUNCTUATION)),
            pair,
        )
        if tag.separates and not text.startswith(tuple(_PUNCTUATION), last):
            tag = tag._replace(encloses_punctuation=True)
            if not previous.isspace() and not tag.space_after:
                plain.append(" ")
                previous, size = " ", size + 1
                tag = tag if tag.closes else tag._replace(position=size)
        tags.append(tag)
    stripped = "".join([*plain, text[last:]])
    end = len(stripped.rstrip())
    in_brackets = _tags_in_brackets(tags, stripped)
    return stripped, [
        tag._replace(
            encloses_punctuation=tag.encloses_punctuation or tag.position >= end,
            in_brackets=number in in_brackets,
        )
        for number, tag in enumerate(tags)
    ]


def _tags_in_brackets(tags: Sequence[Tag], text: str) -> set[int]:
    """Return the numbers of the tags in brackets: see `Tag.in_brackets`. text: the text without tags."""
    result, inside_word = set[int](), set[int]()
    for number, tag in enumerate(tags):
        before, after = text[: tag.position], text[tag.position :]
        if tag.closes:
            rest = after.lstrip(_PUNCTUATION + _CLOSING)[:1]
            in_brackets = after.lstrip(_PUNCTUATION)[:1] in tuple(_CLOSING)
        else:
            rest = before.rstrip(_OPENING)[-1:]
            in_brackets = before[-1:] in tuple(_OPENING)
        if rest and not rest.isspace():
            inside_word.add(number)
        elif in_brackets:
            result.add(number)
    for ends in _pair_tags(tags).items():
        if not inside_word.isdisjoint(ends):  # the tags enclose the whole word, with its brackets
            result -= {*ends}
    return result


def _find_tags(text: str) -> list[tuple[int, int, int]]:
    """Return the start and stop of each tag in order, and its `Tag.pair`."""
    tags = [(*match.span(), 0) for match in _TAG.finditer(text)] if "<" in text or "&lt;" in text else []
    if not any(mark in text for mark in ("](", "*", "_", "~~")):
        return _add_brackets(text, tags) if tags else tags
    taken = {at for start, stop, _ in tags for at in range(start, stop)}
    taken |= {at for match in _CODE.finditer(text) for at in range(*match.span())}
    number, urls = 0, list(_URL.finditer(text))
    for pattern in _MARKDOWN:
        for match in pattern.finditer(text):
            ends = match.span(1), match.span(3)
            if not taken.isdisjoint(at for end in ends for at in range(*end)):
                continue
            number += 1
            tags += [(*ends[0], number), (*ends[1], -number)]
            taken.update(at for end in ends for at in range(*end))
        taken.update(
            at for match in urls for at in range(*match.span())
        )  # after the links, which contain them
    return _add_brackets(text, sorted(tags))


def _add_brackets(text: str, tags: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Add the brackets and quotes around elements, or their contents: the model may not know them.

    tags: result of `_find_tags`.
    """
    if not any(mark in text for mark in _OPENING):
        return tags
    elements = [Tag(text[start:stop], start, pair=pair) for start, stop, pair in tags]
    end_of = _pair_tags(elements) | {i: i for i, tag in enumerate(elements) if tag.stands_alone}
    taken = {at for start, stop, _ in tags for at in range(start, stop)}
    visible = _hide_tags(text, tags)
    number = max((pair for *_, pair in tags), default=0)
    result = list(tags)
    for first, last in sorted(end_of.items(), key=lambda ends: ends[0] - ends[1]):  # inner elements first
        before, after = tags[first][0] - 1, tags[last][1]
        brackets: list[tuple[int, int]] = []
        while before >= 0 and after < len(text) and taken.isdisjoint((before, after)):
            if text[after] not in _BRACKETS.get(text[before], ""):
                break
            brackets.append((before, after))
            before, after = before - 1, after + 1
        if brackets and not _is_separate(visible, *brackets[-1]):
            brackets = []
        inner = _inner_brackets(text, tags[first][1], tags[last][0] - 1)
        brackets += [ends for ends in inner if _is_separate(visible, *ends)]
        for start, stop in brackets:
            if taken.isdisjoint((start, stop)):
                number += 1
                result += [(start, start + 1, number), (stop, stop + 1, -number)]
                taken |= {start, stop}
    return sorted(result)


def _inner_brackets(text: str, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the positions of brackets around the content of an element, such as <b>(Mann)</b>, if any.

    start, stop: positions of the first and last character of the content.
    """
    if start >= stop or text[stop] not in _BRACKETS.get(text[start], ""):
        return []
    marks = text[start] + text[stop]
    return [] if any(mark in text[start + 1 : stop] for mark in marks) else [(start, stop)]


def _hide_tags(text: str, tags: Sequence[tuple[int, int, int]]) -> str:
    """Replace the characters of tags with "\0", or with spaces if they separate words."""
    parts, last = [], 0
    for start, stop, pair in tags:
        separates = Tag(text[start:stop], start, pair=pair).name in _SEPARATORS
        parts += [text[last:start], (" " if separates else "\0") * (stop - start)]
        last = stop
    return "".join([*parts, text[last:]])


def _is_separate(visible: str, start: int, stop: int) -> bool:
    """Return whether the brackets at `start` and `stop` do not touch a letter or digit.

    visible: result of `_hide_tags`.
    """
    before, after = visible[:start].rstrip("\0")[-1:], visible[stop + 1 :].lstrip("\0")[:1]
    return not before.isalnum() and not after.isalnum()


def place_tags(
    tags: Sequence[Tag],
    source: Sequence[tuple[int, int]],
    targets: int,
    weights: "Array | None",
) -> list[int]:
    """Return, for each tag, the number of target words before it. The order of the tags does not change.

    source: character ranges of the source words in the text without tags. targets: number of target words.
    weights: (target, source words); without weights, positions are proportional. A pair of tags encloses the
    target words whose best source words it encloses in the source.

    >>> import numpy
    >>> from regard.translation.text.tags import place_tags, strip_tags
    >>> text, tags = strip_tags("Hunde <b>heute</b> bellen")
    >>> place_tags(tags, [(0, 5), (6, 11), (12, 18)], 3, numpy.eye(3)[[1, 0, 2]])  # "today dogs bark"
    [0, 1]
    """
    best = _best_sources(len(source), targets, weights)
    end_of = _pair_tags(tags)
    ends = set(end_of.values())
    positions = [0] * len(tags)
    for number, tag in enumerate(tags):
        first = words_before(tag, source)
        if number in end_of:
            end = end_of[number]
            stop = _words_started(tags[end], source)
            rows = [row for row, word in enumerate(best) if first <= word < stop]
            before = _target_words_before(first, best)
            inside_pair = number > 0 and tags[number - 1].pair and end_of.get(number - 1) == end + 1
            if (tag.pair or inside_pair) and not rows and first < stop and targets:
                rows = [min(before, targets - 1)]  # an empty ** ** would be parsed as different Markdown
            positions[number] = min(rows, default=before)
            positions[end] = max(rows, default=before - 1) + 1
        elif number not in ends:
            # an end tag follows the word that it is attached to, even before punctuation
            positions[number] = _target_words_before(
                _words_started(tag, source) if tag.closes else first, best
            )
    return list(accumulate(positions, max))


def words_before(tag: Tag, source: Sequence[tuple[int, int]]) -> int:
    """Return the number of source words that end before a tag. source: see `place_tags`."""
    return next((i for i, (_, stop) in enumerate(source) if stop > tag.position), len(source))


def _words_started(tag: Tag, source: Sequence[tuple[int, int]]) -> int:
    """Return the number of source words that start before a tag. source: see `place_tags`."""
    return sum(start < tag.position for start, _ in source)


def _best_sources(sources: int, targets: int, weights: "Array | None") -> list[int]:
    """Return the best source word for each target word."""
    if weights is not None and weights.size:
        best: list[int] = weights.argmax(-1).tolist()
        return best
    return [row * sources // targets for row in range(targets)]


def _pair_tags(tags: Sequence[Tag]) -> dict[int, int]:
    """Return the end tag of each start tag that has one."""
    end_of: dict[int, int] = {}
    opened: list[int] = []
    names = [tag.name for tag in tags]
    for number, tag in enumerate(tags):
        candidates = reversed(opened) if tag.closes else ()
        match = next((start for start in candidates if names[start] == names[number]), None)
        if match is not None:
            end_of[match] = number
            opened = opened[: opened.index(match)]
        elif tag.opens:
            opened.append(number)
    return end_of


def _target_words_before(first: int, best: Sequence[int]) -> int:
    """Return the number of target words before a tag that precedes source word `first`."""
    before = [row for row, word in enumerate(best) if word < first]
    if not before:
        return 0
    return len(best) if max(best) < first else max(before) + 1


def write_tags(tags: Sequence[Tag], positions: Sequence[int], words: Sequence[str]) -> list[str]:
    """Attach the tags to the target words: end tags to the word before, all others to the word after.

    >>> from regard.translation.text.tags import strip_tags, write_tags
    >>> write_tags(strip_tags("<b>Hunde</b> bellen")[1], [0, 1], ["dogs", "bark"])
    ['<b>dogs</b>', 'bark']
    """
    if not words:
        return [_join(tags)] if tags else []
    result = list(words)
    for at in sorted(set(positions), reverse=True):
        group = [tag for tag, position in zip(tags, positions, strict=True) if position == at]
        closing = list(takewhile(lambda tag: tag.closes, group)) if at else []
        opening = group[len(closing) :]
        if at == len(words):
            closing, opening = group, []
        if opening:
            result[at] = _open(opening, result[at])
        if closing:
            result[at - 1] = _close(closing, result[at - 1])
    return result


def _open(tags: Sequence[Tag], word: str) -> str:
    """Write tags before a word; those in brackets follow its opening brackets."""
    outer = list(takewhile(lambda tag: not tag.in_brackets, tags))
    brackets = len(word) - len(word.lstrip(_OPENING))
    if brackets in (0, len(word)):
        return _join_before(tags, word)
    return _join_before(outer, word[:brackets] + _join_before(tags[len(outer) :], word[brackets:]))


def _join_before(tags: Sequence[Tag], word: str) -> str:
    return _join(tags) + (" " if tags and tags[-1].space_after else "") + word


def _close(tags: Sequence[Tag], word: str) -> str:
    """Write tags after a word: end tags before its final punctuation, and those in brackets before these."""
    text = word.rstrip(_PUNCTUATION)
    content = text.rstrip(_CLOSING)
    inner: list[Tag] = []
    if content and content != text:
        inner = list(takewhile(lambda tag: tag.closes and tag.in_brackets, tags))
        if not any(tag.encloses_punctuation for tag in inner):
            content = content.rstrip(_PUNCTUATION) or content
    outer = tags[len(inner) :]
    outside = all(tag.closes and not tag.encloses_punctuation for tag in outer)
    # a space would split "word."
    end = text if text and outside and not (outer and outer[0].space_before) else word
    written = _join_after(content, inner) + end[len(content) :] if inner else end
    return _join_after(written, outer) + word[len(end) :]


def _join_after(word: str, tags: Sequence[Tag]) -> str:
    return word + (" " if tags and tags[0].space_before else "") + _join(tags)


def _join(tags: Sequence[Tag]) -> str:
    """Join adjacent tags, with a space where the source has whitespace."""
    text = "".join(tag.text + (" " if tag.space_after else "") for tag in tags[:-1])
    return text + "".join(tag.text for tag in tags[-1:])
