// Words that can be moved: dragged with any pointer, or with the arrow keys.

import { announce, make } from "./dom.js";

// changed(order) is called with the new order, numbers of the words
export function chips({ changed }) {
  const element = make("div", { class: "deck", role: "group", "aria-label": "The words in their order" });
  let order = [];
  let names = [];

  function lay(words, next, focus = null) {
    [names, order] = [words, [...next]];
    element.replaceChildren(...order.map(chip));
    if (focus !== null) element.children[focus]?.focus();
  }

  function chip(number, place) {
    const label = `${names[number]}, place ${place + 1} of ${order.length}; arrow keys move it`;
    const node = make("button", { type: "button", class: "loose-word", "aria-label": label, "data-number": number },
      make("span", { dir: "auto" }, names[number]), make("sup", { "aria-hidden": "true" }, String(number + 1)));
    node.addEventListener("keydown", (event) => step(event, place));
    node.addEventListener("pointerdown", (event) => drag(event, node));
    return node;
  }

  function step(event, place) {
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: order.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (to < 0 || to >= order.length || to === place) return;
    const next = [...order];
    next.splice(to, 0, ...next.splice(place, 1));
    changed(next);
    element.children[to]?.focus();
    announce(`${names[next[to]]}, place ${to + 1}`);
  }

  // While it is dragged, the word stands where it would be left
  function drag(event, node) {
    if (event.button !== 0) return;
    node.setPointerCapture(event.pointerId);
    node.classList.add("held");
    const move = (now) => {
      const over = document.elementFromPoint(now.clientX, now.clientY)?.closest(".loose-word");
      if (!over || over === node || over.parentElement !== element) return;
      const after = over.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_PRECEDING;
      if (after) over.after(node);
      else over.before(node);
      node.setPointerCapture(now.pointerId); // moving in the document lets go of it
    };
    const drop = () => {
      node.classList.remove("held");
      for (const name of ["pointermove", "pointerup", "pointercancel"]) node.removeEventListener(name, name === "pointermove" ? move : drop);
      const next = [...element.children].map((child) => Number(child.dataset.number));
      if (next.some((number, place) => number !== order[place])) changed(next);
    };
    node.addEventListener("pointermove", move);
    node.addEventListener("pointerup", drop);
    node.addEventListener("pointercancel", drop);
  }

  return { element, lay };
}
