"""The page of `regard look`: every section, light and dark, wide and narrow."""

import re
from math import exp, tanh

import pytest
from hypothesis import settings

from tests.browser.visit import SIZES, Visit, log, needs_encoder, redraw, row, show_at, trainings

pytestmark = pytest.mark.timeout(240)


def test_translate(visit: Visit) -> None:
    visit.enter("translate")
    page = visit.page
    page.wait_for_selector(".translation")
    page.get_by_label("Sentence").fill("1 2 3")  # translated while typing
    visit.until("location.hash.includes('text=1+2+3')")
    visit.settle()
    page.wait_for_selector(".regard-attention [role=tab]")
    for view in ("Matrix", "Lines"):
        page.get_by_role("tab", name=view).click()
    page.get_by_label("Translations").fill("3")
    page.get_by_label("Translations").press("Enter")
    page.wait_for_selector(".alternatives li")
    page.get_by_label("Compare with").select_option("plain")
    page.wait_for_selector(".notice.calm")  # the reason why there is no alignment
    assert page.locator(".translation").count() == 2
    visit.settle()
    visit.look("translate")
    assert "compare=plain" in page.url
    assert "best=3" in page.url


def test_numbers_of_a_translation_open_on_a_layer_with_vectors(visit: Visit) -> None:
    visit.enter("translate", text="1 2 3", model="transformer")
    page = visit.page
    page.wait_for_selector(".regard-attention [role=tab]")
    page.get_by_role("tab", name="Numbers").click()
    page.wait_for_selector(".features .bar.negative")
    heights = page.locator(".features .bar").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect().height)"
    )
    assert min(heights) == max(heights) > 4  # negative products are as visible as positive ones
    visit.look("translate-numbers", SIZES[1:3])


def test_a_sentence_outside_the_training_data_has_an_amber_note(visit: Visit) -> None:
    visit.enter("translate", text="1 2 3", model="transformer")
    page = visit.page
    page.wait_for_selector(".translation")
    assert "Outside" not in visit.text("#section")
    assert page.get_by_label("Sentence").get_attribute("placeholder").startswith("For example: ")
    visit.enter("translate", text="The weather 1 2", model="transformer")
    page.wait_for_selector(".notice.amber")
    assert "“The” and “weather” do not occur" in visit.text(".notice.amber")
    visit.look("translate-amber", SIZES)
    page.get_by_label("Sentence").fill("1 2")  # the old answer is dimmed until the new one arrives
    assert page.locator(".answer.stale .translation").count() == 1
    page.wait_for_selector(".notice.amber", state="detached")
    assert page.locator(".answer.stale").count() == 0


def test_lookup(visit: Visit) -> None:
    visit.enter("lookup")
    page = visit.page
    scores = [
        cell.inner_text() for cell in page.locator(".calculation").first.locator("tbody tr.selected td").all()
    ]
    assert scores == ["2.00", "4.00", "4.00"]
    assert "1·0 + 0·1 + 2·1 = 2" in visit.text(".working")
    page.get_by_label("query of word 1, number 1").fill("5")
    visit.until("document.querySelector('.working').innerText.includes('5·0 + 0·1 + 2·1 = 2')")
    page.get_by_label("Mask", exact=True).select_option("causal")
    page.wait_for_selector("td.masked")
    page.get_by_role("button", name="Add a key").click()
    visit.until("document.querySelectorAll('.by-hand').length === 5")
    visit.settle()
    visit.look("lookup")
    page.get_by_role("button", name="Dictionary").click()
    visit.until("document.querySelector('.working').innerText.includes('the largest score')")
    visit.settle()
    assert "0·10 + 0·20 + 1·30 + 0·40 = 30" in visit.text(".working")
    visit.look("lookup-dictionary", SIZES[:1])


def test_a_soft_lookup_has_a_picture(visit: Visit) -> None:
    """The picture shows the weights of the selected query over the keys; another query has other weights."""
    visit.enter("lookup", preset="soft")
    page = visit.page
    assert page.locator(".line-of-keys .chart path").count() == 2  # weights, and the output for every query
    assert "exp(s / 0.25) / Σ exp(s / 0.25)" in visit.text("#section")
    weights = page.locator(".line-of-keys path.tone-0")
    first = weights.get_attribute("d")
    page.get_by_role("radio", name="at 2").check()
    visit.until(f"document.querySelector('.line-of-keys path.tone-0').getAttribute('d') !== {first!r}")
    visit.look("lookup-soft")
    page.get_by_role("button", name="Dictionary").click()  # its keys are not on a line
    page.wait_for_selector(".line-of-keys", state="detached")


