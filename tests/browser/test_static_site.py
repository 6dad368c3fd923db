"""The static site from a file: address, offline: every section, light and dark, wide and narrow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from regard.app.site.build import write_site
from tests.browser.visit import Visit, redraw

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file: address of a site with the shipped models."""
    return write_site([], tmp_path_factory.mktemp("static") / "site").as_uri()


@pytest.fixture
def offline(page, tab, address: str) -> Iterator[Visit]:
    """An offline visit that loads only the page itself and leaves the error console empty."""
    page.context.set_offline(True)
    yield Visit(page, address)
    page.context.set_offline(False)
    loaded = {url.partition("#")[0] for url in tab.requests if not url.startswith(("data:", "blob:"))}
    assert loaded <= {address}


def test_every_section_works_offline(offline: Visit) -> None:
    page = offline.page
    offline.enter("lookup")
    assert [link.inner_text() for link in page.locator("#sections a").all()] == [
        *("Heads", "Lookup", "Inside", "Translate", "Order"),
    ]
    for section in ("lookup", "order", "inside", "heads", "translate"):
        offline.enter(section)
        assert page.locator(".notice[role=alert]").count() == 0
        offline.look(f"site-{section}")


def test_a_sentence_is_translated_and_aligned(offline: Visit) -> None:
    page = offline.page
    offline.enter("translate", text="twenty-three days ago", model="dates")
    assert offline.text(".translation") == "vor dreiundzwanzig Tagen"
    page.get_by_role("tab", name="Matrix").click()
    page.wait_for_selector(".regard-attention canvas")
    page.get_by_label("Translations").fill("3")
    page.get_by_label("Translations").press("Enter")
    page.wait_for_selector(".alternatives li")
    page.get_by_label("Sentence").fill("four hundred and six")
    offline.until("document.querySelector('.translation').innerText === 'vierhundertsechs'")


def test_heads_show_every_layer(offline: Visit) -> None:
    page = offline.page
    offline.enter("heads", model="stories", text="Lily had a red ball.")
    for view in ("Matrix", "Heads", "Numbers", "Lines"):
        page.get_by_role("tab", name=view, exact=True).click()
        redraw(page)
    offline.enter("heads", model="stories", text="Lily had a red bal.")
    assert "does not know the word 'bal'. Did you mean 'ball'" in offline.text(".notice")


def test_inside_predicts_the_next_token(offline: Visit) -> None:
    page = offline.page
    sentence = "Tom had a red kite and Lily had a blue drum. Lily lost her"
    offline.enter("inside", model="stories", text=sentence)
    page.get_by_role("button", name="Sample next token").click()
    page.get_by_role("button", name="Append").click()
    offline.until(f"document.querySelector('#section input').value !== {sentence!r}")
    assert page.get_by_role("textbox", name="Text").input_value().startswith(sentence)


def test_the_site_of_one_translator_has_only_its_sections(page, tmp_path: Path) -> None:
    from regard.app.site.build import DATES

    visit = Visit(page, write_site([DATES], tmp_path / "site").as_uri())
    visit.enter("translate")
    assert offline_models(visit) == ["dates"]


def offline_models(visit: Visit) -> list[str]:
    options = visit.page.get_by_label("Model").locator("option").all()
    return [option.inner_text() for option in options]
