// The calculation for one query, key by key.

import { make } from "../../shared/dom.js";
import { formatNumber, formatShort } from "../format.js";
import { nameOf } from "./tables.js";

const wrapped = (number) => (number < 0 ? `(${formatShort(number)})` : formatShort(number));
const products = (a, b) => a.map((number, index) => `${wrapped(number)}·${wrapped(b[index])}`).join(" + ");
const dot = (a, b) => a.reduce((sum, number, index) => sum + number * b[index], 0);
const norm = (a) => Math.sqrt(dot(a, a));

const SCORES = {
  dot: (query, key, score) => `${products(query, key)} = ${formatShort(score)}`,
  scaled: (query, key, score) =>
    `${products(query, key)} = ${formatShort(dot(query, key))}; / √${query.length} = ${formatShort(score)}`,
  cosine: (query, key, score) =>
    `${products(query, key)} = ${formatShort(dot(query, key))}; / (${formatShort(norm(query))}·${formatShort(norm(key))}) = ${formatShort(score)}`,
  gaussian: (query, key, score) =>
    `−(${query.map((number, index) => `(${formatShort(number)} − ${wrapped(key[index])})²`).join(" + ")}) / 2 = ${formatShort(score)}`,
  additive: (query, key, score) =>
    `${query.map((number, index) => `tanh(${formatShort(number)} + ${wrapped(key[index])})`).join(" + ")} = ${formatShort(score)}`,
};

// The server's formula with the values of one score filled in; τ is the same for the whole row
function weightFormula(score, index, { answer, settings, row }) {
  const weight = formatNumber(answer.weights[row][index], 3);
  if (answer.masked[row][index]) return `masked: ${weight}`;
  if (settings.normalize === "hard") return answer.weights[row][index] > 0 ? `the largest score: ${weight}` : `not the largest: ${weight}`;
  const visible = answer.masked[row].filter((masked) => !masked).length;
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
      make("dd", {}, make("span", { class: "lead" }, "weight"), make("span", {}, weightFormula(score, index, { answer, settings, row }))),
    );
  });
  const outputs = answer.output[row].map((number, column) => {
    const terms = answer.weights[row].map((weight, index) => `${formatShort(weight)}·${wrapped(tables.value[index][column])}`);
    return make("dd", {}, make("span", { class: "lead" }, `number ${column + 1}`), make("span", {}, `${terms.join(" + ")} = ${formatShort(number)}`));
  });
  const output = make("div", { class: "by-hand" }, make("dt", {}, "output"), ...outputs);
  return make("dl", { class: "working" }, ...keys, output);
}
