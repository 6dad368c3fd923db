"""Read and write TMX 1.4b, the XML format for translation memories. Files are streamed."""

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO
from xml.parsers import expat

from regard._util.extras import installed_version
from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.translation.data.pairs import Pair, normalize_spaces

Languages = tuple[str, str]

_CHUNK_BYTES = 1 << 16
_MAX_UNIT_CHARACTERS = 1 << 24  # a longer translation unit is not a sentence and could exhaust memory
_MAX_DEPTH = 100
_CODES = frozenset({"bpt", "ept", "ph", "it", "ut", "sub"})  # inline elements that contain formatting codes
_INVALID = dict.fromkeys({*range(32), 0xFFFE, 0xFFFF} - {9, 10, 13})  # XML 1.0 cannot represent these


def read_tmx(file: BinaryIO, name: str, languages: Languages | None = None) -> Iterator[Pair]:
    """Yield the sentence pairs in a TMX file.

    file: a file opened for reading bytes. name: file name for error messages.
    languages: source and target, such as ("de", "en"); "en" also matches "en-US" and "EN". Units that lack
        one of the languages are skipped. Default: the header's source language and the only other language.

    Whitespace in segments is normalized, and formatting codes are removed. Entity declarations are rejected;
    external files are never read.

    >>> import io
    >>> from regard.translation.data.tmx import read_tmx, write_tmx
    >>> file = io.BytesIO()
    >>> write_tmx(file, [(("Hund & Katze", "dog & cat"), {"note": "animals"})], ("de", "en"))
    1
    >>> list(read_tmx(io.BytesIO(file.getvalue()), "animals.tmx"))
    [Pair(source='Hund & Katze', target='dog & cat')]
    """
    reader, selected, units, pairs = _Reader(name), languages, 0, 0
    for unit in reader.units(file):
        units += 1
        selected = selected or _guess_languages(unit, reader.source_language, name)
        source, target = (_segment(unit, language) for language in selected)
        if source is not None and target is not None:
            pairs += 1
            yield Pair(source, target)
        elif languages is None:
            raise ArgumentError(
                f"{name}: translation unit {units:,} has {_list(unit)}, but previous units have "
                f"{selected[0]} and {selected[1]}. To skip units that lack one of them, pass the languages, "
                "such as --languages de-en."
            )
    if units and not pairs and selected:
        raise ArgumentError(
            f"{name}: read {pluralize(units, 'translation unit')}, but found none with segments in both "
            f"{selected[0]!r} and {selected[1]!r}; the last one has {_list(unit)}. Choose other languages."
        )


def tmx_languages(file: BinaryIO, name: str) -> Languages | None:
    """Return the source and target languages of a bilingual TMX file; None if it has no units.

    file: a file opened for reading bytes. name: file name for error messages.

    >>> import io
    >>> from regard.translation.data.tmx import tmx_languages, write_tmx
    >>> file = io.BytesIO()
    >>> write_tmx(file, [(("Hund", "dog"), {})], ("de", "en"))
    1
    >>> tmx_languages(io.BytesIO(file.getvalue()), "animals.tmx")
    ('de', 'en')
    """
    reader = _Reader(name)
    unit = next(reader.units(file), None)
    return None if unit is None else _guess_languages(unit, reader.source_language, name)


def write_tmx(
    file: BinaryIO,
    units: Iterable[tuple[tuple[str, str], Mapping[str, str]]],
    languages: Languages = ("x-source", "x-target"),
) -> int:
    """Write sentence pairs as TMX; return the number of pairs.

    file: a file opened for writing bytes. languages: language tags of source and target.
    units: sentence pairs, each with values to store in `<prop>` elements, such as {"x-alignment": "0-0 1-2"}.

    Control characters, which XML cannot represent, are dropped.
    """
    source, target, tool_version = map(_quote, (*languages, installed_version()))
    file.write(
        '<?xml version="1.0" encoding="UTF-8"?>\n<tmx version="1.4">\n'
        f'<header creationtool="regard" creationtoolversion={tool_version} segtype="sentence" '
        f'o-tmf="regard" adminlang="en" srclang={source} datatype="plaintext"/>\n<body>\n'.encode()
    )
    number = 0
    for pair, values in units:
        number += 1
        props = "".join(f"<prop type={_quote(key)}>{_escape(value)}</prop>" for key, value in values.items())
        file.write(
            f"<tu>{props}<tuv xml:lang={source}><seg>{_escape(pair[0])}</seg></tuv>"
            f"<tuv xml:lang={target}><seg>{_escape(pair[1])}</seg></tuv></tu>\n".encode()
        )
    file.write(b"</body>\n</tmx>\n")
    return number


