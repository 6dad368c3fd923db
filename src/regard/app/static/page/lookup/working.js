// One query worked out in numbers, key by key, as one would by hand.

import { make, plain, tell } from "../dom.js";
import { nameOf } from "./tables.js";

const wrapped = (number) => (number < 0 ? `(${plain(number)})` : plain(number));
const products = (one, other) => one.map((number, place) => `${wrapped(number)}·${wrapped(other[place])}`).join(" + ");
const dot = (one, other) => one.reduce((sum, number, place) => sum + number * other[place], 0);
const norm = (one) => Math.sqrt(dot(one, one));

const SCORES = {
  dot: (query, key, score) => `${products(query, key)} = ${plain(score)}`,
  scaled: (query, key, score) =>
    `${products(query, key)} = ${plain(dot(query, key))}; / √${query.length} = ${plain(score)}`,
  cosine: (query, key, score) =>
    `${products(query, key)} = ${plain(dot(query, key))}; / (${plain(norm(query))}·${plain(norm(key))}) = ${plain(score)}`,
  gaussian: (query, key, score) =>
    `−(${query.map((number, place) => `(${plain(number)} − ${wrapped(key[place])})²`).join(" + ")}) / 2 = ${plain(score)}`,
  additive: (query, key, score) =>
    `${query.map((number, place) => `tanh(${plain(number)} + ${wrapped(key[place])})`).join(" + ")} = ${plain(score)}`,
};

// What the normalizer does to one score, which the temperature has divided: τ is one number for the whole row
const WEIGHTS = {
  softmax: (s, tau) => `exp(${s} − ${tau})`,
  softmax1: (s, tau) => `exp(${s} − ${tau})`,
  sparsemax: (s, tau) => `max(${s} − ${tau}, 0)`,
  entmax15: (s, tau) => `max((${s} − ${tau}) / 2, 0)²`,
  sigmoid: (s, tau) => `1 / (1 + exp(−(${s} − ${tau})))`,
  relu: (s, tau, seen) => `max(${s}, 0) / ${seen}`,
  mean: (s, tau, seen) => `${s} / ${seen}`,
};

function weighed(s, place, { answer, settings, row }) {
  const told = tell(answer.weights[row][place], 3);
  if (answer.masked[row][place]) return `may not be looked at: ${told}`;
  if (settings.normalize === "hard") return answer.weights[row][place] > 0 ? `the largest score: ${told}` : `not the largest: ${told}`;
  const heat = Number(settings.temperature);
  const scaled = heat === 1 ? wrapped(s) : `${wrapped(s)}/${plain(heat)}`;
  const seen = answer.masked[row].filter((hidden) => !hidden).length;
  return `${WEIGHTS[settings.normalize](scaled, wrapped(answer.tau[row]), seen)} = ${told}`;
}

// A definition list of the keys: score, then weight; and the output of the row
export function worked(tables, settings, answer, row) {
  const query = tables.query[row];
  const lines = tables.key.map((key, place) => {
    const score = answer.scores[row][place];
    return make("div", { class: "by-hand" },
      make("dt", { dir: "auto" }, nameOf(tables, "key", place)),
      make("dd", {}, make("span", { class: "lead" }, "score"), make("span", {}, SCORES[settings.score](query, key, score))),
      make("dd", {}, make("span", { class: "lead" }, "weight"), make("span", {}, weighed(score, place, { answer, settings, row }))),
    );
  });
  const mixed = answer.output[row].map((number, column) => {
    const sum = answer.weights[row].map((weight, place) => `${plain(weight)}·${wrapped(tables.value[place][column])}`);
    return make("dd", {}, make("span", { class: "lead" }, `number ${column + 1}`), make("span", {}, `${sum.join(" + ")} = ${plain(number)}`));
  });
  const output = make("div", { class: "by-hand" }, make("dt", {}, "output"), ...mixed);
  return make("dl", { class: "working" }, ...lines, output);
}
