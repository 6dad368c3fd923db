"""A server in a process with low limits on open files and memory."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.app.server.live import connected, process

PROGRAM = """
import resource
import torch
torch.set_num_threads(2)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))  # a limit, so that threads of OpenMP begin at once
from regard.app.server.registry import Registry
from regard.app.server.state import AppState
from regard.app.server.run import listen, serve
listening = listen("127.0.0.1", 0)
serve(AppState(Registry()), listening, lambda: print(listening.getsockname()[1], flush=True))
"""


@pytest.fixture(scope="module")
def limited() -> Iterator[tuple[int, int]]:
    """Run a server, yield its process id and port, and check that it exits normally."""
    with process(PROGRAM) as (running, port):
        yield running.pid, port
        running.terminate()
        _, errors = running.communicate(timeout=120)
        assert running.returncode == 0
    assert len(errors) < 2000, errors[:2000]


@pytest.fixture
def client(limited) -> Iterator[httpx.Client]:
    with connected(f"http://127.0.0.1:{limited[1]}") as client:
        yield client


@pytest.mark.sampled(3)
@pytest.mark.parametrize("megabytes", [2, 100, 330])
def test_with_little_memory_work_is_refused(megabytes, limited, client):
    pages = int(Path(f"/proc/{limited[0]}/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20
    resource.prlimit(limited[0], resource.RLIMIT_AS, (most, 2**40))
    result = client.post("/api/long", json={"text": "dogs bark at trees that shed bark " * 300})
    statuses = {result.status_code, client.get("/api/positions").status_code, client.get("/").status_code}
    if result.is_success:
        payload = {"layer": 1, "mean": True, "height": 2048, "width": 2048}
        statuses.add(client.post(f"/api/views/{result.json()['id']}/tile", json=payload).status_code)
    assert statuses <= {200, 503}
    assert (503 in statuses) == (megabytes < 330)
    assert client.get("/api/health").is_success


def test_incomplete_requests_do_not_use_up_file_descriptors(limited, client):
    """Incomplete requests, three times as many as the limit on open files, do not block others."""
    pid, port = limited
    with ExitStack() as stack:
        for number in range(300):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            half.sendall(b"GET /api/health HTTP/1.1\r\nHost: 127.0.0.1")
            if number % 80 == 79:
                with connected(str(client.base_url)) as fresh:
                    assert fresh.get("/api/health").is_success
        assert len(os.listdir(f"/proc/{pid}/fd")) < 128
    assert client.get("/").is_success
