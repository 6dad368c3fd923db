// Form controls and announcements.

import { make } from "../shared/dom.js";

let lastField = 0;

// A control with a label above and a hint below; an id lets `replaceKeepingFocus` find it again
export function field(label, control, hint = "", id = "") {
  control.id = id || `field-${++lastField}`;
  const below = hint ? make("small", { class: "hint", id: `${control.id}-hint` }, hint) : null;
  if (below) control.setAttribute("aria-describedby", below.id);
  return make("div", { class: "entry" }, make("label", { for: control.id }, label), control, below);
}

// options: [value, text] pairs, or texts
export function select(options, value, change) {
  const node = make("select", { change: () => change(node.value) });
  for (const option of options) {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    node.append(make("option", { value: key }, text));
  }
  node.value = value;
  if (node.selectedIndex < 0) node.selectedIndex = 0;
  return node;
}

// An input for an integer between two limits
export function numberInput(value, min, max, change) {
  const bounded = () => Math.min(Math.max(Math.round(Number(node.value)) || min, min), max);
  const update = () => {
    node.value = bounded();
    change(bounded());
  };
  const node = make("input", { type: "number", min, max, step: 1, change: update });
  node.value = value;
  return node;
}

// Replaces all children; the focus stays on the element with the same id
export function replaceKeepingFocus(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.id : "";
  element.replaceChildren(...children);
  if (focused) document.getElementById(focused)?.focus();
}

// Delays a call until no other call has been made for some time
export function debounce(milliseconds, work) {
  let timer = 0;
  const delayed = (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...args), milliseconds);
  };
  delayed.now = (...args) => {
    clearTimeout(timer);
    work(...args);
  };
  delayed.stop = () => clearTimeout(timer);
  return delayed;
}

// Announces a text to screen readers
export function announce(text) {
  document.getElementById("announcement").textContent = text;
}
