// One input with the chosen view of it: title, message, the view, and the line that says what is looked at.
import { button, make } from "./dom.js";
import { Pane } from "./desk.js";
import { LinesView } from "./lines.js";
import { MatrixView } from "./matrix.js";
import { HeadsView } from "./heads.js";
import { NumbersView } from "./numbers.js";

const SLOW = 250; // milliseconds before a wait is shown
const VIEW_CLASSES = { lines: LinesView, matrix: MatrixView, heads: HeadsView, numbers: NumbersView };

export class PaneBox {
  constructor(desk, second = false) {
    this.desk = desk;
    this.pane = new Pane(desk, second);
    this.title = make("h3", { class: "pane-title", dir: "auto" });
    this.note = make("p", { class: "quiet note", dir: "auto" });
    this.message = make("div", { class: "message", role: "alert", hidden: true });
    this.body = make("div", { class: "body" });
    this.readout = make("p", { class: "readout", role: "status", "aria-live": "polite", dir: "auto" });
    this.node = make("section", { class: "pane" }, this.title, this.note, this.message, this.body);
    this.waits = 0;
    Object.assign(this.pane, {
      readout: this.readout,
      say: (text) => this.say(text),
      waiting: () => this.waiting(),
      trouble: (error, again) => this.trouble(error, again),
      well: () => (this.message.hidden = true),
    });
    this.update(new Set(["view", "input"]));
  }

  say(text) {
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }

  // Shown only when it takes a while; the function that it returns ends it
  waiting() {
    this.waits += 1;
    const timer = setTimeout(() => this.node.classList.add("waits"), SLOW);
    return () => {
      clearTimeout(timer);
      this.waits -= 1;
      if (this.waits === 0) this.node.classList.remove("waits");
    };
  }

  trouble(error, again) {
    const press = () => {
      this.message.hidden = true;
      again();
    };
    const retry = error.final ? [] : [button("Try again", press)];
    this.message.replaceChildren(make("span", {}, `This could not be shown: ${error.message}`), ...retry);
    this.message.hidden = false;
  }

  update(changed) {
    const { pane, desk } = this;
    const { input } = pane;
    this.title.textContent = input.title || `Input ${pane.number + 1}`;
    this.title.hidden = desk.exhibit.inputs.length < 2 && (!input.title || input.title === desk.exhibit.title);
    this.note.textContent = input.note ?? "";
    this.note.hidden = !input.note;
    if (changed.has("input") || changed.has("beside") || changed.has("query") || changed.has("key")) this.repin(changed);
    if (!input.layers.length) return this.nothing("There is no attention to look at here: this input has no layers.");
    if (changed.has("view") || !this.view || changed.has(pane.second ? "beside" : "input")) return this.show();
    return this.view.update(changed);
  }

  repin(changed) {
    const { pane, desk } = this;
    if (!pane.second) pane.pinned = { query: desk.state.query, key: desk.state.key };
    else if (changed.has("beside")) pane.pinned = { query: null, key: null };
    for (const side of ["query", "key"]) {
      const length = pane.input.layers.length ? pane.textOf(side).tokens.length : 0;
      if (pane.pinned[side] !== null && !(pane.pinned[side] < length)) pane.pinned[side] = null;
    }
  }

  show() {
    this.view?.destroy();
    this.message.hidden = true;
    this.say("");
    const View = VIEW_CLASSES[this.desk.state.view];
    this.view = new View(this.pane);
    this.body.replaceChildren(this.view.node);
    if (!this.view.node.contains(this.readout)) this.body.append(this.readout); // most have a place for it
    this.view.begin?.();
  }

  nothing(text) {
    this.view?.destroy();
    this.view = null;
    this.body.replaceChildren(make("p", { class: "empty" }, text));
    this.say("");
  }

  reach(place) {
    this.view?.reach?.(place);
  }

  destroy() {
    this.view?.destroy();
    this.view = null;
    this.node.remove();
  }
}
