import gc

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore torch.jit's warning: torch itself uses torch.jit to load forward-mode rules and inductor."""
    item.add_marker(pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(30)


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_collect() -> None:
    """Exclude objects from earlier modules from the garbage collections that many tests trigger."""
    gc.collect()
    gc.freeze()
