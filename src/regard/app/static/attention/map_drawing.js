// Draws the map: tiles, grid, selection, and the labels of both axes.
import { formatCount, visible } from "../shared/dom.js";

const FONT_SIZE = 12; // pixels
const LABEL_SPACING = 15; // minimum distance between labels, in pixels
const NICE_STEPS = [1, 2, 5]; // label steps are these numbers times powers of ten
const MIN_GRID_CELL = 9; // the grid is drawn if cells have at least this many pixels

export function textWidth(context, tokens, font) {
  context.font = `${FONT_SIZE}px ${font}`;
  let width = 0;
  for (const token of tokens.slice(0, 400)) width = Math.max(width, context.measureText(visible(token)).width);
  return width;
}

// Draws the visible tiles; until they are loaded, coarser tiles are stretched
export function drawTiles(context, frame, tiles, selection, colors) {
  const needed = frame.tiles();
  if (!needed.length) return;
  const loaded = needed.map((tile) => tiles.get(selection, tile));
  const coarser = loaded.every(Boolean) ? [] : tiles.coarser(selection, needed[0]);
  context.save();
  clip(context, frame);
  for (const tile of [...coarser, ...loaded]) {
    if (!tile) continue;
    const across = frame.tileRange("x", tile.across, tile.column).range.map((cell) => frame.toPixel("x", cell));
    const down = frame.tileRange("y", tile.down, tile.row).range.map((cell) => frame.toPixel("y", cell));
    context.imageSmoothingEnabled = tile.across > 0 && frame.scale.x * 2 ** tile.across < 4;
    context.drawImage(tiles.image(tile, colors), across[0], down[0], across[1] - across[0], down[1] - down[0]);
  }
  context.restore();
}

function clip(context, { gutter, plot }) {
  context.beginPath();
  context.rect(gutter.x, gutter.y, plot.x, plot.y);
  context.clip();
}

// The rectangle of a row or column of cells
function band(frame, axis, cell, size = 1) {
  const [start, length] = [frame.toPixel(axis, cell), size * frame.scale[axis]];
  const other = axis === "x" ? "y" : "x";
  const end = Math.min(frame.toPixel(other, frame.size[other]), frame.gutter[other] + frame.plot[other]) - frame.gutter[other];
  return axis === "x" ? [start, frame.gutter.y, length, end] : [frame.gutter.x, start, end, length];
}

export function drawOverlay(context, frame, theme, { hidden, pinned, cursor, block }) {
  context.save();
  clip(context, frame);
  drawGrid(context, frame, theme);
  context.fillStyle = theme.raised;
  for (const [axis, positions] of [["x", hidden.key], ["y", hidden.query]]) {
    const [start, stop] = frame.visibleRange(axis);
    for (const position of positions) if (position >= start && position < stop) context.fillRect(...band(frame, axis, position));
  }
  context.strokeStyle = theme.accent;
  context.lineWidth = 2;
  if (pinned.key !== null) outline(context, frame, "x", pinned.key);
  if (pinned.query !== null) outline(context, frame, "y", pinned.query);
  if (cursor) drawCursor(context, frame, theme, cursor, block);
  context.restore();
}

function drawGrid(context, frame, theme) {
  context.strokeStyle = theme.paper;
  context.lineWidth = 1;
  for (const axis of ["x", "y"]) {
    if (frame.scale[axis] < MIN_GRID_CELL) continue;
    const [start, stop] = frame.visibleRange(axis);
    context.beginPath();
    for (let cell = start + 1; cell < stop; cell += 1) {
      const at = Math.round(frame.toPixel(axis, cell)) + 0.5;
      if (axis === "x") context.rect(at, frame.gutter.y - 1, 0, frame.plot.y + 2);
      else context.rect(frame.gutter.x - 1, at, frame.plot.x + 2, 0);
    }
    context.stroke();
  }
}

function outline(context, frame, axis, cell) {
  const [left, top, width, height] = band(frame, axis, cell);
  context.strokeRect(left, top, Math.max(width, 2), Math.max(height, 2));
}

// A light and a dark outline, visible on any color
function drawCursor(context, frame, theme, { query, key }, block) {
  const [left, top] = [frame.toPixel("x", key), frame.toPixel("y", query)];
  const [width, height] = [Math.max(block.x * frame.scale.x, 3), Math.max(block.y * frame.scale.y, 3)];
  for (const [color, lineWidth] of [[theme.paper, 4], [theme.ink, 2]]) {
    context.strokeStyle = color;
    context.lineWidth = lineWidth;
    context.strokeRect(left, top, width, height);
  }
}

// The positions to label, and whether the labels are tokens or numbers
function labelPositions(frame, axis) {
  const minStep = LABEL_SPACING / frame.scale[axis];
  const [start, stop] = frame.visibleRange(axis);
  const tokens = minStep <= 4;
  const step = tokens ? Math.max(1, Math.ceil(minStep)) : niceStep(minStep * (axis === "x" ? 2 : 2.5));
  const first = Math.ceil(start / step) * step;
  const positions = [];
  for (let position = first; position < stop; position += step) positions.push(position);
  return { tokens, positions };
}

function niceStep(min) {
  const power = 10 ** Math.floor(Math.log10(min));
  return power * (NICE_STEPS.find((step) => step * power >= min) ?? 10);
}

export function drawLabels(context, frame, theme, texts, { highlighted, hidden }) {
  context.font = `${FONT_SIZE}px ${theme.font}`;
  context.textBaseline = "middle";
  for (const axis of ["x", "y"]) {
    const { tokens, positions } = labelPositions(frame, axis);
    const side = axis === "x" ? "key" : "query";
    const maxWidth = frame.gutter[axis === "x" ? "y" : "x"] - 14;
    for (const position of withHighlighted(positions, highlighted[side], frame, axis)) {
      if (hidden[side].has(position)) continue;
      const middle = frame.toPixel(axis, position + 0.5);
      if (middle < frame.gutter[axis] || middle > frame.gutter[axis] + frame.plot[axis]) continue;
      const isHighlighted = position === highlighted[side];
      context.fillStyle = isHighlighted ? theme.accent : tokens ? theme.ink : theme.quiet;
      const text = tokens || isHighlighted ? visible(texts[side].tokens[position] ?? "") : formatCount(position);
      drawLabel(context, frame, axis, middle, shortened(context, text, maxWidth));
    }
  }
}

// Adds the highlighted position and drops labels that would overlap it
function withHighlighted(positions, highlighted, frame, axis) {
  if (highlighted === null || highlighted === undefined) return positions;
  const spacing = LABEL_SPACING / frame.scale[axis];
  return [...positions.filter((position) => Math.abs(position - highlighted) >= spacing), highlighted];
}

function drawLabel(context, frame, axis, middle, text) {
  context.textAlign = axis === "x" ? "left" : "right";
  if (axis === "y") return context.fillText(text, frame.gutter.x - 7, middle);
  context.save();
  context.translate(middle, frame.gutter.y - 7);
  context.rotate(-Math.PI / 2);
  context.fillText(text, 0, 0);
  return context.restore();
}

const shortTexts = new Map();

// Truncates a label with "…"; results are cached, because measuring text is slow
function shortened(context, text, maxWidth) {
  const name = `${maxWidth} ${text}`;
  if (!shortTexts.has(name)) {
    if (shortTexts.size > 5000) shortTexts.clear();
    let short = text;
    while (short.length > 1 && context.measureText(short === text ? text : `${short}…`).width > maxWidth) short = [...short].slice(0, -1).join("");
    shortTexts.set(name, short === text ? text : `${short}…`);
  }
  return shortTexts.get(name);
}