def test_tables_have_one_number_format_and_exact_values_on_hover(visit: Visit) -> None:
    visit.enter("lookup", preset="soft")
    cells = visit.page.locator(".matrix tbody td:not(.aside)").evaluate_all(
        "all => all.map((cell) => [cell.textContent, cell.title])"
    )
    for shown, exact in cells:
        assert re.fullmatch(r"−?\d+\.\d\d|·", shown), shown
        if "·" in shown:
            assert re.search("10⁻|^−?0(.00[0-4]|$)", exact), exact
        else:
            value = float(exact.replace("−", "-"))
            assert float(shown.replace("−", "-")) == pytest.approx(value, abs=0.0051)
    assert {"·"} < {shown for shown, _ in cells}


@pytest.mark.hypothesis  # all in `make test-slow`
def test_calculations_of_every_score_and_normalizer_are_correct(visit: Visit) -> None:
    visit.enter("lookup", preset="soft")
    step = 1 if settings.get_current_profile_name() == "deep" else 3
    for name in ("score", "normalize"):
        options = visit.page.locator(f"#{name} option").evaluate_all("all => all.map((one) => one.value)")
        for option in options[::step]:
            visit.enter("lookup", preset="soft", **{name: option})
            assert visit.page.locator(f"#{name}").input_value() == option
            check_arithmetic(visit.text(".working"))


def check_arithmetic(text: str) -> None:
    """Evaluate each `… = number`, up to the digits shown."""
    equations = re.findall(r"^(?:score|weight|number \d+)\n(.+) = (\S+)$", text, re.MULTILINE)
    assert equations
    for formula, result in equations:
        if set(":;") & set(formula) or "·" in result:
            continue  # prose, a computation in two steps, or a power of ten
        python = formula.translate(str.maketrans("·−", "*-")).replace("²", "**2")
        if re.fullmatch(r"[-+*/()., \d]*((exp|tanh|max)[-+*/()., \d]*)*", python) and "10*" not in python:
            expected = eval(python, {"__builtins__": {}}, {"exp": exp, "tanh": tanh, "max": max})
            assert float(result.replace("−", "-")) == pytest.approx(expected, abs=0.02), formula


def test_a_lookup_can_be_shared_as_a_link(visit: Visit) -> None:
    visit.enter("lookup", q="1,0", k="0,1;2,0", v="3;4", normalize="hard", score="dot")
    assert "0·3 + 1·4 = 4" in visit.text(".working")
    visit.enter("lookup", q="1,0;x", k="</script>", normalize="nothing")  # invalid values are ignored
    assert "1·0 + 0·1 + 2·1 = 2" in visit.text(".working")


@needs_encoder
def test_the_page_opens_on_the_head_that_links_a_pronoun_to_its_antecedent(visit: Visit) -> None:
    visit.page.goto("about:blank")
    visit.page.goto(visit.address)
    visit.settle()
    page = visit.page
    page.wait_for_selector(".drawing path")
    assert page.title() == "Heads · regard"
    assert "didn't cross the street" in page.get_by_label("Text", exact=True).input_value()
    assert page.locator(".token.selected").all_inner_texts() == ["it"]
    assert page.locator(".side.query .token.selected").count() == 1
    shares = page.locator(".side.key .token[data-share]").evaluate_all(
        "all => all.map((one) => [parseFloat(one.dataset.share), one.textContent])"
    )
    assert max(shares)[1] == "animal"
    assert max(shares)[0] > 50
    assert page.locator(".chip[aria-pressed=true]:not(.mean)").count() == 1
    visit.look("home")
    page.get_by_role("tab", name="Heads").click()  # the grid outlines the same head
    page.wait_for_selector(".thumbnail[aria-current]")
    visit.until("!document.querySelector('.thumbnail.still')")
    width = "document.querySelector('.thumbnail[aria-current] canvas').width"
    before = page.evaluate(width)
    page.get_by_label("hide special tokens").check()
    assert page.evaluate(width) == before - 2  # excluding [CLS] and [SEP]
    visit.look("home-grid", SIZES[:1])
    page.get_by_label("Text", exact=True).fill("Dogs bark")  # not submitted yet
    assert page.locator(".answer.stale .viewer").count() == 1


