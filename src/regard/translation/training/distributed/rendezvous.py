"""Rendezvous of the processes started by torchrun, and detection of lost connections."""

import re
import secrets
import time
from datetime import timedelta
from typing import Any

from torch import distributed

_TIMEOUT = timedelta(minutes=30)  # time limit for all processes to connect
_POLL_INTERVAL = 0.02  # seconds between checks


def init_process_group(backend: str) -> None:
    """Initialize torch.distributed with the other processes in this launch."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
    store = distributed.PrefixStore(_session_key(store, rank, size), store)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def _session_key(store: Any, rank: int, size: int) -> str:
    """Agree on a key that only the processes in this launch know.

    After a restart, torchrun's store still holds the addresses of dead processes. Each process therefore
    sends rank 0 a request with a new random name, and waits for a reply to this name.
    """
    name = secrets.token_hex(8)
    if rank:
        store.set(f"request/{rank}", name)
        key = store.get(f"reply/{name}").decode()
        store.set(f"confirm/{key}/{rank}", "")
        return key
    missing, deadline = set(range(1, size)), time.monotonic() + _TIMEOUT.total_seconds()
    while missing:
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {min(missing)} of {size} did not connect")
        for other in sorted(missing):
            if store.check([f"request/{other}"]):
                store.set(f"reply/{store.get(f'request/{other}').decode()}", name)
            if store.check([f"confirm/{name}/{other}"]):
                missing.remove(other)
        time.sleep(_POLL_INTERVAL)
    return name


def is_connection_error(error: Exception) -> bool:
    """Return whether an error means that the connection to another process failed."""
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error message, without torch's source location."""
    text = re.sub(r"\[[^]]*\.cc:\d+\]\s*", "", str(error)).strip()
    return text.splitlines()[0].split(". ")[0] if text else type(error).__name__
