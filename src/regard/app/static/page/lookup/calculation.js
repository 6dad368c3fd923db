// The calculation for one query, key by key.

import { make } from "../../shared/dom.js";
import { formatExact, formatShort } from "../format.js";
import { nameOf } from "./tables.js";

// In a formula, three decimals are enough; a tooltip shows the exact weight
const short = (number) => (Math.abs(number) < 0.0005 ? "0" : formatShort(number));
const MAX_EXPONENT = 12; // larger scores are shown relative to τ: exp(s) would be an unreadable number

const wrapped = (number) => (number < 0 ? `(${short(number)})` : short(number));
const products = (a, b) => a.map((number, index) => `${wrapped(number)}·${wrapped(b[index])}`).join(" + ");
const dot = (a, b) => a.reduce((sum, number, index) => sum + number * b[index], 0);
const norm = (a) => Math.sqrt(dot(a, a));

const SCORES = {
  dot: (query, key, score) => `${products(query, key)} = ${short(score)}`,
  scaled: (query, key, score) =>
    `${products(query, key)} = ${short(dot(query, key))}; / √${query.length} = ${short(score)}`,
  cosine: (query, key, score) =>
    `${products(query, key)} = ${short(dot(query, key))}; / (${short(norm(query))}·${short(norm(key))}) = ${short(score)}`,
  gaussian: (query, key, score) =>
    `−(${query.map((number, index) => `(${short(number)} − ${wrapped(key[index])})²`).join(" + ")}) / 2 = ${short(score)}`,
  additive: (query, key, score) =>
    `${query.map((number, index) => `tanh(${short(number)} + ${wrapped(key[index])})`).join(" + ")} = ${short(score)}`,
};

// The server's formula with the values of one score filled in; τ is the same for the whole row
function weightFormula(score, index, { answer, settings, row }) {
  const weight = short(answer.weights[row][index]);
  if (answer.masked[row][index]) return `masked: ${weight}`;
  if (settings.normalize === "hard") return answer.weights[row][index] > 0 ? `the largest score: ${weight}` : `not the largest: ${weight}`;
  const visible = answer.masked[row].filter((masked) => !masked).length;
  if (settings.normalize === "softmax") {
    const scores = answer.scores[row].filter((_, key) => !answer.masked[row][key]).map((other) => other / settings.temperature);
    if (Math.abs(Math.max(...scores)) < MAX_EXPONENT) {
      const sum = scores.reduce((total, other) => total + Math.exp(other), 0);
      const part = Math.exp(score / settings.temperature);
      const exponent = settings.temperature === 1 ? short(score) : `${wrapped(score)} / ${short(settings.temperature)}`;
      return `exp(${exponent}) / Σ exp = ${short(part)} / ${short(sum)} = ${weight}`;
    }
  }
  const formula = answer.formula.normalize
    .replace(/\bs\b/g, () => wrapped(score)).replaceAll("τ", () => wrapped(answer.tau[row])).replace(/\bn\b/g, () => String(visible));
  return `${formula} = ${weight}`;
}

// A definition list: score and weight of each key, then the output
export function calculation(tables, settings, answer, row) {
  const query = tables.query[row];
  const keys = tables.key.map((key, index) => {
    const score = answer.scores[row][index];
    return make("div", { class: "by-hand" },
      make("dt", { dir: "auto" }, nameOf(tables, "key", index)),
      make("dd", {}, make("span", { class: "lead" }, "score"), make("span", {}, SCORES[settings.score](query, key, score))),
      make("dd", {}, make("span", { class: "lead" }, "weight"), make("span", { title: formatExact(answer.weights[row][index]) }, weightFormula(score, index, { answer, settings, row }))),
    );
  });
  const outputs = answer.output[row].map((number, column) => {
    const terms = answer.weights[row].map((weight, index) => `${short(weight)}·${wrapped(tables.value[index][column])}`);
    return make("dd", {}, make("span", { class: "lead" }, `number ${column + 1}`), make("span", {}, `${terms.join(" + ")} = ${short(number)}`));
  });
  const output = make("div", { class: "by-hand" }, make("dt", {}, "output"), ...outputs);
  return make("dl", { class: "working" }, ...keys, output);
}
