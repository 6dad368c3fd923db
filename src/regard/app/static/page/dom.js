// Small helpers around the document. Text may come from anywhere: it only ever becomes text nodes.

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

// make("button", { type: "button", click: go }, "Go")
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Other children, and the focus stays on what has the same id
export function refill(element, ...children) {
  const held = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren(...children);
  if (held) document.getElementById(held)?.focus();
}

let named = 0;

// A control with its label above it, and what is good to know below; an id lets `refill` find it again
export function field(label, control, hint = "", id = "") {
  control.id = id || `field-${++named}`;
  const below = hint ? make("small", { class: "hint", id: `${control.id}-hint` }, hint) : null;
  if (below) control.setAttribute("aria-describedby", below.id);
  return make("div", { class: "entry" }, make("label", { for: control.id }, label), control, below);
}

// options: [value, text] pairs, or texts
export function choice(options, value, change) {
  const node = make("select", { change: () => change(node.value) });
  for (const option of options) {
    const [own, text] = Array.isArray(option) ? option : [option, option];
    node.append(make("option", { value: own }, text));
  }
  node.value = value;
  if (node.selectedIndex < 0) node.selectedIndex = 0;
  return node;
}

// A whole number between two limits
export function count(value, least, most, change) {
  const bounded = () => Math.min(Math.max(Math.round(Number(node.value)) || least, least), most);
  const settle = () => {
    node.value = bounded();
    change(bounded());
  };
  const node = make("input", { type: "number", min: least, max: most, step: 1, change: settle });
  node.value = value;
  return node;
}

export function button(text, click, attributes = {}) {
  return make("button", { type: "button", click, ...attributes }, text);
}

// Calls wait until nothing has been asked for that long
export function later(milliseconds, work) {
  let timer = 0;
  const wait = (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), milliseconds);
  };
  wait.now = (...given) => {
    clearTimeout(timer);
    work(...given);
  };
  wait.stop = () => clearTimeout(timer);
  return wait;
}

// A number as people write it: few digits, a true minus, powers of ten where it is tiny or huge
export function tell(number, digits = 2) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  if (size !== 0 && (size < 10 ** -digits / 2 || size >= 1e6)) return power(number);
  return number.toFixed(digits).replace(/^-/, "−");
}

// As short as it can be said: 2 and not 2.00
export function plain(number, digits = 3) {
  const told = tell(number, digits);
  return told.includes(".") && !told.includes("·") ? told.replace(/\.?0+$/, "") : told;
}

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

function power(number) {
  const [digits, exponent] = number.toExponential(1).split("e");
  const raised = [...String(Number(exponent))].map((digit) => RAISED[digit]).join("");
  return `${digits.replace("-", "−").replace(/\.0$/, "")}·10${raised}`;
}

export function grouped(number) {
  return Math.round(number).toLocaleString("en");
}

// Said to those who listen instead of looking
export function announce(text) {
  document.getElementById("said").textContent = text;
}
