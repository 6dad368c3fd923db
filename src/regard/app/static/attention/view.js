// The interactive view of attention: mount(element, source) shows what the source describes.
import { button, freshId, make } from "./dom.js";
import { Desk, Pane } from "./desk.js";
import { PaneBox } from "./pane.js";
import { Toolbar } from "./toolbar.js";

// options: { view, views, input, beside, layer, heads, mean, special, compact }
export function mount(element, source, options = {}) {
  element.classList.add("regard-attention");
  element.classList.toggle("compact", Boolean(options.compact));
  const shown = new Shown(element, source, options);
  shown.begin();
  return {
    destroy: () => shown.destroy(),
    set: (change) => shown.set(change),
    get state() {
      return { ...(shown.desk?.state ?? shown.options) };
    },
  };
}

class Shown {
  constructor(element, source, options) {
    Object.assign(this, { element, source, options: { ...options }, gone: false });
  }

  async begin() {
    this.element.replaceChildren(make("p", { class: "waiting", role: "status" }, "Loading …"));
    try {
      const exhibit = await this.source.describe();
      if (this.gone) return;
      this.build(exhibit);
    } catch (error) {
      if (!this.gone) this.failed(error);
    }
  }

  failed(error) {
    const again = button("Try again", () => this.begin());
    this.element.replaceChildren(make("div", { class: "message", role: "alert" }, make("span", {}, `This could not be loaded: ${error.message}`), again));
  }

  build(exhibit) {
    if (!exhibit.inputs.length) {
      this.element.replaceChildren(make("p", { class: "empty" }, "There is nothing to look at."));
      return;
    }
    this.desk = new Desk(this.source, exhibit, this.options);
    const id = freshId("panel");
    this.panes = make("div", { class: "panes", id, role: "tabpanel" });
    this.boxes = [new PaneBox(this.desk)];
    this.toolbar = new Toolbar(this.desk, new Pane(this.desk), id, (place) => this.boxes[0].reach(place));
    this.panes.append(this.boxes[0].node);
    this.element.replaceChildren(this.toolbar.node, this.panes);
    this.desk.listeners.add((changed) => this.update(changed));
    this.update(new Set(["beside"]));
  }

  update(changed) {
    this.toolbar.update(changed);
    this.panes.setAttribute("aria-labelledby", this.toolbar.tabId);
    const { beside, view } = this.desk.state;
    this.element.dataset.view = view;
    if (beside === null && this.boxes.length > 1) this.boxes.pop().destroy();
    for (const box of this.boxes) box.update(changed);
    if (beside !== null && this.boxes.length === 1) {
      this.boxes.push(new PaneBox(this.desk, true));
      this.panes.append(this.boxes[1].node);
    }
    this.panes.classList.toggle("two", this.boxes.length > 1);
  }

  set(change) {
    Object.assign(this.options, change);
    this.desk?.set(change);
  }

  destroy() {
    this.gone = true;
    for (const box of this.boxes ?? []) box.destroy();
    this.source.close?.();
    this.element.replaceChildren();
    this.element.classList.remove("regard-attention", "compact");
  }
}
