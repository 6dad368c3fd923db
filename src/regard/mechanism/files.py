"""Files, written whole or not at all, and sizes that people can read."""

import os
import secrets
import stat
from pathlib import Path

from regard.errors import ArgumentError


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write beside the file and rename, so that what was there is never half overwritten.

    A link is followed, and a file that is there keeps its mode. What fails names the file that was asked for.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not stat.S_ISREG(target.stat().st_mode):
        if target.is_dir():
            raise IsADirectoryError(f"{os.fspath(path)!r} is a folder; name a file in it.")
        raise ArgumentError(f"{os.fspath(path)!r} is no file that could be replaced; name a file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _replace(target, content)
    except OSError as error:  # it would name the file beside, or none
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    return Path(path)


def _replace(target: Path, content: bytes) -> None:
    beside = target.parent / f".{secrets.token_hex(8)}.part"
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if target.exists():
                os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def readable(size: float) -> str:
    """A number of bytes: 8.4 MB."""
    unit = next(unit for unit in (1e9, 1e6, 1e3) if size >= unit or unit == 1e3)
    return f"{size / unit:.1f} { {1e9: 'GB', 1e6: 'MB', 1e3: 'kB'}[unit] }"