def _escape(text: str) -> str:
    return html.escape(text.translate(_INVALID), quote=False)


def _quote(text: str) -> str:
    return f'"{html.escape(text)}"'


def _list(unit: Mapping[str, str]) -> str:
    return ", ".join(unit) or "no segments"


def _segment(unit: Mapping[str, str], language: str) -> str | None:
    """Return the segment with exactly this language tag or, if there is none, with a regional variant."""
    wanted = language.lower().replace("_", "-")
    tags = {tag.lower().replace("_", "-"): text for tag, text in unit.items()}
    variants = (text for tag, text in tags.items() if tag.startswith(f"{wanted}-"))
    return tags[wanted] if wanted in tags else next(variants, None)


def _guess_languages(unit: Mapping[str, str], source_language: str, name: str) -> Languages:
    tags = list(unit)
    if len(tags) != 2:
        raise ArgumentError(
            f"{name}: the first translation unit has {pluralize(len(tags), 'language')} ({_list(unit)}). "
            "Pass the two languages to read, such as --languages de-en, or languages=('de', 'en')."
        )
    if source_language.lower() == tags[1].lower():
        tags.reverse()
    return tags[0], tags[1]


class _Reader:
    """Collects translation units from XML events, each as a dictionary from language tag to segment."""

    def __init__(self, name: str) -> None:
        self.source_language = ""
        self._name, self._finished, self._unit = name, list[dict[str, str]](), dict[str, str]()
        self._path: list[str] = []
        self._language = ""
        self._text: list[str] = []
        self._size = 0
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters
        self._parser.EntityDeclHandler = self._refuse_entity
        self._parser.SkippedEntityHandler = self._refuse_entity  # an entity declared in an external file

    def units(self, file: BinaryIO) -> Iterator[dict[str, str]]:
        """Parse a file in chunks and yield its translation units."""
        while True:
            chunk = file.read(_CHUNK_BYTES)
            try:
                self._parser.Parse(chunk, not chunk)
            except (expat.ExpatError, LookupError) as error:  # LookupError: unknown encoding
                reason = expat.ErrorString(error.code) if isinstance(error, expat.ExpatError) else error
                raise self._error(
                    f"not valid XML ({reason}). The file may be truncated, or it may not be a TMX file."
                ) from None
            yield from self._finished
            self._finished.clear()
            if not chunk:
                return

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self._path and tag != "tmx":
            raise self._error(f"the document is <{tag}>, not <tmx>. Pass a TMX file.")
        if len(self._path) == _MAX_DEPTH:
            raise self._error(f"elements are nested more than {_MAX_DEPTH} levels deep. Is this a TMX file?")
        self._path.append(tag)
        if tag == "header":
            self.source_language = attributes.get("srclang", "")
        elif tag == "tu":
            self._unit, self._size = {}, 0
        elif tag == "tuv":
            self._language = attributes.get("xml:lang") or attributes.get("lang") or ""
            if not self._language:
                raise self._error('<tuv> has no xml:lang attribute. Add one, such as xml:lang="de".')
        elif tag == "seg":
            self._text = []

    def _end(self, tag: str) -> None:
        self._path.pop()
        if tag == "seg":
            self._unit.setdefault(self._language, normalize_spaces("".join(self._text)))
        elif tag == "tu":
            self._finished.append(self._unit)

    def _characters(self, text: str) -> None:
        if "seg" not in self._path or not _CODES.isdisjoint(self._path):
            return
        self._size += len(text)
        if self._size > _MAX_UNIT_CHARACTERS:
            raise self._error(
                f"a translation unit has more than {_MAX_UNIT_CHARACTERS:,} characters. Split it into "
                "sentences."
            )
        self._text.append(text)

    def _refuse_entity(self, entity: str, *declaration: Any) -> None:
        raise self._error(
            f"it declares or uses the XML entity {entity!r}. Only &amp; &lt; &gt; &quot; and &apos; are "
            "allowed, because entities can read other files or exhaust memory."
        )

    def _error(self, message: str) -> ArgumentError:
        return ArgumentError(f"{self._name}, line {self._parser.CurrentLineNumber:,}: {message}")
