"""Files, written whole or not at all, and sizes that people can read."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from regard.errors import ArgumentError


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write as a stream, beside its place, which it takes at the end, and only if nothing failed.

    A link is followed, and a file that is there keeps its mode. What fails names the file that was asked for.

    >>> import pathlib, tempfile
    >>> from regard.mechanism.files import writing
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with writing(f"{folder}/notes.txt") as file:
    ...         size = file.write(b"complete")
    ...     print(pathlib.Path(folder, "notes.txt").read_text())
    complete
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not stat.S_ISREG(target.stat().st_mode):
        if target.is_dir():
            raise IsADirectoryError(f"{os.fspath(path)!r} is a folder; name a file in it.")
        raise ArgumentError(f"{os.fspath(path)!r} is no file that could be replaced; name a file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = str(target.parent / f".{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if target.exists():
                os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except OSError as error:
        if error.errno is not None and error.filename in (None, beside):  # what nobody has asked for
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        with suppress(OSError):
            os.unlink(beside)


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write beside the file and rename, so that what was there is never half overwritten; see `writing`."""
    with writing(path) as file:
        file.write(content)
    return Path(path)


def readable(size: float) -> str:
    """A number of bytes: 8.4 MB."""
    unit = next(unit for unit in (1e9, 1e6, 1e3) if size >= unit or unit == 1e3)
    return f"{size / unit:.1f} { {1e9: 'GB', 1e6: 'MB', 1e3: 'kB'}[unit] }"
