import pytest

from regard.mechanism import tiled


@pytest.fixture(params=[30, 2**20], ids=["many tiles", "one tile"])
def tile(request, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", request.param)
