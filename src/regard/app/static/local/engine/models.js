// Models by architecture: the decoder-only language model, the encoder-decoder Transformer, and BERT's encoder.

import { projectSource } from "./attention.js";
import { add, linear, row } from "./ops.js";
import { applyNorm, embed, positionVectors, runBlocks, scoped } from "./stack.js";

// One stack: { name, path: prefix of its module names, ids, tokenEmbedding, positionEmbedding, embedding, layers, steps, final }
function runStack(config, parameters, { name, ids, table, scale, causal, source = null, path = `${name}.`, embeddingNorm = false }) {
  const tokenEmbedding = embed(table, ids, scale);
  const positionEmbedding = positionVectors(config, parameters, ids.length);
  let embedding = positionEmbedding ? add(tokenEmbedding, positionEmbedding) : tokenEmbedding;
  if (embeddingNorm) embedding = applyNorm(config, parameters, "norm", embedding);
  const { layers, steps } = runBlocks(config, parameters, embedding, { causal, source });
  const last = layers.at(-1) ?? embedding;
  const final = config.norm_first ? applyNorm(config, parameters, "norm", last) : last;
  return { name, path, ids, tokenEmbedding, positionEmbedding, embedding, layers, steps, final };
}

// Decoder-only Transformer (Radford et al. 2018); the output embedding is tied to the input embedding
export class LanguageModel {
  constructor(config, tensors) {
    this.kind = "decoder";
    this.config = config;
    this.tensors = tensors;
  }

  run(ids) {
    const table = this.tensors.get("embedding.weight");
    const stack = runStack(this.config, scoped(this.tensors, "decoder"), {
      name: "decoder", ids, table, scale: Math.sqrt(this.config.width), causal: true });
    return { stacks: [stack], logits: linear(stack.final, table) };
  }
}

// Encoder-decoder Transformer (Vaswani et al. 2017)
export class Transformer {
  constructor(config, tensors) {
    this.kind = "encoder-decoder";
    this.config = config;
    this.tensors = tensors;
    this.target = tensors.get("embedding.weight");
    this.source = tensors.get("source_embedding.weight") ?? this.target;
    this.output = tensors.get("matrix") ?? this.target;
  }

  encode(ids) {
    return runStack(this.config, scoped(this.tensors, "encoder"), {
      name: "encoder", ids, table: this.source, scale: Math.sqrt(this.config.width), causal: false });
  }

  // encoded: the result of encode
  decode(ids, encoded) {
    const stack = runStack(this.config, scoped(this.tensors, "decoder"), {
      name: "decoder", ids, table: this.target, scale: Math.sqrt(this.config.width), causal: true, source: encoded.final });
    return { stack, logits: linear(stack.final, this.output) };
  }

  // The state of an empty target: the keys and values that each block projects from the source
  start(source) {
    const encoded = this.encode(source).final;
    const parameters = scoped(this.tensors, "decoder");
    const projected = Array.from({ length: this.config.layers }, (_, block) =>
      projectSource(this.config, (name) => parameters(`blocks.${block}.cross.${name}`), encoded));
    return { projected, caches: null, length: 0 };
  }

  // Reads one more target token and returns { logits, state }. The argument `state` is not modified
  step(token, { projected, caches, length }) {
    const parameters = scoped(this.tensors, "decoder");
    const position = positionVectors(this.config, parameters, 1, length);
    const tokenEmbedding = embed(this.target, [token], Math.sqrt(this.config.width));
    const x = position ? add(tokenEmbedding, position) : tokenEmbedding;
    const { layers, steps } = runBlocks(this.config, parameters, x, { causal: true, source: projected, caches });
    const final = this.config.norm_first ? applyNorm(this.config, parameters, "norm", layers.at(-1)) : layers.at(-1);
    const logits = row(linear(final, this.output), 0);
    return { logits, state: { projected, caches: steps.map((trace) => selfAttention(trace).cache), length: length + 1 } };
  }

  run(source, target) {
    const encoded = this.encode(source);
    const { stack, logits } = this.decode(target, encoded);
    return { stacks: [encoded, stack], logits };
  }
}

const selfAttention = (trace) => trace.find(({ kind, name }) => kind === "attention" && name === "self");

// BERT's encoder (Devlin et al. 2019): the embeddings are normalized, and there is no output vocabulary
export class Encoder {
  constructor(config, tensors) {
    this.kind = "encoder";
    this.config = config;
    this.tensors = tensors;
  }

  run(ids) {
    const stack = runStack(this.config, scoped(this.tensors, ""), {
      name: "encoder", ids, table: this.tensors.get("words.weight"), scale: 1, causal: false, path: "", embeddingNorm: true });
    return { stacks: [stack], logits: null };
  }
}

export function makeModel(kind, config, tensors) {
  const classes = { decoder: LanguageModel, "encoder-decoder": Transformer, encoder: Encoder };
  return new classes[kind](config, tensors);
}
