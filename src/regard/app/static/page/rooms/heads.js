// Texts through a model: every layer and head, for one text or several beside each other.

import { get, post } from "../api.js";
import { announce, button, choice, field, make } from "../dom.js";
import { exhibitor } from "../exhibit.js";
import { about, empty, expected, stage } from "../stage.js";

const MOST = 8; // texts

export function open({ element, state, keep, models, pending, recordings, signal }) {
  const recorded = recordings.map((one) => ({ ...one, kind: "recording", examples: [] }));
  const looking = [...recorded, ...models.filter(({ attends }) => attends)];
  if (!looking.length) {
    const without = empty("No model that attends is loaded", "Open a translator's folder, or an encoder.", "regard look FOLDER", "regard look minilm", "regard look --recording FOLDER");
    element.replaceChildren(pending.length ? expected(pending) : without);
    return;
  }
  const byName = (name) => looking.find((model) => model.name === name);
  const first = byName(state.model) ?? recorded[0] ?? looking.find(({ kind }) => kind === "encoder") ?? looking[0];
  const set = { model: first.name, text: state.text ?? first.examples.slice(0, 1).join("\n") };

  const place = stage("What the heads look at", signal);
  const view = exhibitor({ view: "heads" }, signal);
  const who = make("div");
  const text = make("textarea", { rows: 2, dir: "auto", spellcheck: "false", maxlength: 20000 });
  text.value = set.text;

  function ask() {
    set.text = text.value;
    const texts = set.text.split("\n").map((line) => line.trim()).filter(Boolean);
    const model = byName(set.model);
    who.replaceChildren(about(model));
    keep({ model: set.model, text: set.text });
    written.hidden = model.kind === "recording";
    if (model.kind === "recording") {
      place.run((gone) => get(`api/exhibits/${encodeURIComponent(model.id)}`, gone), (exhibit, body) => {
        body.replaceChildren(view.element);
        view.show({ id: model.id, exhibit });
      });
      return;
    }
    if (!texts.length) {
      view.clear();
      place.clear();
      place.body.replaceChildren(make("p", { class: "hint" }, "Type a text above."));
      return;
    }
    place.run((gone) => post("api/look", { model: set.model, texts: texts.slice(0, MOST) }, gone), (answer, body) => {
      const more = texts.length > MOST ? [make("p", { class: "hint" }, `The first ${MOST} of ${texts.length} lines are shown.`)] : [];
      body.replaceChildren(...more, view.element);
      view.show(answer);
      announce(`${model.name}: ${answer.exhibit.inputs[0].layers.length} layers of attention`);
    });
  }

  function choose(name) {
    const before = byName(set.model).examples;
    set.model = name;
    if ((!text.value || before.includes(text.value)) && byName(name).examples.length) text.value = byName(name).examples[0]; // a text of its own language
    ask();
  }

  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
  const written = field("Text", text, `Each line is a text of its own, up to ${MOST}: Shift + Enter begins another.`);
  element.replaceChildren(
    written,
    make("div", { class: "controls below" },
      field("Model", choice(looking.map(({ name }) => name), set.model, choose)),
      button("Look", ask, { class: "primary" })),
    make("div", { class: "card" }, who, place.element),
  );
  ask();
}
