"""Writing files whole or not at all."""

import os
import secrets
import stat
from pathlib import Path

from regard.errors import ArgumentError


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write beside the file and rename, so that what was there is never half overwritten.

    A link is followed, and a file that is there keeps its mode.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not stat.S_ISREG(target.stat().st_mode):
        raise ArgumentError(f"{os.fspath(path)!r} is no file that could be replaced; name a file.")
    target.parent.mkdir(parents=True, exist_ok=True)
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
    return Path(path)
