"""Translating a file in several processes: each writes shards of it, and the first puts them together.

A shard is written once, whole, under a name that tells of what and how it was made. Who starts again after an
interruption finds those that are there, and goes on with the others.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from regard.cli.shared import written_whole

LINES = 4096  # of a shard, at most


class Shards(NamedTuple):
    """The shards of an output: where they are, how many lines each has, and how many there are."""

    folder: Path
    key: str
    lines: int
    number: int

    @classmethod
    def of(cls, output: Path, key: str, lines: int, processes: int) -> "Shards":
        """Enough of them that each process has one; `key` names of what and how they are made."""
        size = max(1, min(LINES, -(-lines // processes)))
        return cls(output.parent / f"{output.name}.shards", f"{key}-{size}", size, -(-lines // size))

    def path(self, number: int) -> Path:
        """Where the shard with this number is, from 0."""
        return self.folder / f"{self.key}-{number:06}"

    def missing(self, rank: int, processes: int) -> list[int]:
        """Those that a process has to write, and that are not there yet."""
        return [n for n in range(rank, self.number, processes) if not self.path(n).exists()]

    def parts(self, lines: Iterable[str], numbers: Iterable[int]) -> Iterator[tuple[int, list[str]]]:
        """The lines of some shards, with their numbers; the file is read once."""
        lines, wanted = iter(lines), set(numbers)
        for number in range(self.number):
            part = list(islice(lines, self.lines))
            if number in wanted:
                yield number, part

    def join(self, output: Path) -> None:
        """Put all of them together, and take them away."""
        with written_whole(output) as to:
            for number in range(self.number):
                with self.path(number).open(encoding="utf-8", newline="\n") as part:
                    shutil.copyfileobj(part, to)
        for number in range(self.number):
            self.path(number).unlink()
        with suppress(OSError):  # somebody keeps files of their own there
            self.folder.rmdir()


def digest(*parts: object) -> str:
    """A short name for the contents of files, and for values; it is another one if any of them is."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        else:
            found.update(repr(part).encode())
    return found.hexdigest()
