// Position encodings: vectors added to the embeddings, rotations of queries and keys, biases of the scores.

// The angle whose sine and cosine encode a position: position · base^(−2i / width)
function angle(position, pair, width, base = 10_000) {
  return position * base ** ((-2 * pair) / width);
}

// sin at even and cos at odd indices (Vaswani et al. 2017, section 3.5)
export function sinusoidal(position, width) {
  return Array.from({ length: width }, (_, feature) => {
    const x = angle(position, feature >> 1, width);
    return feature % 2 ? Math.cos(x) : Math.sin(x);
  });
}

// Cosines of the angles by which rotary positions rotate each pair of features
export function rotaryCosines(position, width) {
  return Array.from({ length: width / 2 }, (_, pair) => Math.cos(angle(position, pair, width)));
}

// Rotates a vector in place, pairing feature i with feature i + d/2 (Su et al. 2021, eq. 34)
export function rotate(vector, position) {
  const half = vector.length / 2;
  for (let pair = 0; pair < half; pair += 1) {
    const x = angle(position, pair, vector.length);
    const [cos, sin] = [Math.cos(x), Math.sin(x)];
    const [a, b] = [vector[pair], vector[pair + half]];
    vector[pair] = a * cos - b * sin;
    vector[pair + half] = b * cos + a * sin;
  }
}

// The slope of each head; the bias is −slope · |distance| (Press et al. 2022, section 3)
export function alibiSlopes(heads) {
  const power = 2 ** Math.floor(Math.log2(heads));
  const slopes = Array.from({ length: power }, (_, head) => 2 ** ((-8 * (head + 1)) / power));
  if (power === heads) return slopes;
  return [...slopes, ...alibiSlopes(2 * power).filter((_, index) => index % 2 === 0).slice(0, heads - power)];
}

// The bucket of a key − query distance (Raffel et al. 2020, section 2.1)
export function t5Bucket(distance, { buckets = 32, maxDistance = 128, bidirectional = true } = {}) {
  const size = bidirectional ? buckets >> 1 : buckets;
  const base = bidirectional && distance > 0 ? size : 0;
  const far = bidirectional ? Math.abs(distance) : Math.max(-distance, 0);
  const exact = size >> 1;
  if (far < exact) return base + far;
  const growth = Math.fround(Math.fround(Math.log(far / exact)) / Math.fround(Math.log(maxDistance / exact)));
  return base + Math.min(exact + Math.floor(growth * (size - exact)), size - 1);
}

// Returns the function bias(head, distance), which is added to the scores, or null if the encoding has none
export function scoreBias({ positions, heads }, table, causal) {
  if (positions === "alibi") {
    const slopes = alibiSlopes(heads);
    return (head, distance) => -slopes[head] * Math.abs(distance);
  }
  if (positions === "t5") return (head, distance) => table.data[t5Bucket(distance, { bidirectional: !causal }) * heads + head];
  return null;
}
