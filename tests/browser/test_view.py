"""The interactive view in a real browser, with embedded data and with a long text from a server."""

import base64
import functools
import http.server
import re
import threading
from collections import Counter

import numpy as np
import pytest
import torch

import regard
from tests.browser.view_server import CAT, EVIL, SMALL, STATIC, Handler
from tests.browser.visit import redraw, show_at, until

MODULES = [*STATIC.glob("attention/*.js"), *STATIC.glob("shared/*.js")]


@pytest.fixture(scope="module")
def served():
    counts = Counter()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, counts))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", counts
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def opened(page, served):
    def opened(data="small", **options):
        show(page, served[0], data, **options)
        page.wait_for_selector(".toolbar, .empty, .message")
        redraw(page)
        return page

    return opened


def show(page, base, data, **options):
    """Show embedded data, or a long text; reload the page only if another one is open."""
    if page.url != base:
        page.goto(base)
        until(page, lambda: page.evaluate("'show' in window"))
    page.evaluate("([data, options]) => show(data, options)", [data, options])


def weights(data, given, layer):
    packed = data["inputs"][given]["layers"][layer]["weights"]
    return np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])


def ranked(page, side):
    """Return the first row of a ranking: the keys of a query, the queries of a key, or "received"."""
    number = ("query", "key", "received").index(side)
    return page.locator(".rankings section").nth(number).locator(".row").first


def reads(page, selector, part):
    """Wait until an element contains this text."""
    until(page, lambda: part in page.locator(selector).text_content(), part)


SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


# Modules


def test_modules_are_small_and_import_by_name_on_one_line():
    for path in MODULES:
        lines = path.read_text().splitlines()
        assert len(lines) < 400, path.name
        for line in lines:
            if line.startswith("import"):
                assert re.fullmatch(r'import \{ [\w, ]+ \} from "\.(/|\./shared/)\w+\.js";', line), line
        assert "innerHTML" not in path.read_text()


# Lines


def test_lines_show_every_token_and_hovering_one_its_row_in_percent(opened):
    page = opened(heads=[2])
    for side in ("query", "key"):
        assert page.locator(f".side.{side} .token").all_text_contents() == CAT["tokens"]
    assert page.locator(".drawing path").count() > 20
    page.hover(".side.query .token:nth-child(4)")
    page.wait_for_selector(".token.selected")
    row = weights(SMALL, 0, 0)[2, 3]
    shown = page.locator(".side.key .token").evaluate_all(
        "nodes => nodes.map((node) => node.dataset.share ?? '')"
    )
    assert all(share.endswith("%") for share in shown if share)
    shares = [float(share.removesuffix("%") or 0) for share in shown]
    assert shares == pytest.approx(100 * row * (row >= 0.005), abs=0.51)


def test_tokens_are_pinned_and_hidden_and_heads_are_toggled(opened):
    page = opened()
    page.click(".side.key .token:nth-child(3)")
    page.mouse.move(5, 5)
    assert page.evaluate("shown.state.key") == 2
    assert page.locator(".side.key .token.selected").count() == 1
    page.click(".side.key .token:nth-child(3)")
    assert page.evaluate("shown.state.key") is None
    page.get_by_label("hide special tokens").check()
    assert page.locator(".side.query .token").all_text_contents() == CAT["tokens"][1:-1]
    page.get_by_role("button", name="Head 2", exact=True).click()
    assert page.evaluate("shown.state.heads") == [2]
    page.get_by_role("button", name="none").click()
    assert "Select a head" in page.locator(".readout").text_content()
    assert page.locator(".drawing path").count() == 0
    page.get_by_role("button", name="all", exact=True).click()
    assert page.evaluate("shown.state.heads") is None


