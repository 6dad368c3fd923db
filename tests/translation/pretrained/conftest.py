"""Folders shared by all tests of a process: importing transformers takes longer than the tests."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.translation.pretrained.folders import LANGUAGES, MAKERS


class Pretrained(NamedTuple):
    """A folder, the model in transformers, and the languages to choose."""

    path: Path
    model: Any
    languages: dict[str, str]


_MADE: dict[str, Pretrained] = {}


def pretrained(family: str, factory: pytest.TempPathFactory) -> Pretrained:
    """Write the folder of a family once."""
    pytest.importorskip("transformers")
    if family not in _MADE:
        path = factory.mktemp("pretrained") / family
        _MADE[family] = Pretrained(path, MAKERS[family](path), LANGUAGES[family])
    return _MADE[family]


@pytest.fixture(params=list(MAKERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    """One folder per family."""
    return pretrained(request.param, tmp_path_factory)


@pytest.fixture
def marian(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    """A Marian folder."""
    return pretrained("marian", tmp_path_factory)


@pytest.fixture
def m2m_100(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    """An M2M-100 folder."""
    return pretrained("m2m_100", tmp_path_factory)
