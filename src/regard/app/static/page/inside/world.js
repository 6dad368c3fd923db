// The world: all boxes of a model for a text, arranged in lines to be read from left to right.

import { LANE, VECTOR, grid, group, leaf, row, setRows, settle, resize, vectorLeaf, weightLeaf } from "./nodes.js";

const BLOCK_GAP = 44; // between two blocks in a line
const LINE_GAP = 76; // between two lines, with room for a title
const END_SCALE = 1.6; // embedding and prediction are drawn larger than the layers between them
const ONE_PER_LINE = 1.25; // preference for one layer per line, which is easier to read
const HEAD_SCALE = 0.8; // heads are drawn smaller than the vectors around them
const TOKEN_WIDTH = 66;
const LABELS = 30; // width of the tokens to the left of a query's rows
const OPERATOR = 16; // diameter of a plus sign

// answer: the response of api/inside. aspect: width / height of the screen, which the world should fill
export function makeWorld(answer, aspect) {
  let best = null;
  for (const columns of columnChoices(answer.heads)) {
    const maxPerLine = Math.max(...answer.stacks.map(({ layers }) => layers.length)) + 2;
    for (let perLine = 1; perLine <= maxPerLine; perLine += 1) {
      const world = arrange(answer, columns, perLine);
      const fit = Math.min(aspect / world.w, 1 / world.h) * (perLine === 1 ? ONE_PER_LINE : 1);
      if (!best || fit > best.fit) best = { world, fit };
    }
  }
  return settle(best.world);
}

function columnChoices(heads) {
  return [1, 2, 3, 4, 6, 8, heads].filter((columns, index, all) => columns <= heads && heads % columns === 0 && all.indexOf(columns) === index);
}

function arrange(answer, columns, perLine) {
  const lines = [];
  for (const stack of answer.stacks) {
    const blocks = [
      embeddingBlock(answer, stack),
      ...stack.layers.map((_, layer) => layerBlock(answer, stack, layer, columns)),
      ...(stack === answer.stacks.at(-1) ? [outputBlock(answer, stack)] : []),
    ];
    for (const block of blocks) if (block.kind !== "layer") resize(block, END_SCALE);
    for (let start = 0; start < blocks.length; start += perLine) lines.push(blocks.slice(start, start + perLine));
  }
  const world = group("model", "The whole model", { key: "model" });
  let [y, w] = [0, 0];
  for (const line of lines) {
    const height = Math.max(...line.map(({ h }) => h));
    let x = 0;
    for (const block of line) {
      Object.assign(block, { x, y: y + (height - block.h) / 2, parent: world });
      x += block.w + BLOCK_GAP;
      block.space = block.w + (block === line.at(-1) ? Infinity : BLOCK_GAP); // width available for its title
    }
    w = Math.max(w, x - BLOCK_GAP);
    y += height + LINE_GAP;
  }
  world.children = lines.flat();
  return Object.assign(world, { w, h: y - LINE_GAP });
}

// ---- blocks

const prefix = (answer, stack) => (answer.stacks.length > 1 ? `${stack.name}-` : "");
const named = (answer, stack, title) => (answer.stacks.length > 1 ? `${stack.name === "encoder" ? "Encoder" : "Decoder"} ${title.toLowerCase()}` : title);

function embeddingBlock(answer, stack) {
  const { tokens, token_embedding: words, position_embedding: positions } = stack;
  const block = group("embedding", named(answer, stack, "Embedding"), { key: `${prefix(answer, stack)}embedding`, stack });
  const names = leaf("tokens", "tokens", { rows: tokens.length, columns: 1, width: TOKEN_WIDTH, rowTokens: tokens, stack });
  /** @type {any[]} */
  const parts = [names, vectorLeaf("token_embedding", "token vectors", tokens, answer.width, { stack })];
  setRows(parts[1], words);
  if (positions) {
    const added = vectorLeaf("position_embedding", "position vectors", tokens, answer.width, { stack });
    setRows(added, positions);
    parts.push(operator("+"), added);
  }
  const sum = vectorLeaf("embedding", "embedding", tokens, answer.width, { stack });
  setRows(sum, stack.embedding);
  return row(block, [...parts, operator("="), sum]);
}