def test_arrow_keys_move_among_tokens_and_describe_them(opened):
    page = opened(heads=[0])
    page.locator(".side.query .token").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    best = CAT["tokens"][int(weights(SMALL, 0, 0)[0, 2].argmax())]
    reads(page, ".readout", f"query “cat”: “{best}” ")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.closest('.side').className") == "side key"
    assert page.evaluate("document.activeElement.textContent") == best
    stops = page.locator(".side.query .token").evaluate_all(
        "nodes => nodes.filter((node) => node.tabIndex === 0).length"
    )
    assert stops == 1


# Several inputs


def test_two_inputs_side_by_side_and_words_in_two_rows_on_wide_screens(opened):
    page = opened("several")
    assert page.locator(".drawing.across").count() == 1
    assert "no query and key vectors" not in page.locator(".body").text_content()
    page.get_by_label("Compare with").select_option("1")
    assert page.locator(".pane").count() == 2
    assert page.locator(".pane >> nth=1").locator(".side.key .token").all_text_contents() == ["Tee"]
    page.get_by_label("Compare with").select_option("")
    assert page.locator(".pane").count() == 1
    page.set_viewport_size({"width": 200, "height": 700})
    page.wait_for_selector(".drawing.down")
    layer = page.evaluate("shown.state.layer")
    page.evaluate("shown.set({ view: 'numbers' })")  # opens on a layer with vectors
    page.wait_for_selector(".steps")
    assert page.evaluate("shown.state.layer") != layer
    page.evaluate("shown.set({ view: 'lines' })")
    assert page.evaluate("shown.state.layer") == layer
    page.evaluate("shown.set({ view: 'numbers' })")
    page.evaluate("(layer) => shown.set({ layer })", layer)
    assert "no query and key vectors" in page.locator(".body").text_content()


@pytest.mark.parametrize("width", [1280, 200])
def test_the_source_comes_first(opened, page, width):
    """The source is above the target in rows, and on its left in columns."""
    page.set_viewport_size({"width": width, "height": 800})
    opened("several")
    assert page.locator(f".drawing.{'across' if width > 1000 else 'down'}").count() == 1
    boxes = [page.locator(f".side.{side} .token").first.bounding_box() for side in ("key", "query")]
    axis = "y" if width > 1000 else "x"
    assert boxes[0][axis] < boxes[1][axis]
    line = page.locator(".drawing path").first.get_attribute("d")
    start = [float(number) for number in re.findall(r"[\d.]+", line)][:2]
    assert start[1 if width > 1000 else 0] == 0  # lines start at the source


def test_a_click_on_the_map_is_in_the_window_of_lines(opened, page):
    opened("", view="matrix", query=20_000, key=150)
    page.wait_for_selector(".regard-attention canvas")
    page.evaluate("shown.set({ view: 'lines' })")
    page.wait_for_selector(".drawing")
    for side, position in (("query", 20_000), ("key", 150)):
        tokens = page.locator(f".side.{side} .token[title$='{side} {position}']")
        assert tokens.count() == 1, side


def test_texts_are_never_markup(opened):
    page = opened("several", input=2)
    assert page.locator("img").count() == 0
    assert page.locator(".side.query .token").first.text_content() == EVIL
    for view in ("matrix", "heads", "numbers"):
        page.get_by_role("tab", name=view.capitalize()).click()
        redraw(page)
        assert page.locator("img").count() == 0


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [("several", {"input": 3}, "no attention"), ("none", {}, "no inputs")],
)
def test_empty_views_say_so(opened, data, options, message):
    assert message in opened(data, **options).locator(".empty").text_content()


# Search


def test_search_tabs_and_values_set_by_a_script(opened):
    page = opened()
    page.get_by_label("Find a token").fill("because")
    assert page.locator(".found").text_content() == "1 of 1"
    assert page.evaluate("shown.state.query") == 7
    page.get_by_label("Find a token").fill("the")
    page.get_by_role("button", name="Next match").click()
    assert page.evaluate("shown.state.query") == 5
    page.get_by_role("tab", name="Lines").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Matrix").get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.textContent") == "Matrix"
    page.evaluate("shown.set({ view: 'lines', layer: 99, heads: [1, 77], nonsense: 5 })")
    assert page.evaluate("[shown.state.view, shown.state.layer, shown.state.heads]") == ["lines", 3, [1]]
    page.evaluate("shown.destroy()")
    assert page.locator("#view > *").count() == 0


