// Operations on row-major matrices: { data, rows, columns }, with data in float32 or float64.
// Results have the type of the first operand. Sums are computed in float64.

export function zeros(rows, columns) {
  return { data: new Float32Array(rows * columns), rows, columns };
}

// A matrix of zeros of the same type as x
export function zerosLike(x, rows = x.rows, columns = x.columns) {
  return { data: new x.data.constructor(rows * columns), rows, columns };
}

export function row({ data, columns }, index) {
  return data.subarray(index * columns, (index + 1) * columns);
}

export function toRows(matrix) {
  return Array.from({ length: matrix.rows }, (_, index) => Array.from(row(matrix, index)));
}

// x Wᵀ + b. weight: { shape: [outputs, inputs], data }; bias: { data } or undefined
export function linear(x, weight, bias) {
  const [outputs, inputs] = weight.shape;
  if (x.columns !== inputs) throw new Error(`The input has ${x.columns} features, but the weight has shape ${outputs} × ${inputs}.`);
  const result = zerosLike(x, x.rows, outputs);
  for (let i = 0; i < x.rows; i += 1) {
    for (let j = 0; j < outputs; j += 1) {
      let sum = bias ? bias.data[j] : 0;
      for (let k = 0, a = i * inputs, b = j * inputs; k < inputs; k += 1) sum += x.data[a + k] * weight.data[b + k];
      result.data[i * outputs + j] = sum;
    }
  }
  return result;
}

export function add(a, b) {
  const result = zerosLike(a);
  for (let i = 0; i < result.data.length; i += 1) result.data[i] = a.data[i] + b.data[i];
  return result;
}

export function map(x, f) {
  return { ...x, data: x.data.map(f) };
}

// columns [start, stop) of a matrix
export function columns(x, start, stop) {
  const result = zerosLike(x, x.rows, stop - start);
  for (let i = 0; i < x.rows; i += 1) result.data.set(row(x, i).subarray(start, stop), i * result.columns);
  return result;
}

// (x − mean) / √(variance + eps) · weight + bias
export function layerNorm(x, { weight, bias }, eps) {
  return normalizeRows(x, (values) => {
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length;
    return [mean, 1 / Math.sqrt(variance + eps)];
  }, weight, bias);
}

// x / √(mean square + eps) · weight
export function rmsNorm(x, { weight }, eps) {
  return normalizeRows(x, (values) => [0, 1 / Math.sqrt(values.reduce((sum, value) => sum + value * value, 0) / values.length + eps)], weight);
}

function normalizeRows(x, statistics, weight, bias) {
  const result = zerosLike(x);
  for (let i = 0; i < x.rows; i += 1) {
    const [mean, scale] = statistics(row(x, i));
    for (let j = 0, at = i * x.columns; j < x.columns; j += 1, at += 1) {
      result.data[at] = (x.data[at] - mean) * scale * (weight ? weight.data[j] : 1) + (bias ? bias.data[j] : 0);
    }
  }
  return result;
}

export const relu = (x) => Math.max(x, 0);
export const silu = (x) => x / (1 + Math.exp(-x));
export const gelu = (x) => (x * (1 + erf(x / Math.SQRT2))) / 2;

// 2/√π e^(−x²) Σ 2ⁿ x^(2n+1) / (2n+1)!!: all terms have the same sign (Abramowitz and Stegun, 7.1.6)
export function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let term = x;
  let sum = x;
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n += 1) {
    term *= (2 * x * x) / (2 * n + 1);
    sum += term;
  }
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

export function logSumExp(values) {
  let max = -Infinity;
  for (const value of values) max = Math.max(max, value);
  let sum = 0;
  for (const value of values) sum += Math.exp(value - max);
  return max + Math.log(sum);
}

export function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i += 1) if (values[i] > values[best]) best = i;
  return best;
}

// The indices of the k largest values, largest first
export function topIndices(values, k) {
  const order = Array.from(values.keys());
  order.sort((a, b) => values[b] - values[a] || a - b);
  return order.slice(0, k);
}
