// Statistics of attention heads and their labels, as computed by regard.inspection.head_statistics without token ids.

const [SINK, DORMANT] = [0.3, 0.9]; // a row counts if its weight on the first key exceeds this threshold
const DOMINANT = 0.4; // a kind of key with at least this mean weight decides the label
const UNIFORM = 0.85; // a head with at least this normalized entropy counts as broad
const OFFSETS = { previous: -1, next: 1, same: 0 };
const LABELS = { previous: "previous token", next: "next token", same: "same token", first: "first token" };

// weights: (rows × columns) of one head. Returns { label, measures }
export function headStatistics(weights, { cross }) {
  const { rows, columns } = weights;
  if (!rows || !columns) return { label: "empty", measures: {} };
  const sums = {};
  const counts = {};
  const count = (name, value, by = 1) => {
    sums[name] = (sums[name] ?? 0) + value;
    counts[name] = (counts[name] ?? 0) + by;
  };
  for (let i = 0; i < rows; i += 1) measureRow(weights.data.subarray(i * columns, (i + 1) * columns), i, rows, cross, count);
  if (!counts.entropy) return { label: "mixed", measures: {} };
  const means = Object.fromEntries(Object.keys(counts).map((name) => [name, sums[name] / counts[name]]));
  means.normalized_entropy = means.entropy / (columns > 1 ? Math.log(columns) : 1);
  const finite = Object.entries(means).filter(([name, value]) => name !== "entropy" && Number.isFinite(value));
  const measures = Object.fromEntries(finite.map(([name, value]) => [name, Math.round(value * 1e6) / 1e6]));
  return { label: labelOf(Object.fromEntries(finite), columns, cross), measures };
}

function measureRow(row, i, rows, cross, count) {
  const total = row.reduce((sum, weight) => sum + weight, 0);
  if (total === 0) return;
  const keys = row.length;
  const center = cross ? (i + 0.5) * (keys / rows) - 0.5 : i + keys - rows;
  count("first", row[0]);
  count("sink", Number(row[0] > SINK));
  count("dormant", Number(row[0] > DORMANT));
  if (cross) {
    const radius = Math.max(1, 0.1 * keys);
    count("diagonal", row.reduce((sum, weight, key) => sum + (Math.abs(key - center) <= radius ? weight : 0), 0));
  } else {
    for (const [name, offset] of Object.entries(OFFSETS)) if (row[center + offset] !== undefined) count(name, row[center + offset]);
  }
  count("distance", row.reduce((sum, weight, key) => sum + weight * Math.abs(key - center), 0), total);
  count("entropy", row.reduce((sum, weight) => sum - (weight > 0 ? weight * Math.log(weight) : 0), 0));
}

// The dominant kind of key; otherwise "broad" or "mixed"
function labelOf(measures, keys, cross) {
  const broad = (measures.normalized_entropy ?? 0) >= UNIFORM;
  const otherwise = broad ? "broad" : "mixed";
  if (cross) return (measures.diagonal ?? 0) >= DOMINANT && !broad ? "diagonal" : otherwise;
  if (keys === 1) return "same token";
  const best = Object.keys(LABELS).reduce((a, b) => ((measures[b] ?? 0) > (measures[a] ?? 0) ? b : a));
  // in short texts, even uniform weights pass the threshold: require 1.5 × the uniform weight
  let uniform = 1 / keys;
  if (best === "first") uniform *= Array.from({ length: Math.min(keys, 20) }, (_, index) => 1 / (index + 1)).reduce((a, b) => a + b);
  return (measures[best] ?? 0) >= Math.max(DOMINANT, 1.5 * uniform) ? LABELS[best] : otherwise;
}
