// Explanations of a step: one sentence, its formula, and the formula with the numbers under the cursor.

import { formatExact, formatNumber, formatShort } from "../format.js";
import { plain } from "./draw_matrix.js";
import { isMasked, valueAt } from "./matrix.js";

const SHOWN = 3; // number of terms of a sum to write out
const number = (value) => formatNumber(value, 2);
const factor = (value) => (value < 0 ? `(${number(value)})` : number(value));

const ACTIVATIONS = { relu: ["max(0, W x + b)", "negative numbers become 0"], gelu: ["gelu(W x + b)", "negative numbers are damped to nearly 0"], swiglu: ["silu(W x) · (V x)", "one half gates the other"] };

const NORMS = {
  layer: ["Each row is shifted and scaled to mean 0 and variance 1, then multiplied by learned factors, so that no row dominates.", "(x − mean) / deviation · g + b"],
  rms: ["Each row is divided by its root mean square, then multiplied by learned factors, so that no row dominates.", "x / √mean(x²) · g"],
  none: ["This model has no norm: the rows stay as they are.", "x"],
};

// Sentences and formulas by role; `answer` is the response of api/inside
function describe(node, answer) {
  const keys = node.sublayer === "cross" ? "source tokens" : "tokens";
  const [activation, effect] = ACTIVATIONS[answer.activation] ?? [`${answer.activation}(W x + b)`, "a nonlinear function"];
  const width = answer.width / answer.heads;
  return {
    tokens: ["The text is split into tokens. Each token is one row of every matrix that follows.", ""],
    token_embedding: [`Each token has a learned vector of ${answer.width} numbers, looked up in a table.`, "x = table[token]"],
    position_embedding: ["A vector that depends only on the position tells the model where the token is.", "p = position vector"],
    embedding: [node.stack?.position_note ?? "", node.stack?.position_embedding ? "x = token vector + position vector" : "x = token vector"],
    norm: NORMS[answer.norm_type],
    query: [`What this token is looking for: a projection of its row to ${width} numbers.`, "q = W_q x"],
    key: [`What each of the ${keys} offers: a projection to compare with the queries.`, "k = W_k x"],
    value: [`What each of the ${keys} contributes to the queries that attend to it.`, "v = W_v x"],
    scores: ["How well each query matches each key: their dot product, divided by the square root of their length.", `s = q · k / √${width}`],
    weights: [`The scores of a row become weights${answer.normalize === "softmax" ? " that sum to 1" : ""}${node.matrix?.allowed?.flat().includes(false) ? "; hatched keys come later in the text and are masked" : ""}.`, answer.normalize && answer.normalize !== "softmax" ? `weight = ${answer.normalize}(s)` : "weight = exp(s) / Σ exp(s)"],
    mixed: ["The values are multiplied by these weights and summed.", "o = Σ weight · v"],
    projected: [`The outputs of all ${answer.heads} heads are joined and mixed by one learned matrix.`, "y = W_o [o₁, …, o_h]"],
    residual: ["The result is added to the vector of the token: layers add to the residual stream and never replace it.", "x + y"],
    hidden: [`${answer.feed_forward} learned features of each token, computed from that token alone; ${effect}.`, activation],
    feed_forward: ["The active features are written back as a vector of the model’s width.", "y = V h + c"],
    final: [answer.predictions ? "The vector of each token after the last layer; the last row predicts the next token." : "The vectors of the tokens in context, which a search engine or a classifier can use.", answer.norm === "pre" ? "norm(x)" : "x"],
    predictions: ["The last vector is compared with the vector of every token in the vocabulary; softmax turns these logits into probabilities. A low temperature T sharpens them, a high one flattens them.", "p = exp(logit / T) / Σ exp(logit / T)"],
    embeddingBlock: ["Tokens become vectors, and positions are added.", ""],
    layer: ["Attention moves information between tokens; the feed-forward layer processes each token separately. Both add their result to the residual stream.", ""],
    attention: [node.sublayer === "cross" ? "Each target token attends to the source tokens; every head has its own queries, keys and values." : `${answer.heads} heads, each with its own queries, keys and values: every token attends to the tokens it may see.`, "softmax(q kᵀ / √d) v"],
    head: [`One head: queries are compared with keys, ${answer.normalize} turns the scores into weights, and the output is the weighted sum of the values.`, `${answer.normalize}(q kᵀ / √${width}) v`],
    output: [answer.predictions ? "The last vector becomes a probability for every token in the vocabulary." : "This encoder ends with one vector per token; it does not predict a token.", ""],
    model: [summary(answer), ""],
  };
}

function summary(answer) {
  const kinds = { decoder: "A decoder-only language model", encoder: "An encoder", "encoder-decoder": "An encoder-decoder translator" };
  const layers = answer.stacks.map(({ layers }) => layers.length).join(" + ");
  const nouns = [layers === "1" ? "layer" : "layers", answer.heads === 1 ? "head" : "heads"];
  return `${kinds[answer.kind]}: ${layers} ${nouns[0]}, ${answer.heads} ${nouns[1]}, vectors of ${answer.width} numbers. Read it like text: from left to right, line by line.`;
}

// Returns { title, place, sentence, formula, numbers: [line, …] }
export function explain(node, cell, answer) {
  const key = node.kind === "matrix" ? node.role : node.kind === "embedding" ? "embeddingBlock" : node.kind;
  const [sentence, formula] = describe(node, answer)[key] ?? ["", ""];
  const numbers = cell && node.matrix ? (NUMBERS[node.role] ?? readOut)(node, cell, answer) : [];
  return { title: node.title, place: placeOf(node), sentence, formula, numbers };
}

