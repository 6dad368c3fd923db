"""The page of translations: what is in it, and that no word can become part of it as markup."""

import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation import Alignment, Translation
from regard.translation.alignment import DECIMALS
from regard.view import page as module
from regard.view.page import CELLS, make_page, write_page

HOSTILE = [
    "</script><script>document.title='run'</script>",
    "<!--<script>",
    "]]>&amp;&#60;\u2028\u2029\x85",
    "<img/src=x/onerror=document.title='run'>",
    "'\"`${title}$title$$\\u003c\\",
    "\u202eabc\0\udc80",
]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

letters = st.one_of(st.characters(), st.sampled_from("<>&\"'/$\\"))
# words as a translator has them: never empty, without blanks
words = st.text(letters, min_size=1, max_size=9).filter(lambda word: word.split() == [word])
sentences = st.lists(words | st.sampled_from(HOSTILE), min_size=1, max_size=7)
DOGS = ("zwei", "große", "Hunde"), ("two", "big", "dogs")


def translated(source, target, weights: torch.Tensor | None = None, **others) -> Translation:
    """By default each target word looks at one source word, in turn."""
    if weights is None:
        weights = torch.eye(len(source)).repeat(len(target), 1)[: len(target)]
    alignment = Alignment(tuple(source), tuple(target), weights)
    given = {"source": " ".join(source), "text": " ".join(target), "score": -0.5, "tokens": [], **others}
    return Translation(**given, _read=lambda: alignment)


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text within each kind of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.texts, self._open = [], {}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, *attributes))
        self._open = tag if tag != "script" or len(attributes) == 0 else "json"
        self.texts.setdefault(self._open, "")

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        self.texts[self._open] = self.texts.get(self._open, "") + data

    @property
    def pairs(self) -> list[dict]:
        return json.loads(self.texts["json"])["pairs"]


def written(*translations: Translation, title: str = "Dogs", about: str = "") -> str:
    return make_page(translations, title=title, about=about)


def test_the_page_holds_the_words_and_their_weights():
    weights = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) / 3
    page = Page(written(translated(*DOGS, weights, note="copied"), translated(*DOGS)))
    first, second = page.pairs
    assert (first["source"], first["text"]) == ("zwei große Hunde", "two big dogs")
    assert (first["source_words"], first["target_words"]) == (list(DOGS[0]), list(DOGS[1]))
    assert (first["score"], first["note"], first["reason"]) == (-0.5, "copied", "")
    found = torch.tensor(first["weights"])
    torch.testing.assert_close(found, weights, atol=0.51 * 10**-DECIMALS, rtol=0)
    assert second["weights"] == torch.eye(3).tolist()


@given(sentences, sentences, st.text(letters), st.text(letters))
def test_no_word_becomes_markup(source, target, title, about):
    page = Page(written(translated(source, target), title=title, about=about))
    assert page.elements == Page(written(translated(*DOGS))).elements
    assert not re.search("[<>&\u2028\u2029]", page.texts["json"])
    (pair,) = page.pairs
    shown = [[word.encode("utf-8", "replace").decode() for word in side] for side in (source, target)]
    assert [pair["source_words"], pair["target_words"]] == shown
    assert pair["source"] == " ".join(shown[0])


@pytest.mark.parametrize("text", HOSTILE[:-1])
def test_title_and_sentence_about_it_are_text(text):
    page = Page(written(title=text, about=text))
    assert page.texts["title"] == page.texts["h1"] == text
    assert text in page.texts["p"]


def test_only_the_own_style_and_script_may_run():
    """Each is known by its hash; one letter more, and the browser refuses it."""
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


def test_nothing_is_loaded():
    text = written(translated(*DOGS))
    assert {name for _, *attributes in Page(text).elements for name, _ in attributes}.isdisjoint(
        {"src", "href", "style", "onload", "onclick"}
    )
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, no address
    assert not re.search(r"url\(|@import|\bfetch\b|XMLHttp|\bimport\b", text)


