"""Lock a model folder for one training run at a time. Does not import torch."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.errors import ArgumentError


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create and lock a folder for one training run; on exit, remove new folders that are empty.

    The lock is on the folder itself and is released when the process ends, for any reason. The package
    filelock is unsuitable: it would leave a lock file in folders that training rejects, and cannot create
    one in read-only folders, so `is_training` would fail there. It also has no shared lock, so two concurrent
    calls to `is_training` would mistake each other for a training run.
    """
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + 2  # `is_training` holds the lock briefly
        while not _lock(handle):
            if time.monotonic() > deadline:
                name = os.fspath(folder)
                raise ArgumentError(
                    f"Another training run is using {name!r}. Wait for it to end, stop it, or use a new "
                    "folder."
                )
            time.sleep(0.002)
        try:
            yield
        finally:
            for path in created:
                with suppress(OSError):
                    path.rmdir()  # fails unless empty
    finally:
        os.close(handle)  # releases the lock, as does killing the process


def _lock(handle: int, *, shared: bool = False) -> bool:
    """Lock a folder; return False if another process has locked it, True if locks are not supported."""
    try:
        import fcntl

        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def is_training(folder: Path) -> bool:
    """Return whether a training run is active in a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(handle, shared=True)
    finally:
        os.close(handle)
