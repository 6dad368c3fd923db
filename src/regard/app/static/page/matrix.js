// Numbers as pictures: a table whose cells are as deep as what they hold, and a heat map on a canvas.

import { make, tell } from "./dom.js";

export function largest(values) {
  return Math.max(0, ...values.flat().filter(Number.isFinite).map(Math.abs));
}

// { label, rows, columns: names; values; masked: True where nothing may be seen; most: the number of the deepest cell;
//   aside: { name, values } one more column; chosen: number of a row; small }
export function matrix({ label, rows, columns, values, masked, most, digits = 2, aside, chosen, small }) {
  const table = make("table", { class: small ? "matrix small" : "matrix", "aria-label": label });
  const head = table.createTHead().insertRow();
  head.append(make("td", { class: "aside" }), ...columns.map((name) => make("th", { scope: "col", title: name, dir: "auto" }, name)));
  if (aside) head.append(make("th", { scope: "col" }, aside.name));
  const body = table.createTBody();
  const deepest = most ?? largest(values);
  for (const [number, row] of values.entries()) {
    const line = body.insertRow();
    if (number === chosen) line.className = "chosen";
    line.append(make("th", { scope: "row", title: rows[number], dir: "auto" }, rows[number]));
    line.append(...row.map((value, column) => cell(value, deepest, digits, masked?.[number][column])));
    if (aside) line.append(make("td", { class: "aside" }, aside.values[number]));
  }
  return table;
}

function cell(value, deepest, digits, hidden) {
  if (hidden) return make("td", { class: "masked" }, "−∞");
  const node = make("td", { class: value < 0 ? "negative" : null }, tell(value, digits));
  const depth = deepest ? Math.min(Math.abs(value) / deepest, 1) : 0;
  node.style.setProperty("--depth", Number.isFinite(depth) ? depth : 1);
  return node;
}

// Cells change in place while only numbers do, so that nothing jumps
export function scrolled(label, node) {
  return make("div", { class: "scroll", role: "region", "aria-label": label, tabindex: 0 }, node);
}

const dark = matchMedia("(prefers-color-scheme: dark)");

// Rows of numbers as pixels; `signal` ends the watch for another colour scheme
export function heat(values, { label, ratio, signal }) {
  const node = make("canvas", { class: "heat", role: "img", "aria-label": label });
  node.width = values[0]?.length ?? 1;
  node.height = values.length || 1;
  node.style.aspectRatio = ratio ?? `${node.width} / ${node.height}`;
  const paint = () => fill(node, values);
  dark.addEventListener("change", paint, { signal });
  paint();
  return node;
}

function fill(node, values) {
  const style = getComputedStyle(document.documentElement);
  const [none, above, below] = ["--raised", "--accent", "--warm"].map((name) => parse(style.getPropertyValue(name)));
  const deepest = largest(values) || 1;
  const context = node.getContext("2d");
  const image = context.createImageData(node.width, node.height);
  for (const [place, value] of values.flat().entries()) {
    const end = value < 0 ? below : above;
    const depth = Number.isFinite(value) ? Math.min(Math.abs(value) / deepest, 1) : 1;
    for (let part = 0; part < 3; part++) image.data[4 * place + part] = none[part] + depth * (end[part] - none[part]);
    image.data[4 * place + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

function parse(colour) {
  const digits = colour.trim().slice(1);
  const whole = digits.length === 3 ? [...digits].map((digit) => digit + digit).join("") : digits;
  return [0, 2, 4].map((start) => parseInt(whole.slice(start, start + 2), 16));
}

// Names with a bar and a number each: [[name, share, told], …]
export function bars(entries, { label, most, chosen }) {
  const deepest = most ?? (Math.max(0, ...entries.map(([, value]) => value)) || 1);
  const lines = entries.map(([name, value, told], place) => {
    const bar = make("div", { class: "bar-fill" });
    bar.style.width = `${100 * Math.min(Math.max(value / deepest, 0), 1)}%`;
    const mine = chosen === place || chosen === name;
    return make("div", { class: mine ? "chosen" : null },
      make("dt", { dir: "auto" }, name), make("dd", { class: "track", "aria-hidden": "true" }, bar), make("dd", {}, told));
  });
  return make("dl", { class: "bars", "aria-label": label }, ...lines);
}
