"""Links between the words of two sentences: written down, reversed, and two directions made one."""

import re
from bisect import insort
from collections.abc import Iterable
from typing import Literal, get_args

from regard.errors import ArgumentError

Links = frozenset[tuple[int, int]]
"""Links between words: a frozenset of (source word, target word), counted from 0."""

SymmetrizationMethod = Literal["intersection", "union", "grow-diag-final-and"]

_BESIDE = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))  # Moses' order
_LINK = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})")


def to_pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Links in the format of Pharaoh and Moses, source-target, counted from 0.

    links: pairs (source word, target word), in any order.

    >>> from regard.translation.data.links import to_pharaoh
    >>> to_pharaoh({(1, 2), (0, 0)})
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def read_links(line: str, where: str = "", base: int = 0, possible: bool = False) -> tuple[Links, Links]:
    """The sure and the possible links of a line, `1-2 3p4`; both are counted from 0 then.

    where: what an error begins with, a file and a line. possible: whether `p` is allowed.

    >>> from regard.translation.data.links import read_links
    >>> read_links("1-1 2p3", base=1, possible=True)
    (frozenset({(0, 0)}), frozenset({(1, 2)}))
    """
    kinds: dict[str, set[tuple[int, int]]] = {"-": set(), "p": set()}
    for field in line.split():
        link = _LINK.fullmatch(field)
        if link is None or (link[2] == "p" and not possible):
            also = " or, if it is possible and not sure, 0p1" if possible else ""
            raise ArgumentError(f"{where}{field!r} is no link; a link is source-target, as in 0-1{also}.")
        source, target = int(link[1]) - base, int(link[3]) - base
        if min(source, target) < 0:
            raise ArgumentError(
                f"{where}{field!r} counts words from 0, and base={base} says that they are counted from "
                f"{base}; give base=0 (--base 0)."
            )
        kinds[link[2]].add((source, target))
    return frozenset(kinds["-"]), frozenset(kinds["p"])


def reverse_links(links: Iterable[tuple[int, int]]) -> Links:
    """The same links with source and target changed over: what a model of the other direction found.

    >>> from regard.translation.data.links import reverse_links
    >>> sorted(reverse_links({(0, 5), (1, 2)}))
    [(2, 1), (5, 0)]
    """
    return frozenset((target, source) for source, target in links)


def symmetrize(forward: Links, backward: Links, how: SymmetrizationMethod = "grow-diag-final-and") -> Links:
    """One set of links out of those of two directions, both (source word, target word).

    forward: a source for each target word, what a model from source to target finds.
    backward: a target for each source word, what the model of the other direction finds, `reverse_links`.
    how: "intersection", "union", or "grow-diag-final-and", which lies between them.

    >>> from regard.translation.data.links import symmetrize
    >>> forward, backward = frozenset({(0, 0), (1, 1), (1, 2)}), frozenset({(0, 0), (1, 1), (2, 1)})
    >>> sorted(symmetrize(forward, backward, "intersection"))
    [(0, 0), (1, 1)]
    >>> sorted(symmetrize(forward, backward))
    [(0, 0), (1, 1), (1, 2), (2, 1)]
    """
    if how not in get_args(SymmetrizationMethod):
        raise ArgumentError(f"symmetrize got how={how!r}; there are {', '.join(get_args(SymmetrizationMethod))}.")
    if how == "intersection":
        return forward & backward
    if how == "union":
        return forward | backward
    return _grown(forward, backward)


def _grown(forward: Links, backward: Links) -> Links:
    """Och and Ney 2003, section 5.1, exactly as Moses' `symal` does it, whose order of links matters.

    From the intersection on, a neighbour that is in the union joins if it links a word that has no link; last
    (final-and) each link joins whose words both have none, those of `forward` first.
    """
    union = reverse_links(forward | backward)  # (target, source): symal goes from target word to target word
    found = sorted(reverse_links(forward & backward))
    targets, sources = {target for target, _ in found}, {source for _, source in found}

    def join(point: tuple[int, int]) -> None:
        insort(found, point)
        targets.add(point[0])
        sources.add(point[1])

    growing = True
    while growing:
        before, at = len(found), 0
        while at < len(found):
            here = found[at]
            for target, source in _BESIDE:
                point = here[0] + target, here[1] + source
                if point in union and not (point[0] in targets and point[1] in sources):
                    join(point)
                    at += point < here  # one that comes later is scanned in this round too
            at += 1
        growing = len(found) > before
    for one, other in ((forward, backward), (backward, forward)):
        for point in sorted(reverse_links(one - other)):
            if point[0] not in targets and point[1] not in sources:
                join(point)
    return reverse_links(found)
