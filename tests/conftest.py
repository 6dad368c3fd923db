import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# In CI the same examples every time, so that a red run can be repeated; new ones on every run elsewhere.
settings.register_profile("regard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("regard")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny problems, where threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
