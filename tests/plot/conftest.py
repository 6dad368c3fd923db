"""Figures as matplotlib objects."""

import pytest

from regard.plot import curves, grids
from regard.plot.style import save


@pytest.fixture
def figures(monkeypatch):
    """Collect the figures before they are written."""
    drawn = []
    for module in (curves, grids):
        monkeypatch.setattr(module, "save", lambda figure, path: drawn.append(figure) or save(figure, path))
    return drawn
