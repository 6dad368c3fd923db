// Views of attention: their descriptions, and answers to questions about their weights.

import { EmbeddedLayer } from "../attention/embedded.js";
import { logSumExp } from "./engine/ops.js";
import { headStatistics } from "./statistics.js";

const MAX_VIEWS = 16; // older views are dropped

// A layer: { name, label, kind, queries, keys, step }, where step is an attention step of a trace,
// or { …, weights } with one matrix (an alignment)
export class ViewStore {
  constructor(formulas) {
    this.formulas = formulas; // formulas of the normalizers, by name
    this.views = new Map();
    this.count = 0;
  }

  // inputs: [{ title, note, texts: [{ tokens, special }], layers }]. Returns the view's description
  add(title, inputs, normalize) {
    this.count += 1;
    const id = `local-${this.count}`;
    const described = inputs.map(({ layers, ...rest }) => ({ ...rest, layers: layers.map(describeLayer) }));
    const stored = inputs.map(({ layers, texts }) => layers.map((layer) => new EmbeddedLayer(
      this.store(layer, normalize), texts[layer.queries].tokens.length, texts[layer.keys].tokens.length)));
    const view = { id, title, inputs: described };
    this.views.set(id, { view, stored });
    if (this.views.size > MAX_VIEWS) this.views.delete(this.views.keys().next().value);
    return view;
  }

  get(id) {
    const view = this.views.get(id);
    if (!view) throw new Error("This view has expired. Run the text again.");
    return view;
  }

  describe(id) {
    return this.get(id).view;
  }

  ask(id, question, { input = 0, layer = 0, ...rest }) {
    const answer = this.get(id).stored[input][layer][question](rest);
    return question === "tile" ? encodeTile(answer) : answer;
  }

  store({ kind, step, weights }, normalize) {
    const heads = step ? step.weights : [weights];
    const statistics = heads.map((matrix, head) => ({ head, ...headStatistics(matrix, { cross: kind !== "self" }) }));
    const data = { weights: stack(heads), pooled: false, heads: statistics };
    if (!step) return { ...data, query: null, key: null, tau: null };
    const formula = this.formulas[normalize].replaceAll("{s}", "score");
    const normalizer = normalize[0].toUpperCase() + normalize.slice(1);
    return { ...data, query: stack(step.query), key: stack(step.key), scale: step.scale, normalizer, formula, tau: normalize === "softmax" ? taus(step) : null };
  }
}

function describeLayer({ name, label, kind, queries, keys, step }) {
  return { name, label, kind, heads: step ? step.weights.length : 1, queries, keys, vectors: Boolean(step) };
}

// h matrices → { shape: [h, rows, columns], data }
function stack(matrices) {
  const [{ rows, columns }] = matrices;
  const data = new Float32Array(matrices.length * rows * columns);
  matrices.forEach((matrix, index) => data.set(matrix.data, index * rows * columns));
  return { shape: [matrices.length, rows, columns], data };
}

// log Σ exp(score) over the visible keys of each row
function taus({ scores, causal }) {
  const rows = scores.flatMap((matrix) => Array.from({ length: matrix.rows }, (_, i) =>
    logSumExp(matrix.data.subarray(i * matrix.columns, causal ? i * matrix.columns + i + 1 : (i + 1) * matrix.columns))));
  return { shape: [scores.length, scores[0].rows], data: Float32Array.from(rows) };
}

// The format of the server: three uint32 for heads, height and width; then the weights as float32
function encodeTile({ shape, data }) {
  const bytes = new ArrayBuffer(12 + 4 * data.length);
  new Uint32Array(bytes, 0, 3).set(shape);
  new Float32Array(bytes, 12).set(data);
  return bytes;
}

// The attention steps of a trace as layers. textOf: name of a stack → index of its text
export function attentionLayers(stacks, textOf, label = layerLabel) {
  return stacks.flatMap(({ name, path, steps }) => steps.flatMap((trace, index) => trace.filter(({ kind }) => kind === "attention").map((step) => {
    const cross = step.name === "cross";
    const queries = textOf[name];
    return {
      name: `${path}blocks.${index}.${cross ? "cross" : "attention"}`, label: label(name, index, cross),
      kind: cross ? "cross" : "self", queries, keys: cross ? textOf.encoder : queries, step };
  })));
}

const layerLabel = (stack, index, cross) => `${stack} ${index}${cross ? " to source" : ""}`;
