// Answers questions in the browser from the weights embedded in a page.
// If the weights are pooled, the answer for a position is the answer for its block.

function decodeArray(array) {
  if (!array || typeof array.data !== "string") return array; // not encoded
  const bytes = Uint8Array.from(atob(array.data), (character) => character.charCodeAt(0));
  return { shape: array.shape, data: new Float32Array(bytes.buffer) };
}

// One layer: its stored weights (h, rows, columns), and the number of queries and keys before pooling
export class EmbeddedLayer {
  constructor(stored, queries, keys) {
    this.stored = stored;
    this.queries = queries;
    this.keys = keys;
    const { shape: [heads, rows, columns], data } = decodeArray(stored.weights);
    this.headCount = heads;
    this.rows = rows;
    this.columns = columns;
    this.data = data;
    this.means = new Map();
  }

  get note() {
    return this.stored.pooled ? `means of ${this.rows} × ${this.columns} blocks; this file has no finer data` : "";
  }

  matrix(head) {
    const size = this.rows * this.columns;
    return this.data.subarray(head * size, (head + 1) * size);
  }

  selected(heads) {
    return heads ?? Array.from({ length: this.headCount }, (_, head) => head);
  }

  // The mean matrix of the given heads, cached
  mean(heads) {
    const selected = this.selected(heads);
    if (selected.length === 1) return this.matrix(selected[0]);
    const name = selected.join();
    if (!this.means.has(name)) {
      if (this.means.size > 8) this.means.clear();
      const sum = new Float32Array(this.rows * this.columns);
      for (const head of selected) {
        const matrix = this.matrix(head);
        for (let index = 0; index < sum.length; index += 1) sum[index] += matrix[index] / selected.length;
      }
      this.means.set(name, sum);
    }
    return this.means.get(name);
  }

  // Converts a range of positions to a range of stored rows or columns
  storedRange(start, stop, length, rows) {
    const first = Math.floor((start * rows) / length);
    return [first, Math.max(Math.ceil((stop * rows) / length), first + 1)];
  }

  tile({ heads, mean, rows = [0, this.queries], columns = [0, this.keys], height, width }) {
    const matrices = mean ? [this.mean(heads)] : this.selected(heads).map((head) => this.matrix(head));
    const [outRows, outColumns] = [Math.min(height, rows[1] - rows[0]), Math.min(width, columns[1] - columns[0])];
    const rowRanges = splitRange(rows, outRows).map(([a, b]) => this.storedRange(a, b, this.queries, this.rows));
    const columnRanges = splitRange(columns, outColumns).map(([a, b]) => this.storedRange(a, b, this.keys, this.columns));
    const data = new Float32Array(matrices.length * outRows * outColumns);
    let index = 0;
    for (const matrix of matrices) {
      for (const [top, bottom] of rowRanges) {
        for (const [left, right] of columnRanges) {
          data[index] = blockMean(matrix, this.columns, top, bottom, left, right);
          index += 1;
        }
      }
    }
    return { shape: [matrices.length, outRows, outColumns], data, note: this.note };
  }

  topk({ heads, side, position, k }) {
    const matrix = this.mean(heads);
    const byQuery = side === "query";
    const [length, stored] = byQuery ? [this.keys, this.columns] : [this.queries, this.rows];
    const [line] = byQuery ? this.storedRange(position, position + 1, this.queries, this.rows) : this.storedRange(position, position + 1, this.keys, this.columns);
    const weight = (other) => (byQuery ? matrix[line * this.columns + other] : matrix[other * this.columns + line]);
    return largestWeights(Float32Array.from({ length: stored }, (_, other) => weight(other)), k, length);
  }

  received({ heads, k, bins }) {
    const matrix = this.mean(heads);
    const sums = new Float32Array(this.columns);
    for (let index = 0; index < matrix.length; index += 1) sums[index % this.columns] += (matrix[index] * this.queries) / this.rows;
    const parts = splitRange([0, this.columns], Math.min(bins, this.columns));
    return { ...largestWeights(sums, k, this.keys), bins: parts.map(([a, b]) => blockMean(sums, this.columns, 0, 1, a, b)) };
  }

  heads({ heads = null }) {
    return { heads: (this.stored.heads ?? []).filter(({ head }) => heads?.includes(head) ?? true) };
  }

  numbers({ head, query, key }) {
    const [queries, keys] = [decodeArray(this.stored.query), decodeArray(this.stored.key)];
    if (!queries || !keys) throw new Error("This file has no query and key vectors.");
    const queryVector = vectorAt(queries, head, query);
    const keyVector = vectorAt(keys, head, key);
    const product = queryVector.reduce((sum, feature, index) => sum + feature * keyVector[index], 0);
    const { scale = 1, normalizer, formula } = this.stored;
    const taus = decodeArray(this.stored.tau);
    const tau = taus ? taus.data[head * taus.shape[1] + query] : null;
    const [row] = this.storedRange(query, query + 1, this.queries, this.rows);
    const [column] = this.storedRange(key, key + 1, this.keys, this.columns);
    const weight = this.matrix(head)[row * this.columns + column];
    const bias = this.stored.pooled ? 0 : inferBias(product * scale, weight, tau, normalizer);
    const score = product * scale + bias;
    const masked = weight === 0 && normalizer === "Softmax";
    return { query: queryVector, key: keyVector, scale, bias, score, masked, tau, weight, normalizer, formula };
  }
}

// The bias of a score, from weight = exp(score − τ); 0 if the normalizer is not softmax
function inferBias(product, weight, tau, normalizer) {
  if (normalizer !== "Softmax" || tau === null || !(weight > 1e-30)) return 0;
  const bias = Math.log(weight) + tau - product;
  return Math.abs(bias) < 1e-3 * (1 + Math.abs(product)) ? 0 : bias;
}

function vectorAt({ shape, data }, head, position) {
  const [, length, width] = shape;
  const start = (head * length + position) * width;
  return Array.from(data.subarray(start, start + width));
}

// Splits a range into parts of nearly equal length
function splitRange(range, parts) {
  const [start, stop] = range;
  const at = (part) => start + Math.floor((part * (stop - start)) / parts);
  return Array.from({ length: parts }, (_, part) => [at(part), at(part + 1)]);
}

function blockMean(matrix, columns, top, bottom, left, right) {
  let sum = 0;
  for (let row = top; row < bottom; row += 1) {
    for (let column = left; column < right; column += 1) sum += matrix[row * columns + column];
  }
  return sum / ((bottom - top) * (right - left));
}

function largestWeights(weights, k, length) {
  const order = [...weights.keys()].filter((index) => weights[index] > 0);
  order.sort((a, b) => weights[b] - weights[a]);
  const largest = order.slice(0, k);
  return {
    positions: largest.map((index) => Math.floor((index * length) / weights.length)),
    weights: largest.map((index) => weights[index]),
  };
}
