// Draws a matrix as an image; when zoomed in, also lines between the tokens, and the numbers in the cells.

import { colorOf, imageOf, isMasked, valueAt } from "./matrix.js";

const MIN_NUMBER = { width: 27, height: 10 }; // smallest cell that shows its number, in pixels
const MIN_LABEL = 8; // smallest row that shows its token, in pixels
const MIN_LANE = 7; // smallest row with hatching or separating lines, in pixels
const LIGHT = 130; // cells with at least this luma, 0 to 255, have dark text
const STICKY = 24; // smallest row or column whose token stays at the edge of the screen, in pixels
const FONT = 13; // largest font of a token's label, in pixels

// box: the node's rectangle on the screen
export function drawMatrix(pen, node, box, screen) {
  const { context, theme } = pen;
  const { matrix } = node;
  context.fillStyle = theme.raised;
  context.fillRect(box.x, box.y, box.w, box.h);
  if (!matrix) return;
  if (matrix.allowed && box.h / node.rows >= MIN_LANE) hatch(pen, box);
  const cell = cellSize(node, box);
  context.imageSmoothingEnabled = cell.w < 2 || cell.h < 2;
  context.drawImage(imageOf(matrix, node.fold, theme), box.x, box.y, box.w, box.h);
  const lane = box.h / node.rows;
  if (node.fold > 1 && lane >= MIN_LANE) separate(pen, node, box, lane, screen);
  if (cell.w >= MIN_NUMBER.width && cell.h >= MIN_NUMBER.height) drawNumbers(pen, node, box, cell, screen);
}

export function cellSize(node, box) {
  return { w: box.w / Math.ceil(node.columns / node.fold), h: box.h / node.rows / node.fold };
}

function hatch({ context, theme, pattern }, box) {
  context.fillStyle = theme.raised;
  context.fillRect(box.x, box.y, box.w, box.h);
  context.fillStyle = pattern;
  context.fillRect(box.x, box.y, box.w, box.h);
}

function separate({ context, theme }, node, box, lane, screen) {
  context.fillStyle = theme.paper;
  const first = Math.max(1, Math.floor((screen.y - box.y) / lane));
  const last = Math.min(node.rows - 1, Math.ceil((screen.y + screen.h - box.y) / lane));
  const width = Math.min(Math.max(lane / 14, 1), 3);
  for (let row = first; row <= last; row += 1) context.fillRect(box.x, box.y + row * lane - width / 2, box.w, width);
}

function drawNumbers({ context, theme }, node, box, cell, screen) {
  const { matrix, fold } = node;
  const width = Math.ceil(node.columns / fold);
  const [left, right] = [Math.max(0, Math.floor((screen.x - box.x) / cell.w)), Math.min(width - 1, Math.floor((screen.x + screen.w - box.x) / cell.w))];
  const [top, bottom] = [Math.max(0, Math.floor((screen.y - box.y) / cell.h)), Math.min(node.rows * fold - 1, Math.floor((screen.y + screen.h - box.y) / cell.h))];
  context.font = `${Math.min(cell.w / 3.4, cell.h * 0.7, 15)}px ${theme.font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let line = top; line <= bottom; line += 1) {
    const row = Math.floor(line / fold);
    for (let across = left; across <= right; across += 1) {
      const column = (line % fold) * width + across;
      if (column >= node.columns) continue;
      const masked = isMasked(matrix, row, column);
      const value = valueAt(matrix, row, column);
      context.fillStyle = masked ? theme.quiet : textColor(matrix, value, theme);
      context.fillText(masked ? (matrix.kind === "weights" ? "0" : "−∞") : format(value), box.x + (across + 0.5) * cell.w, box.y + (line + 0.5) * cell.h + 0.5);
    }
  }
}

export function format(value) {
  return value.toFixed(Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2).replace("-", "−");
}

function textColor(matrix, value, theme) {
  const [r, g, b] = colorOf(matrix, value, theme);
  return 0.299 * r + 0.587 * g + 0.114 * b > LIGHT ? "#10161b" : "#fff";
}

// The tokens of the rows, left of a matrix, and of the columns, above it
export function drawLabels(pen, node, box, { rows, columns, selected }) {
  if (rows) drawRowLabels(pen, node, box, selected);
  if (columns) drawColumnLabels(pen, node, box);
}

function drawRowLabels(pen, node, box, selected) {
  const { context, theme, screen } = pen;
  const lane = box.h / node.rows;
  if (lane < MIN_LABEL) return;
  const isSticky = box.x < 8 && box.x + box.w > 60 && lane >= STICKY;
  context.font = `${Math.min(lane * 0.8, FONT)}px ${theme.font}`;
  context.textBaseline = "middle";
  for (let row = 0; row < node.rows; row += 1) {
    const y = box.y + (row + 0.5) * lane;
    if (y < -lane || y > screen.h + lane) continue;
    const color = row === selected ? theme.accent : theme.quiet;
    if (isSticky) pill(pen, clip(node.rowTokens[row]), 4, y, color);
    else {
      context.textAlign = "right";
      context.fillStyle = color;
      context.fillText(clip(node.rowTokens[row]), box.x - 5, y);
    }
  }
}

function drawColumnLabels(pen, node, box) {
  const { context, theme, screen } = pen;
  const cell = box.w / node.columns;
  if (cell < MIN_LABEL) return;
  const isWide = cell > 44;
  const isSticky = isWide && box.y < 14 && box.y + box.h > 40;
  context.font = `${Math.min(cell * 0.8, FONT)}px ${theme.font}`;
  context.textBaseline = "middle";
  for (let column = 0; column < node.columns; column += 1) {
    const x = box.x + (column + 0.5) * cell;
    if (x < -cell || x > screen.w + cell) continue;
    const token = clip(node.columnTokens[column]);
    if (isSticky) {
      pill(pen, token, x - context.measureText(token).width / 2 - 4, 13, theme.quiet);
      continue;
    }
    context.save();
    context.textAlign = isWide ? "center" : "left";
    context.fillStyle = theme.quiet;
    context.translate(x, box.y - 8);
    if (!isWide) context.rotate(-Math.PI / 3.2);
    context.fillText(token, 0, 0);
    context.restore();
  }
}

// A label over the cells, at the edge of the screen
function pill({ context, theme }, text, x, y, color) {
  const width = context.measureText(text).width;
  context.fillStyle = theme.paper;
  context.beginPath();
  context.roundRect(x, y - 10, width + 8, 20, 5);
  context.fill();
  context.fillStyle = color;
  context.textAlign = "left";
  context.fillText(text, x + 4, y);
}

function clip(token) {
  const text = token.replace(/^▁/, "");
  return text.length > 12 ? `${text.slice(0, 11)}…` : text;
}

export const plain = (token) => token.replace(/^▁/, "").replace(/^$/, "▁");
