// Example tables. Omitted settings have their default values.

export const DEFAULTS = { score: "scaled", normalize: "softmax", temperature: 1, mask: "none", window: 2 };

export const PRESETS = {
  words: {
    title: "Self-attention of three words",
    about: "Three words, each projected to a query, a key and a value.",
    query: [[1, 0, 2], [2, 2, 2], [2, 1, 3]],
    key: [[0, 1, 1], [4, 4, 0], [2, 3, 1]],
    value: [[1, 2, 3], [2, 8, 0], [2, 6, 3]],
    names: { query: ["word 1", "word 2", "word 3"], key: ["word 1", "word 2", "word 3"] },
    score: "dot",
  },
  dictionary: {
    title: "Dictionary",
    about: "Exact lookup: the keys are orthogonal, and the hard normalizer returns the value of the best match.",
    query: [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0.6, 0.4]],
    key: [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    value: [[10], [20], [30], [40]],
    names: { query: ["birthday?", "first name?", "a bit of both?"], key: ["first name", "last name", "birthday", "birthplace"] },
    score: "dot",
    normalize: "hard",
  },
  soft: {
    title: "Soft lookup",
    about: "Keys are points on a line, and values are measurements. Between two keys, their values are averaged.",
    query: [[0.5], [2], [3.4]],
    key: [[0], [1], [2], [3], [4]],
    value: [[0], [0.84], [0.91], [0.14], [-0.76]],
    names: { query: ["at 0.5", "at 2", "at 3.4"], key: ["0", "1", "2", "3", "4"] },
    score: "gaussian",
    temperature: 0.25,
  },
  saturation: {
    title: "Saturation without √d",
    about: "With sixteen features, dot products are large and softmax saturates. Choose the scaled score to avoid this.",
    query: [wave(0, 1.3), wave(3, 1.3)],
    key: [wave(0.7, 1.2), wave(1.6, 1.3), wave(2.9, 1.2), wave(4.4, 1.3)],
    value: [[1, 0], [0, 1], [-1, 0], [0, -1]],
    names: { query: [], key: [] },
    score: "dot",
  },
};

// Sixteen numbers with one decimal
function wave(shift, size) {
  return Array.from({ length: 16 }, (_, index) => Math.round(10 * size * Math.sin(1.7 * index + shift)) / 10);
}

export const SCORES = [
  ["dot", "dot: q · k"],
  ["scaled", "scaled: q · k / √d"],
  ["cosine", "cosine: q · k / (‖q‖ ‖k‖)"],
  ["gaussian", "Gaussian: −‖q − k‖² / 2"],
  ["additive", "additive: Σ tanh(q + k)"],
];

// Normalizers from hard to soft, then normalizers whose rows need not sum to 1
export const NORMALIZERS = [
  ["hard", "hard: only the best key"],
  ["sparsemax", "sparsemax"],
  ["entmax15", "entmax 1.5"],
  ["softmax", "softmax"],
  ["softmax1", "softmax1: with a zero sink"],
  ["sigmoid", "sigmoid: independent keys"],
  ["relu", "relu"],
  ["mean", "mean"],
];

export const MASKS = [
  ["none", "none"],
  ["causal", "causal: no later keys"],
  ["window", "window: only nearby keys"],
];

// Formats a table as "1,0;0.5,2", for the URL
export function formatTable(rows) {
  return rows.map((row) => row.join(",")).join(";");
}

export function parseTable(text) {
  const rows = (text ?? "").split(";").map((row) => row.split(",").map(Number));
  const valid = rows.every((row) => row.length === rows[0].length && row.every(Number.isFinite));
  return text && valid && rows.length <= MAX_ROWS && rows[0].length <= MAX_COLUMNS ? rows : null;
}

export const MAX_ROWS = 12;
export const MAX_COLUMNS = 16;
