import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_collect() -> None:
    """Exclude objects of earlier modules from the garbage collections that many tests trigger."""
    gc.collect()
    gc.freeze()
