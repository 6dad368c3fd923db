"""Word alignment links: Pharaoh format, reversal and symmetrization."""

import re
from bisect import insort
from collections.abc import Iterable
from typing import Literal, get_args

from regard._util.checks import check_number
from regard.errors import ArgumentError

Links = frozenset[tuple[int, int]]
"""Word alignment: a frozenset of (source word, target word) indices."""

SymmetrizationMethod = Literal["intersection", "union", "grow-diag", "grow-diag-final-and"]

_NEIGHBORS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))  # in Moses' order
_LINK = re.compile(r"([0-9]{1,9})([-p])([0-9]{1,9})")


def to_pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Format links as in Pharaoh and Moses: source-target word indices, counted from 0.

    links: (source word, target word) pairs in any order.

    >>> from regard.translation.alignment.links import to_pharaoh
    >>> to_pharaoh({(1, 2), (0, 0)})
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def read_links(
    line: str, where: str = "", index_base: int = 0, possible: bool = False
) -> tuple[Links, Links]:
    """Parse a line such as `1-2 3p4`; return its sure and possible links, with words counted from 0.

    where: prefix for error messages, such as file and line. index_base: index of the first word in `line`.
    possible: whether possible links (`p`) are allowed.
    """
    kinds: dict[str, set[tuple[int, int]]] = {"-": set(), "p": set()}
    for field in line.split():
        link = _LINK.fullmatch(field)
        if link is None or (link[2] == "p" and not possible):
            allowed = "0-1 (sure) or 0p1 (possible)" if possible else "source-target, such as 0-1"
            raise ArgumentError(f"{where}{field!r} is not a link. Write {allowed}.")
        source, target = int(link[1]) - index_base, int(link[3]) - index_base
        if min(source, target) < 0:
            raise ArgumentError(
                f"{where}{field!r} refers to word 0, but index_base={index_base} counts from 1. Use "
                "index_base=0."
            )
        kinds[link[2]].add((source, target))
    return frozenset(kinds["-"]), frozenset(kinds["p"])


def check_threshold(threshold: float | None) -> None:
    """Raise unless the threshold is valid for `Alignment.links`."""
    if threshold is not None:
        check_number("links got threshold", threshold, above=0, max=1)


def reverse_links(links: Iterable[tuple[int, int]]) -> Links:
    """Swap source and target of every link."""
    return frozenset((target, source) for source, target in links)


def symmetrize(
    forward: Links, backward: Links, method: SymmetrizationMethod = "grow-diag-final-and"
) -> Links:
    """Combine alignments from two directions; both contain (source word, target word) links.

    forward: links from the source-to-target model. backward: links from the target-to-source model, after
        `reverse_links`.
    method: "intersection" (most precise), "union" (most complete), or, as a compromise, "grow-diag" or
        "grow-diag-final-and".

    >>> from regard.translation.alignment.links import symmetrize
    >>> forward, backward = frozenset({(0, 0), (1, 1), (1, 2)}), frozenset({(0, 0), (1, 1), (2, 1)})
    >>> sorted(symmetrize(forward, backward, "intersection"))
    [(0, 0), (1, 1)]
    >>> sorted(symmetrize(forward, backward))
    [(0, 0), (1, 1), (1, 2), (2, 1)]
    """
    if method not in get_args(SymmetrizationMethod):
        choices = ", ".join(get_args(SymmetrizationMethod))
        raise ArgumentError(f"Unknown symmetrization method {method!r}. Choose from {choices}.")
    if method == "intersection":
        return forward & backward
    if method == "union":
        return forward | backward
    return _grow_diag(forward, backward, final_and=method == "grow-diag-final-and")


def _grow_diag(forward: Links, backward: Links, *, final_and: bool) -> Links:
    """Symmetrize as in Och and Ney 2003, section 5.1, adding links in the same order as Moses' `symal`.

    Start from the intersection and add neighboring links from the union that link an unlinked word.
    final_and: then add links between two unlinked words, first from `forward`, then from `backward`.
    """
    union = reverse_links(forward | backward)  # (target, source): symal iterates over target words
    links = sorted(reverse_links(forward & backward))
    targets, sources = {target for target, _ in links}, {source for _, source in links}

    def add(link: tuple[int, int]) -> None:
        insort(links, link)
        targets.add(link[0])
        sources.add(link[1])

    growing = True
    while growing:
        before, index = len(links), 0
        while index < len(links):
            current = links[index]
            for target, source in _NEIGHBORS:
                link = current[0] + target, current[1] + source
                if link in union and not (link[0] in targets and link[1] in sources):
                    add(link)
                    index += link < current  # a link inserted before `current` moves it by one
            index += 1
        growing = len(links) > before
    for rest in (forward - backward, backward - forward) if final_and else ():
        for link in sorted(reverse_links(rest)):
            if link[0] not in targets and link[1] not in sources:
                add(link)
    return reverse_links(links)
