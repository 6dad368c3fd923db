import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

from tests.processor import disable_broken_amx

disable_broken_amx()

# In CI the same examples every time, so that a red run can be repeated; new ones on every run elsewhere.
settings.register_profile("quick", deadline=None, derandomize="CI" in os.environ, max_examples=25)
settings.register_profile("deep", deadline=None, max_examples=200)
settings.load_profile("quick")

# Run in the background by a shell, the tests would ignore Ctrl-C, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but every n-th case of a test with `@pytest.mark.sampled(n)` as slow."""
    cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % sampled.args[0]:
                item.add_marker("slow")
            cases[test] += 1


def pytest_collection_finish() -> None:
    """Exclude what is there by now from garbage collections, which many tests ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny problems, where threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide as `make docs` builds it, once for all processes of a run."""
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
