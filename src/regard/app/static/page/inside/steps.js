// The steps as buttons: the path to the current box, and the boxes in it. Tab moves between them, Enter opens one, Escape leaves it.

import { button, make } from "../../shared/dom.js";

// actions: { go(node), describe(node) → text }
export function makeSteps(actions) {
  const path = make("ol", { class: "inside-path", "aria-label": "Path" });
  const list = make("ol", { class: "inside-steps", "aria-label": "Steps" });
  const element = make("nav", { class: "inside-nav", "aria-label": "Steps of the model", keydown: (event) => event.key === "Escape" && leave(event) }, path, list);
  let current = null;

  function show(node) {
    if (node === current) return;
    current = node;
    const parents = [];
    for (let each = node; each; each = each.parent) parents.unshift(each);
    path.replaceChildren(...parents.map((each) => make("li", {}, button(each.title, () => actions.go(each), { "aria-current": each === node ? "step" : null }))));
    const group = node.children.length ? node : node.parent; // for a matrix: its siblings
    const steps = group.children.filter(({ kind }) => kind !== "operator");
    list.replaceChildren(...steps.map((each) => make("li", {}, stepButton(each))));
  }

  function stepButton(node) {
    const step = button(node.label ?? node.title, () => {
      const focused = document.activeElement === step;
      actions.go(node);
      if (!focused) return;
      show(node); // immediately, so that the next Tab moves to the steps inside
      (list.querySelector("[aria-pressed]") ?? list.querySelector("button")).focus();
    }, { title: actions.describe(node), "data-step": node.id, "aria-pressed": node === current ? "true" : null, focus: () => step.matches(":focus-visible") && actions.preview(node) });
    return step;
  }

  function leave(event) {
    if (!current?.parent) return;
    event.preventDefault();
    const child = current;
    actions.go(current.parent);
    show(current.parent);
    [...list.querySelectorAll("button")].find(({ dataset }) => dataset.step === child.id)?.focus();
  }

  return { element, show };
}
