// A sentence, its translation by one model or two, and which word came from which.

import { post } from "../api.js";
import { announce, button, choice, count, field, later, make, tell } from "../dom.js";
import { exhibitor } from "../exhibit.js";
import { about, empty, expected, stage } from "../stage.js";

const WIDEST = 16; // hypotheses
const LONGEST = 2000; // characters

export function open({ element, state, keep, models, pending, signal }) {
  const translators = models.filter(({ kind }) => kind === "translator");
  if (!translators.length) {
    const without = empty("No translator is loaded", "This room needs a trained translator. Train one on two files of sentences, line by line, and open its folder; or train the small one of the demo, in two minutes.", "regard train SOURCE TARGET --output FOLDER", "regard look FOLDER", "regard demo && regard look");
    element.replaceChildren(pending.length ? expected(pending) : without);
    return;
  }
  const byName = (name) => translators.find((model) => model.name === name);
  const first = byName(state.model) ?? translators[0];
  const set = { text: state.text ?? first.examples[0] ?? "", model: first.name, beside: byName(state.beside)?.name ?? "", beam: bounded(state.beam, 5), best: bounded(state.best, 1) };
  set.best = Math.min(set.best, set.beam);

  const halves = ["model", "beside"].map(() => half(signal));
  const room = make("div", { class: "pair" });
  const text = make("textarea", { rows: 2, maxlength: LONGEST, dir: "auto", spellcheck: "false" });
  text.value = set.text;

  function ask() {
    soon.stop();
    const sentence = set.text.replace(/\s+/g, " ").trim();
    const chosen = [set.model, set.beside].filter(Boolean);
    keep({ text: set.text, model: set.model, beside: set.beside, beam: set.beam === 5 ? "" : set.beam, best: set.best === 1 ? "" : set.best });
    room.classList.toggle("pair", chosen.length > 1);
    room.replaceChildren(...chosen.map((_, place) => halves[place].element));
    chosen.forEach((name, place) => halves[place].show(byName(name), sentence, set));
    if (chosen.length < 2) halves[1].clear();
  }

  const soon = later(500, ask);
  text.addEventListener("input", () => {
    set.text = text.value;
    soon();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });

  element.replaceChildren(...furniture({ set, text, translators, ask }), room);
  signal.addEventListener("abort", () => soon.stop());
  ask();
}

function bounded(text, otherwise) {
  const number = Math.round(Number(text));
  return number >= 1 && number <= WIDEST ? number : otherwise;
}

function furniture({ set, text, translators, ask }) {
  const names = translators.map(({ name }) => name);
  const change = (name) => (value) => {
    set[name] = value;
    ask();
  };
  const beam = count(set.beam, 1, WIDEST, (value) => {
    set.beam = value;
    set.best = Math.min(set.best, value);
    best.value = set.best;
    ask();
  });
  const best = count(set.best, 1, WIDEST, (value) => {
    set.best = value;
    set.beam = Math.max(set.beam, value);
    beam.value = set.beam;
    ask();
  });
  const examples = () => translators.find(({ name }) => name === set.model).examples;
  const offers = make("div", { class: "flow examples" });
  const offer = () => {
    const nodes = examples().slice(0, 3).map((example) => button(example, () => {
      text.value = set.text = example;
      ask();
    }, { dir: "auto", class: "example", title: example }));
    offers.replaceChildren(...(nodes.length ? [make("span", { class: "lead" }, "For example"), ...nodes] : []));
  };
  offer();
  const small = (node) => {
    node.classList.add("small");
    return node;
  };
  const model = choice(names, set.model, (value) => {
    set.model = value;
    offer();
    ask();
  });
  return [
    field("Sentence", text),
    offers,
    make("div", { class: "controls" },
      field("Model", model),
      field("Beside it", choice([["", "none"], ...names], set.beside, change("beside"))),
      small(field("Beam", beam)), small(field("Translations", best)),
      button("Translate", ask, { class: "primary" })),
  ];
}

// ---- one model's translation

function half(signal) {
  const place = stage("Translation", signal);
  const view = exhibitor({ view: "lines" }, signal);
  view.element.classList.add("alone");
  const element = make("div", { class: "card" }, place.element);

  function show(model, sentence, { beam, best }) {
    place.element.setAttribute("aria-label", `Translation by ${model.name}`);
    if (!sentence) {
      clear();
      place.body.replaceChildren(about(model), make("p", { class: "hint" }, "Type a sentence above."));
      return;
    }
    const question = { model: model.name, sentences: [sentence], beam, best, alignment: true, look: true };
    place.run((gone) => post("api/translate", question, gone), ({ translations: [found], exhibit }, body) => {
      body.replaceChildren(about(model), ...translated(found), view.element, ...others(found));
      if (exhibit?.exhibit.inputs.some(({ layers }) => layers.length)) view.show(exhibit);
      else view.clear();
      announce(`${model.name}: ${found.text}`);
    });
  }

  function clear() {
    place.clear();
    view.clear();
  }

  return { element, show, clear };
}

function translated({ text, score, tokens, note: remark, reason }) {
  const told = [`score ${tell(score, 3)}`, `${tokens.length} ${tokens.length === 1 ? "token" : "tokens"}`, reason ? remark : ""] // the view tells it otherwise
   .filter(Boolean).join(" · ");
  const nodes = [
    make("p", { class: "translation", dir: "auto" }, text || "(an empty translation)"),
    make("p", { class: "told" }, told),
  ];
  if (reason) nodes.push(make("div", { class: "notice calm" }, make("p", { dir: "auto" }, sentenceCase(reason))));
  return nodes;
}

function sentenceCase(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function others({ alternatives, text }) {
  const rest = alternatives.filter((one) => one.text !== text);
  if (!rest.length) return [];
  const items = rest.map((one) => make("li", {}, make("span", { dir: "auto" }, one.text || "(empty)"), " ", make("small", {}, tell(one.score, 3))));
  return [make("div", { class: "more" }, make("h3", {}, "Other translations, the next best first"), make("ol", { class: "alternatives", start: 2 }, ...items))];
}
