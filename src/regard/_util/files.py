"""Atomic writes, size-limited reads of regular files, and checksums."""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from regard._util.text import format_bytes
from regard.errors import ArgumentError

MAX_TEXT_BYTES = 1 << 20  # limit for config files and metadata
CHECKSUMS = "SHA256SUMS"  # name of a file in the format of sha256sum
_PART = re.compile(r"\.regard-[0-9a-f]{16}\.part")  # names of the temporary files that `open_atomic` creates
_SUM = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success and is deleted on failure.

    Symbolic links are followed, and an existing file keeps its permissions. Errors name `path`, not the
    temporary file.

    >>> import pathlib, tempfile
    >>> from regard._util.files import open_atomic
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with open_atomic(f"{folder}/notes.txt") as file:
    ...         size = file.write(b"complete")
    ...     print(pathlib.Path(folder, "notes.txt").read_text())
    complete
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not stat.S_ISREG(target.stat().st_mode):
        if target.is_dir():
            raise IsADirectoryError(f"{os.fspath(path)!r} is a folder; pass a file path.")
        raise ArgumentError(f"{os.fspath(path)!r} is not a regular file; pass another path.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = str(target.parent / f".regard-{os.urandom(8).hex()}.part")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            if target.exists():
                os.chmod(partial, stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError as error:
        if error.errno is not None and error.filename in (None, partial):  # name the caller's path instead
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
    finally:
        with suppress(OSError):
            os.unlink(partial)


def write_atomic(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file atomically: readers see the old or the new content, never a mixture."""
    with open_atomic(path) as file:
        file.write(content)
    return Path(path)


def short_names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the last part of each path, or the whole path if the last part is ambiguous, as valid UTF-8.

    >>> from regard._util.files import short_names
    >>> short_names(["runs/small", "other/small", "minilm"])
    ['runs/small', 'other/small', 'minilm']
    """
    whole = [os.fsencode(path).decode(errors="replace") for path in paths]
    for path in whole:
        if whole.count(path) > 1:
            raise ArgumentError(f"{path!r} is given {whole.count(path)} times; pass it once.")
    short = [os.path.basename(os.path.realpath(path)) or path for path in whole]
    return [path if short.count(name) > 1 else name for path, name in zip(whole, short, strict=True)]


def remove_partial_files(folder: Path) -> None:
    """Delete the temporary files of `open_atomic` that killed processes left in a folder."""
    for path in folder.glob(".regard-*.part"):
        if _PART.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def check_regular(path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
    """Raise ArgumentError unless `path` is, or links to, a regular file of at most `max_bytes` bytes.

    Reading a pipe can block, and reading a device might never end. A missing file raises OSError.

    >>> from regard._util.files import check_regular
    >>> check_regular("/dev/null")
    Traceback (most recent call last):
    regard.errors.ArgumentError: '/dev/null' is a device; pass a regular file.
    """
    _check(path, os.stat(path), max_bytes)


def open_regular(path: str | os.PathLike[str], max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file of at most `max_bytes` bytes for reading; see `check_regular`."""
    check_regular(path, max_bytes)  # before opening: opening a device can have side effects
    # non-blocking: another process may have replaced the file with a pipe
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(path, os.fstat(handle), max_bytes)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes` bytes; see `check_regular`."""
    with open_regular(path, max_bytes) as file:
        content = file.read(max_bytes + 1)  # the file may grow, and files in /proc report size 0
    if len(content) > max_bytes:
        raise ArgumentError(_too_large(path, len(content), max_bytes))
    return content


def check_loadable(path: str | os.PathLike[str]) -> None:
    """Raise ArgumentError unless `path` is a regular file that fits in memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # this system does not report its memory size
        memory = None
    check_regular(path, memory)


def _check(path: str | os.PathLike[str], status: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise ArgumentError(f"{os.fspath(path)!r} is {kind}; pass a regular file.")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ArgumentError(_too_large(path, status.st_size, max_bytes))


def _too_large(path: str | os.PathLike[str], size: int, max_bytes: int) -> str:
    return (
        f"{os.fspath(path)!r} is {format_bytes(size)}; the limit is "
        f"{format_bytes(max_bytes)}. Check the path."
    )


def write_checksums(path: Path, names: Iterable[str]) -> None:
    """Write the checksums of files, in the format of sha256sum, to `path`.

    names: file names, relative to the folder of `path`.

    >>> import pathlib, tempfile
    >>> from regard._util.files import verify_checksums, write_checksums
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder)
    ...     size = (path / "notes.txt").write_text("complete")
    ...     write_checksums(path / "SHA256SUMS", ["notes.txt"])
    ...     verify_checksums(path / "SHA256SUMS", ["notes.txt"])
    ...     size = (path / "notes.txt").write_text("Complete")
    ...     verify_checksums(path / "SHA256SUMS", ["notes.txt"])
    Traceback (most recent call last):
    ValueError: notes.txt does not match its checksum
    """
    lines = [f"{_sha256(path.parent / name)}  {name}\n" for name in sorted(names)]
    write_atomic(path, "".join(lines).encode())


def verify_checksums(path: Path, names: Iterable[str]) -> None:
    """Raise ValueError or OSError unless the named files match the checksums in `path`."""
    try:
        lines = read_regular(path, MAX_TEXT_BYTES).decode().split("\n")
    except UnicodeDecodeError:
        lines = [""]
    matches = [_SUM.fullmatch(line) for line in lines[:-1]]
    if lines[-1] or not all(matches):
        raise ValueError(f"{path.name} is not a valid list of checksums")
    sums = {match[2]: match[1] for match in matches if match}
    for name in names:
        if name not in sums:
            raise ValueError(f"{path.name} has no checksum for {name}")
        if not name.endswith(".safetensors"):  # a safetensors header states the file size
            check_loadable(path.parent / name)  # hashing a huge sparse file takes hours
        if _sha256(path.parent / name) != sums[name]:
            raise ValueError(f"{name} does not match its checksum")


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
