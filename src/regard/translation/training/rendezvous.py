"""How the processes that torchrun started find each other, and what it looks like when one is lost."""

import re
import secrets
import time
from datetime import timedelta
from typing import Any

from torch import distributed

_MEETING = timedelta(minutes=30)  # until all processes are there
_PAUSE = 0.02  # seconds between two looks at who has come


def meet(backend: str) -> None:
    """Find the other processes of this start: torch.distributed is ready then."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=_MEETING))
    store = distributed.PrefixStore(_password(store, rank, size), store)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)


def _password(store: Any, rank: int, size: int) -> str:
    """What the processes of this start alone know.

    After a restart, torchrun's store still says where those before them could be reached, and they would wait
    for the dead. So each asks the first one under a name that is new, until it is answered.
    """
    name = secrets.token_hex(8)
    if rank:
        store.set(f"asks/{rank}", name)
        password = store.get(f"told/{name}").decode()
        store.set(f"heard/{password}/{rank}", "")
        return password
    others, end = set(range(1, size)), time.monotonic() + _MEETING.total_seconds()
    while others:
        if time.monotonic() > end:
            raise RuntimeError(f"process {min(others)} of {size} did not come")
        for other in sorted(others):
            if store.check([f"asks/{other}"]):
                store.set(f"told/{store.get(f'asks/{other}').decode()}", name)
            if store.check([f"heard/{name}/{other}"]):
                others.remove(other)
        time.sleep(_PAUSE)
    return name


def lost(error: Exception) -> bool:
    """Whether the connection to another process is what failed."""
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)


def brief(error: Exception) -> str:
    """The first sentence of an error of torch's, without the place in its source."""
    text = re.sub(r"\[[^]]*\.cc:\d+\]\s*", "", str(error)).strip()
    return text.splitlines()[0].split(". ")[0] if text else type(error).__name__