def test_heads(visit: Visit) -> None:
    visit.enter("heads", model="transformer", text="1 2 3\n4 5")
    visit.page.get_by_role("tab", name="Heads").click()
    visit.page.wait_for_selector(".regard-attention .thumbnail")
    visit.look("heads")


@needs_encoder
def test_words_in_context(visit: Visit) -> None:
    visit.enter("words")
    page = visit.page
    page.wait_for_selector(".chart path")
    page.get_by_role("button", name="bark", exact=True).first.click()
    visit.until("document.querySelector('.facts').innerText.includes('layer 0')")
    page.get_by_label("Layer", exact=True).select_option("2")
    page.get_by_label("Head", exact=True).select_option("3")
    visit.settle()
    page.wait_for_selector(".bars .selected")
    shares = [
        float(share.strip("<% "))
        for share in page.locator(".bars").first.inner_text().split("\n")
        if "%" in share
    ]
    assert sum(shares) == pytest.approx(100, abs=1.5)
    page.locator(".chart svg[tabindex]").focus()
    page.keyboard.press("ArrowLeft")  # the legend shows the last layer
    assert page.locator(".chart-legend b").count() >= 2
    visit.look("words")
    page.get_by_role("button", name="bank", exact=True).first.click()
    visit.until(
        "document.querySelectorAll('.chart-legend li').length === 2"
    )  # two lines: this sentence and one with the same sense
    visit.settle()
    assert "[CLS]" in visit.text(".bars >> nth=0")
    page.get_by_label("hide special tokens").check()
    visit.until("!document.querySelector('.bars').innerText.includes('[CLS]')")
    assert "%, hidden" in visit.text("#section")
    visit.look("words-without-special")
    page.get_by_label("Second sentence").fill("nothing else")
    visit.until("document.body.innerText.includes('no word in common')")
    visit.until("!document.querySelector('.answer .chart, .answer .bars')")  # cleared
    assert visit.text("#section").count("Enter two sentences that share a word.") == 2
    page.get_by_role("button", name="bank", exact=True).first.click()
    page.wait_for_selector(".answer .chart path")


def test_order(visit: Visit) -> None:
    visit.enter("order", sentence="one two three", order="2.1.0")
    page = visit.page
    page.wait_for_selector("#summary")
    assert "only the order changes" in visit.text("#summary")
    page.get_by_label("Positions").select_option("sinusoidal")
    visit.until("document.querySelector('#summary').innerText.includes('changes by')")
    page.wait_for_selector(".gallery canvas")
    visit.look("order")
    words = page.locator(".draggable span")
    assert words.all_inner_texts() == ["three", "two", "one"]
    page.locator(".draggable").first.focus()
    page.keyboard.press("ArrowRight")
    assert words.all_inner_texts() == ["two", "three", "one"]
    box = page.locator(".draggable").nth(2).bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    first = page.locator(".draggable").first.bounding_box()
    page.mouse.move(first["x"] + 5, first["y"] + 5, steps=4)
    page.mouse.up()
    assert words.all_inner_texts() == ["one", "two", "three"]


def test_long_text(visit: Visit) -> None:
    page = visit.page
    page.route(
        "**/api/long/sample", lambda route: route.continue_(post_data='{"words": 600}')
    )  # two passages
    visit.enter("long")  # opens on the sample
    page.wait_for_selector(".regard-attention canvas", timeout=120_000)
    page.get_by_label("Text", exact=True).fill("")
    page.get_by_role("button", name="Show the map").click()
    assert "No text yet" in visit.text("#section")
    visit.look("long-empty", SIZES[:1])
    page.get_by_role("button", name="Sample of 4,000 words").click()
    page.wait_for_selector(".regard-attention canvas", timeout=120_000)
    assert "tokens attend only within their passage" in visit.text("#section")
    visit.until("!document.querySelector('.regard-attention .loading')")
    visit.look("long-model")
    verse = "row my boat down the stream , merrily merrily and row again ."
    page.get_by_label("Text", exact=True).fill("\n".join([verse] * 60))
    page.get_by_label("Model", exact=True).select_option("co-occurrence")
    visit.until("document.querySelector('#section').innerText.includes('Not the attention of a model')")
    visit.until("!document.querySelector('.regard-attention .loading')")
    visit.look("long")
    page.set_input_files(
        "input[type=file]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"one two " * 50}
    )
    visit.until("document.querySelector('.text-size').innerText.startsWith('100 words')")
    page.set_input_files(
        "input[type=file]", {"name": "a.bin", "mimeType": "text/plain", "buffer": b"\0" * 50}
    )
    visit.until("document.querySelector('#section').innerText.includes('is not a text file')")


