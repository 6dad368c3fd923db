// Multi-head attention (Vaswani et al. 2017, section 3.2.2), with every step of the computation.

import { NORMALIZERS } from "./normalizers.js";
import { columns, linear, row, zerosLike } from "./ops.js";
import { rotate } from "./positions.js";

// config: { width, heads, key_heads, normalize, positions }; parameters(name): a tensor or undefined
// source: the matrix that keys and values come from, or its projection { key, value }; null for self-attention
// cache: { key, value } of earlier positions. bias(head, distance): see scoreBias
export function multiHeadAttention(config, parameters, x, { source = null, causal = false, bias = null, cache = null } = {}) {
  const { heads } = config;
  const rotary = config.positions === "rotary" && source === null;
  const start = cache ? cache.key[0].rows : 0; // the position of the first row of x
  const query = splitHeads(project(config, parameters, x, 0), heads, rotary, start);
  const own = source?.key ? source : projectSource(config, parameters, source ?? x, rotary, start);
  const all = cache ? { key: join(cache.key, own.key), value: join(cache.value, own.value) } : own;
  const [key, value] = [shareHeads(all.key, heads), shareHeads(all.value, heads)];
  const scale = 1 / Math.sqrt(config.width / heads);
  const results = query.map((each, head) => attendHead(each, key[head], value[head], {
    scale, start, causal, bias: bias && ((distance) => bias(head, distance)), normalize: NORMALIZERS[config.normalize] }));
  const merged = mergeHeads(results.map(({ mixed }) => mixed));
  return {
    query, key, value, scale, cache: all,
    scores: results.map(({ scores }) => scores),
    weights: results.map(({ weights }) => weights),
    mixed: results.map(({ mixed }) => mixed),
    output: linear(merged, parameters("out_proj.weight"), parameters("out_proj.bias")),
  };
}

// Keys and values of each key head
export function projectSource(config, parameters, x, rotary = false, start = 0) {
  return {
    key: splitHeads(project(config, parameters, x, 1), config.key_heads, rotary, start),
    value: splitHeads(project(config, parameters, x, 2), config.key_heads, false, start),
  };
}

// Each key head serves several query heads (Ainslie et al. 2023)
function shareHeads(list, heads) {
  return Array.from({ length: heads }, (_, head) => list[Math.floor((head * list.length) / heads)]);
}

function join(before, after) {
  return before.map((a, head) => {
    const b = after[head];
    const result = zerosLike(a, a.rows + b.rows);
    result.data.set(a.data);
    result.data.set(b.data, a.data.length);
    return result;
  });
}

// Part 0, 1 or 2 of the projection to queries, keys and values
function project({ width, heads, key_heads: keyHeads }, parameters, x, part) {
  const sizes = [heads, keyHeads, keyHeads].map((count) => (count * width) / heads);
  const first = sizes.slice(0, part).reduce((sum, size) => sum + size, 0);
  const weight = parameters("in_proj.weight");
  const bias = parameters("in_proj.bias");
  const inputs = weight.shape[1];
  return linear(x, { shape: [sizes[part], inputs], data: weight.data.subarray(first * inputs, (first + sizes[part]) * inputs) },
    bias && { data: bias.data.subarray(first, first + sizes[part]) });
}

// n (h d) -> h n d
function splitHeads(x, heads, rotary, start) {
  const size = x.columns / heads;
  return Array.from({ length: heads }, (_, head) => {
    const part = columns(x, head * size, (head + 1) * size);
    if (rotary) for (let position = 0; position < part.rows; position += 1) rotate(row(part, position), start + position);
    return part;
  });
}

// h n d -> n (h d)
function mergeHeads(parts) {
  const size = parts[0].columns;
  const result = zerosLike(parts[0], parts[0].rows, size * parts.length);
  parts.forEach((part, head) => {
    for (let i = 0; i < part.rows; i += 1) result.data.set(row(part, i), i * result.columns + head * size);
  });
  return result;
}

// One head; scores include the bias, but not the mask
function attendHead(query, key, value, { scale, start, causal, bias, normalize }) {
  const scores = zerosLike(query, query.rows, key.rows);
  const weights = zerosLike(query, query.rows, key.rows);
  const mixed = zerosLike(query, query.rows, value.columns);
  for (let i = 0; i < query.rows; i += 1) {
    const q = row(query, i);
    for (let j = 0; j < key.rows; j += 1) {
      const k = row(key, j);
      let sum = 0;
      for (let f = 0; f < q.length; f += 1) sum += q[f] * k[f];
      scores.data[i * key.rows + j] = sum * scale + (bias ? bias(j - i - start) : 0);
    }
    const visible = Array.from(row(scores, i), (score, j) => (causal && j > start + i ? -Infinity : score));
    weights.data.set(normalize(visible).weights, i * key.rows);
    const output = row(mixed, i);
    const own = row(weights, i);
    for (let f = 0; f < output.length; f += 1) {
      let sum = 0;
      for (let j = 0; j < key.rows; j += 1) sum += own[j] * value.data[j * value.columns + f];
      output[f] = sum;
    }
  }
  return { scores, weights, mixed };
}
