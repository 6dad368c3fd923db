// A stack of Transformer blocks, with a trace of every step.
// pre-norm: x + f(norm(x)) (Xiong et al. 2020); post-norm: norm(x + f(x)) (Vaswani et al. 2017, section 3.1)

import { multiHeadAttention } from "./attention.js";
import { add, gelu, layerNorm, linear, map, relu, rmsNorm, row, silu, zeros, zerosLike } from "./ops.js";
import { scoreBias, sinusoidal } from "./positions.js";

// Parameters whose names start with a prefix: name → tensor or undefined
export function scoped(tensors, prefix) {
  return (name) => tensors.get(prefix ? `${prefix}.${name}` : name);
}

// The norm whose parameters have this prefix; the identity if the config has no norm
export function applyNorm(config, parameters, prefix, x) {
  if (config.norm === "none") return x;
  const norm = { weight: parameters(`${prefix}.weight`), bias: parameters(`${prefix}.bias`) };
  return config.norm === "rms" ? rmsNorm(x, norm, config.eps) : layerNorm(x, norm, config.eps);
}

// The position vectors that are added to the embeddings, or null
export function positionVectors(config, parameters, length, start = 0) {
  const { width } = config;
  if (config.positions === "sinusoidal") return fromRows(Array.from({ length }, (_, index) => sinusoidal(start + index, width)), width);
  if (config.positions !== "learned") return null;
  const table = parameters("positions.vectors");
  if (start + length > table.shape[0]) throw new Error(`The text has ${start + length} tokens; this model reads at most ${table.shape[0]}. Shorten it.`);
  return { data: table.data.slice(start * width, (start + length) * width), rows: length, columns: width };
}

function fromRows(list, width) {
  const result = zeros(list.length, width);
  list.forEach((values, index) => result.data.set(values, index * result.columns));
  return result;
}

// The rows of an embedding matrix for these ids, times a scale
export function embed(table, ids, scale = 1) {
  const width = table.shape[1];
  const result = zeros(ids.length, width);
  ids.forEach((id, index) => {
    if (!(id >= 0 && id < table.shape[0])) throw new Error(`Token ${id} is out of range for a vocabulary of ${table.shape[0]}; use this model’s tokenizer.`);
    result.data.set(table.data.subarray(id * width, (id + 1) * width), index * width);
  });
  return scale === 1 ? result : map(result, (value) => value * scale);
}

// x: input of the first block. Returns { layers: the output of each block, steps: the steps of each block }
// source: the encoder's output, or one projection of it per block; caches: one { key, value } per block
export function runBlocks(config, parameters, x, { causal = false, source = null, caches = null } = {}) {
  const layers = [];
  const steps = [];
  const bias = scoreBias(config, parameters("positions.table"), causal);
  for (let index = 0; index < config.layers; index += 1) {
    const own = (name) => parameters(`blocks.${index}.${name}`);
    const trace = [];
    x = runBlock(config, own, x, { causal, source: Array.isArray(source) ? source[index] : source, bias, cache: caches?.[index], trace });
    layers.push(x);
    steps.push(trace);
  }
  return { layers, steps };
}

export function runBlock(config, parameters, x, { causal, source, bias, cache, trace }) {
  const attend = (prefix, name, options) => (y) => {
    const step = multiHeadAttention(config, (part) => parameters(`${prefix}.${part}`), y, options);
    trace.push({ kind: "attention", name, causal: Boolean(options.causal), ...step });
    return step.output;
  };
  x = residual(config, parameters, ["attention_residual", "self"], x, attend("attention", "self", { causal, bias, cache }), trace);
  if (source) x = residual(config, parameters, ["cross_residual", "cross"], x, attend("cross", "cross", { source }), trace);
  return residual(config, parameters, ["feed_forward_residual", "feed-forward"], x, (y) => {
    const { hidden, output } = feedForward(config, parameters, y);
    trace.push({ kind: "feed_forward", name: "feed-forward", hidden, output });
    return output;
  }, trace);
}

// prefix: start of the names of the norm's parameters; name: name of the sublayer in the trace
function residual(config, parameters, [prefix, name], x, sublayer, trace) {
  const norm = (input) => {
    const output = applyNorm(config, parameters, `${prefix}.norm`, input);
    if (config.norm !== "none") trace.push({ kind: "norm", name, input, output });
    return output;
  };
  const branch = sublayer(config.norm_first ? norm(x) : x);
  const sum = add(x, branch);
  trace.push({ kind: "residual", name, output: sum });
  return config.norm_first ? sum : norm(sum);
}

function feedForward(config, parameters, x) {
  let hidden = linear(x, parameters("feed_forward.in_proj.weight"), parameters("feed_forward.in_proj.bias"));
  if (config.activation === "swiglu") hidden = gated(hidden);
  else hidden = map(hidden, config.activation === "gelu" ? gelu : relu);
  return { hidden, output: linear(hidden, parameters("feed_forward.out_proj.weight"), parameters("feed_forward.out_proj.bias")) };
}

// silu(gate) · hidden, where gate and hidden are the two halves of the features (Shazeer 2020, eq. 6)
function gated(x) {
  const half = x.columns / 2;
  const result = zerosLike(x, x.rows, half);
  for (let i = 0; i < x.rows; i += 1) {
    const values = row(x, i);
    for (let j = 0; j < half; j += 1) result.data[i * half + j] = silu(values[j]) * values[half + j];
  }
  return result;
}
