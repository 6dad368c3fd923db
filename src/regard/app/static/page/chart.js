// Line charts as SVG. The pointer and the arrow keys move a cursor that shows values.

import { make, makeSvg } from "../shared/dom.js";
import { formatShort } from "./format.js";

const LEFT = 46;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 34;

// x: name of the x axis. range: [min, max] of y; default: from the points. integers: x has integer ticks. fromZero: x starts at 0.
// update(series): [{ name, points: [[x, y], …], flat, dots, line, color, dash }]; line: false draws dots only
export function makeChart({ label, x, height = 240, range = null, integers = false, fromZero = false, signal }) {
  const legend = make("ul", { class: "chart-legend" });
  const picture = makeSvg("svg", { role: "img", tabindex: 0, height, "aria-label": label });
  const element = make("div", { class: "chart" }, legend, picture);
  let series = [];
  let cursor = null; // x value of the cursor

  const xValues = () => [...new Set(series.flatMap(({ points }) => points.map(([value]) => value)))].sort((a, b) => a - b);

  function paint() {
    const frame = makeFrame(series, picture.clientWidth || 600, height, { range, integers, fromZero });
    picture.setAttribute("aria-label", `${label}. ${series.map(describe).join("; ")}`);
    picture.replaceChildren(...axes(frame, x, height), ...series.flatMap((curve) => line(curve, frame)), ...cursorLine(cursor, frame, height));
    legend.replaceChildren(...series.map((curve) => legendEntry(curve, cursor)), cursor === null ? "" : make("li", {}, `${x} `, make("b", {}, formatShort(cursor))));
    picture.onpointermove = (event) => moveCursor(nearest(xValues(), frame.toX(event.offsetX)));
  }

  function moveCursor(value) {
    if (value === cursor) return;
    cursor = value ?? null;
    paint();
  }

  picture.addEventListener("pointerleave", () => moveCursor(null));
  picture.addEventListener("blur", () => moveCursor(null));
  picture.addEventListener("keydown", (event) => {
    const values = xValues();
    const current = cursor === null ? values.length : values.indexOf(cursor);
    const next = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: values.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    moveCursor(values[Math.min(Math.max(next, 0), values.length - 1)]);
  });
  const observer = new ResizeObserver(() => paint());
  observer.observe(picture);
  signal.addEventListener("abort", () => observer.disconnect());

  return {
    element,
    update(curves) {
      series = curves.map((curve, number) => ({ color: number, dash: 0, ...curve }));
      if (cursor !== null && !xValues().includes(cursor)) cursor = null;
      paint();
    },
  };
}

function describe({ name, points }) {
  if (!points.length) return `${name}: no values yet`;
  return `${name}: from ${formatShort(points[0][1])} to ${formatShort(points.at(-1)[1])}`;
}

function makeFrame(series, width, height, { range, integers, fromZero }) {
  const [xs, ys] = [0, 1].map((axis) => series.flatMap(({ points }) => points.map((point) => point[axis])));
  const [left, right] = xs.length ? [fromZero ? 0 : Math.min(...xs), Math.max(...xs)] : [0, 1];
  const [low, high] = range ?? (ys.length ? roundedRange(Math.min(...ys), Math.max(...ys)) : [0, 1]);
  const plotWidth = width - LEFT - RIGHT;
  const plotHeight = height - TOP - BOTTOM;
  const span = right - left || 1;
  return {
    width,
    xPixel: (value) => LEFT + ((value - left) / span) * plotWidth,
    yPixel: (value) => TOP + (1 - (value - low) / (high - low || 1)) * plotHeight,
    toX: (pixel) => left + ((pixel - LEFT) / plotWidth) * span,
    xTicks: ticks(left, right, Math.max(2, Math.floor(plotWidth / (right < 100 ? 40 : 90))), integers),
    yTicks: ticks(low, high, 5, false),
  };
}

function tickStep(span, count) {
  const rough = span / count || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return unit * ([1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999) ?? 10);
}

function roundedRange(low, high) {
  const by = tickStep(high - low || Math.abs(high) || 1, 5);
  const floor = Math.floor(low / by) * by;
  return [floor, Math.max(Math.ceil(high / by) * by, floor + by)];
}

function ticks(low, high, count, integers) {
  const by = integers ? Math.max(1, tickStep(high - low, count)) : tickStep(high - low, count);
  const first = Math.ceil(low / by - 1e-9);
  return Array.from({ length: Math.floor(high / by + 1e-9) - first + 1 }, (_, number) => (first + number) * by);
}

function axes({ width, xPixel, yPixel, xTicks, yTicks }, x, height) {
  const floor = height - BOTTOM;
  const nodes = yTicks.flatMap((value) => [
    makeSvg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: yPixel(value), y2: yPixel(value) }),
    makeSvg("text", { x: LEFT - 8, y: yPixel(value) + 4, "text-anchor": "end" }, formatShort(value)),
  ]);
  nodes.push(makeSvg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: floor, y2: floor }));
  for (const value of xTicks) nodes.push(makeSvg("text", { x: xPixel(value), y: floor + 16, "text-anchor": "middle" }, value.toLocaleString("en")));
  nodes.push(makeSvg("text", { x: width - RIGHT, y: height - 2, "text-anchor": "end" }, x));
  return nodes;
}

function line({ points, flat, dots, line: connected = true, color, dash }, { width, xPixel, yPixel }) {
  const ends = flat && points.length === 1 ? [[LEFT, yPixel(points[0][1])], [width - RIGHT, yPixel(points[0][1])]] : null;
  const corners = ends ?? points.map(([at, value]) => [xPixel(at), yPixel(value)]);
  const path = corners.map(([left, top], number) => `${number ? "L" : "M"}${left.toFixed(1)} ${top.toFixed(1)}`).join("");
  const style = `tone-${color % 5}`;
  const nodes = connected ? [makeSvg("path", { class: `${style} dash-${dash}`, d: path })] : [];
  if (!ends && (dots || points.length === 1)) nodes.push(...corners.map(([cx, cy]) => makeSvg("circle", { class: style, cx, cy, r: 3 })));
  return nodes;
}

function cursorLine(cursor, { xPixel }, height) {
  if (cursor === null) return [];
  return [makeSvg("line", { class: "cross", x1: xPixel(cursor), x2: xPixel(cursor), y1: TOP, y2: height - BOTTOM })];
}

function legendEntry({ name, points, flat, line: connected = true, color, dash }, cursor) {
  const style = `tone-${color % 5}`;
  const sample = makeSvg("svg", { viewBox: "0 0 24 10", "aria-hidden": "true" },
    connected ? makeSvg("line", { class: `${style} dash-${dash}`, x1: 0, x2: 24, y1: 5, y2: 5 }) : makeSvg("circle", { class: style, cx: 12, cy: 5, r: 4 }));
  const point = flat ? points[0] : points.find(([at]) => at === cursor);
  const value = cursor !== null && point ? make("b", {}, ` ${formatShort(point[1])}`) : null;
  return make("li", {}, sample, make("span", { dir: "auto" }, name), value);
}

function nearest(values, target) {
  return values.reduce((best, value) => (best === undefined || Math.abs(value - target) < Math.abs(best - target) ? value : best), undefined);
}
