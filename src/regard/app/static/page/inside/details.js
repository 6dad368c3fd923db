// The explanation of the step under the cursor, and the prediction of the next token.

import { button, make, percent } from "../../shared/dom.js";
import { debounce, field } from "../controls.js";
import { plain } from "./draw_matrix.js";
import { explain } from "./explain.js";

const LISTED = 8; // candidates shown as bars
const DELAY = 60; // milliseconds to wait after a temperature change before sending a request

export function makeDetails() {
  const element = make("section", { class: "card inside-details", "aria-label": "Explanation" });

  function show(node, cell, answer) {
    const { title, place, sentence, formula, numbers } = explain(node, cell, answer);
    element.replaceChildren(
      make("p", { class: "hint inside-place" }, place),
      make("h2", {}, title),
      make("p", {}, sentence),
      ...(formula ? [make("p", { class: "formula" }, formula)] : []),
      ...numbers.map((line) => make("p", { class: "inside-numbers", dir: "auto" }, line)),
    );
  }

  return { element, show };
}

// actions: { temperature(value), sample() → promise of { token, text }, append(text), ask(temperature) → promise }
export function makePredictions(actions, temperature) {
  const list = make("dl", { class: "bars inside-candidates", "aria-label": "Most probable next tokens" });
  const sampled = make("p", { class: "inside-sampled", role: "status" });
  const output = make("output", {}, temperature.toFixed(1));
  const slider = make("input", { type: "range", min: 0, max: 2, step: 0.1, input: () => {
    output.textContent = Number(slider.value).toFixed(1);
    update();
  } });
  slider.value = temperature;
  const update = debounce(DELAY, () => actions.temperature(Number(slider.value)));
  const entry = field("Temperature", slider);
  entry.querySelector("label").append(" ", output);
  let chosen = null;
  const append = button("Append", () => chosen && actions.append(chosen), { disabled: true });

  async function sample() {
    const answer = await actions.sample();
    if (!answer) return;
    chosen = answer;
    append.disabled = false;
    sampled.replaceChildren("Sampled: ", make("b", { dir: "auto" }, plain(answer.token)));
  }

  const element = make("section", { class: "card inside-predictions", "aria-label": "Next token" },
    make("h2", {}, "Next token"), entry, list,
    make("div", { class: "flow" }, button("Sample next token", sample, { class: "primary" }), append), sampled);

  // candidates: [{ token, probability }, …]
  function show(candidates) {
    chosen = null;
    append.disabled = true;
    sampled.replaceChildren();
    setCandidates(candidates);
  }

  function setCandidates(candidates) {
    list.replaceChildren(...candidates.slice(0, LISTED).map(({ token, probability }) => {
      const bar = make("div", { class: "bar-fill" });
      bar.style.width = `${100 * probability}%`;
      return make("div", {}, make("dt", { dir: "auto" }, plain(token)), make("dd", { class: "track", "aria-hidden": "true" }, bar), make("dd", {}, `${percent(probability)}%`));
    }));
  }

  return { element, show, setCandidates, stop: update.stop };
}
