// Every layer and head of a model for one or more texts.

import { get, post } from "../../shared/client.js";
import { button, make, select } from "../../shared/dom.js";
import { announce, field, submitOnEnter } from "../controls.js";
import { emptyState, inTraining, makePanel, modelLine } from "../panel.js";
import { describeLink, viewer } from "../viewer.js";

export const about = { place: 1, title: "Heads", text: "Run text through a model and see what every head attends to.", chapters: ["self-attention", "looking-inside"] };

const MAX_TEXTS = 8;

export function open({ element, state, save, models, pending, recordings, minilm, signal }) {
  const recorded = recordings.map((recording) => ({ ...recording, kind: "recording", examples: [] }));
  const choices = [...recorded, ...models.filter(({ attends }) => attends)];
  if (!choices.length) {
    const empty = emptyState("No model with attention is loaded", "Open the folder of a translator, an encoder or a recording, or install a pretrained encoder.", ...(minilm ? [minilm] : []), "regard look minilm", "regard look FOLDER", "regard look --recording FOLDER");
    element.replaceChildren(pending.length ? inTraining(pending) : empty);
    return;
  }
  const byName = (name) => choices.find((model) => model.name === name);
  const first = byName(state.model) ?? recorded[0] ?? choices.find(({ kind }) => kind === "encoder") ?? choices[0];
  let selected = first.name;
  let shown = ""; // the text of the view

  const panel = makePanel("Attention by head", signal);
  const view = viewer({ view: "lines" }, signal);
  const about = make("div");
  const text = make("textarea", { rows: 2, dir: "auto", spellcheck: "false", maxlength: 20000 });
  text.value = state.text ?? first.examples.slice(0, 1).join("\n");

  function update() {
    const entered = text.value;
    const texts = entered.split("\n").map((line) => line.trim()).filter(Boolean);
    const model = byName(selected);
    about.replaceChildren(modelLine(model));
    save({ model: selected, text: text.value });
    textField.hidden = model.kind === "recording";
    if (model.kind === "recording") {
      panel.run((abort) => get(`api/views/${encodeURIComponent(model.id)}`, abort), (answer, body) => {
        body.replaceChildren(view.element);
        view.show(answer);
      });
      return;
    }
    if (!texts.length) {
      view.clear();
      panel.clear();
      panel.body.replaceChildren(make("p", { class: "hint" }, "Type some text above."));
      return;
    }
    panel.run((abort) => post("api/look", { model: selected, texts: texts.slice(0, MAX_TEXTS) }, abort), (answer, body) => {
      const hints = texts.length > MAX_TEXTS ? [make("p", { class: "hint" }, `Showing the first ${MAX_TEXTS} of ${texts.length} lines.`)] : [];
      shown = entered;
      body.replaceChildren(...hints, ...describeLink(answer), view.element);
      view.show(answer, answer.first);
      const { length } = answer.inputs[0].layers;
      announce(`${model.name}: ${length} attention ${length === 1 ? "layer" : "layers"}`);
    });
  }

  function selectModel(name) {
    const { examples } = byName(selected);
    selected = name;
    if ((!text.value || examples.includes(text.value)) && byName(name).examples.length) text.value = byName(name).examples[0]; // an example in the model's language
    update();
  }

  submitOnEnter(text, update);
  text.addEventListener("input", () => panel.body.classList.toggle("stale", text.value !== shown)); // the view is stale until the new text is submitted
  const textField = field("Text", text, `One text per line, up to ${MAX_TEXTS}. Shift + Enter starts a new line.`);
  element.replaceChildren(
    textField,
    make("div", { class: "controls below" },
      field("Model", select(choices.map(({ name }) => name), selected, selectModel)),
      button("Show attention", update, { class: "primary" })),
    make("div", { class: "card" }, about, panel.element),
  );
  update();
}
