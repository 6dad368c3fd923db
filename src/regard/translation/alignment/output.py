"""Write aligned sentence pairs: links, links with scores, JSON or TMX."""

import json
import os
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Literal, NamedTuple, Union

from regard._util.files import open_atomic
from regard.translation.alignment.links import Links, to_pharaoh
from regard.translation.data.formats import compressed
from regard.translation.data.tmx import Languages, write_tmx

if TYPE_CHECKING:
    from regard.translation.alignment.alignment import Alignment
    from regard.translation.alignment.lexical_alignment import LexicalAlignment

Style = Literal["links", "scores", "json"]


class AlignedPair(NamedTuple):
    """A sentence pair, its links, and the alignment that contains their scores."""

    pair: tuple[str, str]
    links: Links
    alignment: Union["Alignment", "LexicalAlignment"]


def batch_pairs(
    pairs: Iterable[tuple[str, str]], max_pairs: int, max_cells: int
) -> Iterator[list[tuple[str, str]]]:
    """Group pairs into batches; long sentences, whose weights need more memory, form smaller batches.

    >>> from regard.translation.alignment.output import batch_pairs
    >>> list(batch_pairs([("a b", "c d"), ("e", "f"), ("g", "h")], max_pairs=2, max_cells=3))
    [[('a b', 'c d')], [('e', 'f'), ('g', 'h')]]
    """
    batch: list[tuple[str, str]] = []
    cells = 0
    for source, target in pairs:
        batch.append((source, target))
        cells += len(source.split()) * len(target.split())
        if len(batch) == max_pairs or cells > max_cells:
            yield batch
            batch, cells = [], 0
    if batch:
        yield batch


def write_aligned(file: IO[str], pairs: Iterable[AlignedPair], style: Style = "links") -> None:
    """Write one line per pair.

    style: "links" writes Pharaoh format, as in Moses: 0-0 1-2. "scores" writes the pair's score, a tab, and
        0-0:0.98 1-2:0.75. "json" writes an object with words, links and all weights.
    """
    for aligned in pairs:
        file.write(f"{_format(aligned, style)}\n")


def write_aligned_tmx(
    path: str | os.PathLike[str], pairs: Iterable[AlignedPair], languages: Languages | None = None
) -> None:
    """Write sentences, links (x-alignment) and pair scores (x-alignment-score) to a TMX file.

    The file is compressed if its name ends in .gz.
    """
    units = ((aligned.pair, _properties(aligned)) for aligned in pairs)
    with open_atomic(path) as raw, compressed(raw, os.fspath(path)) as file:
        write_tmx(file, units, languages or ("x-source", "x-target"))


def _format(aligned: AlignedPair, style: Style) -> str:
    from regard.translation.alignment.lexical_alignment import LexicalAlignment  # needs numpy

    _, links, alignment = aligned
    if style == "json":
        return json.dumps(alignment.to_dict(links), ensure_ascii=False)
    if style == "scores" and isinstance(alignment, LexicalAlignment):
        scored = (f"{s}-{t}:{alignment.weights[t, s]:.3f}" for s, t in sorted(links))
        return f"{alignment.score:.4f}\t{' '.join(scored)}"
    return to_pharaoh(links)


def _properties(aligned: AlignedPair) -> dict[str, str]:
    from regard.translation.alignment.lexical_alignment import LexicalAlignment

    properties = {"x-alignment": to_pharaoh(aligned.links)}
    if isinstance(aligned.alignment, LexicalAlignment):
        properties["x-alignment-score"] = f"{aligned.alignment.score:.4f}"
    return properties
