"""The Inside section: the picture of a model, its steps and its numbers."""

import re

import pytest

import regard
from regard.app.trace_text import trace_text
from tests.browser.visit import Visit, needs_encoder, redraw

pytestmark = pytest.mark.timeout(240)
TEXT = "Tom had a red kite."
SIZES = ((1280, 900, "light"), (390, 800, "dark"))
COLORS = """() => {
    const canvas = document.querySelector(".inside-canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
}"""


def enter(visit: Visit, **state: str) -> None:
    visit.enter("inside", **state)
    visit.until("document.querySelector('.inside-canvas')?.dataset.loaded === 'true'")
    redraw(visit.page)


def hover(visit: Visit, x: float = 0.5, y: float = 0.5) -> None:
    """Move the mouse to a point on the canvas, given as fractions of its size."""
    box = visit.page.locator(".inside-canvas").bounding_box()
    visit.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


def steps(visit: Visit) -> list[str]:
    return visit.page.locator(".inside-steps button").all_inner_texts()


def path(visit: Visit) -> str:
    return " > ".join(visit.page.locator(".inside-path button").all_inner_texts())


def numbers(text: str) -> list[float]:
    return [float(number.replace("−", "-")) for number in re.findall(r"−?\d+\.\d+", text)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", ["stories", "transformer", pytest.param("minilm", marks=needs_encoder)])
def test_each_architecture_is_drawn(visit: Visit, model: str) -> None:
    enter(visit, model=model)
    assert visit.page.evaluate(COLORS) > 200
    last = "Output" if model == "minilm" else "Prediction"
    assert steps(visit)[-1] == last
    assert visit.page.locator(".inside-predictions").is_visible() == (model != "minilm")
    visit.look(f"inside-{model}", SIZES)


@needs_encoder
def test_an_encoder_does_not_show_the_prediction_of_the_previous_model(visit: Visit) -> None:
    visit.page.evaluate(
        """() => {
            const { fillText } = CanvasRenderingContext2D.prototype;
            window.drawn = [];
            CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                window.drawn.push(text);
                fillText.call(this, text, ...rest);
            };
        }"""
    )
    predicted = "window.drawn.some((text) => /[0-9]%$/.test(text))"
    enter(visit, model="stories", text=TEXT)
    visit.until(predicted)
    visit.page.get_by_label("Model", exact=True).select_option("minilm")
    visit.until("document.querySelector('.inside-canvas')?.ariaLabel.startsWith('minilm')")
    visit.settle()
    redraw(visit.page)
    visit.page.evaluate("window.drawn.length = 0")
    visit.page.locator(".inside-canvas").focus()
    visit.page.keyboard.press("0")
    visit.until("window.drawn.includes('Output')")
    assert not visit.page.evaluate(predicted)


def test_the_language_model_is_shown_first_and_recurrent_models_are_not_offered(visit: Visit) -> None:
    enter(visit)
    options = visit.page.get_by_label("Model").locator("option").all_inner_texts()
    assert options[0] == "stories"
    assert "plain" not in options
    assert "model=stories" in visit.page.url


def test_weights_are_explained_with_their_own_numbers(visit: Visit) -> None:
    enter(visit, model="stories", text=TEXT, at="layer-0/self/head-1/weights")
    (stack,) = trace_text(regard.load_language_model("stories"), TEXT).trace.stacks
    tensors, n = stack.steps[0][1].tensors, len(stack.tokens)
    weights, scores = tensors["weights"][1], tensors["scores"][1]
    row = 4
    column = int(weights[row].argmax())
    box = visit.page.locator(".inside-canvas").bounding_box()
    cell = 0.88 * min(box["width"], box["height"]) / n  # the matrix is square and fitted
    hover(
        visit,
        0.5 + (column + 0.5 - n / 2) * cell / box["width"],
        0.5 + (row + 0.5 - n / 2) * cell / box["height"],
    )
    visit.until("document.querySelectorAll('.inside-numbers').length === 3")
    names, formula, result = visit.page.locator(".inside-numbers").all_inner_texts()
    assert names == f"“{stack.tokens[row]}” → “{stack.tokens[column]}”"
    assert numbers(formula)[0] == pytest.approx(scores[row, column].item(), abs=0.006)
    top, total, shown = numbers(result)
    assert shown == pytest.approx(weights[row, column].item(), abs=6e-5)
    assert top / total == pytest.approx(shown, abs=0.02)


def test_the_future_is_masked(visit: Visit) -> None:
    enter(visit, model="stories", text=TEXT, at="layer-0/self/head-1/weights")
    hover(visit, 0.7, 0.2)
    visit.until("document.querySelector('.inside-details').innerText.includes('masked')")


@pytest.mark.slow
def test_every_kind_of_matrix_has_a_read_out(visit: Visit) -> None:
    inner = ["query", "key", "scores", "value", "mixed"]
    outer = ["self-norm", "self-projected", "self-residual", "hidden", "feed-forward-feed_forward"]
    for at in ["embedding/embedding", *(f"layer-1/{name}" for name in outer)] + [
        f"layer-1/self/head-0/{name}" for name in inner
    ]:
        enter(visit, model="stories", text=TEXT, at=at)
        hover(visit, 0.5, 0.45)
        visit.until("document.querySelectorAll('.inside-numbers').length > 0")
        assert re.search(r"[:=] −?\d", visit.text(".inside-details")), at


def test_steps_are_reached_with_the_keyboard(visit: Visit) -> None:
    enter(visit, model="stories", text=TEXT)
    page, frames = visit.page, []
    page.emulate_media(reduced_motion="no-preference")
    page.get_by_role("button", name="Embedding", exact=True).focus()
    page.keyboard.press("Tab")
    visit.until("document.activeElement.textContent === 'Layer 0'")
    visit.until("document.querySelector('#announcement').textContent.startsWith('Layer 0.')")
    while not frames or frames[-1] not in frames[:-1]:  # until the camera stops
        redraw(page)
        frames.append(page.locator(".inside-canvas").get_attribute("data-frames"))
    assert page.evaluate("document.activeElement.textContent") == "Layer 0"
    page.keyboard.press("Enter")
    visit.until("document.activeElement.dataset.step === 'layer-0/self-norm'")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert steps(visit) == ["Head 0", "Head 1", "Head 2", "Head 3"]
    page.keyboard.press("Escape")
    visit.until("document.activeElement.dataset.step === 'layer-0/self'")
    visit.until("location.hash.includes('at=layer-0')")
    page.keyboard.press("Escape")
    visit.until("document.activeElement.dataset.step === 'layer-0'")
    assert path(visit) == "The whole model"


def test_the_canvas_zooms_and_pans_with_keys_wheel_and_double_click(visit: Visit) -> None:
    enter(visit, model="stories", text=TEXT)
    page = visit.page
    canvas = page.locator(".inside-canvas")
    canvas.focus()
    seen = {canvas.screenshot()}
    for key in ("+", "+", "ArrowLeft", "ArrowDown", "-", "0"):
        page.keyboard.press(key)
        redraw(page)
        seen.add(canvas.screenshot())
    assert len(seen) >= 6
    hover(visit, 0.4, 0.4)
    before = int(canvas.get_attribute("data-frames"))
    for _ in range(12):
        page.mouse.wheel(0, -500)
        redraw(page)
    assert int(canvas.get_attribute("data-frames")) >= before + 10
    visit.until("location.hash.includes('at=')")
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    visit.until("!location.hash.includes('at=')")
    box = canvas.bounding_box()
    page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visit.until("location.hash.includes('at=layer-')")


PINCH = """(spread) => {
    const canvas = document.querySelector(".inside-canvas");
    canvas.setPointerCapture = () => {};
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const fire = (type, pointerId, shift) => {
        const point = { clientX: left + width / 2 + shift, clientY: top + height / 2 };
        canvas.dispatchEvent(new PointerEvent(type, { pointerId, ...point, button: 0, bubbles: true }));
    };
    fire("pointerdown", 1, -20);
    fire("pointerdown", 2, 20);
    for (let shift = 20; shift <= spread; shift += 10) {
        fire("pointermove", 1, -shift);
        fire("pointermove", 2, shift);
    }
    fire("pointerup", 1, 0);
    fire("pointerup", 2, 0);
}"""


@pytest.mark.slow
def test_two_fingers_zoom(visit: Visit) -> None:
    enter(visit, model="stories", text=TEXT)
    visit.page.evaluate(PINCH, 180)
    visit.until("location.hash.includes('at=layer')")


def test_temperature_sampling_and_appending(visit: Visit) -> None:
    enter(visit, model="stories", text=TEXT)
    page = visit.page
    slider = page.get_by_label("Temperature")
    slider.fill("0")
    visit.until("document.querySelector('.inside-candidates').innerText.includes('100%')")
    assert "temperature=0" in page.url
    best = page.locator(".inside-candidates dt").first.inner_text()
    page.get_by_role("button", name="Sample next token").click()
    visit.until(f"document.querySelector('.inside-sampled').innerText.includes('{best}')")
    page.get_by_role("button", name="Append").click()
    visit.until(f"document.querySelector('.controls input').value.toLowerCase().includes('kite. {best}')")
    visit.settle()
    assert page.locator(".inside-candidates div").count() >= 1


@pytest.mark.slow
def test_a_target_is_continued(visit: Visit) -> None:
    enter(visit, model="transformer", text="1 2 3", target="3")
    assert visit.page.get_by_label("Target").input_value() == "3"
    visit.page.get_by_role("button", name="Sample next token").click()
    visit.until("document.querySelector('.inside-sampled').innerText.length > 0")
    visit.page.get_by_role("button", name="Append").click()
    visit.settle()
    assert visit.page.get_by_label("Target").input_value().startswith("3")


def test_an_unknown_word_is_explained(rough: Visit) -> None:
    enter(rough, model="stories", text=TEXT)
    rough.page.get_by_label("Text", exact=True).fill("Tom had a xylophone")
    rough.page.get_by_role("button", name="Show").click()
    rough.until("document.querySelector('#section').innerText.includes(\"'xylophone'\")")
