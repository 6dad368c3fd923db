// Words that can be reordered by dragging or with the arrow keys.

import { make } from "../shared/dom.js";
import { announce } from "./controls.js";

// changed(order): called with the new order of the word indices
export function chips({ changed }) {
  const element = make("div", { class: "word-list", role: "group", "aria-label": "Words in their current order" });
  let order = [];
  let words = [];

  function render(newWords, newOrder, focus = null) {
    [words, order] = [newWords, [...newOrder]];
    element.replaceChildren(...order.map(makeChip));
    if (focus !== null) element.children[focus]?.focus();
  }

  function makeChip(word, index) {
    const label = `${words[word]}, position ${index + 1} of ${order.length}; move with the arrow keys`;
    const node = make("button", { type: "button", class: "draggable", "aria-label": label, "data-word": word },
      make("span", { dir: "auto" }, words[word]), make("sup", { "aria-hidden": "true" }, String(word + 1)));
    node.addEventListener("keydown", (event) => moveByKey(event, index));
    node.addEventListener("pointerdown", (event) => drag(event, node));
    return node;
  }

  function moveByKey(event, index) {
    const target = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: order.length - 1 }[event.key];
    if (target === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (target < 0 || target >= order.length || target === index) return;
    const next = [...order];
    next.splice(target, 0, ...next.splice(index, 1));
    changed(next);
    element.children[target]?.focus();
    announce(`${words[next[target]]}, position ${target + 1}`);
  }

  // A dragged chip is shown where it would be dropped
  function drag(event, node) {
    if (event.button !== 0) return;
    node.setPointerCapture(event.pointerId);
    node.classList.add("dragging");
    const move = (pointer) => {
      const target = document.elementFromPoint(pointer.clientX, pointer.clientY)?.closest(".draggable");
      if (!target || target === node || target.parentElement !== element) return;
      const isAfter = target.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_PRECEDING;
      if (isAfter) target.after(node);
      else target.before(node);
      node.setPointerCapture(pointer.pointerId); // again, because moving the node releases the capture
    };
    const dropped = new AbortController();
    const { signal } = dropped;
    const drop = () => {
      dropped.abort();
      node.classList.remove("dragging");
      const next = [...element.children].map((child) => Number(child.dataset.word));
      if (next.some((word, index) => word !== order[index])) changed(next);
    };
    node.addEventListener("pointermove", move, { signal });
    node.addEventListener("pointerup", drop, { signal });
    node.addEventListener("pointercancel", drop, { signal });
  }

  return { element, render };
}
