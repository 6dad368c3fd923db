// Form controls and announcements.

import { clamp, freshId, make } from "../shared/dom.js";

// A control with a label above and a hint below; an id lets `replaceKeepingFocus` find it again
export function field(label, control, hint = "", id = "") {
  control.id = id || freshId("field");
  const below = hint ? make("small", { class: "hint", id: `${control.id}-hint` }, hint) : null;
  if (below) control.setAttribute("aria-describedby", below.id);
  return make("div", { class: "entry" }, make("label", { for: control.id }, label), control, below);
}

// Enter submits a text; Shift + Enter starts a new line
export function submitOnEnter(text, submit) {
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
}

// An input for an integer between two limits
export function numberInput(value, min, max, change) {
  const update = () => {
    const number = clamp(Math.round(Number(node.value)) || min, min, max);
    node.value = number;
    change(number);
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
