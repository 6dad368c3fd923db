"""The standalone page: its contents, and the escaping of words."""

import base64
import json
import math
import re
import webbrowser
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.app import standalone as module
from regard.app.standalone import make_page, show, write_page
from regard.app.view_model import ViewModel
from regard.errors import ArgumentError
from regard.translation import Alignment, Translation
from tests.cases import looped

HOSTILE = [
    "</script><script>document.title='run'</script>",
    "<!--<script>",
    "]]>&amp;&#60;\u2028\u2029\x85",
    "<img/src=x/onerror=document.title='run'>",
    "'\"`${title}$title$$\\u003c\\",
    "\u202eabc\0\udc80",
]

letters = st.one_of(st.characters(), st.sampled_from("<>&\"'/$\\"))
# words as in a translator: never empty, no whitespace
words = st.text(letters, min_size=1, max_size=9).filter(lambda word: word.split() == [word])
sentences = st.lists(words | st.sampled_from(HOSTILE), min_size=1, max_size=7)
DOGS = ("zwei", "große", "Hunde"), ("two", "big", "dogs")


def translated(source, target, weights: torch.Tensor | None = None, **others) -> Translation:
    """Return a translation; by default, target words attend to the source words in turn."""
    if weights is None:
        weights = torch.eye(len(source)).repeat(len(target), 1)[: len(target)]
    alignment = Alignment(tuple(source), tuple(target), weights)
    given = {"source": " ".join(source), "text": " ".join(target), "score": -0.5, "tokens": [], **others}
    return Translation(**given, _align=lambda: alignment)


def lazy(heads=2, queries=5, keys=5, **options) -> regard.Weights:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(heads, n, 4, generator=generator) for n in (queries, keys))
    return regard.attend(query, key, key, **options)[1]


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.texts, self._open = [], {}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, *attributes))
        self._open = "json" if ("type", "application/json") in attributes else tag
        self.texts.setdefault(self._open, "")

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        self.texts[self._open] = self.texts.get(self._open, "") + data

    @property
    def data(self) -> dict:
        return json.loads(self.texts["json"])

    @property
    def inputs(self) -> list[dict]:
        return self.data["view"]["inputs"]

    def layer(self, input_: int = 0, layer: int = 0) -> dict:
        return self.data["inputs"][input_]["layers"][layer]


def floats(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])


def written(*translations: Translation, title: str = "Dogs", about: str = "") -> str:
    return make_page(translations, title=title, about=about)


# Contents


def test_the_page_contains_words_and_weights():
    weights = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) / 3
    page = Page(written(translated(*DOGS, weights, note="copied"), translated(*DOGS)))
    first, second = page.inputs
    assert first["title"] == "zwei große Hunde → two big dogs"
    assert [text["tokens"] for text in first["texts"]] == [list(DOGS[0]), list(DOGS[1])]
    assert (first["note"], second["note"]) == ("copied", "")
    np.testing.assert_array_equal(floats(page.layer(0)["weights"])[0], weights)
    np.testing.assert_array_equal(floats(page.layer(1)["weights"])[0], torch.eye(3))


def test_the_page_contains_all_heads_and_their_statistics():
    weights = lazy(mask=regard.Causal())
    page = Page(make_page(weights, title="Heads"))
    held = page.layer()
    np.testing.assert_allclose(floats(held["weights"]), weights.dense(), atol=1e-6)
    assert held["pooled"] is False
    assert held["heads"] == msgspec.to_builtins(ViewModel.of(weights).ask("heads").heads)
    assert page.inputs[0]["note"] == ""


def test_the_page_contains_query_key_and_tau():
    weights = lazy(keys=7)
    page = Page(make_page(weights))
    held = page.layer()
    query, key, tau = (floats(held[name]) for name in ("query", "key", "tau"))
    weighed = np.exp(query @ key.transpose(0, 2, 1) * held["scale"] - tau[..., None])
    np.testing.assert_allclose(weighed, weights.dense(), atol=1e-6)
    assert (held["normalizer"], held["formula"]) == ("Softmax", "exp(score − τ)")
    assert page.inputs[0]["layers"][0]["vectors"] is True
    query, key = torch.randn(4, 5, 3), torch.randn(2, 6, 3)  # two query heads share a key head
    held = Page(make_page(regard.attend(query, key, key)[1])).layer()
    np.testing.assert_array_equal(floats(held["query"]), query)
    np.testing.assert_array_equal(floats(held["key"]), key.repeat_interleave(2, 0))


def test_large_matrices_are_pooled_with_a_note():
    weights = lazy(1, 700, 600)
    page = Page(make_page(weights))
    held = page.layer()
    assert held["pooled"] is True
    np.testing.assert_allclose(floats(held["weights"])[0], weights.pool(512, 512)[0], atol=1e-7)
    assert "512 × 512 of 700 × 600" in page.inputs[0]["note"]
    assert held["query"] is None
    assert page.inputs[0]["layers"][0]["vectors"] is False  # not offered, because the file has no vectors


def test_many_layers_are_pooled_to_a_smaller_size_and_large_vectors_omitted(monkeypatch):
    monkeypatch.setattr(module, "_MAX_WEIGHTS", 3 * 2 * 100 * 100)
    page = Page(make_page({f"blocks.{n}": lazy(2, 120, 120) for n in range(3)}))
    shapes = [layer["weights"]["shape"] for layer in page.data["inputs"][0]["layers"]]
    assert shapes == [[2, 96, 96]] * 3
    monkeypatch.setattr(module, "_MAX_VECTOR_NUMBERS", 10)
    page = Page(make_page(lazy()))
    assert page.layer()["query"] is None
    assert page.inputs[0]["layers"][0]["vectors"] is False


