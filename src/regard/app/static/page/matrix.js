// Tables with colored cells, heat maps and bars.

import { make } from "../shared/dom.js";
import { formatExact, formatNumber } from "./format.js";

const MAX_NUMBERED = 16; // a fitted matrix with more columns shows no numbers

function maxAbs(values) {
  return Math.max(0, ...values.flat().filter(Number.isFinite).map(Math.abs));
}

// rows, columns: names. masked: true for masked cells. max: the value with the strongest color.
// extra: { name, values }, one more column. selected: number of a row.
// fit: makes the table as wide as its container, whatever the number of columns, with vertical headings.
export function matrix({ label, rows, columns, values, masked = null, max = null, digits = 2, extra = null, selected = -1, small = false, fit = false }) {
  const dense = fit && columns.length > MAX_NUMBERED; // there is no room for numbers
  const table = make("table", { class: ["matrix", small && "small", fit && "fit", dense && "dense"].filter(Boolean).join(" "), "aria-label": label });
  const head = table.createTHead().insertRow();
  head.append(make("td", { class: "aside" }), ...columns.map((name) => make("th", { scope: "col", title: name, dir: "auto" }, make("span", {}, name))));
  if (extra) head.append(make("th", { scope: "col" }, extra.name));
  const body = table.createTBody();
  const limit = max ?? maxAbs(values);
  for (const [number, row] of values.entries()) {
    const line = body.insertRow();
    if (number === selected) line.className = "selected";
    line.append(make("th", { scope: "row", title: rows[number], dir: "auto" }, rows[number]));
    line.append(...row.map((value, column) => cell(value, limit, digits, masked?.[number][column])));
    if (extra) line.append(make("td", { class: "aside" }, extra.values[number]));
  }
  return table;
}

function cell(value, limit, digits, masked) {
  if (masked) return make("td", { class: "masked" }, "−∞");
  const node = make("td", { class: value < 0 ? "negative" : null, title: formatExact(value) }, formatNumber(value, digits));
  const depth = limit ? Math.min(Math.abs(value) / limit, 1) : 0;
  node.style.setProperty("--depth", Number.isFinite(depth) ? depth : 1);
  return node;
}

export function scrollable(label, node) {
  return make("div", { class: "scroll", role: "region", "aria-label": label, tabindex: 0 }, node);
}

const dark = matchMedia("(prefers-color-scheme: dark)");

// Rows of numbers as pixels; follows the color scheme until `signal` is aborted
export function heat(values, { label, ratio = null, signal }) {
  const node = make("canvas", { class: "heat", role: "img", "aria-label": label });
  node.width = values[0]?.length ?? 1;
  node.height = values.length || 1;
  node.style.aspectRatio = ratio ?? `${node.width} / ${node.height}`;
  const paint = () => fillCanvas(node, values);
  dark.addEventListener("change", paint, { signal });
  paint();
  return node;
}

function fillCanvas(node, values) {
  const style = getComputedStyle(document.documentElement);
  const [zero, positive, negative] = ["--raised", "--accent", "--warm"].map((name) => style.getPropertyValue(name).match(/\d+/g).map(Number));
  const limit = maxAbs(values) || 1;
  const context = node.getContext("2d");
  const image = context.createImageData(node.width, node.height);
  for (const [pixel, value] of values.flat().entries()) {
    const end = value < 0 ? negative : positive;
    const depth = Number.isFinite(value) ? Math.min(Math.abs(value) / limit, 1) : 1;
    for (let channel = 0; channel < 3; channel++) image.data[4 * pixel + channel] = zero[channel] + depth * (end[channel] - zero[channel]);
    image.data[4 * pixel + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

// entries: [[name, value, text], …]. selected: index or name of an entry.
export function bars(entries, { label, max = null, selected = null }) {
  const limit = max ?? (Math.max(0, ...entries.map(([, value]) => value)) || 1);
  const lines = entries.map(([name, value, text], index) => {
    const bar = make("div", { class: "bar-fill" });
    bar.style.width = `${100 * Math.min(Math.max(value / limit, 0), 1)}%`;
    const isSelected = selected === index || selected === name;
    return make("div", { class: isSelected ? "selected" : null },
      make("dt", { dir: "auto" }, name), make("dd", { class: "track", "aria-hidden": "true" }, bar), make("dd", { title: formatExact(value) }, text));
  });
  return make("dl", { class: "bars", "aria-label": label }, ...lines);
}
