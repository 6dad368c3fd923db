// The questions, answered in the browser from weights that are inside the page.
// Where the page holds fewer weights than there are ("pooled"), a place stands for its block.

export function decodeFloats(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

function unpack(packed) {
  return packed ? { shape: packed.shape, data: decodeFloats(packed.data) } : null;
}

// One layer: its weights as held (h, rows, columns), and the lengths they stand for
export class EmbeddedLayer {
  constructor(stored, queries, keys) {
    this.stored = stored;
    this.queries = queries;
    this.keys = keys;
    const { shape, data } = unpack(stored.weights);
    [this.heads, this.rows, this.columns] = shape;
    this.data = data;
    this.means = new Map();
  }

  get note() {
    return this.stored.pooled ? `means of ${this.rows} × ${this.columns} blocks: this file holds no more` : "";
  }

  matrix(head) {
    const size = this.rows * this.columns;
    return this.data.subarray(head * size, (head + 1) * size);
  }

  chosen(heads) {
    return heads ?? Array.from({ length: this.heads }, (_, head) => head);
  }

  // The mean matrix of some heads, kept: many questions about the same heads follow each other
  mean(heads) {
    const chosen = this.chosen(heads);
    if (chosen.length === 1) return this.matrix(chosen[0]);
    const name = chosen.join();
    if (!this.means.has(name)) {
      if (this.means.size > 8) this.means.clear();
      const sum = new Float32Array(this.rows * this.columns);
      for (const head of chosen) {
        const matrix = this.matrix(head);
        for (let place = 0; place < sum.length; place += 1) sum[place] += matrix[place] / chosen.length;
      }
      this.means.set(name, sum);
    }
    return this.means.get(name);
  }

  // From a range of places to the range of rows or columns that are held for them
  held(first, last, length, rows) {
    const from = Math.floor((first * rows) / length);
    return [from, Math.max(Math.ceil((last * rows) / length), from + 1)];
  }

  tile({ heads, mean, rows, columns, height, width }) {
    const matrices = mean ? [this.mean(heads)] : this.chosen(heads).map((head) => this.matrix(head));
    const [tall, wide] = [Math.min(height, rows[1] - rows[0]), Math.min(width, columns[1] - columns[0])];
    const down = cuts(rows, tall).map(([a, b]) => this.held(a, b, this.queries, this.rows));
    const along = cuts(columns, wide).map(([a, b]) => this.held(a, b, this.keys, this.columns));
    const data = new Float32Array(matrices.length * tall * wide);
    let place = 0;
    for (const matrix of matrices) {
      for (const [top, bottom] of down) {
        for (const [left, right] of along) {
          data[place] = blockMean(matrix, this.columns, top, bottom, left, right);
          place += 1;
        }
      }
    }
    return { facts: { note: this.note }, arrays: [{ shape: [matrices.length, tall, wide], data }] };
  }

  top({ heads, side, place, most }) {
    const matrix = this.mean(heads);
    const byQuery = side === "query";
    const [across, lines] = byQuery ? [this.keys, this.columns] : [this.queries, this.rows];
    const [own] = byQuery ? this.held(place, place + 1, this.queries, this.rows) : this.held(place, place + 1, this.keys, this.columns);
    const at = (other) => (byQuery ? matrix[own * this.columns + other] : matrix[other * this.columns + own]);
    return { facts: strongestOf(Float32Array.from({ length: lines }, (_, other) => at(other)), most, across), arrays: [] };
  }

  received({ heads, most, bins }) {
    const matrix = this.mean(heads);
    const sums = new Float32Array(this.columns);
    for (let place = 0; place < matrix.length; place += 1) sums[place % this.columns] += (matrix[place] * this.queries) / this.rows;
    const parts = cuts([0, this.columns], Math.min(bins, this.columns));
    const data = Float32Array.from(parts, ([a, b]) => blockMean(sums, this.columns, 0, 1, a, b));
    return { facts: strongestOf(sums, most, this.keys), arrays: [{ shape: [data.length], data }] };
  }

  thumbnails({ size, heads = null }) {
    const whole = { heads, mean: false, rows: [0, this.queries], columns: [0, this.keys], height: size, width: size };
    return { facts: { heads: (this.stored.heads ?? []).filter(({ head }) => heads?.includes(head) ?? true) }, arrays: this.tile(whole).arrays };
  }

  numbers({ head, query, key }) {
    const [queries, keys] = [unpack(this.stored.query), unpack(this.stored.key)];
    if (!queries || !keys) throw new Error("this file holds the weights and not the vectors they were made of");
    const one = vectorAt(queries, head, query);
    const other = vectorAt(keys, head, key);
    const product = one.reduce((sum, feature, place) => sum + feature * other[place], 0);
    const { scale = 1, normalizer, formula } = this.stored;
    const taus = unpack(this.stored.tau);
    const tau = taus ? taus.data[head * taus.shape[1] + query] : null;
    const [row] = this.held(query, query + 1, this.queries, this.rows);
    const [column] = this.held(key, key + 1, this.keys, this.columns);
    const weight = this.matrix(head)[row * this.columns + column];
    const bias = this.stored.pooled ? 0 : addedTo(product * scale, weight, tau, normalizer);
    const score = product * scale + bias;
    const masked = weight === 0 && normalizer === "Softmax";
    return { facts: { query: one, key: other, scale, bias, score, masked, tau, weight, normalizer, formula }, arrays: [] };
  }
}

// What else is in the score, where softmax lets it be told from the weight: weight = exp(score − τ)
function addedTo(product, weight, tau, normalizer) {
  if (normalizer !== "Softmax" || tau === null || !(weight > 1e-30)) return 0;
  const bias = Math.log(weight) + tau - product;
  return Math.abs(bias) < 1e-3 * (1 + Math.abs(product)) ? 0 : bias;
}

function vectorAt({ shape, data }, head, place) {
  const [, length, width] = shape;
  const start = (head * length + place) * width;
  return Array.from(data.subarray(start, start + width));
}

// A range in so many parts, as even as can be
function cuts([first, last], parts) {
  const at = (part) => first + Math.floor((part * (last - first)) / parts);
  return Array.from({ length: parts }, (_, part) => [at(part), at(part + 1)]);
}

function blockMean(matrix, columns, top, bottom, left, right) {
  let sum = 0;
  for (let row = top; row < bottom; row += 1) {
    for (let column = left; column < right; column += 1) sum += matrix[row * columns + column];
  }
  return sum / ((bottom - top) * (right - left));
}

function strongestOf(weights, most, length) {
  const order = [...weights.keys()].filter((place) => weights[place] > 0);
  order.sort((one, other) => weights[other] - weights[one]);
  const first = order.slice(0, most);
  return {
    places: first.map((place) => Math.floor((place * length) / weights.length)),
    weights: first.map((place) => weights[place]),
  };
}
