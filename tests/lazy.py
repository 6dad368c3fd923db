"""Defer packages that take seconds to import until a test uses them."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


def lazy_import(name: str) -> Any:
    """Like `pytest.importorskip`, but import the package when one of its attributes is first used."""
    if find_spec(name) is None:
        pytest.skip(f"needs the package {name}", allow_module_level=True)
    return _Module(name)


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for wrapped fixtures and mocks in every module
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
