"""Files: written whole or not at all, read if they are regular and of bounded size; their checksums."""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from regard.errors import ArgumentError

SMALL = 1 << 20  # bytes: a limit for settings and descriptions
SUMS = "SHA256SUMS"  # as sha256sum writes and checks it
_PART = re.compile(r"\.regard-[0-9a-f]{16}\.part")  # the names that `writing` gives
_SUM = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write as a stream, beside its place, which it takes at the end, and only if nothing failed.

    A link is followed, and a file that is there keeps its mode. What fails names the file that was asked for.

    >>> import pathlib, tempfile
    >>> from regard._util.files import writing
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
    beside = str(target.parent / f".regard-{secrets.token_hex(8)}.part")
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


def remove_parts(folder: Path) -> None:
    """Remove what `writing` left half written in a folder when its process was killed, and nothing else."""
    for path in folder.glob(".regard-*.part"):
        if _PART.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def check_regular(path: str | os.PathLike[str], most: int | None = None) -> None:
    """Raise ArgumentError unless a path, links followed, is a regular file of at most so many bytes.

    A pipe would be waited for, and a device may never end. Where there is nothing, OSError is raised.

    >>> from regard._util.files import check_regular
    >>> check_regular("/dev/null")
    Traceback (most recent call last):
    regard.errors.ArgumentError: '/dev/null' is a device; give a regular file.
    """
    _check(path, os.stat(path), most)


def open_regular(path: str | os.PathLike[str], most: int | None = None) -> BufferedReader:
    """Open a regular file of at most so many bytes to read it; see `check_regular`."""
    check_regular(path, most)  # before it is opened: opening a device may already do something
    # without waiting, as another process may have put a pipe there meanwhile
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(path, os.fstat(handle), most)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """All of a regular file of at most so many bytes; see `check_regular`."""
    with open_regular(path, most) as file:
        content = file.read(most + 1)  # it may grow, and a file of /proc has no size
    if len(content) > most:
        raise ArgumentError(_too_large(path, len(content), most))
    return content


def check_loadable(path: str | os.PathLike[str]) -> None:
    """Raise ArgumentError unless a path is a regular file that fits into this machine's memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        memory = None
    check_regular(path, memory)


def _check(path: str | os.PathLike[str], found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise ArgumentError(f"{os.fspath(path)!r} is {kind}; give a regular file.")
    if most is not None and found.st_size > most:
        raise ArgumentError(_too_large(path, found.st_size, most))


def _too_large(path: str | os.PathLike[str], size: int, most: int) -> str:
    return (
        f"{os.fspath(path)!r} has {readable(size)}, and at most {readable(most)} are read of such a file; "
        "check that it is the right one."
    )


def write_sums(path: Path, names: Iterable[str]) -> None:
    """Write the checksums of files, named relative to the folder of `path`, as sha256sum does.

    >>> import pathlib, tempfile
    >>> from regard._util.files import check_sums, write_sums
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder)
    ...     size = (path / "notes.txt").write_text("complete")
    ...     write_sums(path / "SHA256SUMS", ["notes.txt"])
    ...     check_sums(path / "SHA256SUMS", ["notes.txt"])
    ...     size = (path / "notes.txt").write_text("Complete")
    ...     check_sums(path / "SHA256SUMS", ["notes.txt"])
    Traceback (most recent call last):
    ValueError: notes.txt does not have its checksum
    """
    lines = [f"{_sum_of(path.parent / name)}  {name}\n" for name in sorted(names)]
    write_whole(path, "".join(lines).encode())


def check_sums(path: Path, names: Iterable[str]) -> None:
    """Raise ValueError or OSError unless these files have the checksums that `write_sums` wrote to `path`."""
    try:
        lines = read_regular(path, SMALL).decode().split("\n")
    except UnicodeDecodeError:
        lines = [""]
    found = [_SUM.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not all(found):
        raise ValueError(f"{path.name} is no list of checksums")
    sums = {line[2]: line[1] for line in found if line}
    for name in names:
        if name not in sums:
            raise ValueError(f"{path.name} has no checksum of {name}")
        if not name.endswith(".safetensors"):  # whose header tells their size; see `checkpoint`
            check_loadable(path.parent / name)  # hashing a hole takes hours
        if _sum_of(path.parent / name) != sums[name]:
            raise ValueError(f"{name} does not have its checksum")


def _sum_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def readable(size: float) -> str:
    """A number of bytes: 8.4 MB."""
    unit = next(unit for unit in (1e9, 1e6, 1e3) if size >= unit or unit == 1e3)
    return f"{size / unit:.1f} { {1e9: 'GB', 1e6: 'MB', 1e3: 'kB'}[unit] }"
