// The effect of word order on a random Transformer block, and position encodings, in float64.
// The random numbers are the same as in regard.app.server.routes.lessons.

import { add, row, toRows } from "../engine/ops.js";
import { alibiSlopes, rotaryCosines, scoreBias, sinusoidal, t5Bucket } from "../engine/positions.js";
import { runBlock } from "../engine/stack.js";
import { Generator } from "../random.js";

const T5_BUCKETS = 32;

// config: architecture of the random block
export function order(config, { sentence, order: indices, positions = "none", seed = 0 }) {
  const words = sentence.split(/\s+/u).filter(Boolean);
  const sorted = [...indices].sort((a, b) => a - b);
  if (sorted.length !== words.length || sorted.some((index, at) => index !== at)) {
    throw new Error(`order is [${indices}] for ${words.length} words; it must contain each number from 0 to ${words.length - 1} once.`);
  }
  const generator = new Generator(seed);
  const parameters = randomBlock(config, generator);
  const vocabulary = [...new Set(words)].sort(byCodePoint);
  const table = generator.normal(vocabulary.length * config.width);
  const vectors = (list) => fromRows(list.map((word) => {
    const at = vocabulary.indexOf(word) * config.width;
    return table.subarray(at, at + config.width);
  }));
  const encoding = randomPositions({ ...config, positions }, generator, words.length);
  const shuffled = indices.map((index) => words[index]);
  const before = run(encoding, parameters, vectors(words));
  const after = run(encoding, parameters, vectors(shuffled));
  const change = words.map((_, index) => distance(row(before.output, index), row(after.output, indices.indexOf(index))));
  return {
    words, shuffled, change,
    before: toRows(before.output), after: toRows(after.output),
    weights_before: before.weights, weights_after: after.weights,
  };
}

function byCodePoint(a, b) {
  const [first, second] = [[...a], [...b]];
  const at = first.findIndex((letter, index) => letter !== second[index]);
  if (at < 0) return first.length - second.length;
  return at >= second.length ? 1 : first[at].codePointAt(0) - second[at].codePointAt(0);
}

function float64(rows, columns) {
  return { data: new Float64Array(rows * columns), rows, columns };
}

function fromRows(list) {
  const result = float64(list.length, list[0].length);
  list.forEach((values, index) => result.data.set(values, index * result.columns));
  return result;
}

const distance = (a, b) => Math.sqrt(a.reduce((sum, value, index) => sum + (value - b[index]) ** 2, 0));

// Normally distributed weights with standard deviation 1/√inputs, no biases, and norms without learned parameters
function randomBlock({ width, ffn_dim: hidden }, generator) {
  const shapes = {
    "attention.in_proj": [3 * width, width], "attention.out_proj": [width, width],
    "feed_forward.in_proj": [hidden, width], "feed_forward.out_proj": [width, hidden],
  };
  const tensors = new Map();
  for (const [name, [outputs, inputs]] of Object.entries(shapes)) {
    tensors.set(`${name}.weight`, { shape: [outputs, inputs], data: generator.normal(outputs * inputs, inputs ** -0.5) });
  }
  return (name) => tensors.get(name);
}

function randomPositions(config, generator, length) {
  const { positions, width, heads } = config;
  if (positions === "learned") return { config, table: generator.normal(length * width, 1, true) };
  if (positions === "t5") return { config, table: generator.normal(T5_BUCKETS * heads, 1, true) };
  return { config, table: null };
}

// The output of the block and the mean weights of its heads
function run({ config, table }, parameters, x) {
  const { positions, width } = config;
  if (positions === "sinusoidal") x = add(x, fromRows(Array.from({ length: x.rows }, (_, position) => sinusoidal(position, width))));
  if (positions === "learned") x = add(x, { ...x, data: table.subarray(0, x.data.length) });
  const trace = [];
  const bias = scoreBias(config, { data: table }, false);
  const output = runBlock(config, parameters, x, { causal: false, source: null, bias, cache: null, trace });
  const { weights } = trace.find(({ kind }) => kind === "attention");
  const mean = float64(x.rows, x.rows);
  for (const head of weights) head.data.forEach((weight, index) => { mean.data[index] += weight / weights.length; });
  return { output, weights: toRows(mean) };
}

// A position encoding as a table: features by position, or a bias by distance
export function positions({ kind = "sinusoidal", length = 64, width = 64 }) {
  const generator = new Generator(0);
  const everyPosition = (f) => Array.from({ length }, (_, position) => f(position));
  const everyDistance = (f) => Array.from({ length: 2 * length - 1 }, (_, index) => f(index + 1 - length));
  const byPosition = (values, columns = "feature") => ({ values: rounded(values), rows: "position", columns, start: 0 });
  const byHead = (f) => ({
    values: rounded(Array.from({ length: width }, (_, head) => everyDistance((step) => f(head, step)))), rows: "head", columns: "distance", start: 1 - length });
  if (kind === "learned") {
    const table = generator.normal(length * width, 1, true);
    return byPosition(everyPosition((position) => Array.from(table.subarray(position * width, (position + 1) * width))));
  }
  if (kind === "rotary") return byPosition(everyPosition((position) => rotaryCosines(position, width - (width % 2))), "pair of features");
  if (kind === "alibi") {
    const slopes = alibiSlopes(width);
    return byHead((head, step) => -slopes[head] * Math.abs(step));
  }
  if (kind === "t5") {
    const table = generator.normal(T5_BUCKETS * width, 1, true);
    return byHead((head, step) => table[t5Bucket(step) * width + head]);
  }
  return byPosition(everyPosition((position) => sinusoidal(position, width)));
}

const rounded = (rows) => rows.map((values) => values.map((value) => Math.round(value * 1e6) / 1e6));