function placeOf(node) {
  const names = [];
  for (let box = node.parent; box?.parent; box = box.parent) names.unshift(box.title);
  return names.join(" › ");
}

const token = (node, row) => `“${plain(node.rowTokens[row])}”`;
const sibling = (node, role) => node.parent.children.find((other) => other.role === role && other.matrix);

function readOut(node, { row, column }) {
  return [`${token(node, row)}, number ${column + 1} of ${node.columns}: ${formatExact(valueAt(node.matrix, row, column))}`];
}

// 0.1·2 + 0.3·(−1) + … = total
function products(pairs, total) {
  const terms = pairs.slice(0, SHOWN).map(([a, b]) => `${factor(a)}·${factor(b)}`);
  return `${terms.join(" + ")}${pairs.length > SHOWN ? ` + … (${pairs.length} terms)` : ""} = ${number(total)}`;
}

const NUMBERS = {
  scores: (node, { row, column }) => {
    const names = `${token(node, row)} → “${plain(node.columnTokens[column])}”`;
    const [query, key] = [sibling(node, "query").matrix, sibling(node, "key").matrix];
    const pairs = Array.from({ length: query.columns }, (_, index) => [valueAt(query, row, index), valueAt(key, column, index)]);
    const dot = pairs.reduce((sum, [a, b]) => sum + a * b, 0);
    const score = valueAt(node.matrix, row, column);
    const bias = score - node.scale * dot;
    const added = Math.abs(bias) > 1e-3 ? ` + position bias ${factor(bias)}` : "";
    const masked = isMasked(node.matrix, row, column) ? ["Masked: this key comes later, so the score is replaced by −∞."] : [];
    return [names, `q · k = ${products(pairs, dot)}`, `s = ${number(dot)} · ${formatShort(node.scale)}${added} = ${number(score)}`, ...masked];
  },
  weights: (node, { row, column }) => {
    const names = `${token(node, row)} → “${plain(node.columnTokens[column])}”`;
    if (isMasked(node.matrix, row, column)) return [names, "exp(−∞) = 0: this key comes later and is masked."];
    const scores = sibling(node, "scores").matrix;
    const weight = valueAt(node.matrix, row, column);
    const visible = Array.from({ length: scores.columns }, (_, key) => key).filter((key) => !isMasked(scores, row, key));
    const total = visible.reduce((sum, key) => sum + Math.exp(valueAt(scores, row, key)), 0);
    const score = valueAt(scores, row, column);
    const terms = visible.slice(0, SHOWN).map((key) => `exp(${number(valueAt(scores, row, key))})`);
    if (Math.abs(Math.exp(score) / total - weight) > 1e-3) return [names, `weight ${formatNumber(weight, 4)}`]; // the normalizer is not softmax
    return [names, `exp(${number(score)}) / (${terms.join(" + ")}${visible.length > SHOWN ? " + …" : ""})`, `= ${number(Math.exp(score))} / ${number(total)} = ${formatNumber(weight, 4)}`];
  },
  mixed: (node, { row, column }) => {
    const [weights, values] = [sibling(node, "weights").matrix, sibling(node, "value").matrix];
    const pairs = Array.from({ length: weights.columns }, (_, key) => [valueAt(weights, row, key), valueAt(values, key, column)]);
    const sorted = pairs.sort(([a], [b]) => b - a).filter(([weight]) => weight > 0);
    return [`${token(node, row)}, number ${column + 1}; largest weights first:`, products(sorted, valueAt(node.matrix, row, column))];
  },
  norm: (node, { row, column }, { norm_type: type }) => {
    const input = node.inputRows?.[row];
    if (!input || type === "none") return readOut(node, { row, column });
    if (type === "rms") {
      const size = Math.sqrt(input.reduce((sum, value) => sum + value ** 2, 0) / input.length);
      return [`${token(node, row)}, number ${column + 1}: x = ${number(input[column])}, root mean square ${number(size)}`,
        `${number(input[column])} / ${number(size)} = ${number(input[column] / size)}; after g: ${number(valueAt(node.matrix, row, column))}`];
    }
    const mean = input.reduce((sum, value) => sum + value, 0) / input.length;
    const deviation = Math.sqrt(input.reduce((sum, value) => sum + (value - mean) ** 2, 0) / input.length);
    return [`${token(node, row)}, number ${column + 1}: x = ${number(input[column])}, mean ${number(mean)}, deviation ${number(deviation)}`,
      `(${number(input[column])} − ${factor(mean)}) / ${number(deviation)} = ${number((input[column] - mean) / deviation)}; after g and b: ${number(valueAt(node.matrix, row, column))}`];
  },
  residual: (node, { row, column }) => {
    const index = node.parent.children.indexOf(node);
    const added = node.parent.children[index - 2].matrix; // the matrix before the plus sign
    const [sum, part] = [valueAt(node.matrix, row, column), valueAt(added, row, column)];
    return [`${token(node, row)}, number ${column + 1}: ${number(sum - part)} + ${factor(part)} = ${number(sum)}`];
  },
  embedding: (node, { row, column }) => {
    const [word, position] = [sibling(node, "token_embedding")?.matrix, sibling(node, "position_embedding")?.matrix];
    const value = valueAt(node.matrix, row, column);
    if (!word || !position) return readOut(node, { row, column });
    const sum = valueAt(word, row, column) + valueAt(position, row, column);
    const normed = Math.abs(sum - value) > 1e-3 ? `; normalized: ${number(value)}` : "";
    return [`${token(node, row)}, number ${column + 1}: ${number(valueAt(word, row, column))} + ${factor(valueAt(position, row, column))} = ${number(sum)}${normed}`];
  },
};
