"""Static sites: the written files, and invalid arguments."""

import json
import re
from base64 import b64decode
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from regard.app.dates import accuracy
from regard.app.site import build as site_module
from regard.app.site.build import DATES, INDEX, describe_site, load_models, make_site, write_site
from regard.app.site.models import SiteModel
from regard.errors import ArgumentError
from regard.models.text_model import SHIPPED
from regard.translation.translator import load_translator


@pytest.fixture(scope="module")
def page() -> str:
    return make_site(load_models())


def block(page: str, name: str) -> str:
    """Return the content of a data block."""
    found = re.search(f'<script type="[a-z/]+" id="{name}">([^<]*)</script>', page)
    assert found is not None
    return found[1]


def test_a_site_loads_nothing(page: str) -> None:
    outside = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', outside) == []
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src &#x27;none&#x27;; style-src &#x27;sha256-")
    assert "unsafe" not in policy[1]


def test_parameters_are_embedded_unchanged(page: str) -> None:
    stored = load(b64decode(block(page, "weights-1")))
    expected = load_translator(DATES).model.state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].float(), tensor) for name, tensor in expected.items())


def test_shipped_models_are_small(page: str) -> None:
    files = [path for folder in (DATES, SHIPPED["stories"]) for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {tensor.dtype for tensor in load(b64decode(block(page, "weights-1"))).values()} == {torch.float16}


@pytest.mark.slow
def test_the_shipped_translator_translates() -> None:
    assert re.match(r"1,000 sentences with unseen values: (9[89]|100)\.", accuracy(DATES))


def test_sections_have_a_backend() -> None:
    assert describe_site([])["sections"] == ["lookup", "order"]
    assert describe_site(load_models())["sections"] == ["lookup", "order", "inside", "heads", "translate"]
    assert "translate" not in describe_site(load_models([SHIPPED["stories"]]))["sections"]


def test_text_cannot_end_a_data_block() -> None:
    about = {"architecture": "decoder", "info": {"name": "</script><script>alert(1)</script>"}}
    page = make_site([SiteModel(about, b"")])
    assert "<script>alert" not in page
    assert json.loads(block(page, "site-data"))["models"][0] == about


def test_a_site_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    index = write_site([SHIPPED["stories"]], tmp_path / "site")
    (tmp_path / "site" / "CNAME").write_text("example.org")
    before = index.read_text()
    assert write_site([DATES], tmp_path / "site") == index
    assert index.read_text() != before
    assert sorted(path.name for path in index.parent.iterdir()) == ["CNAME", INDEX]


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("my own page")
    with pytest.raises(ArgumentError, match="has files, but was not written by regard site"):
        write_site([DATES], tmp_path)
    assert (tmp_path / INDEX).read_text() == "my own page"
    with pytest.raises(ArgumentError, match="is a file; pass a folder"):
        write_site([DATES], tmp_path / INDEX)


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="does not exist"):
        write_site([tmp_path / "missing"], tmp_path / "site")
    assert list(tmp_path.iterdir()) == []


def test_large_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "MAX_BYTES", 1_000_000)
    with pytest.raises(ArgumentError, match=r"The models have 1\.\d MB of parameters; the limit for a site"):
        make_site(load_models())
