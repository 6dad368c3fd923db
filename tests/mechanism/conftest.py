import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_collect() -> None:
    """Exclude what earlier modules left behind from garbage collections, which many tests ask for."""
    gc.collect()
    gc.freeze()
