"""The job queue: batching, order, limits and cancellation."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from regard._util import interrupt
from regard.app.server import memory
from regard.app.server.security import RequestError
from regard.app.server.worker import Worker
from regard.errors import ArgumentError
from tests.app.server.live import Gate


async def entered(gate: Gate) -> None:
    while not gate.begun.is_set():
        await asyncio.sleep(0.001)


@pytest.fixture
def worker() -> Iterator[Worker]:
    result = Worker(max_waiting=5, batch_size=4)
    yield result
    result.stop()


def behind_a_gate(worker: Worker, ask: Callable[[], Any]) -> Any:
    """Run the coroutine function `ask`; the worker is blocked until all its jobs are queued."""
    gate = Gate()

    async def run() -> Any:
        first = asyncio.ensure_future(worker.run(gate))
        await entered(gate)
        payload = asyncio.ensure_future(ask())
        await asyncio.sleep(0.05)
        gate.opened.set()
        assert await first == "gate"
        return await payload

    return asyncio.run(run())


def test_batches_have_one_key_and_a_maximum_size(worker):
    calls = []

    def record(kind, numbers):
        calls.append((kind, list(numbers)))
        return numbers

    async def ask():
        jobs = enumerate(["a", "b", "a", "a", "b"])
        return await asyncio.gather(
            *(worker.run_batched(kind, partial(record, kind), n, size=2) for n, kind in jobs)
        )

    assert behind_a_gate(worker, ask) == [0, 1, 2, 3, 4]
    assert calls == [("a", [0, 2]), ("b", [1, 4]), ("a", [3])]  # at most 4 parts per batch


def test_an_error_affects_only_its_own_request(worker):
    def halves(numbers):
        if 0 in numbers:
            raise ArgumentError("0 has no inverse")
        return [1 / number for number in numbers]

    async def ask():
        jobs = (worker.run_batched("halves", halves, n) for n in (1, 0, 2))
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, wrong, last = behind_a_gate(worker, ask)
    assert (first, last) == (1, 0.5)
    assert isinstance(wrong, ArgumentError)

    async def fail():
        return await worker.run_batched("a", lambda _: [ArgumentError("returned")], 1)

    with pytest.raises(ArgumentError, match="returned"):
        asyncio.run(fail())


def test_a_full_queue_refuses_with_retry_after(worker):
    async def ask():
        jobs = (worker.run(lambda: 1) for _ in range(7))
        return await asyncio.gather(*jobs, return_exceptions=True)

    result = behind_a_gate(worker, ask)
    assert result[:5] == [1] * 5
    for refused in result[5:]:
        assert isinstance(refused, RequestError)
        assert refused.status == 503
        assert refused.headers == {"retry-after": "1"}
    assert worker.waiting == 0


def test_cancelled_jobs_leave_the_queue(worker):
    done = []

    async def ask():
        task = asyncio.ensure_future(worker.run(lambda: done.append("in vain")))
        await asyncio.sleep(0.01)
        assert worker.waiting == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert worker.waiting == 0  # immediately, so that the queue has room for others
        return await worker.run(lambda: "next")

    assert behind_a_gate(worker, ask) == "next"
    assert not done


def test_the_worker_survives_exceptions(worker):
    async def ask():
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)
        return await worker.run(lambda: "alive")

    assert asyncio.run(ask()) == "alive"


def test_several_threads_share_one_bounded_queue():
    worker, gates = Worker(max_waiting=1, threads=2), [Gate(), Gate()]

    async def ask():
        jobs = []
        for gate in gates:  # the second starts although the first has not finished
            jobs.append(asyncio.ensure_future(worker.run(gate)))
            await entered(gate)
        jobs += [asyncio.ensure_future(worker.run(lambda: "waited")) for _ in range(2)]
        await asyncio.sleep(0.02)
        for gate in gates:
            gate.opened.set()
        return await asyncio.gather(*jobs, return_exceptions=True)

    try:
        *right, refused = asyncio.run(ask())
    finally:
        assert worker.stop()
    assert right == ["gate", "gate", "waited"]
    assert refused.status == 503


class Tiles(Gate):
    """Work that checks for interrupts until it is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def __call__(self, *_) -> None:
        end = time.monotonic() + 20
        try:
            while time.monotonic() < end:
                interrupt.check()
                self.begun.set()
                time.sleep(0.001)
        finally:
            self.ended.set()


def test_running_work_is_interrupted_when_the_client_disconnects(worker):
    tiles = Tiles()

    async def ask():
        task = asyncio.ensure_future(worker.run(tiles))
        await entered(tiles)
        task.cancel()
        return await worker.run(lambda: "next")

    assert asyncio.run(asyncio.wait_for(ask(), 10)) == "next"
    assert tiles.ended.is_set()


def test_a_batch_continues_while_one_client_is_connected(worker):
    tiles = Tiles()

    def together(numbers):
        if 7 in numbers:  # a batch with both jobs
            tiles.begun.set()
            for _ in range(200):
                interrupt.check()
                time.sleep(0.001)
        return numbers

    async def ask():
        gone, stays = (asyncio.ensure_future(worker.run_batched("a", together, n)) for n in (6, 7))
        await entered(tiles)
        gone.cancel()
        return await stays

    assert behind_a_gate(worker, ask) == 7


def test_cancel_interrupts_running_and_refuses_waiting_jobs():
    worker, tiles = Worker(), Tiles()

    async def ask():
        jobs = [asyncio.ensure_future(worker.run(tiles))]
        await entered(tiles)
        jobs.append(asyncio.ensure_future(worker.run(lambda: "in vain")))
        await asyncio.sleep(0.01)
        worker.cancel()
        return await asyncio.gather(*jobs, return_exceptions=True)

    result = asyncio.run(asyncio.wait_for(ask(), 10))
    assert [no.status for no in result] == [503, 503]
    assert worker.stop()


def test_stop_reports_threads_that_cannot_be_interrupted():
    worker, gate = Worker(), Gate()

    async def ask():
        task = asyncio.ensure_future(worker.run(gate))
        await entered(gate)
        assert not worker.stop(seconds=0.01)
        gate.opened.set()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask())
    assert worker.stop()


def test_work_is_refused_if_memory_is_too_low(worker, monkeypatch):
    """The job is rejected before it starts: OpenMP and Rust would abort the process."""

    async def ask():
        return await worker.run(lambda: "done")

    monkeypatch.setattr(memory, "available", lambda: memory.RESERVE - 1)
    with pytest.raises(RequestError, match=r"268\.4 MB required") as no:
        asyncio.run(ask())
    assert no.value.status == 503
    for enough in (memory.RESERVE, None):
        monkeypatch.setattr(memory, "available", lambda enough=enough: enough)
        assert asyncio.run(ask()) == "done"
