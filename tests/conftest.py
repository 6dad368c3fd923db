import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings
from hypothesis.internal.conjecture import providers

# The same examples in every run, so that a failure can be reproduced; the deep profile draws new ones.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=15)
settings.register_profile("deep", deadline=None, max_examples=100)
settings.load_profile("quick")

# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP;
# the tests and the programs they start need the default handlers.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_sessionstart(session: pytest.Session) -> None:
    if getattr(session.config.option, "numprocesses", None):
        return  # this process only starts the workers that run the tests, and needs no torch
    from tests.processor import disable_broken_amx

    disable_broken_amx()
    if settings.get_current_profile_name() == "quick":
        # Hypothesis would also parse every imported module of regard for constants: this takes seconds,
        # and makes the examples depend on the imported modules.
        providers._get_local_constants = lambda: providers._local_constants  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Drop the slow cases unless they are selected: creating a case takes as long as running a small one.

    With `@pytest.mark.sampled(n)`, all but every n-th case are slow.
    """
    yield
    calls = metafunc._calls
    if sampled := metafunc.definition.get_closest_marker("sampled"):
        for i, call in enumerate([call for call in calls if not _is_slow(call)]):
            if i % sampled.args[0]:
                call.marks.append(pytest.mark.slow.mark)
    if metafunc.config.option.markexpr == "not slow":
        slow = metafunc.definition.get_closest_marker("slow") is not None
        calls[:] = [call for call in calls if not (slow or _is_slow(call))] or calls[:1]


def _is_slow(call: Any) -> bool:
    return any(mark.name == "slow" for mark in call.marks)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for docstring examples only in files that have some."""
    collectors = yield
    with_examples = file_path.suffix == ".py" and ">>> " in file_path.read_text("utf-8")
    return [collector for collector in collectors if with_examples or type(collector) is pytest.Module]


def pytest_collection_finish() -> None:
    """Make garbage collections rare and cheap; at Python's default threshold, they take 5% of the time."""
    gc.collect()
    gc.freeze()  # exclude all modules and tests
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread for tiny problems, where threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Log(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.emit = self.records.append  # type: ignore[method-assign]

    @property
    def text(self) -> str:
        return "".join(self.format(record) + "\n" for record in self.records)


@pytest.fixture
def caplog() -> Iterator[Log]:
    """Capture log records like pytest's own plugin, whose setup takes longer than most tests."""
    log, root = Log(), logging.getLogger()
    root.addHandler(log)
    yield log
    root.removeHandler(log)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide as built by `make docs`, once for all processes of a run."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            _build_site(folder)
    return folder


def _build_site(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    if built.returncode:
        shutil.rmtree(folder, ignore_errors=True)
    assert built.returncode == 0, built.stdout + built.stderr
