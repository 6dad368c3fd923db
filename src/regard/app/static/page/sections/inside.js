// A text followed through a whole model, as one zoomable picture: from the overview to every number.

import { post } from "../../shared/client.js";
import { button, make, select } from "../../shared/dom.js";
import { announce, field, submitOnEnter } from "../controls.js";
import { makeDetails, makePredictions } from "../inside/details.js";
import { explain } from "../inside/explain.js";
import { makeStage } from "../inside/stage.js";
import { makeSteps } from "../inside/steps.js";
import { emptyState, inTraining, makePanel, notice } from "../panel.js";

export const about = { place: 2.5, title: "Inside", text: "Follow a sentence through a whole Transformer to its prediction. Zoom in until you see the numbers.", chapters: ["transformer"] };

const KINDS = { language: 0, encoder: 1, translator: 2 }; // order of preference for the model shown first
const HINT = "Drag to move; click the picture, then scroll or pinch to zoom; double-click a box to enter it. Keys: arrows, + and −, Enter, Escape; 0 shows the whole model.";

export function open({ element, state, save, models, pending, signal }) {
  const choices = models.filter(({ traceable = true, attends }) => traceable && attends).sort((a, b) => KINDS[a.kind] - KINDS[b.kind]);
  if (!choices.length) {
    const empty = emptyState("No Transformer is loaded", "Open a translator of kind transformer, or an encoder.", "regard look minilm", "regard look FOLDER");
    element.replaceChildren(pending.length ? inTraining(pending) : empty);
    return;
  }
  const byName = (name) => choices.find((model) => model.name === name);
  const settings = { model: (byName(state.model) ?? choices[0]).name, temperature: clampTemperature(state.temperature), at: state.at ?? "" };
  let answer = null;
  let seed = 0;

  const panel = makePanel("Picture of the model", signal);
  const details = makeDetails();
  const stage = makeStage({ hover: showHover, moved: moved, click: selectRow, failed: (error) => panel.body.prepend(notice(error.message)) }, signal);
  const steps = makeSteps({ go: (node) => stage.goTo(node), describe: (node) => describe(node), preview });
  const predictions = makePredictions({ temperature: setTemperature, sample, append }, settings.temperature);
  const text = make("input", { dir: "auto", autocomplete: "off", spellcheck: "false", maxlength: 1000 });
  const target = make("input", { dir: "auto", autocomplete: "off", spellcheck: "false", maxlength: 1000, placeholder: "the model’s own translation" });
  text.value = state.text ?? byName(settings.model).examples[0] ?? "";
  target.value = state.target ?? "";

  const describe = (node) => (answer ? explain(node, null, answer).sentence : "");
  const isTranslator = () => byName(settings.model).kind === "translator";
  const request = () => ({ model: settings.model, text: text.value.trim(), ...(isTranslator() && target.value.trim() ? { target: target.value.trim() } : {}) });

  function update(at) {
    targetField.hidden = !isTranslator();
    saveState();
    if (!request().text) return;
    panel.run((abort) => post("api/inside", request(), abort), (result, body) => {
      answer = result;
      body.replaceChildren(layout);
      stage.scene.selected = null;
      predictions.element.hidden = !answer.predictions;
      stage.scene.predictions = null; // those of the previous model
      if (answer.predictions) showPredictions();
      stage.canvas.setAttribute("aria-label", `${settings.model} reads “${request().text}”. ${describe({ kind: "model" })}`);
      stage.show(answer, request(), at);
      announce(describe({ kind: "model" }));
    });
  }

  function saveState() {
    save({ model: settings.model, text: text.value, target: isTranslator() ? target.value : "", at: settings.at, temperature: settings.temperature === 1 ? "" : settings.temperature });
  }

  // ---- the picture

  // box: the box whose steps are listed. node: the node that the camera shows
  function moved(box, node) {
    steps.show(box);
    settings.at = box.parent ? box.id : "";
    saveState();
    if (!stage.scene.hover) details.show(node, null, answer);
  }

  function showHover(hit) {
    if (!answer) return;
    details.show(hit?.node ?? stage.enclosing(), hit?.cell ?? null, answer);
  }

  function selectRow(hit) {
    stage.scene.selected = hit.row === stage.scene.selected ? null : hit.row;
    details.show(hit.node, hit.cell, answer);
    stage.draw();
  }

  function preview(node) {
    stage.goTo(node, node.parent);
    details.show(node, null, answer);
    announce(`${node.title}. ${describe(node)}`);
  }

  // ---- the next token

  const last = () => answer.predictions.at(-1);

  function showPredictions() {
    predictions.show(last().top);
    stage.scene.predictions = { top: last().top, temperature: 1 };
    if (settings.temperature !== 1) setTemperature(settings.temperature);
  }

  const ask = () => post("api/inside/next", { ...request(), temperature: settings.temperature, seed }, signal);

  async function setTemperature(temperature) {
    settings.temperature = temperature;
    saveState();
    const own = answer;
    const result = await ask().catch(() => null); // a failed request keeps the old bars
    if (!result || own !== answer || settings.temperature !== temperature) return;
    predictions.setCandidates(result.probabilities);
    const byId = new Map(result.probabilities.map(({ id, probability }) => [id, probability]));
    stage.scene.predictions = { top: last().top.map((each) => ({ ...each, probability: byId.get(each.id) ?? 0 })), temperature };
    stage.draw();
  }

  async function sample() {
    seed = Math.floor(Math.random() * 2 ** 32);
    return ask().catch(() => null);
  }

  function append({ text: longer }) {
    if (isTranslator()) target.value = longer;
    else text.value = longer;
    update();
  }

  function selectModel(name) {
    const { examples } = byName(settings.model);
    settings.model = name;
    target.value = "";
    if (!text.value || examples.includes(text.value) || byName(name).kind !== "encoder") text.value = byName(name).examples[0] ?? text.value;
    settings.at = "";
    update("");
  }

  const textField = field("Text", text);
  const targetField = field("Target", target, "");
  textField.classList.add("grow");
  for (const input of [text, target]) submitOnEnter(input, () => update());
  const tools = make("div", { class: "inside-tools", role: "group", "aria-label": "Zoom" },
    button("+", () => stage.camera.zoom(1.6), { "aria-label": "Zoom in" }), button("−", () => stage.camera.zoom(1 / 1.6), { "aria-label": "Zoom out" }),
    button("Whole model", () => stage.goTo(stage.scene.root)));
  const layout = make("div", { class: "inside" },
    make("div", { class: "inside-stage" }, steps.element, make("div", { class: "inside-frame" }, stage.canvas, tools), make("p", { class: "hint" }, HINT), legend()),
    make("div", { class: "inside-side" }, details.element, predictions.element));
  element.replaceChildren(
    make("div", { class: "controls" }, textField, targetField, field("Model", select(choices.map(({ name }) => name), settings.model, selectModel)), button("Show", () => update(), { class: "primary" })),
    panel.element,
  );
  signal.addEventListener("abort", () => predictions.stop());
  update(settings.at);
}

function clampTemperature(value) {
  const number = Number(value);
  return value !== undefined && number >= 0 && number <= 2 ? number : 1;
}

function legend() {
  const swatch = (name, label) => make("span", {}, make("i", { class: `swatch ${name}` }), label);
  return make("p", { class: "inside-legend" }, swatch("negative", "negative"), swatch("positive", "positive"), swatch("weight", "weight 0 to 1"), swatch("masked", "masked"));
}
