// What is chosen, and the ways to choose otherwise: input, layer, heads, view, special tokens, search.
import { button, checkbox, choices, count, freshId, make, rove, enter } from "./dom.js";
import { headColour } from "./colours.js";
import { VIEWS } from "./desk.js";
import { findPlaces } from "./finding.js";

export class Toolbar {
  // panelId: the id of the element that the tabs show; reach(place): goes to a token in the first pane
  constructor(desk, pane, panelId, reach) {
    Object.assign(this, { desk, pane, panelId, reach });
    this.tabs = this.makeTabs();
    this.inputs = make("span", { class: "group" });
    this.layers = make("span", { class: "group" });
    this.heads = make("div", { class: "heads", role: "group", "aria-label": "Heads" });
    this.special = checkbox("hide special tokens", !desk.state.special, (hide) => desk.set({ special: !hide }));
    this.search = this.makeSearch();
    const row = make("div", { class: "row-of-fields" }, this.inputs, this.layers, this.special, desk.compact ? null : this.search);
    this.node = make("div", { class: "toolbar" }, desk.views.length > 1 ? this.tabs : null, row, this.heads);
    this.update(new Set(["input"]));
  }

  makeTabs() {
    const tabs = this.desk.views.map((view) => {
      const attributes = { role: "tab", id: freshId("tab"), "aria-controls": this.panelId, "data-view": view };
      return button(VIEWS[view], () => this.desk.set({ view }), attributes);
    });
    const list = make("div", { class: "tabs", role: "tablist", "aria-label": "Views" }, ...tabs);
    list.addEventListener("keydown", (event) => rove(tabs, event)?.click());
    return list;
  }

  get tabId() {
    return this.tabs.querySelector("[aria-selected=true]")?.id ?? "";
  }

  update(changed) {
    const { state } = this.desk;
    const tabs = [...this.tabs.children];
    for (const tab of tabs) tab.setAttribute("aria-selected", String(tab.dataset.view === state.view));
    enter(tabs, tabs.find((tab) => tab.dataset.view === state.view));
    if (changed.has("input") || changed.has("beside")) this.fillInputs();
    if (changed.has("input")) this.fillLayers();
    const select = this.layers.querySelector("select");
    if (select) select.value = String(state.layer);
    const without = !this.pane.input?.layers.length;
    this.layers.hidden = state.view === "heads" || without;
    this.heads.hidden = state.view === "heads" || state.view === "numbers" || without || this.pane.layer.heads < 2;
    const marked = without ? 0 : this.pane.queries.special.length + this.pane.keys.special.length;
    this.special.hidden = state.view === "heads" || state.view === "numbers" || marked === 0;
    this.special.firstChild.checked = !state.special;
    this.search.hidden = state.view === "heads" || without;
    if (!without && (changed.has("input") || changed.has("layer"))) this.fillHeads();
    this.markHeads();
  }

  fillInputs() {
    const { inputs } = this.desk.exhibit;
    if (inputs.length < 2) return this.inputs.replaceChildren();
    const { input, beside } = this.desk.state;
    const focused = [...this.inputs.querySelectorAll("select")].indexOf(document.activeElement);
    const names = inputs.map(({ title }, number) => [number, `${number + 1}. ${title || "input"}`]);
    const one = choices("Input", names, input, (value) => this.desk.set({ input: Number(value) }));
    const other = choices("beside", [["", "nothing"], ...names], beside ?? "", (value) => this.desk.set({ beside: value === "" ? null : Number(value) }));
    this.inputs.replaceChildren(one, other);
    return this.inputs.querySelectorAll("select")[focused]?.focus();
  }