function layerBlock(answer, stack, layer, columns) {
  const block = group("layer", named(answer, stack, `Layer ${layer}`), { key: `${prefix(answer, stack)}layer-${layer}`, stack, layer, loaded: false });
  const kinds = stack.name === "decoder" && answer.stacks.length > 1 ? ["self", "cross", "feed-forward"] : ["self", "feed-forward"];
  const parts = [];
  for (const kind of kinds) {
    const own = { stack, layer, sublayer: kind };
    const part = { self: "self-attention", cross: "source", "feed-forward": "feed-forward" }[kind];
    const vector = (role, title) => vectorLeaf(role, title, stack.tokens, answer.width, { ...own, key: `${kind}-${role}`, label: role === "feed_forward" ? title : `${title} · ${part}` });
    const sublayer = kind === "feed-forward"
      ? [vectorLeaf("hidden", "hidden", stack.tokens, answer.feed_forward, { ...own, key: "hidden" }), vector("feed_forward", "feed-forward output")]
      : [attentionBox(answer, stack, layer, kind, columns), vector("projected", "projection")];
    const sum = [operator("+", true), vector("residual", "residual sum")];
    const norm = vector("norm", "norm");
    parts.push(...(answer.norm === "pre" ? [norm, ...sublayer, ...sum] : [...sublayer, ...sum, norm]));
  }
  return row(block, parts, { gap: 16, margin: 14 });
}

function attentionBox(answer, stack, layer, kind, columns) {
  const title = kind === "cross" ? "attention to the source" : "self-attention";
  const box = group("attention", title, { key: kind, stack, layer, sublayer: kind });
  const heads = Array.from({ length: answer.heads }, (_, head) => headBox(answer, stack, layer, kind, head));
  return resize(grid(box, heads, columns), HEAD_SCALE);
}

function headBox(answer, stack, layer, kind, head) {
  const keys = kind === "cross" ? answer.stacks[0].tokens : stack.tokens;
  const own = { stack, layer, sublayer: kind, head };
  const width = answer.width / answer.heads;
  const parts = [
    vectorLeaf("query", "query", stack.tokens, width, own),
    operator("·"),
    vectorLeaf("key", "key", keys, width, own),
    operator("="),
    weightLeaf("scores", "scores", stack.tokens, keys, own),
    operator("→"),
    weightLeaf("weights", "weights", stack.tokens, keys, own),
    operator("×"),
    vectorLeaf("value", "value", keys, width, own),
    operator("="),
    vectorLeaf("mixed", "weighted sum", stack.tokens, width, own),
  ];
  return row(group("head", `Head ${head}`, { ...own, key: `head-${head}` }), parts, { gap: 7, margin: LABELS, header: 28 });
}

function outputBlock(answer, stack) {
  const block = group("output", answer.predictions ? "Prediction" : "Output", { key: "output", stack });
  const final = vectorLeaf("final", "final vectors", stack.tokens, answer.width, { stack });
  setRows(final, stack.final);
  if (!answer.predictions) return row(block, [final]);
  const bars = leaf("predictions", "next token", { rows: 1, columns: 1, width: 2.6 * VECTOR, rowTokens: stack.tokens, stack });
  bars.h = Math.max(13 * LANE, final.h);
  return row(block, [final, bars]);
}

function operator(sign, skips = false) {
  return { kind: "operator", title: sign, sign, skips, x: 0, y: 0, w: OPERATOR, h: OPERATOR, header: 0, children: [], parent: null };
}

// ---- the values of a layer

// steps: the response of api/inside/layer
export function fillLayer(block, steps) {
  const find = (test) => block.children.find(test);
  for (const step of steps) {
    const kind = step.name;
    const set = (role, rows) => setRows(find((node) => node.role === role && node.sublayer === kind), rows);
    if (step.kind === "norm") {
      set("norm", step.output);
      find((node) => node.role === "norm" && node.sublayer === kind).inputRows = step.input;
    } else if (step.kind === "residual") set("residual", step.output);
    else if (step.kind === "feed_forward") {
      set("hidden", step.hidden);
      set("feed_forward", step.output);
    } else {
      set("projected", step.output);
      fillHeads(find((node) => node.kind === "attention" && node.sublayer === kind), step);
    }
  }
  block.loaded = true;
}

function fillHeads(box, step) {
  for (const { children, head } of box.children) {
    const { allowed } = step;
    for (const node of children.filter(({ kind }) => kind === "matrix")) {
      if (node.role === "weights") setRows(node, step.weights[head], { kind: "weights", allowed });
      else if (node.role === "scores") setRows(node, step.scores[head], { allowed });
      else setRows(node, step[node.role][head]);
      node.scale = step.scale;
    }
  }
}
