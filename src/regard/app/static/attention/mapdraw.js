// The map on its canvas: tiles, lines between cells, what is chosen, and the labels of both axes.
import { count, visible } from "./dom.js";

const LABEL = 12; // pixels of the type
const PITCH = 15; // from one label to the next
const NICE = [1, 2, 5]; // steps of numbers, times powers of ten
const GRID = 9; // pixels of a cell, from which lines part the cells

export function textWidth(context, tokens, font) {
  context.font = `${LABEL}px ${font}`;
  let most = 0;
  for (const token of tokens.slice(0, 400)) most = Math.max(most, context.measureText(visible(token)).width);
  return most;
}

// Tiles in sight; where one is still to come, coarser ones are stretched
export function drawTiles(context, frame, tiles, which, colours) {
  const wanted = frame.tiles();
  if (!wanted.length) return;
  const here = wanted.map((tile) => tiles.get(which, tile));
  const stand = here.every(Boolean) ? [] : tiles.coarser(which, wanted[0]);
  context.save();
  clip(context, frame);
  for (const tile of [...stand, ...here]) {
    if (!tile) continue;
    const across = frame.tileRange("x", tile.across, tile.column).range.map((cell) => frame.toPixel("x", cell));
    const down = frame.tileRange("y", tile.down, tile.row).range.map((cell) => frame.toPixel("y", cell));
    context.imageSmoothingEnabled = tile.across > 0 && frame.scale.x * 2 ** tile.across < 4;
    context.drawImage(tiles.image(tile, colours), across[0], down[0], across[1] - across[0], down[1] - down[0]);
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

export function drawOver(context, frame, theme, { hidden, pinned, cursor, block }) {
  context.save();
  clip(context, frame);
  grid(context, frame, theme);
  context.fillStyle = theme.raised;
  for (const [axis, places] of [["x", hidden.key], ["y", hidden.query]]) {
    const [first, last] = frame.sight(axis);
    for (const place of places) if (place >= first && place < last) context.fillRect(...band(frame, axis, place));
  }
  context.strokeStyle = theme.accent;
  context.lineWidth = 2;
  if (pinned.key !== null) outline(context, frame, "x", pinned.key);
  if (pinned.query !== null) outline(context, frame, "y", pinned.query);
  if (cursor) box(context, frame, theme, cursor, block);
  context.restore();
}

function grid(context, frame, theme) {
  context.strokeStyle = theme.paper;
  context.lineWidth = 1;
  for (const axis of ["x", "y"]) {
    if (frame.scale[axis] < GRID) continue;
    const [first, last] = frame.sight(axis);
    context.beginPath();
    for (let cell = first + 1; cell < last; cell += 1) {
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

// Two lines, one light and one dark: seen on every colour
function box(context, frame, theme, { query, key }, block) {
  const [left, top] = [frame.toPixel("x", key), frame.toPixel("y", query)];
  const [width, height] = [Math.max(block.x * frame.scale.x, 3), Math.max(block.y * frame.scale.y, 3)];
  for (const [colour, line] of [[theme.paper, 4], [theme.ink, 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(left, top, width, height);
  }
}

// The places that get a label, and whether it is the token or its number
export function labelled(frame, axis) {
  const least = PITCH / frame.scale[axis];
  const [first, last] = frame.sight(axis);
  const tokens = least <= 4;
  const step = tokens ? Math.max(1, Math.ceil(least)) : niceStep(least * (axis === "x" ? 2 : 2.5));
  const places = [];
  // numbers are round ones: place 99 is the hundredth
  for (let place = tokens ? Math.ceil(first / step) * step : Math.ceil((first + 1) / step) * step - 1; place < last; place += step) places.push(place);
  return { tokens, step, places };
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * (NICE.find((nice) => nice * power >= least) ?? 10);
}

export function drawLabels(context, frame, theme, texts, { strong, hidden }) {
  context.font = `${LABEL}px ${theme.font}`;
  context.textBaseline = "middle";
  for (const axis of ["x", "y"]) {
    const { tokens, places } = labelled(frame, axis);
    const side = axis === "x" ? "key" : "query";
    const room = frame.gutter[axis === "x" ? "y" : "x"] - 14;
    for (const place of withStrong(places, strong[side], frame, axis)) {
      if (hidden[side].has(place)) continue;
      const middle = frame.toPixel(axis, place + 0.5);
      if (middle < frame.gutter[axis] || middle > frame.gutter[axis] + frame.plot[axis]) continue;
      context.fillStyle = place === strong[side] ? theme.accent : tokens ? theme.ink : theme.quiet;
      const text = tokens || place === strong[side] ? visible(texts[side].tokens[place] ?? "") : count(place + 1);
      label(context, frame, axis, middle, shortened(context, text, room));
    }
  }
}

// The chosen place has its label in any case, and its neighbours make room
function withStrong(places, strong, frame, axis) {
  if (strong === null || strong === undefined) return places;
  const near = PITCH / frame.scale[axis];
  return [...places.filter((place) => place === strong || Math.abs(place - strong) >= near), ...(places.includes(strong) ? [] : [strong])];
}

function label(context, frame, axis, middle, text) {
  context.textAlign = axis === "x" ? "left" : "right";
  if (axis === "y") return context.fillText(text, frame.gutter.x - 7, middle);
  context.save();
  context.translate(middle, frame.gutter.y - 7);
  context.rotate(-Math.PI / 2);
  context.fillText(text, 0, 0);
  return context.restore();
}

const widths = new Map();

// Cut to the room there is, with "…"; widths of letters are remembered, as there are many labels a second
function shortened(context, text, room) {
  const name = `${room} ${text}`;
  if (!widths.has(name)) {
    if (widths.size > 5000) widths.clear();
    let short = text;
    while (short.length > 1 && context.measureText(short === text ? text : `${short}…`).width > room) short = [...short].slice(0, -1).join("");
    widths.set(name, short === text ? text : `${short}…`);
  }
  return widths.get(name);
}
