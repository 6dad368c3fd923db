import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from regard.app.server.registry import Registry
from regard.app.server.state import AppState
from regard.models import BertEncoder, StaticEncoder, Vocabulary
from tests.app.server.client import Client
from tests.translation.folders import write

WORDS = ["dogs", "may", "bark", "at", "strangers", "trees", "shed", "in", "winter", "."]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small translator with random weights."""
    return write(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def registry(folder: Path) -> Registry:
    """Translators with and without attention, a contextual encoder and a static one."""
    plain = write(folder.parent / "plain", "plain")
    recurrent = write(folder.parent / "recurrent", "recurrent")
    result = Registry.load(map(os.fspath, (folder, plain, recurrent)))
    torch.manual_seed(0)
    bert = BertEncoder(
        Vocabulary(WORDS, special_tokens=("<unk>", "<s>", "</s>", "<mask>")), 16, 2, heads=2, max_positions=40
    )
    static = StaticEncoder(WORDS, torch.randn(len(WORDS), 4))
    result.entries.update(Registry({"bert": bert.eval(), "static": static}).entries)
    return result


@pytest.fixture
def state(registry: Registry, one_thread: None) -> Iterator[AppState]:
    result = AppState(registry)
    yield result
    result.close()


@pytest.fixture
def client(state: AppState) -> Client:
    return Client(state)
