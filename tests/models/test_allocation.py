"""keep_memory, in processes of their own, as it cannot be undone."""

import subprocess
import sys

import pytest

from regard.models import allocation

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
    """Pages newly mapped for ten arrays of 8 MB, and for ten of 64 MB."""
    run = [sys.executable, "-c", COUNT.format(keep=keep, path=allocation.__file__)]
    return [int(line) for line in subprocess.run(run, check=True, capture_output=True).stdout.split()]


@pytest.mark.skipif(not allocation._glibc(), reason="only glibc is told")
def test_arrays_get_the_pages_of_those_before() -> None:
    assert max(faults(keep=True)) < 100
    # What the call is there to change; where pages are huge they are few, hence the low bound.
    assert max(faults(keep=False)) > 100


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_glibc", lambda: False)
    assert not allocation.keep_memory()
