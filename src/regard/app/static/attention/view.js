// The interactive view of attention: mount(element, source) shows the view model of a source.
import { button, freshId, make } from "../shared/dom.js";
import { Pane, State } from "./state.js";
import { PaneBox } from "./pane.js";
import { Toolbar } from "./toolbar.js";

// options: { view, views, input, compare, layer, heads, mean, special, compact }
export function mount(element, source, options = {}) {
  element.classList.add("regard-attention");
  element.classList.toggle("compact", Boolean(options.compact));
  const mounted = new MountedView(element, source, options);
  mounted.load();
  return {
    destroy: () => mounted.destroy(),
    set: (change) => mounted.set(change),
    get state() {
      return { ...(mounted.state?.values ?? mounted.options) };
    },
  };
}

class MountedView {
  constructor(element, source, options) {
    this.element = element;
    this.source = source;
    this.options = { ...options };
    this.destroyed = false;
  }

  async load() {
    this.element.replaceChildren(make("p", { class: "waiting", role: "status" }, "Loading …"));
    try {
      const viewModel = await this.source.describe();
      if (!this.destroyed) this.build(viewModel);
    } catch (error) {
      if (!this.destroyed) this.showError(error);
    }
  }

  showError(error) {
    const retry = button("Try again", () => this.load());
    this.element.replaceChildren(make("div", { class: "message", role: "alert" }, make("span", {}, `Loading failed: ${error.message}`), retry));
  }

  build(viewModel) {
    if (!viewModel.inputs.length) {
      this.element.replaceChildren(make("p", { class: "empty" }, "There are no inputs to show."));
      return;
    }
    this.state = new State(this.source, viewModel, this.options);
    const id = freshId("panel");
    this.panes = make("div", { class: "panes", id, role: "tabpanel" });
    this.boxes = [new PaneBox(this.state)];
    this.toolbar = new Toolbar(this.state, new Pane(this.state), id, (cell) => this.boxes[0].goTo(cell));
    this.panes.append(this.boxes[0].node);
    this.element.replaceChildren(this.toolbar.node, this.panes);
    this.state.listeners.add((changed) => this.update(changed));
    this.update(new Set(["compare"]));
  }

  update(changed) {
    this.toolbar.update(changed);
    this.panes.setAttribute("aria-labelledby", this.toolbar.tabId);
    const { compare, view } = this.state.values;
    this.element.dataset.view = view;
    if (compare === null && this.boxes.length > 1) this.boxes.pop().destroy();
    for (const box of this.boxes) box.update(changed);
    if (compare !== null && this.boxes.length === 1) {
      this.boxes.push(new PaneBox(this.state, true));
      this.panes.append(this.boxes[1].node);
    }
    this.panes.classList.toggle("two", this.boxes.length > 1);
  }

  set(change) {
    Object.assign(this.options, change);
    this.state?.set(change);
  }

  destroy() {
    this.destroyed = true;
    for (const box of this.boxes ?? []) box.destroy();
    this.source.close?.();
    this.element.replaceChildren();
    this.element.classList.remove("regard-attention", "compact");
  }
}
