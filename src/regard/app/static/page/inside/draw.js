// Draws the world: boxes, arrows, titles, and the matrices that are large enough on the screen.

import { percent } from "../../shared/dom.js";
import { drawLabels, drawMatrix, plain } from "./draw_matrix.js";
import { drawPredictions } from "./draw_output.js";
import { LANE } from "./nodes.js";

const MIN_BOX = 5; // pixels; smaller boxes are not drawn
const TITLE = 12; // pixels
const ROW_LABELS = 36; // pixels left of a matrix that shows the tokens of its rows
const COLUMN_LABELS = 42; // pixels above a matrix that shows the tokens of its columns

export function makePattern(context, theme) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const brush = tile.getContext("2d");
  brush.strokeStyle = theme.rule;
  brush.beginPath();
  for (const shift of [-6, 0, 6]) {
    brush.moveTo(shift, 6);
    brush.lineTo(shift + 6, 0);
  }
  brush.stroke();
  return context.createPattern(tile, "repeat");
}

// scene: { root, camera, theme, pattern, hover, selected, predictions }
export function drawWorld(context, scene) {
  const { camera, theme, root } = scene;
  const { width, height } = camera.size;
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, width, height);
  const pen = { context, theme, pattern: scene.pattern, scene, screen: { x: 0, y: 0, w: width, h: height }, titles: [] };
  drawStream(pen, root);
  for (const block of root.children) drawNode(pen, block);
  for (const title of pen.titles) drawTitle(pen, title);
}

export function boxOf(camera, node) {
  const { x, y } = camera.toScreen(node.x, node.y);
  return { x, y, w: node.w * camera.scale, h: node.h * camera.scale };
}

const isVisible = (box, screen, margin = 0) => box.x < screen.w + margin && box.y < screen.h + margin && box.x + box.w > -margin && box.y + box.h > -margin;

function drawNode(pen, node) {
  const box = boxOf(pen.scene.camera, node);
  if (!isVisible(box, pen.screen, 90) || Math.max(box.w, box.h) < MIN_BOX) return;
  if (node.kind === "operator") drawOperator(pen, node, box);
  else if (node.role === "tokens") drawTokens(pen, node, box);
  else if (node.role === "predictions") drawPredictions(pen, box);
  else if (node.kind === "matrix") drawLeaf(pen, node, box);
  else drawGroup(pen, node, box);
}

function drawLeaf(pen, node, box) {
  const { scene, screen } = pen;
  drawMatrix(pen, node, box, screen);
  markRow(pen, node, box);
  const above = headerHeight(pen, node.parent);
  const isNamed = node.columnTokens && above >= COLUMN_LABELS + TITLE;
  const left = (node.role === "query" ? 30 : 18) * scene.camera.scale * (node.head === undefined ? 1 : 0.8);
  drawLabels(pen, node, box, { rows: left >= ROW_LABELS, columns: isNamed, selected: scene.hover?.row ?? scene.selected });
  const needed = node.head === undefined ? TITLE : 1.8 * TITLE; // a head needs room for its own title
  if (above >= needed) pen.titles.push({ text: node.caption ?? node.title, box, small: true, above: isNamed ? COLUMN_LABELS : 3 });
}

// The row of the hovered or selected token, and the hovered cell
function markRow({ context, theme, scene }, node, box) {
  const { hover, selected } = scene;
  const row = hover?.stack === node.stack ? hover.row : selected;
  const lane = box.h / node.rows;
  const isOther = node.sublayer === "cross" && (node.role === "key" || node.role === "value");
  if (row !== null && row !== undefined && row < node.rows && !isOther) {
    context.strokeStyle = theme.ink;
    context.lineWidth = lane > 6 ? 1.5 : 1;
    context.strokeRect(box.x - 1, box.y + row * lane, box.w + 2, lane);
  }
  if (hover?.node === node && hover.cell) {
    const { x, y, w, h } = hover.cell;
    context.strokeStyle = theme.ink;
    context.lineWidth = 2.5;
    context.strokeRect(box.x + x * box.w, box.y + y * box.h, w * box.w, h * box.h);
  }
}

