"""The guide built in a clone is served, and the page links to it."""

import pytest

from regard.app.server import guide
from regard.app.server.registry import Registry
from regard.app.server.security import SECURITY_HEADERS
from regard.app.server.state import AppState
from tests.app.server.client import Client


@pytest.fixture
def clone(tmp_path):
    chapter = tmp_path / "site" / "path" / "order.html"
    chapter.parent.mkdir(parents=True)
    chapter.write_text("<h1>Order</h1>")
    (tmp_path / "site" / "index.html").write_text("<h1>Guide</h1>")
    (tmp_path / "mkdocs.yml").write_text("")
    return tmp_path


def test_a_guide_needs_a_clone_and_a_build(clone):
    assert guide.built_guide(clone) == clone / "site"
    (clone / "mkdocs.yml").unlink()
    assert guide.built_guide(clone) is None


def test_the_built_guide_is_served_with_its_own_policy(clone, monkeypatch):
    monkeypatch.setattr("regard.app.server.app.built_guide", lambda: clone / "site")
    state = AppState(Registry())
    client = Client(state)
    for path, text in (("/guide/", "Guide"), ("/guide/path/order.html", "Order")):
        response = client.send("GET", path)
        assert response.status_code == 200
        assert text in response.text
        assert "frame-ancestors 'self'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
    for path in ("/", "/guide/../mkdocs.yml", "/guide/no-such-page.html"):
        response = client.send("GET", path)
        assert response.status_code == (200 if path == "/" else 404)
    policy = client.send("GET", "/").headers["content-security-policy"]
    assert policy == SECURITY_HEADERS["content-security-policy"]
    state.close()


def test_without_a_guide_the_page_names_the_address_of_the_package(monkeypatch):
    monkeypatch.setattr(guide, "built_guide", lambda: None)
    monkeypatch.setattr(guide, "published_guide", lambda: "https://guide.example/")
    assert guide.guide_address() == "https://guide.example/"
    monkeypatch.setattr(guide, "built_guide", lambda: "site")
    assert guide.guide_address() == "guide"
