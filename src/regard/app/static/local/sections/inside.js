// Traces of a text through a model: states, the steps of one layer, and the next token.

import { argmax, logSumExp, row, toRows, topIndices } from "../engine/ops.js";
import { END, START } from "../engine/search.js";
import { Generator } from "../random.js";

const MAX_TOKENS = 64;
const PREDICTIONS = 20; // number of most probable tokens per position
const [START_MARK, END_MARK] = ["<s>", "</s>"];
const NOTES = {
  rotary: "Positions rotate the queries and keys of every head; nothing is added here.",
  alibi: "Positions enter the scores: each head subtracts a multiple of the distance.",
  t5: "Positions enter the scores: each head adds a learned number per distance.",
  none: "The model has no position encoding: without a mask, it ignores word order.",
};

function positionNote({ kind, config }) {
  const added = `are added to the token vectors${kind === "encoder" ? ", and the sum is normalized" : ""}`;
  if (config.positions === "learned") return `Learned position vectors ${added}.`;
  if (config.positions === "sinusoidal") return `Sine and cosine waves of the position ${added}.`;
  return NOTES[config.positions];
}

function checkLength(name, tokens, limit = MAX_TOKENS) {
  const max = Math.min(limit, MAX_TOKENS);
  if (tokens.length <= max) return;
  throw new Error(`${name} has ${tokens.length} tokens; ${max === MAX_TOKENS ? "a trace covers" : "this model reads"} at most ${max}. Shorten it.`);
}

// Returns { model, stacks, tokens: the tokens of each stack, logits, token(id), append(id) }
export function trace(entry, text, target = null) {
  if (target !== null && entry.kind !== "translator") {
    throw new Error(`Got the target '${target.slice(0, 40)}', but only a translator reads a target. Omit it, or choose a translator.`);
  }
  if (entry.kind === "translator") return traceTranslation(entry, text, target);
  if (entry.kind === "encoder") return traceEncoder(entry, text);
  const { model, tokens } = entry;
  const ids = tokens.encode(text);
  checkLength("The text", ids, entry.maxTokens ?? MAX_TOKENS);
  return {
    model, ...model.run(ids), tokens: [ids.map((id) => tokens.tokens[id])],
    token: (id) => tokens.tokens[id], append: (id) => tokens.decode([...ids, id]) };
}

function traceEncoder({ model, tokens, maxTokens }, text) {
  const encoded = tokens.encode(text);
  checkLength("The text", encoded.ids, maxTokens);
  return { model, ...model.run(encoded.ids), tokens: [encoded.tokens], token: null, append: null };
}

function traceTranslation({ translator }, text, target) {
  const source = translator.source.segment(text);
  if (!source.ids.length) throw new Error("The source has no tokens; type at least one word.");
  checkLength("The source", [...source.ids, END], translator.maxTokens + 1);
  const { ids, pieces } = target === null ? translator.translate(text) : translator.target.segment(target);
  checkLength("The target", [START, ...ids], translator.maxTokens + 1);
  const marks = { [START]: START_MARK, [END]: END_MARK };
  const { model } = translator;
  return {
    model, ...model.run([...source.ids, END], [START, ...ids]),
    tokens: [[...source.pieces, END_MARK], [START_MARK, ...pieces]],
    token: (id) => marks[id] ?? translator.target.decode([id]).pieces[0],
    append: (id) => translator.target.decode([...ids, id]).words.join(" "),
  };
}

export function inside(name, { model, stacks, tokens, logits, token }) {
  const { config } = model;
  return {
    model: name, kind: model.kind, width: config.width, heads: config.heads, feed_forward: config.ffn_dim,
    activation: config.activation, norm: config.norm_first ? "pre" : "post", norm_type: config.norm, normalize: config.normalize,
    stacks: stacks.map((stack, index) => ({
      name: stack.name, tokens: tokens[index],
      token_embedding: toRows(stack.tokenEmbedding),
      position_embedding: stack.positionEmbedding ? toRows(stack.positionEmbedding) : null,
      position_note: positionNote(model),
      embedding: toRows(stack.embedding), layers: stack.layers.map(toRows), final: toRows(stack.final),
    })),
    predictions: logits && Array.from({ length: logits.rows }, (_, position) => predict(row(logits, position), position, token)),
  };
}

function predict(logits, position, token) {
  const total = logSumExp(logits);
  const top = topIndices(logits, PREDICTIONS).map((id) => ({ token: token(id), id, logit: logits[id], probability: Math.exp(logits[id] - total) }));
  return { position, total, top };
}

export function insideLayer(name, { stacks }, { stack, layer }) {
  const selected = stacks.find((each) => each.name === stack);
  if (!selected) throw new Error(`'${name}' has no ${stack}; choose ${stacks.map((each) => `'${each.name}'`).join(" or ")}.`);
  if (layer >= selected.steps.length) throw new Error(`Layer ${layer} is out of range: the ${stack} of '${name}' has layers 0 to ${selected.steps.length - 1}.`);
  return { steps: selected.steps[layer].map(describeStep) };
}

function describeStep(step) {
  const { kind, name, output } = step;
  if (kind === "norm") return { kind, name, input: toRows(step.input), output: toRows(output) };
  if (kind === "feed_forward") return { kind, name, hidden: toRows(step.hidden), output: toRows(output) };
  if (kind === "residual") return { kind, name, output: toRows(output) };
  const { rows, columns } = step.weights[0];
  const byHead = Object.fromEntries(["query", "key", "value", "scores", "weights", "mixed"].map((field) => [field, step[field].map(toRows)]));
  const allowed = Array.from({ length: rows }, (_, i) => Array.from({ length: columns }, (_, j) => !step.causal || j <= i));
  return { kind, name, scale: step.scale, ...byHead, allowed, output: toRows(output) };
}

// Samples the next token; temperature 0 selects the most probable one
export function insideNext(name, { logits, token, append }, { temperature = 1, seed = 0 }) {
  if (!logits) throw new Error(`'${name}' is an encoder, which does not predict the next token. Choose a language model or a translator.`);
  const last = row(logits, logits.rows - 1);
  const probabilities = nextProbabilities(last, temperature);
  const id = temperature === 0 ? argmax(last) : sample(probabilities, new Generator(seed % 2 ** 32).uniform64());
  const best = topIndices(probabilities, PREDICTIONS).map((each) => ({ token: token(each), id: each, probability: probabilities[each] }));
  return { token: token(id), id, probabilities: best, text: append(id) };
}

function nextProbabilities(logits, temperature) {
  if (temperature === 0) return Float64Array.from(logits, (_, id) => Number(id === argmax(logits)));
  const scaled = Float64Array.from(logits, (logit) => logit / temperature);
  const total = logSumExp(scaled);
  return scaled.map((logit) => Math.exp(logit - total));
}

function sample(probabilities, uniform) {
  let sum = 0;
  for (let id = 0; id < probabilities.length; id += 1) {
    sum += probabilities[id];
    if (uniform < sum) return id;
  }
  return argmax(probabilities);
}