function drawGroup(pen, node, box) {
  const { context, theme } = pen;
  const isHead = node.kind === "head";
  context.fillStyle = node.kind === "attention" || isHead ? theme.paper : theme.raised;
  context.strokeStyle = theme.rule;
  context.lineWidth = 1;
  context.beginPath();
  context.roundRect(box.x, box.y, box.w, box.h, Math.min(8, box.h / 12));
  context.fill();
  context.stroke();
  if (isHead) {
    context.fillStyle = theme.heads[node.head % theme.heads.length];
    context.fillRect(box.x, box.y, Math.max(2, Math.min(4, box.w / 90)), box.h);
  }
  drawArrows(pen, node);
  for (const child of node.children) drawNode(pen, child);
  const isInner = isHead || node.kind === "attention";
  if (!isInner) pen.titles.push({ text: node.title, box, outside: true, ...subtitle(pen, node) });
  else if (headerHeight(pen, node) >= TITLE) pen.titles.push({ text: node.title, box, small: true, inside: true, color: isHead ? theme.heads[node.head % theme.heads.length] : null });
}

// Pixels above the contents of a box, for a title
const headerHeight = ({ scene }, node) => node.header * scene.camera.scale;

// The subtitle of a box: for the embedding, the text while its rows are too small to read; for the output, the most
// probable next token
function subtitle({ scene }, node) {
  const space = node.space * scene.camera.scale;
  if (node.kind === "embedding" && LANE * scene.camera.scale < 9) return { more: node.stack.tokens.map(plain).join(" "), space };
  const [best] = (node.kind === "output" && scene.predictions?.top) || [];
  return best ? { more: `${plain(best.token)}  ${percent(best.probability)}%`, space } : {};
}