def test_the_sample_text_is_deterministic_and_has_the_requested_length(visit: Visit) -> None:
    visit.enter("long", text="one two")
    texts = visit.page.evaluate(
        "import('./static/page/sample_text.js').then(({ sampleText }) => [32000, 32000, 100].map(sampleText))"
    )
    assert texts[0] == texts[1]
    assert [len(text.split()) for text in texts] == [32_000, 32_000, 100]
    assert texts[0].count("O row my darling") > 100


def test_training(visit: Visit) -> None:
    visit.enter("training", name="transformer")
    page = visit.page
    page.wait_for_selector(".chart path")
    page.wait_for_selector("#validation")
    assert re.search(r"updates\s+4\b", visit.text(".numbers"))
    newest = visit.text("output")
    page.locator("#validation").focus()
    page.keyboard.press("Home")
    assert visit.text("output") != newest
    visit.look("training")


def test_the_alignment_of_a_long_sentence_is_not_clipped(visit: Visit) -> None:
    words = [f"word{number}" for number in range(40)]
    shares = [[float(row == column) for column in range(40)] for row in range(40)]
    aligned = {"source_words": words, "target_words": words, "links": "", "weights": shares}
    answer = log(" ".join(words))
    answer["samples"][0]["alignment"] = aligned
    visit.answer("training", trainings("run"))
    visit.answer("training/**", answer)
    visit.enter("training")
    visit.page.wait_for_selector(".matrix.fit")
    for width, height, scheme in SIZES:
        show_at(visit.page, width, height, scheme)
        redraw(visit.page)
        table, card, cells = visit.page.evaluate(
            """() => {
                const table = document.querySelector(".matrix.fit");
                const boxes = [table, table.closest(".card")].map((node) => node.getBoundingClientRect());
                return [...boxes, table.tBodies[0].rows[0].cells.length];
            }"""
        )
        assert card["left"] <= table["left"] < table["right"] <= card["right"]
        assert cells == len(words) + 1


def test_an_active_run_is_polled(visit: Visit) -> None:
    rows = [row(step) for step in (1, 2, 3)]
    payload: list[str] = []

    def answer(route) -> None:
        payload.append(route.request.url)
        steps = min(len(payload), 3)
        route.fulfill(json={"steps": steps, "state": "running", "rows": rows[:steps], "samples": []})

    page = visit.page
    visit.answer("training", trainings("a b", "running"))
    page.route("**/api/training/*", answer)
    visit.enter("training")
    visit.until(r"/updates\s+3/.test(document.querySelector('.numbers')?.innerText)")
    assert visit.text(".live") == "Running."
    assert "a%20b" in payload[0]


def test_changes_of_training_state_are_shown(visit: Visit) -> None:
    """The page shows the current state when a training run finishes, resumes, is killed or restarts."""
    now = {"steps": 2, "state": "finished"}

    def answer(route) -> None:
        after = int(route.request.url.rpartition("=")[2])
        rows = [row(step) for step in range(1, now["steps"] + 1) if step > after]
        route.fulfill(json={**now, "rows": rows, "samples": []})

    visit.answer("training", trainings("run"))
    visit.page.route("**/api/training/*", answer)
    visit.enter("training")
    for steps, state, message in (
        (2, "finished", "Finished."),
        (4, "running", "Running."),
        (4, "stopped", "Stopped. Resume with regard train --resume."),
        (3, "running", "Running."),
        (5, "finished", "Finished."),
    ):
        now.update(steps=steps, state=state)
        visit.until(f"document.querySelector('.live')?.innerText === {message!r}")
        visit.until(rf"/updates\s+{steps}\b/.test(document.querySelector('.numbers').innerText)")
        assert f"run: {steps} updates, {state}" in visit.text("#section select")
    visit.look("training-states", SIZES[:1])