def test_the_script_makes_no_markup_of_text():
    script = Page(written()).texts["script"]
    assert "textContent" in script
    assert not re.search(r"HTML\b|document\.write|\beval\b|Function\(|DOMParser|createContextual", script)


def test_the_script_finds_every_element_it_names():
    page = Page(written())
    ids = {dict(attributes).get("id") for _, *attributes in page.elements}
    named = set(re.findall(r'byId\("(\w+)"\)', page.texts["script"]))
    assert {"pairs", "matrix", "lines"} <= named <= ids
    assert {"source", "target"} <= ids


def test_a_page_of_nothing():
    page = Page(written())
    assert page.pairs == []
    assert ("p", ("id", "nothing"), ("hidden", None)) in page.elements


def test_a_model_without_attention_is_shown_without_lines():
    def refuse():
        raise ArgumentError("this Recurrent does not attend")

    pair = Page(written(Translation("ein Hund", "a dog", -1.0, [], _read=refuse))).pairs[0]
    assert (pair["source_words"], pair["target_words"]) == (["ein", "Hund"], ["a", "dog"])
    assert pair["weights"] is None
    assert pair["reason"] == "this Recurrent does not attend"


def test_an_alignment_too_large_to_draw_is_not_read():
    def fail():
        raise AssertionError("read")

    n = int(CELLS**0.5) + 1
    pair = Page(written(Translation("a " * n, "b " * n, -1.0, [], _read=fail))).pairs[0]
    assert pair["weights"] is None
    assert f"{n:,} source words" in pair["reason"]


def test_an_empty_translation_has_no_weights():
    pair = Page(written(translated(["Hund"], [], torch.zeros(0, 1)))).pairs[0]
    assert (pair["source_words"], pair["target_words"]) == (["Hund"], [])
    assert pair["weights"] is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), -0.25, 1.5])
def test_what_is_no_weight_does_not_break_the_page(odd):
    weights = torch.tensor([[odd, 0.5]])
    pair = Page(written(translated(["ein", "Hund"], ["dog"], weights, score=odd))).pairs[0]
    assert pair["weights"] == [[1 if odd == 1.5 else 0, 0.5]]
    assert pair["score"] == (odd if abs(odd) < 2 else None)


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"page\.png.*\.html"):
        write_page(tmp_path / "page.png", [], title="Dogs")
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_written_whole(tmp_path, monkeypatch):
    """What was there stays until the new one is complete."""
    path = write_page(tmp_path / "new" / "page.html", [translated(*DOGS)], title="Dogs")
    before = path.read_bytes()
    assert before.decode("utf-8") == written(translated(*DOGS))
    monkeypatch.setattr(module, "_static", lambda name: "$missing")
    with pytest.raises(KeyError):
        write_page(path, [], title="Dogs")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_browser_draws_it_and_runs_no_word(tmp_path):
    """The browser says what the page has become once its script has run."""
    path = write_page(
        tmp_path / "page.html", [translated(HOSTILE, HOSTILE[::-1]), translated(*DOGS)], title="Dogs"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser"]
    hostile, dogs = (
        Page(
            subprocess.run(
                [BROWSER, *options, "--dump-dom", f"{path.as_uri()}#{number}"],
                capture_output=True,
                check=True,
                timeout=240,
            ).stdout.decode()
        )
        for number in (1, 2)
    )
    for page, lines in (hostile, 6), (dogs, 3):
        assert page.texts["title"] == "Dogs"
        tags = [tag for tag, *_ in page.elements]
        assert (tags.count("script"), tags.count("img"), tags.count("path")) == (2, 0, lines)
        assert page.texts["td"] == "100" * lines
    assert dogs.texts["button"] == "zweigroßeHundetwobigdogs"
    assert HOSTILE[0] in hostile.texts["button"]
