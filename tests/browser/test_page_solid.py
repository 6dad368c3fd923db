"""The page of `regard look` with hostile text, no models, errors and a lost server."""

import pytest

from tests.browser.visit import (
    ENCODER,
    HOSTILE,
    SIZES,
    Visit,
    log,
    model_info,
    redraw,
    screenshot,
    trainings,
    translation,
    until,
)

pytestmark = pytest.mark.timeout(240)
NARROW = SIZES[-1:]


SECTIONS = {
    "translate": ("text", "Sentence", ".translation"),
    "heads": ("text", "Text", ".regard-attention"),
    "words": ("first", "First sentence", "#section"),
    "order": ("sentence", "Sentence", "#summary"),
    "long": ("text", "Text", ".regard-attention"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("section", SECTIONS)
def test_hostile_text_is_shown_as_text(visit: Visit, section: str) -> None:
    if section == "words" and not ENCODER:
        pytest.skip("minilm is not installed")
    name, label, result = SECTIONS[section]
    others = {
        "words": {"second": f"{HOSTILE} too", "word": "src"},
        "long": {"model": "co-occurrence"},  # needs no model
    }
    state = {name: f"{HOSTILE} src"} | others.get(section, {})
    visit.enter(section, **state)
    visit.page.wait_for_selector(result)
    assert HOSTILE in visit.page.get_by_label(label, exact=True).input_value()
    redraw(visit.page)
    visit.settle()
    visit.no_markup_came_of_text()
    visit.look(f"hostile-{section}", NARROW)


def test_hostile_names_are_shown_as_text(visit: Visit) -> None:
    page = visit.page
    visit.answer("models", {"models": [model_info(HOSTILE)], "folders": [HOSTILE]})
    visit.answer("translate", translation(HOSTILE))
    visit.answer("training", trainings(HOSTILE))
    visit.answer("training/**", log(HOSTILE))
    visit.enter("translate")
    page.wait_for_selector(".alternatives")
    assert visit.text(".translation") == HOSTILE
    visit.enter("training")
    page.wait_for_selector(".sample")
    assert HOSTILE in visit.text(".sample")
    visit.no_markup_came_of_text()


def test_sections_without_a_model_show_the_commands_to_get_one(visit: Visit) -> None:
    visit.answer("models", {"models": [], "folders": []})
    visit.answer("training", {"trainings": []})
    for section in ("translate", "heads", "words", "training"):
        visit.enter(section)
        assert "regard look" in visit.text(".empty-state"), section
    visit.look("empty-training", SIZES[:1])


@pytest.mark.parametrize("section", ["translate", "training"])
def test_the_demo_is_trained_by_a_button(visit: Visit, section: str) -> None:
    found = {"models": [], "pending": [], "demo": True, "folders": [], "recordings": []}
    page, asked = visit.page, []

    def train(route) -> None:
        asked.append(route.request.method)
        found.update(pending=["transformer"], demo=False)
        route.fulfill(json={"name": "transformer"})

    page.route("**/api/models", lambda route: route.fulfill(json=found))
    page.route("**/api/demo", train)
    visit.answer("training", {"trainings": []})
    visit.enter(section)
    visit.look(f"demo-{section}", (SIZES[0], SIZES[-1]))
    page.get_by_role("button", name="Train the demo translator").click()
    visit.until("document.querySelector('#section').innerText.includes('Training is starting')")
    assert page.url.endswith("#training")
    assert asked == ["POST"]
    assert page.get_by_role("button", name="Train the demo translator").count() == 0


def test_without_models_the_page_opens_on_a_section_that_needs_none(visit: Visit) -> None:
    command = 'pip install "regard[minilm]"'
    health = visit.page.request.get(f"{visit.address}api/health").json()
    visit.answer("health", {**health, "guide": "https://guide.example/"})
    visit.answer("models", {"models": [], "folders": [], "minilm": command})
    visit.page.goto("about:blank")
    visit.page.goto(visit.address)
    visit.settle()
    assert visit.page.title() == "Lookup · regard"
    message = f"No model is loaded. For a pretrained one, run {command} and restart regard look."
    assert visit.text("#no-model") == message
    visit.look("no-model", (SIZES[0], SIZES[-1]))
    visit.enter("order")
    link = visit.page.locator("#chapters a")
    assert link.get_attribute("href") == "https://guide.example/path/order.html"
    visit.page.goto("about:blank")


def test_server_errors_are_shown_with_a_retry_button_unless_final(rough: Visit) -> None:
    page = rough.page
    rough.answer("lookup", {"error": f"{HOSTILE}: give another."}, 500)
    rough.enter("lookup")
    page.wait_for_selector(".errors .notice")
    assert HOSTILE in rough.text(".errors .notice")
    rough.no_markup_came_of_text()
    rough.look("error", (SIZES[0], SIZES[-1]))
    page.unroute("**/api/lookup")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".errors .notice", state="detached")
    message = "Too long: 902 tokens; this model reads at most 512."
    rough.answer("lookup", {"error": message}, 422)
    page.get_by_label("Score", exact=True).select_option("dot")
    page.wait_for_selector(".errors .notice")
    assert message in rough.text(".errors .notice")
    assert page.get_by_role("button", name="Try again").count() == 0
    page.unroute("**/api/lookup")
    page.get_by_label("Score", exact=True).select_option("cosine")  # a different question
    page.wait_for_selector(".errors .notice", state="detached")


def test_the_view_retries_while_the_server_is_busy(rough: Visit) -> None:
    page, refused = rough.page, []

    def answer(route) -> None:
        if len(refused) < 2:
            refused.append(route.request.url)
            route.fulfill(
                status=503, headers={"Retry-After": "1"}, json={"error": "128 requests are waiting."}
            )
        else:
            route.continue_()

    page.route("**/api/views/*/tile", answer)
    rough.enter("long", model="co-occurrence", text="the dog barks and the cat sleeps " * 20)
    page.wait_for_selector(".regard-attention canvas")
    rough.until("!document.querySelector('.regard-attention .loading')")
    until(page, lambda: len(refused) == 2)
    rough.until("!document.querySelector('.regard-attention .loading')")
    rough.settle()
    assert len(refused) == 2
    assert "Loading failed" not in rough.text("#section")


def test_the_page_waits_for_a_model_in_training(visit: Visit) -> None:
    """Sections that need no model are open immediately; the others open when the model is ready."""
    found = {"models": [], "pending": ["transformer"], "folders": [], "recordings": []}
    page = visit.page
    page.route("**/api/models", lambda route: route.fulfill(json=found))
    visit.answer("translate", translation("zwei Hunde"))
    for section in ("lookup", "order"):
        visit.enter(section)
        assert page.locator(".empty-state").count() == 0
    visit.enter("heads")
    assert "being trained" in visit.text(".empty-state")
    visit.enter("translate")
    assert "being trained" in visit.text(".empty-state")
    visit.look("expected", (SIZES[0], SIZES[-1]))
    found.update(models=[model_info("transformer")], pending=[])
    page.wait_for_selector(".translation")
    assert visit.text(".translation") == "zwei Hunde"


def test_the_page_reconnects_to_a_lost_server(rough: Visit) -> None:
    page = rough.page
    rough.enter("lookup")
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_label("Score", exact=True).select_option("cosine")
    page.wait_for_selector("#banner:not([hidden])")
    rough.look("gone", (SIZES[0], SIZES[-1]))
    page.unroute("**/api/**")
    page.wait_for_selector("#banner", state="hidden")
    rough.until("document.querySelector('.formula').innerText.includes('‖q‖')")  # the page retries by itself


def test_slow_answers_show_a_loading_bar_and_outdated_ones_are_dropped(visit: Visit) -> None:
    page, held = visit.page, []
    visit.enter("lookup")
    page.route("**/api/lookup", lambda route: route.continue_() if held else held.append(route))
    page.get_by_label("Score", exact=True).select_option("cosine")
    page.wait_for_selector(".panel.busy")
    page.get_by_label("Score", exact=True).select_option("gaussian")
    visit.until("document.querySelector('.formula').innerText.includes('−‖q − k‖²')")
    held[0].fulfill(status=400, json={"error": "too late"})
    redraw(page)
    assert "−‖q − k‖²" in visit.text(".formula")
    assert page.locator(".notice").count() == 0


def test_sections_are_reached_by_keyboard_and_keep_their_state(visit: Visit) -> None:
    page = visit.page
    page.set_viewport_size({"width": 360, "height": 740})
    visit.enter("order", sentence="two words", order="1.0")
    menu = page.get_by_role("button", name="Menu")
    menu.focus()
    page.keyboard.press("Enter")
    assert menu.get_attribute("aria-expanded") == "true"
    screenshot(page, "menu-360-light")
    page.keyboard.press("Escape")
    assert menu.get_attribute("aria-expanded") == "false"
    menu.click()
    page.get_by_role("link", name="Lookup").click()
    visit.settle()
    assert page.title() == "Lookup · regard"
    assert page.locator("#to-lookup").get_attribute("aria-current") == "page"
    menu.click()
    page.get_by_role("link", name="Order").click()
    page.wait_for_selector("#summary")
    assert page.get_by_label("Sentence").input_value() == "two words"
