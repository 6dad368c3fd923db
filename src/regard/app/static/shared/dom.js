// DOM helpers. External text always becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// make("button", { type: "button", click: go }, "Go"): attributes that are functions become event listeners
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function button(label, click, attributes = {}) {
  return make("button", { type: "button", click, ...attributes }, label);
}

export function clamp(value, min, max) {
  return Math.max(min, Math.min(value, max));
}

export function pick(object, names) {
  return Object.fromEntries(names.filter((name) => object?.[name] !== undefined).map((name) => [name, object[name]]));
}

// 12345 → "12,345"
export function formatCount(number) {
  return Math.round(Number(number)).toLocaleString("en");
}

// A weight in percent: 34, 3.4, 0.34, and "< 0.01" instead of zeros
export function percent(weight) {
  const value = 100 * weight;
  if (value === 0) return "0";
  if (value < 0.01) return "< 0.01";
  return value >= 9.95 ? value.toFixed(0) : value >= 0.995 ? value.toFixed(1) : value.toFixed(2);
}

export function decimals(number, digits = 3) {
  return Number(number).toFixed(digits).replace("-", "−");
}

// Makes empty tokens and whitespace visible
export function visible(token) {
  if (token === "") return "∅";
  return token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +$/, (spaces) => "␣".repeat(spaces.length));
}

let lastId = 0;

export function freshId(name) {
  lastId += 1;
  return `regard-${name}-${lastId}`;
}

// Roving tab index: one node is in the tab order; arrow keys, Home and End move among the nodes.
// columns(): number of nodes per row.
export function rove(nodes, event, columns = () => 1) {
  if (event.ctrlKey || event.altKey || event.metaKey) return null;
  const current = nodes.indexOf(event.target.closest("button, [tabindex]"));
  if (current < 0) return null;
  const right = getComputedStyle(nodes[current].parentElement).direction === "rtl" ? -1 : 1;
  const steps = { ArrowLeft: -right, ArrowRight: right, ArrowUp: -columns(), ArrowDown: columns() };
  const ends = { Home: 0, End: nodes.length - 1 };
  const next = nodes[event.key in steps ? current + steps[event.key] : ends[event.key]];
  if (!next) return null;
  event.preventDefault();
  setTabStop(nodes, next);
  next.focus();
  return next;
}

export function setTabStop(nodes, stop) {
  for (const node of nodes) node.tabIndex = node === stop ? 0 : -1;
}

// options: [value, text] pairs, or texts
export function select(options, value, change) {
  const node = make("select", { change: () => change(node.value) });
  for (const option of options) {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    node.append(make("option", { value: key, dir: "auto" }, text));
  }
  node.value = String(value);
  if (node.selectedIndex < 0) node.selectedIndex = 0;
  return node;
}

export function labeledSelect(label, options, value, change) {
  const node = select(options, value, change);
  node.id = freshId("select");
  return make("span", { class: "field" }, make("label", { for: node.id }, label), node);
}

export function checkbox(label, checked, change) {
  const box = make("input", { type: "checkbox", checked, change: () => change(box.checked) });
  return make("label", { class: "check" }, box, label);
}
