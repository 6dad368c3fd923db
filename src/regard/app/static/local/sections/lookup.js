// Attention over a small table, step by step, in float64, computed as in regard.app.server.routes.lessons.

import { NORMALIZERS } from "../engine/normalizers.js";

const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
const norm = (a) => Math.sqrt(dot(a, a));
const SCORES = {
  dot,
  scaled: (q, k) => dot(q, k) / Math.sqrt(q.length),
  cosine: (q, k) => dot(q, k) / (Math.max(norm(q), 1e-12) * Math.max(norm(k), 1e-12)),
  gaussian: (q, k) => -q.reduce((sum, value, index) => sum + (value - k[index]) ** 2, 0) / 2,
  additive: (q, k) => q.reduce((sum, value, index) => sum + Math.tanh(value + k[index]), 0),
};

// Whether query i may attend to key j; the last query is aligned to the last key
function allowed({ mask, window }, i, j, queries, keys) {
  const distance = j - (i + keys - queries);
  if (mask === "causal") return distance <= 0;
  return mask === "window" ? Math.abs(distance) <= window : true;
}

// formulas: { scores: name → text, normalizers: name → text with {s} for the score }
export function lookup(formulas, request) {
  const { query, key, value, score = "scaled", normalize = "softmax", temperature = 1, mask = "none", window = 2 } = request;
  for (const [name, table] of Object.entries({ query, key, value })) checkTable(name, table);
  if (query[0].length !== key[0].length) throw new Error(`query has ${query[0].length} features and key has ${key[0].length}; the numbers must be equal.`);
  if (key.length !== value.length) throw new Error(`There are ${key.length} keys and ${value.length} values; there must be one value per key.`);
  const scores = query.map((q) => key.map((k) => SCORES[score](q, k)));
  const masked = scores.map((line, i) => line.map((_, j) => !allowed({ mask, window }, i, j, query.length, key.length)));
  const rows = scores.map((line, i) => NORMALIZERS[normalize](line.map((s, j) => (masked[i][j] ? -Infinity : s / temperature))));
  const weights = rows.map((row) => row.weights);
  const symbol = temperature === 1 ? "s" : `(s / ${Number(temperature.toPrecision(6))})`;
  return {
    scores, masked, weights,
    output: weights.map((line) => value[0].map((_, column) => line.reduce((sum, weight, j) => sum + weight * value[j][column], 0))),
    tau: rows.map(({ tau }) => tau),
    formula: { score: formulas.scores[score], normalize: formulas.normalizers[normalize].replaceAll("{s}", symbol), output: "Σ w v" },
  };
}

function checkTable(name, rows) {
  const wrong = rows.findIndex((row) => row.length !== rows[0].length);
  if (wrong >= 0) throw new Error(`${name}: row 0 has ${rows[0].length} numbers and row ${wrong} has ${rows[wrong].length}; all rows must have the same length.`);
}
