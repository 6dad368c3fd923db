// The boxes of the world: a tree of nodes with positions, in the order of computation.

import { foldOf, makeMatrix } from "./matrix.js";

export const LANE = 12; // height of a token's row
export const GAP = 24; // between two boxes, for an arrow
export const HEADER = 16; // above a box, for its title
export const VECTOR = 84; // width of a model vector
const HEAD_VECTOR = 48; // width of a query, key or value
const HIDDEN = 128; // width of the feed-forward activations
const CAPTIONS = { mixed: "sum", residual: "sum", feed_forward: "output" }; // for boxes that are too narrow for their title
const WEIGHTS = { min: 5, max: 12, total: 150 }; // limits of the width of a weight, and the preferred width of a row

// A group contains other nodes; `row` or `grid` sets its size
export function group(kind, title, more = {}) {
  return { kind, title, x: 0, y: 0, w: 0, h: 0, header: 0, children: [], parent: null, ...more };
}

// A matrix whose rows are tokens; `setRows` sets its numbers once they are loaded
export function leaf(role, title, { rows, columns, width, rowTokens, columnTokens = null, ...more }) {
  const h = rows * LANE;
  return {
    kind: "matrix", role, title, x: 0, y: 0, w: width, h, header: 0, children: [], parent: null, matrix: null,
    rows, columns, rowTokens, columnTokens, fold: columnTokens ? 1 : foldOf(columns, width, LANE), ...more,
  };
}

export function vectorLeaf(role, title, tokens, columns, more = {}) {
  const width = { query: HEAD_VECTOR, key: HEAD_VECTOR, value: HEAD_VECTOR, mixed: HEAD_VECTOR, hidden: HIDDEN }[role] ?? VECTOR;
  return leaf(role, title, { rows: tokens.length, columns, width, rowTokens: tokens, caption: CAPTIONS[role], ...more });
}

export function weightLeaf(role, title, rowTokens, columnTokens, more = {}) {
  const cell = Math.min(Math.max(WEIGHTS.total / columnTokens.length, WEIGHTS.min), WEIGHTS.max);
  return leaf(role, title, { rows: rowTokens.length, columns: columnTokens.length, width: cell * columnTokens.length, rowTokens, columnTokens, ...more });
}

export function setRows(node, rows, options) {
  node.matrix = makeMatrix(rows, options);
}

// ---- placement: positions are relative to the parent until `settle`

// margin: space to the left of the first child, for the tokens of its rows
export function row(parent, children, { gap = GAP, pad = 10, header = HEADER, margin = 0 } = {}) {
  const height = Math.max(...children.map(({ h }) => h));
  let x = pad + margin;
  for (const child of children) {
    child.x = x;
    child.y = header + pad + (height - child.h) / 2;
    x += child.w + gap;
  }
  return enclose(parent, children, x - gap + pad, height + header + 2 * pad, header);
}

export function grid(parent, children, columns, { gap = 14, pad = 8, header = HEADER } = {}) {
  const width = Math.max(...children.map(({ w }) => w));
  const height = Math.max(...children.map(({ h }) => h));
  const lines = Math.ceil(children.length / columns);
  children.forEach((child, index) => {
    child.x = pad + (index % columns) * (width + gap);
    child.y = header + pad + Math.floor(index / columns) * (height + gap);
  });
  return enclose(parent, children, columns * (width + gap) - gap + 2 * pad, lines * (height + gap) - gap + header + 2 * pad, header);
}

function enclose(parent, children, w, h, header) {
  Object.assign(parent, { children, w, h, header });
  for (const child of children) child.parent = parent;
  return parent;
}

// Scales a node and everything in it
export function resize(node, factor) {
  for (const key of ["w", "h", "header"]) node[key] *= factor;
  for (const child of node.children) {
    child.x *= factor;
    child.y *= factor;
    resize(child, factor);
  }
  return node;
}

// Makes all positions absolute, and gives every node an id such as "decoder/layer-0/self/head-1"
export function settle(node, x = 0, y = 0, path = "") {
  node.x += x;
  node.y += y;
  node.id = path ? `${path}/${node.key ?? node.role ?? node.kind}` : node.key ?? node.kind;
  for (const child of node.children) settle(child, node.x, node.y, node.parent ? node.id : "");
  return node;
}

export function* walk(node) {
  yield node;
  for (const child of node.children) yield* walk(child);
}
