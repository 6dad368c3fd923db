// One input with the selected view: title, note, error message, the view, and a status line.
import { button, make } from "../shared/dom.js";
import { Pane } from "./state.js";
import { LinesView } from "./lines.js";
import { MatrixView } from "./matrix.js";
import { HeadsView } from "./heads.js";
import { NumbersView } from "./numbers.js";

const LOADING_DELAY = 250; // milliseconds before the loading bar appears
const VIEW_CLASSES = { lines: LinesView, matrix: MatrixView, heads: HeadsView, numbers: NumbersView };

export class PaneBox extends Pane {
  constructor(state, second = false) {
    super(state, second);
    this.title = make("h3", { class: "pane-title", dir: "auto" });
    this.note = make("p", { class: "quiet note", dir: "auto" });
    this.message = make("div", { class: "message", role: "alert", hidden: true });
    this.body = make("div", { class: "body" });
    this.readout = make("p", { class: "readout", role: "status", "aria-live": "polite", dir: "auto" });
    this.node = make("section", { class: "pane" }, this.title, this.note, this.message, this.body);
    this.loading = 0;
    this.failures = new Map(); // source of the error → { error, retry }
    this.update(new Set(["view", "input"]));
  }

  setStatus(text) {
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }

  // Shows the loading bar after a delay; returns a function that ends it
  startLoading() {
    this.loading += 1;
    const timer = setTimeout(() => this.node.classList.add("loading"), LOADING_DELAY);
    return () => {
      clearTimeout(timer);
      this.loading -= 1;
      if (this.loading === 0) this.node.classList.remove("loading");
    };
  }

  clearError(source) {
    if (this.failures.delete(source)) this.showFailures();
  }

  // source: identifies the request that failed; the next error from the same source replaces this one
  showError(source, error, retry) {
    this.failures.set(source, { error, retry });
    this.showFailures();
  }

  // Shows an error, and a button that repeats everything that failed
  showFailures() {
    const failures = [...this.failures.values()];
    const repeatable = failures.filter(({ error }) => !error.final);
    const click = () => {
      this.clearErrors();
      for (const { retry } of repeatable) retry();
    };
    const buttons = repeatable.length ? [button("Try again", click)] : [];
    const text = failures.length ? `Loading failed: ${failures.at(-1).error.message}` : "";
    this.message.replaceChildren(make("span", {}, text), ...buttons);
    this.message.hidden = !failures.length;
  }

  clearErrors() {
    this.failures.clear();
    this.showFailures();
  }

  update(changed) {
    const { input, state } = this;
    this.title.textContent = input.title || `Input ${this.number + 1}`;
    this.title.hidden = state.viewModel.inputs.length < 2 && (!input.title || input.title === state.viewModel.title);
    this.note.textContent = input.note ?? "";
    this.note.hidden = !input.note;
    if (changed.has("input") || changed.has("compare") || changed.has("query") || changed.has("key")) this.updatePinned(changed);
    if (!input.layers.length) return this.showEmpty("This input has no attention layers.");
    if (changed.has("view") || !this.view || changed.has(this.second ? "compare" : "input")) return this.show();
    return this.view.update(changed);
  }

  updatePinned(changed) {
    const { query, key } = this.state.values;
    if (!this.second) this.pinned = { query, key };
    else if (changed.has("compare")) this.pinned = { query: null, key: null };
    for (const side of ["query", "key"]) {
      const length = this.input.layers.length ? this.textOf(side).tokens.length : 0;
      if (!(this.pinned[side] < length)) this.pinned[side] = null;
    }
  }

  show() {
    this.view?.destroy();
    this.clearErrors();
    this.setStatus("");
    const View = VIEW_CLASSES[this.state.values.view];
    this.view = new View(this);
    this.body.replaceChildren(this.view.node);
    if (!this.view.node.contains(this.readout)) this.body.append(this.readout); // lines and matrix place it themselves
    this.view.shown?.();
  }

  showEmpty(text) {
    this.view?.destroy();
    this.view = null;
    this.body.replaceChildren(make("p", { class: "empty" }, text));
    this.setStatus("");
  }

  goTo(cell) {
    this.view?.goTo?.(cell);
  }

  destroy() {
    this.view?.destroy();
    this.view = null;
    this.node.remove();
  }
}
