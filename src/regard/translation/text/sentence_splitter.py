"""Find sentence ends with language-independent rules: punctuation, abbreviations, ordinals, quotes, CJK."""
# ruff: noqa: SIM905 (words are easier to read without quotes)

import re
from collections.abc import Sequence

from regard.translation.text.protected_spans import Span

_CLOSING = "\"'»«”“’‘)\\]}›‹」』）】》"
_SPACED = re.compile(rf"(?<![.!?…‽])[.!?…‽]++[{_CLOSING}*]*+(?=\s)")  # ends a sentence only before whitespace
_UNSPACED = re.compile(rf"[。！？｡．؟۔।॥։።၊။។]++[{_CLOSING}]*+")
_MISSING_SPACE = re.compile(rf"(?<=[^\W\d_]{{2}})[.!?][{_CLOSING}]*+(?=[^\W\d_]{{2}})")  # "end.Next"
_OPENING = "\"'»«”“„’‘([{‹›¿¡「『（-–—•"
_CONTEXT = 60  # characters examined on either side of a possible sentence end
_ORDINAL_DIGITS = 3  # "19. Jahrhundert" may continue the sentence, "1999. Danach" does not
# abbreviations that precede a name or noun and never end a sentence
_TITLES = frozenset(
    "dr prof mr mrs ms mme mlle sr sra st hr fr frl dipl ing jr lt sgt capt maj nr núm abs kap bd "
    "vol abb vgl cf ca approx zb bzw evtl ggf inkl exkl tel dept hrsg eds vs gegr geb gest jan "
    "feb apr jun jul aug sept okt oct nov dez d.h z.b u.a i.e e.g p.ex mio mrd tsd bzgl sog fa fam hl mind "
    "rev gen col mt".split()
)
_BEFORE_NUMBERS = frozenset("no nos num art fig tab max min op eq sec dec sep p pp".split())
# abbreviations that end a sentence only if a sentence starter follows
_FINAL = frozenset(
    "etc usw u.s.w inc ltd corp co al a.m p.m u.s u.k d.c ph.d b.a m.a gmbh bros jh std sek chr".split()
)
_STARTERS = frozenset(
    "der die das den dem ein eine einen einem einer er sie es wir ich ihr du man mein sein dieser "
    "diese dieses in im auf mit und aber dann danach heute zwei drei viele the a an he she it "
    "they we i you this that these those his her their my our there then two three some in on at "
    "and but le la les un une il elle ils elles on nous vous je tu ce cette ces des deux el los "
    "las una ella ellos yo este esta il lo gli uno lui lei loro un'".split()
)


def sentence_ends(text: str, spans: Sequence[Span] = ()) -> list[int]:
    """Return the end of each sentence: character positions, the last of which is the end of the text.

    spans: characters that belong together, such as URLs; see `find_spans`.

    >>> from regard.translation.text.sentence_splitter import sentence_ends
    >>> text = "Dr. Braun kommt am 3. Mai. „Gut!“ Er isst z. B. 2.5 kg Brot."
    >>> [text[start:stop] for start, stop in zip([0, *sentence_ends(text)], sentence_ends(text))]
    ['Dr. Braun kommt am 3. Mai.', ' „Gut!“', ' Er isst z. B. 2.5 kg Brot.']
    >>> sentence_ends("我是。你好！")
    [3, 6]
    """
    uncased = not any(character.isupper() for character in text)
    inside = {at for span in spans for at in range(span.start, span.stop - 1)}
    ends = [match.end() for match in _UNSPACED.finditer(text)]
    ends += [match.end() for match in _SPACED.finditer(text) if _ends_sentence(text, match, uncased)]
    ends += [match.end() for match in _MISSING_SPACE.finditer(text) if _starts_word(text, match)]
    last = next((at for at in range(len(text) - 1, -1, -1) if text[at].isalnum()), -1)
    kept: list[int] = []
    for end in sorted({end for end in ends if end - 1 not in inside and end <= last}):
        if any(character.isalnum() for character in text[kept[-1] if kept else 0 : end]):
            kept.append(end)
    return [*kept, len(text)] if text.strip() else []


def _ends_sentence(text: str, match: re.Match[str], uncased: bool) -> bool:
    """Return whether punctuation before whitespace ends a sentence."""
    following = text[match.end() : match.end() + _CONTEXT].lstrip().lstrip(_OPENING)
    if not following:
        return True
    if following[0].islower() and not uncased:
        return False  # "Help!" she cried
    if not match[0].startswith(".") or match[0].startswith(".."):
        return True
    before = text[max(match.start() - _CONTEXT, 0) : match.start()].split()
    word = before[-1].lstrip(_OPENING) if before and not text[match.start() - 1].isspace() else ""
    return _period_ends_sentence(word, re.split(r"[\s.,;:!?]", following, maxsplit=1)[0])


def _period_ends_sentence(word: str, following: str) -> bool:
    """Return whether a period ends a sentence, given the word before it and the word after it."""
    lower = word.lower()
    if not word:
        return True
    if re.fullmatch(r"\d{1,3}\.[-–/]\d{1,3}", word):  # 24./25. Dezember
        word = word[-1]
    if word.isdigit():
        return len(word) > _ORDINAL_DIGITS or following.lower() in _STARTERS
    if len(word) == 1 and word.isalpha():  # an initial, or part of "z. B."
        return False
    if lower.rpartition("-")[2] in _TITLES:  # also Dipl.-Ing.
        return False
    if following[:1].isdigit() and (lower in _BEFORE_NUMBERS or lower.endswith("str")):  # Bahnhofstr. 5
        return False
    if lower in _FINAL or re.fullmatch(r"(?:[^\W\d_]\.)+[^\W\d_]", word):
        return following.lower() in _STARTERS
    return True


def _starts_word(text: str, match: re.Match[str]) -> bool:
    """Return whether a period is between a lowercase letter and a capitalized word, without a space."""
    end = match.end()
    return text[match.start() - 1].islower() and text[end].isupper() and text[end + 1].islower()


def group_sentences(lengths: Sequence[int], max_sentences: int, max_length: int) -> list[int]:
    """Group consecutive sentences; return the number of sentences in each group.

    lengths: the length of each sentence. A group has at most `max_sentences` sentences and a total length
    of at most `max_length`, unless it is a single sentence.

    >>> from regard.translation.text.sentence_splitter import group_sentences
    >>> group_sentences([5, 5, 5, 30, 5], max_sentences=2, max_length=20)
    [2, 1, 1, 1]
    """
    groups: list[int] = []
    total = 0
    for length in lengths:
        if groups and groups[-1] < max_sentences and total + length <= max_length:
            groups[-1] += 1
            total += length
        else:
            groups.append(1)
            total = length
    return groups
