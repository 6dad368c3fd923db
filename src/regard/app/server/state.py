"""Application state: models, open views and worker threads."""

import time

from regard.app.server.memory import QUICK_RESERVE
from regard.app.server.registry import Registry
from regard.app.server.view_store import ViewStore
from regard.app.server.worker import Worker

THREADS = 2  # threads per pool
MAX_WAITING = 128  # queued requests per pool


class AppState:
    """Objects shared by all requests of a server. version: version of regard, reported by /api/health.

    >>> from regard.app.server.registry import Registry
    >>> from regard.app.server.state import AppState
    >>> state = AppState(Registry())
    >>> state.worker.waiting
    0
    >>> state.close()
    True
    """

    def __init__(
        self,
        registry: Registry,
        *,
        worker: Worker | None = None,
        views: ViewStore | None = None,
        version: str = "",
    ) -> None:
        self.registry, self.version = registry, version
        self.views = views or ViewStore()
        self.recordings = {name: (self.views.pin(view), view) for name, view in registry.recordings.items()}
        self.worker = worker or Worker()
        self.quick = Worker(MAX_WAITING, threads=THREADS, name="quick", reserve=QUICK_RESERVE)
        self.queries = Worker(MAX_WAITING, threads=THREADS, name="queries")

    def close(self, seconds: float = 10.0) -> bool:
        """Interrupt all work; return whether all threads ended in time."""
        workers = (self.worker, self.quick, self.queries)
        for worker in workers:
            worker.cancel()
        end = time.monotonic() + seconds
        return all(worker.stop(max(end - time.monotonic(), 0)) for worker in workers)
