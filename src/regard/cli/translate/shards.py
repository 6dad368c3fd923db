"""Translate a file in several processes: each writes shards, and the first process joins them.

A shard is written atomically, and its name identifies input, model and options. To continue after an
interruption, run the same command again: it reuses the finished shards.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from regard.cli.shared import open_output

MAX_LINES = 4096  # maximum number of lines per shard


class Shards(NamedTuple):
    """The shards of an output file: folder, key, lines per shard, number of shards."""

    folder: Path
    key: str
    lines: int
    number: int

    @classmethod
    def of(cls, output: Path, key: str, lines: int, processes: int) -> "Shards":
        """Divide `lines` into shards, at least one per process; `key` identifies input, model and options."""
        size = max(1, min(MAX_LINES, -(-lines // processes)))
        return cls(output.parent / f"{output.name}.shards", f"{key}-{size}", size, -(-lines // size))

    def path(self, number: int) -> Path:
        """Return the path of shard `number`, counted from 0."""
        return self.folder / f"{self.key}-{number:06}"

    def missing(self, rank: int, processes: int) -> list[int]:
        """Return the shards that process `rank` still has to write."""
        return [n for n in range(rank, self.number, processes) if not self.path(n).exists()]

    def parts(self, lines: Iterable[str], numbers: Iterable[int]) -> Iterator[tuple[int, list[str]]]:
        """Yield the number and the lines of each requested shard; the input is read once."""
        lines, requested = iter(lines), set(numbers)
        for number in range(self.number):
            part = list(islice(lines, self.lines))
            if number in requested:
                yield number, part

    def join(self, output: Path) -> None:
        """Concatenate all shards into `output` and delete them."""
        with open_output(output) as file:
            for number in range(self.number):
                with self.path(number).open(encoding="utf-8", newline="\n") as part:
                    shutil.copyfileobj(part, file)
        for number in range(self.number):
            self.path(number).unlink()
        with suppress(OSError):  # the folder may contain other files
            self.folder.rmdir()


def digest(*parts: object) -> str:
    """Hash values into a short key; for a path, hash the contents of the file."""
    key = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                key.update(hashlib.file_digest(file, "sha256").digest())
        else:
            key.update(repr(part).encode())
    return key.hexdigest()