# Matrix


def test_the_cell_under_the_cursor_is_described_and_pinned(opened):
    page = opened(view="matrix", heads=[1])
    page.locator(".map canvas").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    weight = 100 * weights(SMALL, 0, 0)[1, 2, 1]
    shown = re.compile(r"query 2 “cat” → key 1 “the”: ([\d.]+)%")
    until(page, lambda: shown.fullmatch(page.locator(".readout").text_content()))
    message = shown.fullmatch(page.locator(".readout").text_content())
    assert float(message[1]) == pytest.approx(weight, rel=0.06)
    page.keyboard.press("Enter")
    assert page.evaluate("[shown.state.query, shown.state.key]") == [2, 1]
    assert page.locator(".rankings section:not([hidden])").count() == 3
    page.locator(".map canvas").click(position={"x": 300, "y": 300})
    query, key = page.evaluate("[shown.state.query, shown.state.key]")
    reads(page, ".tip", f"query {query} ")
    reads(page, ".tip", f"key {key} ")


# Long text from a server


def test_a_long_map_loads_few_tiles_and_zooms_to_single_weights(opened, served):
    _, counts = served
    counts.clear()
    page = opened("", view="matrix")
    page.wait_for_selector(".map:not(.loading)")
    assert 1 <= counts["tile"] <= 25
    assert "mean of" in page.locator(".map-bar").text_content()
    ranked(page, "received").click()  # the key with the most weight received: 20,000
    assert page.evaluate("shown.state.key") == 20000
    until(page, lambda: "mean of" not in page.locator(".map-bar").text_content())
    ranked(page, "key").click()  # the query with the largest weight on it
    assert page.evaluate("[shown.state.query, shown.state.key]") == [21000, 20000]
    page.locator(".map canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    reads(page, ".readout", "query 21,000 “w21000” → key 20,000 “w20000”: 50%")
    assert page.locator("*").count() < 400


def test_wheel_and_drag_move_a_long_map(opened):
    page = opened("", view="matrix")
    page.wait_for_selector(".map:not(.loading)")
    before = page.locator(".map-bar").text_content()
    page.locator(".map canvas").hover(position={"x": 400, "y": 300})
    for _ in range(8):
        page.mouse.wheel(0, -300)
    until(page, lambda: page.locator(".map-bar").text_content() != before)
    page.wait_for_selector(".map:not(.loading)")
    page.mouse.move(420, 420)
    until(page, lambda: page.locator(".readout").text_content())
    message = page.locator(".readout").text_content()
    page.mouse.down()
    page.mouse.move(300, 300, steps=4)
    page.mouse.up()
    page.mouse.move(420, 420)
    until(page, lambda: page.locator(".readout").text_content() != message)


def test_lines_of_a_long_text_show_a_window(opened):
    page = opened("", view="lines")
    until(page, lambda: page.locator(".token").count() == 80)
    page.get_by_label("Find a token").fill("w30303")
    until(page, lambda: page.locator(".side.query .token.selected").all_text_contents() == ["w30303"])
    ranked(page, "query").click()
    until(page, lambda: "w29303" in page.locator(".side.key .token").all_text_contents())
    assert page.locator(".token").count() == 80


def test_errors_are_shown_with_a_button_that_repeats_all_that_failed(rough_page, served):
    (base, counts), page = served, rough_page
    counts["broken"] = 1
    try:
        show(page, base, "", view="matrix")
        reads(page, ".message", "/long/received")  # requested after all tiles have failed
    finally:
        counts["broken"] = 0
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".message[hidden]", state="attached")
    until(page, lambda: page.locator(".legend span").last.text_content(), "the map")
    assert ranked(page, "received").text_content().startswith("w20000")


