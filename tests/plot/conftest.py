"""Figures as matplotlib objects."""

import pytest

from regard.plot import curves, grids


@pytest.fixture
def figures(monkeypatch):
    """Collect the figures instead of writing them."""
    drawn = []
    for module in (curves, grids):
        monkeypatch.setattr(module, "save", lambda figure, path: drawn.append(figure) or path)
    return drawn