  fillLayers() {
    const { layers } = this.pane.input ?? { layers: [] };
    const options = layers.map(({ label, name }, number) => [number, label || name]);
    const field = choices("Layer", options, this.desk.state.layer, (value) => this.desk.set({ layer: Number(value) }));
    const step = (by) => () => this.desk.set({ layer: this.desk.state.layer + by });
    const steps = make("span", { class: "buttons" }, button("‹", step(-1), { "aria-label": "The layer before", title: "The layer before" }), button("›", step(1), { "aria-label": "The next layer", title: "The next layer" }));
    if (layers.length > 1) field.append(steps);
    this.layers.replaceChildren(...(layers.length ? [field] : []));
  }

  // ---- heads

  fillHeads() {
    const chips = this.pane.allHeads.map((head) => {
      const chip = button(String(head), () => this.toggle(head), { class: "chip", "aria-label": `Head ${head}`, title: `Head ${head}; double click for this one alone` });
      chip.style.setProperty("--colour", headColour(head));
      chip.addEventListener("dblclick", () => this.desk.set({ heads: [head], mean: false }));
      return chip;
    });
    this.chips = chips;
    enter(chips, chips[0]);
    const box = make("span", { class: "chips" }, ...chips);
    box.addEventListener("keydown", (event) => rove(chips, event));
    this.mean = button("mean", () => this.desk.set({ mean: !this.desk.state.mean }), { class: "chip mean", title: "The mean of the chosen heads as one" });
    this.heads.replaceChildren(
      make("span", { class: "name" }, "Heads"),
      box,
      make("span", { class: "buttons" }, button("all", () => this.desk.set({ heads: null })), button("none", () => this.desk.set({ heads: [] }))),
      this.mean,
    );
  }

  toggle(head) {
    const { heads } = this.pane;
    const all = heads.length === this.pane.layer.heads && heads.length > 1;
    if (all) return this.desk.set({ heads: [head] }); // from all to one: the usual wish
    return this.desk.set({ heads: heads.includes(head) ? heads.filter((one) => one !== head) : [...heads, head] });
  }

  markHeads() {
    if (!this.chips || !this.pane.input?.layers.length) return;
    const { heads } = this.pane;
    for (const [head, chip] of this.chips.entries()) chip.setAttribute("aria-pressed", String(heads.includes(head)));
    this.mean.setAttribute("aria-pressed", String(this.desk.state.mean));
    this.mean.hidden = this.desk.state.view !== "lines"; // a matrix of several heads is their mean in any case
    this.heads.classList.toggle("as-one", this.desk.state.mean || this.desk.state.view === "matrix");
  }

  // ---- search

  makeSearch() {
    const box = make("input", { type: "search", placeholder: "Find a token", "aria-label": "Find a token", spellcheck: "false", autocomplete: "off" });
    const told = make("span", { class: "quiet found", role: "status" });
    let found = [];
    let at = -1;
    const go = (step) => {
      if (!found.length) return;
      at = (at + step + found.length) % found.length;
      told.textContent = `${count(at + 1)} of ${count(found.length)}`;
      this.reach(found[at]);
    };
    box.addEventListener("input", () => {
      found = this.places(box.value);
      at = -1;
      told.textContent = box.value.trim() ? `${count(found.length)} found` : "";
      if (found.length) go(1);
    });
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      const now = this.places(box.value);
      if (JSON.stringify(now) !== JSON.stringify(found)) [found, at] = [now, -1];
      go(event.shiftKey ? -1 : 1);
    });
    const press = (sign, name, step) => button(sign, () => go(step), { "aria-label": name, title: name });
    return make("span", { class: "search", role: "search" }, box, press("‹", "The one before", -1), press("›", "The next one", 1), told);
  }

  // Where a text is found: in both sides; of self-attention, whose sides are one text, as a query
  places(text) {
    const { pane } = this;
    if (!pane.input?.layers.length) return [];
    const queries = findPlaces(pane.queries.tokens, text).map((query) => ({ query }));
    if (pane.layer.queries === pane.layer.keys) return queries;
    return [...queries, ...findPlaces(pane.keys.tokens, text).map((key) => ({ key }))];
  }
}
