"""The output of `regard translate`: lines, tab-separated columns, JSON or a document."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from regard._util.text import pluralize, printable, shorten
from regard.translation.alignment.links import to_pharaoh
from regard.translation.decoding.strategies import Strategy
from regard.translation.text.documents import Format

if TYPE_CHECKING:
    from regard.translation.alignment.alignment import Alignment
    from regard.translation.text.memory import Match
    from regard.translation.translation import Translation
    from regard.translation.translator import Translator

_MAX_NOTES = 5  # maximum number of notes to print
_SORTED_BATCHES = 16  # number of batches whose lines are sorted by length together


class OutputFormat(NamedTuple):
    """Output format of a translation: tab-separated columns, or JSON."""

    n_best: bool
    scores: bool
    alignment: bool
    json: bool
    matches: int = 0

    def lines(
        self, number: int, translation: "Translation", matches: "Sequence[Match]" = ()
    ) -> Iterator[str]:
        """Yield the output lines for a translation; `number` is its source line, counted from 1."""
        if self.json:
            values = self._to_dict(translation)
            if self.matches:
                values["matches"] = [match._asdict() for match in matches]
            yield json.dumps(values, ensure_ascii=False)
            return
        for alternative in [translation, *translation.alternatives]:
            columns = [
                *([str(number)] if self.n_best else []),
                alternative.text,
                *([f"{alternative.score:.4f}"] if self.scores else []),
                *([_whitespace_links(alternative.alignment)] if self.alignment else []),
            ]
            if len(columns) > 1:  # a tab in the text would look like a new column
                columns = [column.replace("\t", " ") for column in columns]
            yield "\t".join(columns)
        for match in matches:
            yield "\t".join([f"# {match.similarity:.0%}", match.source, match.target])

    def _to_dict(self, translation: "Translation") -> dict[str, Any]:
        values: dict[str, Any] = {
            "source": translation.source,
            "text": translation.text,
            "score": translation.score,
            "confidence": round(translation.confidence, 4),
            "tokens": translation.tokens,
            "words": translation.words,
            "word_confidences": [round(value, 4) for value in translation.word_confidences],
        }
        if translation.note:
            values["note"] = translation.note
        if translation.warning:
            values["warning"] = translation.warning
        if self.alignment:
            values["alignment"] = translation.alignment.to_dict()
        if self.n_best:
            values["alternatives"] = [self._to_dict(alternative) for alternative in translation.alternatives]
        return values


def _whitespace_links(alignment: "Alignment") -> str:
    """Return the links between whitespace-separated words; a span such as "3,5 %" counts as two."""
    sources, targets = map(_whitespace_words, (alignment.source_words, alignment.target_words))
    links = ((i, j) for source, target in alignment.links() for i in sources[source] for j in targets[target])
    return to_pharaoh(links)


def _whitespace_words(words: Sequence[str]) -> list[range]:
    """Return the indices of each word's whitespace-separated parts."""
    stops = list(accumulate(len(word.split()) for word in words))
    return [range(start, stop) for start, stop in pairwise([0, *stops])]


class Writer:
    """Translates lines, writes the translations, and collects notes about unusual lines."""

    def __init__(
        self, translator: "Translator", strategy: Strategy, batch: int, format: OutputFormat
    ) -> None:
        self.translator, self.format = translator, format
        self.options: dict[str, Any] = {
            "strategy": strategy,
            "batch_size": batch,
            "alignment": format.alignment,
            "confidence": format.json,
        }
        self.notes: list[str] = []  # at most _MAX_NOTES
        self.noted = self.number = 0  # number of lines with a note, and total number of lines so far
        self._cure = "; use --json to see all notes"
        self.report: Callable[[str], None] = lambda text: None

    def write(self, lines: Iterable[str], to: IO[str]) -> None:
        """Translate the lines in a file, in large groups sorted by length."""
        lines = iter(lines)
        while group := list(islice(lines, self.options["batch_size"] * _SORTED_BATCHES)):
            self._write(self.translator.translate(group, **self.options), to)
            self.report(f"{pluralize(self.number, 'line')} translated …")

    def write_stream(self, lines: Iterable[str], to: IO[str]) -> None:
        """Translate lines as they arrive."""
        self._write(self.translator.stream(lines, **self.options), to)

    def write_document(self, text: str, format: Format, column: int, to: IO[str]) -> None:
        """Translate a document and keep its structure."""
        from regard.translation.text.documents import translate_document

        document = translate_document(self.translator, text, format, column=column, **self.options)
        to.write(document.text)
        self.noted, self._cure = len(document.notes), ""  # documents cannot be printed as JSON
        self.notes = [f"{shorten(source, 60)!r}: {note}." for source, note in document.notes[:_MAX_NOTES]]

    def _write(self, translations: Iterable["Translation"], to: IO[str]) -> None:
        for translation in translations:
            self.number += 1
            similar = (
                self.translator.matches(translation.source, self.format.matches)
                if self.format.matches and translation.source.strip()
                else []
            )
            for line in self.format.lines(self.number, translation, similar):
                to.write(f"{line}\n")
            if to is sys.stdout:  # flushing a compressed file would make it larger
                to.flush()
            if translation.note:
                self.noted += 1
                if self.noted <= _MAX_NOTES:
                    self.notes.append(f"line {self.number:,}: {translation.note}.")

    def print_notes(self) -> None:
        """Print the notes to stderr."""
        for note in self.notes:
            print(f"regard: {printable(note)}", file=sys.stderr)
        if self.noted > _MAX_NOTES:
            more = pluralize(self.noted - _MAX_NOTES, "more note")
            verb = "is" if self.noted == _MAX_NOTES + 1 else "are"
            print(f"regard: {more} {verb} not shown{self._cure}.", file=sys.stderr)