# Heads and numbers


def test_head_thumbnails_can_be_enlarged(opened):
    page = opened(view="heads")
    page.wait_for_selector(".thumbnail.still", state="detached")
    assert page.locator("button.thumbnail").count() == 32
    page.get_by_label("Sort by").select_option("measure first")
    assert page.locator("button.thumbnail .name").first.text_content() == "layer 0 · 7"
    page.get_by_role("button", name="layer 2, head 7").click()
    assert page.evaluate("[shown.state.view, shown.state.layer, shown.state.heads]") == ["matrix", 2, [7]]


def test_numbers_lead_from_products_to_the_weight(opened):
    page = opened(view="numbers", heads=[5], query=3, key=6)
    page.wait_for_selector(".steps")
    stored = SMALL["inputs"][0]["layers"][0]
    query, key = (
        np.frombuffer(base64.b64decode(stored[side]["data"]), "<f4").reshape(8, 12, 8)
        for side in ("query", "key")
    )
    both = "nodes => nodes.map((node) => [node.title, node.textContent])"
    steps = page.locator(".step .value[title]").evaluate_all(both)
    values = [float(exact.replace("−", "-")) for exact, _ in steps]
    assert all(re.fullmatch(r"−?\d+\.\d\d", shown) for _, shown in steps)
    product = float(query[5, 3] @ key[5, 6])
    assert values[0] == pytest.approx(product, abs=1e-3)
    assert values[1] == pytest.approx(product * 8**-0.5, abs=1e-3)
    part, total, weight = values[-3:]  # softmax as exp(score) / sum
    assert part == pytest.approx(np.exp(values[1]), rel=1e-3)
    assert weight == pytest.approx(part / total, abs=1e-4)
    assert weight == pytest.approx(weights(SMALL, 0, 0)[5, 3, 6], abs=1e-4)
    page.locator(".picker >> nth=1").get_by_role("button", name="sat").click()
    page.wait_for_selector(".readout:has-text('sat → sat')")


# All views


@pytest.mark.parametrize("data", ["small", "several"])
def test_a_phone_never_scrolls_sideways(opened, page, data):
    show_at(page, 360, 740, "dark")
    opened(data)
    for view in ("lines", "matrix", "heads", "numbers"):
        page.evaluate("(view) => shown.set({ view })", view)
        redraw(page)
        assert page.evaluate(SIDEWAYS) <= 0, view


def test_the_widget_shows_what_its_kernel_answers(page, served):
    page.goto(f"{served[0]}?widget")
    page.wait_for_selector(".drawing path")
    page.hover(".side.query .token:nth-child(4)")
    page.wait_for_selector(".token.selected")
    best = CAT["tokens"][int(weights(SMALL, 0, 0)[2, 3].argmax())]
    reads(page, ".readout", f"query “sat”: “{best}” ")
    page.get_by_role("tab", name="Heads").click()
    page.wait_for_selector(".message:not([hidden])")
    assert "the kernel is gone" in page.locator(".message").text_content()
    page.evaluate("end()")
    assert page.locator("#view .toolbar").count() == 0


def test_a_standalone_page_opens_from_disk(page, tmp_path):
    from regard.app.standalone import write_page
    from regard.app.view_model import ViewModel

    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    shown = ViewModel.of(regard.attend(x, x, x)[1], queries=["a", EVIL, "c", "d", "e"], title=EVIL)
    page.goto(write_page(tmp_path / "attention.html", shown).as_uri())
    page.wait_for_selector(".drawing path")
    for view in ("Matrix", "Heads", "Numbers"):
        page.get_by_role("tab", name=view).click()
        redraw(page)
    until(page, lambda: page.locator(".step").count() >= 5)
    assert page.locator("img").count() == 0
