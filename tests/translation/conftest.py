import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _quick() -> Iterator[None]:
    """Do not wait for the disk, and measure training speed with fewer batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr("regard.translation.training.loop.TIMED_BATCHES", 2)
        yield
