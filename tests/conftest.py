import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# In CI the same examples every time, so that a red run can be repeated; new ones on every run elsewhere.
settings.register_profile("regard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("regard")

# Run in the background by a shell, the tests would ignore Ctrl-C, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny problems, where threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