@looped("shape", [(2, 0, 0), (2, 0, 3), (1, 1, 1), (0, 0), (2, 3)])
def test_empty_pages_and_pages_of_tiny_matrices(shape):
    empty = Page(written())
    assert empty.inputs == empty.data["inputs"] == []
    page = Page(make_page(torch.zeros(shape)))
    assert page.layer()["weights"]["shape"] == [*([1] if len(shape) == 2 else []), *shape]


@looped("odd", [math.nan, math.inf, -math.inf, -0.25, 1.5])
def test_invalid_weights_do_not_break_the_page(odd):
    weights = torch.tensor([[odd, 0.5]])
    page = Page(written(translated(["ein", "Hund"], ["dog"], weights, score=odd)))
    assert floats(page.layer()["weights"]).tolist() == [[[1 if odd == 1.5 else 0, 0.5]]]
    broken = torch.full((1, 3, 4), odd)
    held = Page(make_page(regard.attend(broken, broken, broken)[1])).layer()
    assert np.isfinite(floats(held["weights"])).all()


# Escaping and security policy


@given(sentences, sentences, st.text(letters), st.text(letters))
def test_words_never_become_markup(source, target, title, about):
    page = Page(written(translated(source, target), title=title, about=about))
    assert page.elements == Page(written(translated(*DOGS))).elements
    assert not re.search("[<>&\u2028\u2029]", page.texts["json"])
    (item,) = page.inputs
    shown = [[word.encode("utf-8", "replace").decode() for word in side] for side in (source, target)]
    assert [text["tokens"] for text in item["texts"]] == shown


@looped("token", [*HOSTILE, "", "x" * 10_000])
def test_tokens_titles_and_names_never_become_markup(token):
    page = Page(make_page({token: torch.eye(1)}, title=token, about=token))
    assert page.elements == Page(written()).elements
    if token not in ("", HOSTILE[-1]):
        assert page.texts["title"] == page.texts["h1"] == token
        assert token in page.texts["p"]
    text = make_page(ViewModel.of(lazy(keys=5), queries=[token] * 5, title=token))
    assert Page(text).elements == page.elements
    assert Page(text).inputs[0]["texts"][0]["tokens"] == [token.replace("\udc80", "?")] * 5


def test_the_policy_allows_only_our_style_and_script():
    """Style and script are each allowed by their hash."""
    page = Page(written(translated(*DOGS)))
    (policy,) = (
        dict(attributes)["content"]
        for _, *attributes in page.elements
        if ("http-equiv", "Content-Security-Policy") in attributes
    )
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for name, tag in {"style-src": "style", "script-src": "script"}.items():
        digest = b64encode(sha256(page.texts[tag].encode()).digest()).decode()
        assert rules.pop(name) == f"'sha256-{digest}'"
    assert rules == dict.fromkeys(["default-src", "base-uri", "form-action"], "'none'")


def test_the_page_loads_nothing_and_never_creates_markup_from_text():
    text = written(translated(*DOGS))
    page = Page(text)
    names = {name for _, *attributes in page.elements for name, _ in attributes}
    assert names.isdisjoint({"src", "href", "style", "onload", "onclick"})
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # a namespace
    assert not re.search(r"url\(|@import|XMLHttp|\bimport\b", text)
    script = page.texts["script"]
    assert not re.search(r"HTML\b|document\.write|\beval\b|Function\(|DOMParser|createContextual", script)
    ids = {dict(attributes).get("id") for _, *attributes in page.elements}
    assert {"view-data", "view"} <= set(re.findall(r'getElementById\("([\w-]+)"\)', script)) <= ids


# Writing and opening


def test_other_extensions_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"page\.png.*\.html"):
        write_page(tmp_path / "page.png", [], title="Dogs")
    with pytest.raises(ArgumentError, match=r"page\.png.*\.html"):
        lazy().to_html(tmp_path / "page.png")
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_written_atomically(tmp_path, monkeypatch):
    """The old page stays until the new one is complete."""
    path = write_page(tmp_path / "new" / "page.html", [translated(*DOGS)], title="Dogs")
    before = path.read_bytes()
    assert before.decode("utf-8") == written(translated(*DOGS))
    monkeypatch.setattr(module, "static", lambda name: "$missing")
    with pytest.raises(KeyError):
        write_page(path, [], title="Dogs")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_weights_and_seen_have_to_html(tmp_path):
    page = Page(
        lazy().to_html(tmp_path / "w.html", queries=list("abcde"), title="Letters").read_text("utf-8")
    )
    assert page.texts["title"] == "Letters"
    assert page.inputs[0]["texts"][0]["tokens"] == list("abcde")
    layer = regard.models.SelfAttention()
    with regard.watch(layer) as seen:
        layer(torch.eye(3))
    page = Page(seen.to_html(tmp_path / "s.html", title="Seen").read_text("utf-8"))
    assert page.data["view"]["title"] == "Seen"


def test_outside_a_notebook_show_opens_the_browser(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(module.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    path = lazy().show(queries=list("abcde"), title="Letters")
    assert isinstance(path, Path)
    assert opened == [path.resolve().as_uri()]
    assert Page(path.read_text("utf-8")).inputs[0]["texts"][0]["tokens"] == list("abcde")


def test_in_a_notebook_show_returns_a_widget(monkeypatch):
    from regard.app.widget import AttentionWidget

    assert not module._in_notebook()
    monkeypatch.setattr(webbrowser, "open", lambda _: pytest.fail("opened"))
    monkeypatch.setattr(module, "_in_notebook", lambda: True)
    assert isinstance(show(lazy()), AttentionWidget)
