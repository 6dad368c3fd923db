"""keep_memory and return_memory, each in a separate process because they cannot be undone."""

import subprocess
import sys
from pathlib import Path

import pytest

from regard.models.layers import allocation
from tests.cli.running import run
from tests.translation.small import train_small

COUNT = """
import resource, runpy, numpy
if {keep}:
    assert runpy.run_path({path!r})["keep_memory"]()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for megabytes in (8, 64):
    for _ in range(3):
        numpy.ones(megabytes * 2**17)
    before = faults()
    for _ in range(10):
        numpy.ones(megabytes * 2**17)
    print(faults() - before)
"""


def faults(keep: bool) -> list[int]:
    """Count the pages newly mapped for ten arrays of 8 MB, and for ten of 64 MB."""
    run = [sys.executable, "-c", COUNT.format(keep=keep, path=allocation.__file__)]
    return [int(line) for line in subprocess.run(run, check=True, capture_output=True).stdout.split()]


@pytest.mark.skipif(not allocation._glibc(), reason="only glibc is configured")
def test_freed_pages_are_reused() -> None:
    assert max(faults(keep=True)) < 100
    # The bound is low because there are few huge pages.
    assert max(faults(keep=False)) > 100


def test_other_c_libraries_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_glibc", lambda: False)
    assert not allocation.keep_memory()
    assert not allocation.return_memory()


HEAP = """
import resource, runpy, numpy
if {returned}:
    assert runpy.run_path({path!r})["return_memory"]()
def held():
    status = open("/proc/self/status").read()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024
del_ = numpy.ones(2**22 - 2**12)  # just below 32 MB: from here on glibc keeps such blocks in its heap
del del_
before = held()
arrays = [numpy.ones(2**20) for _ in range(20)]  # 8 MB each
arrays = arrays[-1:]  # at the top of the heap
print(held() - before)
"""


@pytest.mark.skipif(not allocation._glibc(), reason="only glibc is configured")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_freed_blocks_below_live_ones_are_released() -> None:
    actual = {}
    for returned in (False, True):
        program = HEAP.format(returned=returned, path=allocation.__file__)
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        actual[returned] = int(done.stdout)
    assert actual[True] < 20  # the 8 MB of one array
    assert actual[False] > 100  # gaps in the heap


@pytest.fixture
def allocator_options(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """Record the options instead of passing them to the C library."""
    options: list[dict[int, int]] = []
    monkeypatch.setattr(allocation, "_set", lambda values: bool(options.append(values)) or True)
    return options


def test_training_from_python_leaves_the_allocator_unchanged(
    tmp_path: Path, allocator_options: list[dict[int, int]]
) -> None:
    train_small(tmp_path)
    assert allocator_options == []


def test_training_from_the_command_line_keeps_memory(
    tmp_path: Path, allocator_options: list[dict[int, int]]
) -> None:
    pytest.importorskip("typer")
    (tmp_path / "a.tsv").write_text("".join(f"a b {n}\tc {n} d\n" for n in range(60)))
    settings = [
        "tokens.kind=words",
        "model.width=16",
        "model.heads=2",
        "training.updates=1",
        "corpus.dev_size=4",
    ]
    options = [option for setting in settings for option in ("--set", setting)]
    run("train", tmp_path / "a.tsv", "--output", tmp_path / "model", "--preset", "tiny", *options)
    assert len(allocator_options) == 1
    assert allocation._MMAP_MAX in allocator_options[0]
