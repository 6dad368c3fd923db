// Word order: the effect of shuffling words, without positions and with each position encoding.

import { get, post } from "../../shared/client.js";
import { button, make, percent, select } from "../../shared/dom.js";
import { chips } from "../chips.js";
import { announce, debounce, field } from "../controls.js";
import { formatExact, formatNumber } from "../format.js";
import { bars, heat, matrix, scrollable } from "../matrix.js";
import { makePanel } from "../panel.js";

export const about = { place: 5, title: "Order", text: "Attention alone ignores word order. Shuffle the words, with and without positions.", chapters: ["order"] };

const KINDS = {
  none: ["no positions", "Attention alone treats a sentence as a set of words."],
  sinusoidal: ["sinusoidal", "Sine and cosine waves of many wavelengths, added to the word vectors."],
  learned: ["learned", "One vector per position, added to the word vectors (untrained here)."],
  rotary: ["rotary", "Query and key are rotated by an angle proportional to the position. The picture shows its cosine."],
  alibi: ["ALiBi", "The score decreases with distance, at a different rate in each head."],
  t5: ["T5", "A learned bias for each range of distances (untrained here)."],
};
const TOLERANCE = 1e-9; // smaller differences are float64 rounding
const MAX_WORDS = 24;
const WORD = /\p{Script=Han}|(?:(?!\p{Script=Han})[\p{L}\p{M}\p{N}])+(?:['’-][\p{L}\p{N}]+)*/gu; // without punctuation

const identity = (length) => Array.from({ length }, (_, index) => index);
const isIdentity = (order) => order.every((word, index) => word === index);

export function open({ element, state, save, signal }) {
  const settings = { sentence: state.sentence ?? "the dog chased the cat", positions: state.positions in KINDS ? state.positions : "none" };
  const words = () => (settings.sentence.match(WORD) ?? []).slice(0, MAX_WORDS);
  let order = parseOrder(state.order, words().length);

  const result = makePanel("Effect of the new order", signal);
  const gallery = makePanel("Position encodings", signal);
  const wordChips = chips({ changed: (next) => reorder(next) });
  const text = make("input", { maxlength: 400, dir: "auto", autocomplete: "off", spellcheck: "false", input: () => {
    settings.sentence = text.value;
    order = identity(words().length);
    wordChips.render(words(), order);
    updateSoon();
  } });
  text.value = settings.sentence;

  function reorder(next, focus) {
    order = next;
    wordChips.render(words(), order, focus);
    update();
  }

  function selectKind(kind) {
    settings.positions = kind;
    positions.value = kind;
    markSelected();
    update();
  }

  function update() {
    updateSoon.stop();
    save({ ...settings, order: isIdentity(order) ? "" : order.join(".") });
    if (!order.length) return result.clear();
    const sentence = words().join(" ");
    const kinds = Object.keys(KINDS);
    const request = (abort) => Promise.all(kinds.map((kind) => post("api/order", { sentence, order, positions: kind, seed: 0 }, abort)));
    result.run(request, (list, body) => {
      const answers = Object.fromEntries(kinds.map((kind, index) => [kind, list[index]]));
      body.replaceChildren(...showResult(answers, settings.positions, order, signal));
      announce(summarize(answers[settings.positions], settings.positions, order));
    });
  }

  const updateSoon = debounce(400, update);
  const positions = select(Object.entries(KINDS).map(([kind, [title]]) => [kind, title]), settings.positions, selectKind);
  const markSelected = () => gallery.body.querySelectorAll("button").forEach((node) => node.setAttribute("aria-pressed", String(node.dataset.kind === settings.positions)));
  const sentenceField = field("Sentence", text);
  sentenceField.classList.add("grow");

  wordChips.render(words(), order);
  element.replaceChildren(
    make("div", { class: "controls" }, sentenceField, field("Positions", positions)),
    make("div", { class: "card" }, make("h2", {}, "Move the words"), wordChips.element,
      make("div", { class: "flow" }, button("Shuffle", () => reorder(shuffle(order))), button("Reverse", () => reorder([...order].reverse())),
        button("Reset", () => reorder(identity(words().length)))),
      make("p", { class: "hint" }, `Drag a word, or select it with Tab and move it with the arrow keys. Up to ${MAX_WORDS} words, without punctuation.`)),
    result.element,
    make("div", { class: "card" }, make("h2", {}, "Position encodings"), gallery.element),
  );
  signal.addEventListener("abort", () => updateSoon.stop());
  if (isIdentity(order)) reorder(shuffle(order));
  else update();
  showEncodings(gallery, selectKind, markSelected, signal);
}

function parseOrder(text, length) {
  const order = (text ?? "").split(".").map(Number);
  const valid = order.length === length && new Set(order).size === length && order.every((index) => index >= 0 && index < length);
  return text && valid ? order : identity(length);
}

// Returns a different order, if there is one
function shuffle(order) {
  const next = [...order];
  for (let tries = 0; tries < 20; tries++) {
    for (let last = next.length - 1; last > 0; last--) {
      const other = Math.floor(Math.random() * (last + 1));
      [next[last], next[other]] = [next[other], next[last]];
    }
    if (next.some((word, index) => word !== order[index])) break;
  }
  return next;
}

// ---- the effect

const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
const meanNorm = (rows) => mean(rows.map((row) => Math.hypot(...row)));

function summarize({ change, before }, kind, order) {
  const max = Math.max(...change);
  const [title] = KINDS[kind];
  if (isIdentity(order)) return "The words are in their original order. Move one.";
  if (max < TOLERANCE) return `With ${title}, only the order changes: each word’s output stays the same. Largest difference: ${formatExact(max)}.`;
  return `With ${title} positions, each word’s output changes by ${formatNumber(mean(change))} on average. The mean norm of the outputs is ${formatNumber(meanNorm(before))}.`;
}

function showResult(answers, kind, order, signal) {
  const answer = answers[kind];
  const unchanged = Math.max(...answer.change) < TOLERANCE;
  const byKind = Object.entries(answers).map(([name, { change, before }]) => {
    const ratio = mean(change) / meanNorm(before);
    return [KINDS[name][0], ratio, mean(change) < TOLERANCE ? "·" : `${percent(ratio)}%`];
  });
  const max = Math.max(...answer.change, TOLERANCE);
  const byWord = answer.words.map((word, index) => [`${word}  ${index + 1} → ${order.indexOf(index) + 1}`, answer.change[index], formatNumber(answer.change[index])]);
  return [
    make("div", { class: `notice ${unchanged ? "calm" : ""}` }, make("p", { id: "summary" }, summarize(answer, kind, order))),
    make("div", { class: "pair" },
      make("div", { class: "card" }, make("h2", {}, "Change in each word’s output"), bars(byWord, { label: "Change in each word’s output", max: unchanged ? 1 : max })),
      make("div", { class: "card" }, make("h2", {}, "Mean change with each encoding"), bars(byKind, { label: "Mean change with each encoding", selected: KINDS[kind][0] }),
        make("p", { class: "hint" }, "Relative to the mean norm of the outputs."))),
    make("div", { class: "pair" },
      weightTable("Weights before", answer.words, answer.weights_before),
      weightTable("Weights after", answer.shuffled, answer.weights_after)),
    make("div", { class: "pair" },
      outputStrips("Outputs before", answer.words, answer.before, signal),
      outputStrips("Outputs after", answer.shuffled, answer.after, signal)),
  ];
}

function weightTable(title, words, values) {
  return make("div", { class: "card" }, make("h2", {}, title),
    scrollable(title, matrix({ label: title, rows: words, columns: words, values, max: 1, small: true })));
}

function outputStrips(title, words, values, signal) {
  const rows = values.map((row, index) => make("div", { class: "strip" },
    make("span", { dir: "auto", title: words[index] }, words[index]), heat([row], { label: `${title}: ${words[index]}`, ratio: "auto", signal })));
  return make("div", { class: "card" }, make("h2", {}, title), make("div", { class: "strips" }, ...rows));
}

// ---- the encodings

function showEncodings(gallery, selectKind, markSelected, signal) {
  const kinds = Object.keys(KINDS).filter((kind) => kind !== "none");
  const path = (kind) => `api/positions?kind=${kind}&length=64&width=${kind === "alibi" || kind === "t5" ? 8 : 64}`;
  gallery.run((abort) => Promise.all(kinds.map((kind) => get(path(kind), abort))), (answers, body) => {
    const figures = answers.map(({ values, rows, columns }, index) => {
      const [title, about] = KINDS[kinds[index]];
      const label = `${title}; rows: ${rows}, columns: ${columns}`;
      return make("figure", {}, heat(values, { label, ratio: "1", signal }),
        make("figcaption", {}, make("span", {}, `↓ ${rows}, → ${columns}. `), about),
        button(title, () => selectKind(kinds[index]), { "data-kind": kinds[index] }));
    });
    body.replaceChildren(make("div", { class: "gallery" }, ...figures));
    markSelected();
  });
}
