"""Find contradictions in the names, colors, owners, places and pronouns of a story."""

import re
from collections.abc import Callable, Iterator

from regard.app.stories.words import ANIMALS, BOYS, COLORS, FOODS, GIRLS, GROWN_UPS, THINGS, TOYS

_NAME, _COLOR = (f"(?:{'|'.join(words)})" for words in (GIRLS + BOYS, COLORS))
_THING = f"(?:{'|'.join(TOYS + THINGS)})"
_CAST = {*GIRLS, *BOYS, *ANIMALS, *FOODS}
_FEMALE = {*GIRLS, *(name for name, pronoun in GROWN_UPS.items() if pronoun == "she")}
_MALE = {*BOYS, *(name for name, pronoun in GROWN_UPS.items() if pronoun == "he")}
_SPOT = "(?:behind|in|on|under) the [a-z]+"


def contradictions(story: str) -> list[str]:
    """Return the contradictions in a story, each as a phrase. The story must be worded as in the grammar.

    >>> from regard.app.stories.consistency import contradictions
    >>> contradictions("tom had a red ball . leo had a blue kite . tom lost the green ball .")
    ['the green ball was red']
    """
    return [message for check in _CHECKS for message in check(story)]


def _cast(story: str) -> Iterator[str]:
    """Yield a message for each character that was not introduced in the first two sentences."""
    sentences = [sentence.split() for sentence in re.split(r"(?<=[.!?]) ", story)]
    introduced = {word for sentence in sentences[:2] for word in sentence}
    for word in sorted({word for sentence in sentences[2:] for word in sentence} & _CAST - introduced):
        yield f"{word} was not introduced"


def _colors(story: str) -> Iterator[str]:
    """Yield a message for each thing that was not introduced or has changed its color."""
    colors: dict[str, str] = {}
    for match in re.finditer(rf"\b(an?|the|his|her|my|your|new) (?:({_COLOR}) )?({_THING})\b", story):
        article, color, noun = match.groups()
        if article in ("a", "an"):
            colors[noun] = color
        elif noun not in colors:
            yield f"the {noun} was not introduced"
        elif color is not None and color != colors[noun]:
            yield f"the {color} {noun} was {colors[noun]}"


def _owners(story: str) -> Iterator[str]:
    """Yield a message for each thing that is held, lost or given away by someone other than its owner."""
    owners: dict[str, str] = {}
    last = ""
    pattern = (
        rf"(?P<first>{_NAME}) had an? {_COLOR} (?P<new>{_THING})"
        rf"|(?P<giver>{_NAME}) gave (?:the {_COLOR} (?P<given>{_THING})|(?P<it>it)) to (?P<taker>{_NAME})"
        rf"|(?P<swapped>swapped)"
        rf"|(?P<holder>{_NAME}) (?P<verb>had|lost) (?:the {_COLOR}|his|her) (?P<held>{_THING})"
        rf"|i have it , \" said (?P<answer>{_NAME})"
    )
    for match in re.finditer(pattern, story):
        part = match.groupdict()
        if part["first"]:
            owners[part["new"]], last = part["first"], part["new"]
        elif part["giver"]:
            last = part["given"] or last
            if owners.get(last, part["giver"]) != part["giver"] and " found " not in story:
                yield f"{part['giver']} gave away {owners[last]}'s {last}"
            owners[last] = part["taker"]
        elif part["swapped"] and len(owners) == 2:
            first, second = owners
            owners = {first: owners[second], second: owners[first]}
        elif part["holder"]:
            last = part["held"]
            if "it was raining" in story or "it was snowing" in story:
                continue  # the owner lends the thing, in sentences that the pattern does not cover
            if owners.get(last, part["holder"]) != part["holder"]:
                yield f"{part['holder']} {part['verb']} {owners[last]}'s {last}"
        elif part["answer"] and owners.get(last, part["answer"]) != part["answer"]:
            yield f"{part['answer']} has {owners[last]}'s {last}"


def _places(story: str) -> Iterator[str]:
    """Yield a message for each child or thing that was not found where it was hidden or put."""
    spots = dict(re.findall(rf"({_NAME}) hid ({_SPOT})", story))
    for spot, child in re.findall(rf"looked ({_SPOT}) and found ({_NAME})", story):
        if spots.get(child, "") != spot:
            yield f"{child} was found {spot}, not {spots.get(child, 'hidden')}"
    put = dict(re.findall(rf"put an? {_COLOR} ({_THING}) ({_SPOT})", story))
    asked = re.findall(rf"(?:where is|wanted) the {_COLOR} ({_THING})", story)
    answers = re.findall(rf"(?:it is|looked) ({_SPOT}) (?:, \"|and found it)", story)
    for noun, spot in zip(asked, answers, strict=False):
        if noun in put and put[noun] != spot:
            yield f"the {noun} was {put[noun]}, not {spot}"


def _pronouns(story: str) -> Iterator[str]:
    """Yield a message for each pronoun without an antecedent."""
    words, mentioned = story.split(), set()
    for word in words:
        mentioned.add(word)
        if word in ("she", "her") and not mentioned & _FEMALE:
            yield f"{word} has no antecedent"
        if word in ("he", "him", "his") and not mentioned & _MALE:
            yield f"{word} has no antecedent"


_CHECKS: tuple[Callable[[str], Iterator[str]], ...] = (_cast, _colors, _owners, _places, _pronouns)
