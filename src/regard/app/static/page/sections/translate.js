// A sentence, its translation by one or two models, and the word alignment.

import { post } from "../../shared/client.js";
import { button, make, select } from "../../shared/dom.js";
import { announce, debounce, field, numberInput, submitOnEnter } from "../controls.js";
import { formatNumber } from "../format.js";
import { demoButton, emptyState, inTraining, makePanel, modelLine } from "../panel.js";
import { viewer } from "../viewer.js";

export const about = { place: 3, title: "Translate", text: "Type a sentence to see its translation and word alignment.", chapters: ["attention-for-translation", "transformer"] };

const MAX_BEAM = 16;
const MAX_CHARACTERS = 2000;

export function open({ element, state, save, models, pending, demo, missing, signal }) {
  const translators = models.filter(({ kind }) => kind === "translator");
  if (!translators.length) {
    const empty = emptyState("No translator is loaded", missing || "Train one on two files of parallel sentences and open its folder, or train the small demo model in two minutes.", "regard train SOURCE TARGET --output FOLDER", "regard look FOLDER", "regard demo && regard look");
    if (demo && !missing) empty.append(demoButton());
    element.replaceChildren(pending.length && !missing ? inTraining(pending) : empty);
    return;
  }
  const byName = (name) => translators.find((model) => model.name === name);
  const first = byName(state.model) ?? translators[0];
  const settings = { text: state.text ?? first.examples[0] ?? "", model: first.name, compare: byName(state.compare)?.name ?? "", beam: parseCount(state.beam, 5), best: parseCount(state.best, 1) };
  settings.best = Math.min(settings.best, settings.beam);

  const results = [makeResult(signal), makeResult(signal)];
  const container = make("div", { class: "pair" });
  const text = make("textarea", { rows: 2, maxlength: MAX_CHARACTERS, dir: "auto", spellcheck: "false" });
  text.value = settings.text;

  function update() {
    updateSoon.stop();
    const sentence = settings.text.replace(/\s+/g, " ").trim();
    const names = [settings.model, settings.compare].filter(Boolean);
    save({ ...settings, beam: settings.beam === 5 ? "" : settings.beam, best: settings.best === 1 ? "" : settings.best });
    container.classList.toggle("pair", names.length > 1);
    container.replaceChildren(...names.map((_, index) => results[index].element));
    names.forEach((name, index) => results[index].show(byName(name), sentence, settings));
    if (names.length < 2) results[1].clear();
  }

  const updateSoon = debounce(500, update);
  text.addEventListener("input", () => {
    settings.text = text.value;
    results.forEach((result) => result.markStale());
    updateSoon();
  });
  submitOnEnter(text, update);

  element.replaceChildren(...makeControls({ settings, text, translators, update }), container);
  signal.addEventListener("abort", () => updateSoon.stop());
  update();
}

function parseCount(text, fallback) {
  const number = Math.round(Number(text));
  return number >= 1 && number <= MAX_BEAM ? number : fallback;
}

function makeControls({ settings, text, translators, update }) {
  const names = translators.map(({ name }) => name);
  const beam = numberInput(settings.beam, 1, MAX_BEAM, (value) => {
    settings.beam = value;
    settings.best = Math.min(settings.best, value);
    best.value = settings.best;
    update();
  });
  const best = numberInput(settings.best, 1, MAX_BEAM, (value) => {
    settings.best = value;
    settings.beam = Math.max(settings.beam, value);
    beam.value = settings.beam;
    update();
  });
  const examples = make("div", { class: "flow examples" });
  const hint = make("p", { class: "domain" });
  const showExamples = () => {
    const sentences = translators.find(({ name }) => name === settings.model).examples.slice(0, 3);
    const buttons = sentences.map((sentence) => button(sentence, () => {
      text.value = settings.text = sentence;
      update();
    }, { dir: "auto", class: "example", title: sentence }));
    examples.replaceChildren(...(buttons.length ? [make("span", { class: "lead" }, "Examples"), ...buttons] : []));
  };
  showExamples();
  const small = (node) => {
    node.classList.add("small");
    return node;
  };
  const showDomain = () => {
    const { languages, examples: [example = ""] } = translators.find(({ name }) => name === settings.model);
    text.placeholder = example ? `For example: ${example}` : "";
    const [pair, ...domain] = languages.split(", ");
    hint.textContent = languages ? `${settings.model} translates ${[pair, domain.join(", ")].filter(Boolean).join(": ")}.` : "";
    hint.hidden = !languages;
  };
  showDomain();
  const model = select(names, settings.model, (value) => {
    settings.model = value;
    showExamples();
    showDomain();
    update();
  });
  const compare = select([["", "none"], ...names], settings.compare, (value) => {
    settings.compare = value;
    update();
  });
  return [
    field("Sentence", text),
    hint,
    examples,
    make("div", { class: "controls" },
      field("Model", model),
      field("Compare with", compare),
      small(field("Beam size", beam)), small(field("Translations", best)),
      button("Translate", update, { class: "primary" })),
  ];
}

// ---- the translation of one model

function makeResult(signal) {
  const panel = makePanel("Translation", signal);
  const view = viewer({ view: "lines" }, signal);
  view.element.classList.add("alone");
  const element = make("div", { class: "card" }, panel.element);

  function show(model, sentence, { beam, best }) {
    panel.element.setAttribute("aria-label", `Translation by ${model.name}`);
    if (!sentence) {
      clear();
      panel.body.replaceChildren(modelLine(model), make("p", { class: "hint" }, "Type a sentence above."));
      return;
    }
    const request = { model: model.name, sentences: [sentence], beam, n_best: best, alignment: true, view: true };
    panel.run((abort) => post("api/translate", request, abort), ({ translations: [translation], view: answer }, body) => {
      body.replaceChildren(modelLine(model), ...describe(translation), view.element, ...listAlternatives(translation));
      if (answer?.inputs.some(({ layers }) => layers.length)) view.show(answer);
      else view.clear();
      announce(`${model.name}: ${translation.text}`);
    });
  }

  function clear() {
    panel.clear();
    view.clear();
  }

  return { element, show, clear, markStale: panel.markStale };
}

function describe({ text, score, tokens, note, reason, warning }) {
  const summary = [`score ${formatNumber(score)} per token`, `${tokens.length} ${tokens.length === 1 ? "token" : "tokens"}`, reason ? note : ""] // without a reason, the view shows the note
   .filter(Boolean).join(" · ");
  const nodes = [
    make("p", { class: "translation", dir: "auto" }, text || "(empty translation)"),
    make("p", { class: "summary" }, summary),
  ];
  if (warning) nodes.unshift(make("div", { class: "notice amber", role: "status" }, make("p", { dir: "auto" }, warning)));
  if (reason) nodes.push(make("div", { class: "notice calm" }, make("p", { dir: "auto" }, reason)));
  return nodes;
}

function listAlternatives({ alternatives, text }) {
  const others = alternatives.filter((alternative) => alternative.text !== text);
  if (!others.length) return [];
  const items = others.map((other) => make("li", {}, make("span", { dir: "auto" }, other.text || "(empty)"), " ", make("small", {}, formatNumber(other.score))));
  return [make("div", { class: "more" }, make("h3", {}, "Alternative translations"), make("ol", { class: "alternatives", start: 2 }, ...items))];
}