function drawOperator({ context, theme, scene }, node, box) {
  const [x, y, radius] = [box.x + box.w / 2, box.y + box.h / 2, box.w / 2];
  if (node.skips) {
    context.fillStyle = theme.paper;
    context.strokeStyle = theme.edge;
    context.lineWidth = Math.max(1, radius / 9);
    context.beginPath();
    context.arc(x, y, radius * 0.8, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
  }
  if (radius < 2.5) return;
  context.fillStyle = theme.ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `${radius * (node.skips ? 1.3 : 1.8)}px ${theme.font}`;
  context.fillText(node.sign, x, y + radius * 0.08);
  if (node.sign !== "→" || radius < 14) return;
  context.fillStyle = theme.quiet;
  context.font = `${Math.min(radius * 0.62, TITLE)}px ${theme.font}`;
  context.fillText(scene.normalize, x, y - radius * 0.9);
}

function drawTokens(pen, node, box) {
  const { context, theme, scene } = pen;
  const lane = box.h / node.rows;
  if (lane < 4.5) return;
  context.font = `600 ${Math.min(lane * 0.78, 30)}px ${theme.font}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const row = scene.hover?.stack === node.stack ? scene.hover.row : scene.selected;
  for (let index = 0; index < node.rows; index += 1) {
    context.fillStyle = index === row ? theme.accent : theme.ink;
    context.fillText(plain(node.rowTokens[index]), box.x + box.w, box.y + (index + 0.5) * lane, box.w);
  }
}

// ---- arrows

function drawArrows({ context, theme, scene }, node) {
  const { camera } = scene;
  const boxes = node.children.map((child) => boxOf(camera, child));
  if (node.kind === "attention") return;
  context.strokeStyle = context.fillStyle = theme.edge;
  context.lineWidth = Math.max(0.75, Math.min(camera.scale, 2));
  const outer = boxOf(camera, node);
  boxes.slice(1).forEach((box, index) => {
    const before = boxes[index];
    const isSum = [node.children[index], node.children[index + 1]].some(({ kind, skips }) => kind === "operator" && !skips);
    const last = node.kind === "output" ? 1 - 0.5 / node.children[0].rows : 0.5; // the last token predicts the next
    if (!isSum) arrow(context, before.x + before.w, box.x, before.y + last * before.h, camera.scale);
  });
  let start = outer.x;
  node.children.forEach((child, index) => {
    if (!child.skips) return;
    const end = boxes[index];
    const [x, y, top] = [end.x + end.w / 2, end.y, outer.y + 12 * camera.scale];
    context.beginPath();
    context.moveTo(start, end.y + end.h / 2);
    context.bezierCurveTo(start + 8 * camera.scale, top, start + 8 * camera.scale, top, start + 24 * camera.scale, top);
    context.lineTo(x - 16 * camera.scale, top);
    context.quadraticCurveTo(x, top, x, y);
    context.stroke();
    const after = node.children[index + 1];
    const isNormed = node.children[index + 2]?.role === "norm" && node.children[index + 3]?.kind !== "attention" && node.children[index + 2].sublayer === after.sublayer;
    const from = boxes[index + (isNormed ? 2 : 1)];
    start = from.x + from.w;
  });
}

function arrow(context, from, to, y, scale) {
  const head = Math.min(5 * scale, 8, (to - from) / 2);
  if (to - from < 2) return;
  context.beginPath();
  context.moveTo(from + 1, y);
  context.lineTo(to - head, y);
  context.stroke();
  context.beginPath();
  context.moveTo(to - 1, y);
  context.lineTo(to - 1 - head, y - head * 0.6);
  context.lineTo(to - 1 - head, y + head * 0.6);
  context.fill();
}

// The residual stream between the blocks; from the end of a line it continues to the start of the next line
function drawStream({ context, theme, scene }, root) {
  const { camera } = scene;
  context.strokeStyle = context.fillStyle = theme.accent;
  context.lineWidth = Math.max(1.25, Math.min(2.5 * camera.scale, 3.5));
  const blocks = root.children;
  for (let index = 1; index < blocks.length; index += 1) {
    const [before, box] = [boxOf(camera, blocks[index - 1]), boxOf(camera, blocks[index])];
    const [y, to] = [before.y + before.h / 2, box.y + box.h / 2];
    if (blocks[index].stack !== blocks[index - 1].stack) continue;
    if (box.x > before.x) arrow(context, before.x + before.w, box.x, y, 2 * camera.scale);
    else {
      const [reach, middle] = [20 * camera.scale, before.y + before.h + 0.3 * (box.y - before.y - before.h)];
      const right = before.x + before.w;
      context.beginPath();
      context.moveTo(right, y);
      context.bezierCurveTo(right + reach, y, right + reach, middle, right - reach, middle);
      context.lineTo(box.x + reach, middle);
      context.bezierCurveTo(box.x - 1.6 * reach, middle, box.x - 1.6 * reach, to, box.x, to);
      context.stroke();
    }
  }
  drawMemory(context, root, camera, theme);
}

// Lines from the last layer of the encoder to every cross-attention
function drawMemory(context, root, camera, theme) {
  const crosses = root.children.flatMap(({ children }) => children.filter(({ sublayer, kind }) => sublayer === "cross" && kind === "attention"));
  if (!crosses.length) return;
  const last = root.children.filter(({ stack }) => stack.name === "encoder").at(-1);
  const from = boxOf(camera, last);
  context.strokeStyle = theme.violet;
  context.lineWidth = 1.5;
  context.setLineDash([6, 4]);
  for (const cross of crosses) {
    const to = boxOf(camera, cross);
    context.beginPath();
    context.moveTo(from.x + from.w / 2, from.y + from.h);
    const middle = from.y + from.h + 14 * camera.scale;
    context.bezierCurveTo(from.x + from.w / 2, middle + 20 * camera.scale, to.x + to.w / 2, middle - 10 * camera.scale, to.x + to.w / 2, to.y);
    context.stroke();
  }
  context.setLineDash([]);
}

// ---- titles keep their size on the screen

function drawTitle({ context, theme, screen }, { text, box, small, inside, outside, above = 3, color, more = "", space = 0 }) {
  context.font = `${small ? "" : "600 "}${small ? TITLE : TITLE + 1}px ${theme.font}`;
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  const width = context.measureText(text).width;
  if (small && width > box.w + 8) return;
  const x = box.x + (inside ? 8 : 0);
  const y = inside ? box.y + 14 : box.y - (outside ? 5 : above);
  if (y < 8 || y > screen.h + 20 || x > screen.w || x + Math.max(width, space) < 0) return;
  if (outside) {
    context.fillStyle = theme.paper;
    context.fillRect(x - 3, y - TITLE, width + 6, TITLE + 4);
  }
  context.fillStyle = color ?? (small ? theme.quiet : theme.ink);
  context.fillText(text, x, y);
  if (more) drawSubtitle(context, theme, more, x + width + 10, y, Math.min(x + space, screen.w - 8));
}

function drawSubtitle(context, theme, text, x, y, end) {
  context.font = `${TITLE + 1}px ${theme.font}`;
  let shown = text;
  while (shown && context.measureText(shown).width > end - x) shown = shown.slice(0, -2).replace(/…?$/, "…");
  if (shown.length < 4) return;
  context.fillStyle = theme.paper;
  context.fillRect(x - 3, y - TITLE, context.measureText(shown).width + 6, TITLE + 4);
  context.fillStyle = theme.accent;
  context.fillText(shown, x, y);
}
