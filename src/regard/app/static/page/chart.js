// Lines over one number, as SVG: drawn to the width there is; the pointer or the arrow keys read them off.

import { draw, make, plain } from "./dom.js";

const LEFT = 46;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 34;

// { label, x, height, range: [least, most] of y, or as the points are; whole: x has no fractions; zero: x begins there }; update(series), series: [{ name, points: [[x, y], …], flat, dots, tone, dash }]
export function chart({ label, x, height = 240, range = null, whole = false, zero = false, signal }) {
  const legend = make("ul", { class: "lines-named" });
  const picture = draw("svg", { role: "img", tabindex: 0, height, "aria-label": label });
  const element = make("div", { class: "chart" }, legend, picture);
  let series = [];
  let at = null; // the place that is read off

  const places = () => [...new Set(series.flatMap(({ points }) => points.map(([place]) => place)))].sort((a, b) => a - b);

  function paint() {
    const frame = framed(series, picture.clientWidth || 600, height, { range, whole, zero });
    picture.setAttribute("aria-label", `${label}. ${series.map(spoken).join("; ")}`);
    picture.replaceChildren(...axes(frame, x, height), ...series.flatMap((one) => line(one, frame)), ...cross(at, frame, height));
    legend.replaceChildren(...series.map((one) => entry(one, at)), at === null ? "" : make("li", {}, `${x} `, make("b", {}, plain(at))));
    picture.onpointermove = (event) => read(nearest(places(), frame.back(event.offsetX)));
  }

  function read(place) {
    if (place === at) return;
    at = place ?? null;
    paint();
  }

  picture.addEventListener("pointerleave", () => read(null));
  picture.addEventListener("blur", () => read(null));
  picture.addEventListener("keydown", (event) => {
    const all = places();
    const now = at === null ? all.length : all.indexOf(at);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: all.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    read(all[Math.min(Math.max(next, 0), all.length - 1)]);
  });
  const size = new ResizeObserver(() => paint());
  size.observe(picture);
  signal.addEventListener("abort", () => size.disconnect());

  return {
    element,
    update(given) {
      series = given.map((one, number) => ({ tone: number, dash: 0, ...one }));
      if (at !== null && !places().includes(at)) at = null;
      paint();
    },
  };
}

function spoken({ name, points }) {
  if (!points.length) return `${name}: nothing yet`;
  return `${name}: from ${plain(points[0][1])} to ${plain(points.at(-1)[1])}`;
}

function framed(series, width, height, { range, whole, zero }) {
  const [xs, ys] = [0, 1].map((part) => series.flatMap(({ points }) => points.map((point) => point[part])));
  const [left, right] = xs.length ? [zero ? 0 : Math.min(...xs), Math.max(...xs)] : [0, 1];
  const [low, high] = range ?? (ys.length ? rounded(Math.min(...ys), Math.max(...ys)) : [0, 1]);
  const wide = width - LEFT - RIGHT;
  const tall = height - TOP - BOTTOM;
  const span = right - left || 1;
  return {
    width,
    across: (value) => LEFT + ((value - left) / span) * wide,
    up: (value) => TOP + (1 - (value - low) / (high - low || 1)) * tall,
    back: (pixel) => left + ((pixel - LEFT) / wide) * span,
    xTicks: ticks(left, right, Math.max(2, Math.floor(wide / (right < 100 ? 40 : 90))), whole),
    yTicks: ticks(low, high, 5, false),
  };
}

function step(span, most) {
  const rough = span / most || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return unit * ([1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999) ?? 10);
}

function rounded(low, high) {
  const by = step(high - low || Math.abs(high) || 1, 5);
  const floor = Math.floor(low / by) * by;
  return [floor, Math.max(Math.ceil(high / by) * by, floor + by)];
}

function ticks(low, high, most, whole) {
  const by = whole ? Math.max(1, step(high - low, most)) : step(high - low, most);
  const first = Math.ceil(low / by - 1e-9);
  return Array.from({ length: Math.floor(high / by + 1e-9) - first + 1 }, (_, number) => (first + number) * by);
}

function axes({ width, across, up, xTicks, yTicks }, x, height) {
  const floor = height - BOTTOM;
  const nodes = yTicks.flatMap((value) => [
    draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(value), y2: up(value) }),
    draw("text", { x: LEFT - 8, y: up(value) + 4, "text-anchor": "end" }, plain(value)),
  ]);
  nodes.push(draw("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: floor, y2: floor }));
  for (const value of xTicks) nodes.push(draw("text", { x: across(value), y: floor + 16, "text-anchor": "middle" }, value.toLocaleString("en")));
  nodes.push(draw("text", { x: width - RIGHT, y: height - 2, "text-anchor": "end" }, x));
  return nodes;
}

function line({ points, flat, dots, tone, dash }, { width, across, up }) {
  const ends = flat && points.length === 1 ? [[LEFT, up(points[0][1])], [width - RIGHT, up(points[0][1])]] : null;
  const corners = ends ?? points.map(([place, value]) => [across(place), up(value)]);
  const path = corners.map(([one, other], number) => `${number ? "L" : "M"}${one.toFixed(1)} ${other.toFixed(1)}`).join("");
  const look = `tone-${tone % 5}`;
  const nodes = [draw("path", { class: `${look} dash-${dash}`, d: path })];
  if (!ends && (dots || points.length === 1)) nodes.push(...corners.map(([cx, cy]) => draw("circle", { class: look, cx, cy, r: 3 })));
  return nodes;
}

function cross(at, { across }, height) {
  if (at === null) return [];
  return [draw("line", { class: "cross", x1: across(at), x2: across(at), y1: TOP, y2: height - BOTTOM })];
}

function entry({ name, points, flat, tone, dash }, at) {
  const sample = draw("svg", { viewBox: "0 0 24 10", "aria-hidden": "true" },
    draw("line", { class: `tone-${tone % 5} dash-${dash}`, x1: 0, x2: 24, y1: 5, y2: 5 }));
  const found = flat ? points[0] : points.find(([place]) => place === at);
  const told = at !== null && found ? make("b", {}, ` ${plain(found[1])}`) : null;
  return make("li", {}, sample, make("span", { dir: "auto" }, name), told);
}

function nearest(places, wanted) {
  return places.reduce((best, place) => (best === undefined || Math.abs(place - wanted) < Math.abs(best - wanted) ? place : best), undefined);
}
