// Controls that select the view, input, layer and heads, toggle special tokens, and search for tokens.
import { button, checkbox, formatCount, freshId, labeledSelect, make, rove, setTabStop } from "../shared/dom.js";
import { headColor } from "./colors.js";
import { VIEWS } from "./state.js";
import { findPositions } from "./search.js";

export class Toolbar {
  // panelId: id of the element controlled by the tabs. goTo(cell): shows a token in the first pane.
  constructor(state, pane, panelId, goTo) {
    this.state = state;
    this.pane = pane;
    this.panelId = panelId;
    this.goTo = goTo;
    this.tabs = this.makeTabs();
    this.inputs = make("span", { class: "group" });
    this.layers = make("span", { class: "group" });
    this.heads = make("div", { class: "heads", role: "group", "aria-label": "Heads" });
    this.special = checkbox("hide special tokens", !state.values.special, (hide) => state.set({ special: !hide }));
    this.search = this.makeSearch();
    const row = make("div", { class: "row-of-fields" }, this.inputs, this.layers, this.special, state.compact ? null : this.search);
    this.node = make("div", { class: "toolbar" }, state.views.length > 1 ? this.tabs : null, row, this.heads);
    this.update(new Set(["input"]));
  }

  makeTabs() {
    const tabs = this.state.views.map((view) => {
      const attributes = { role: "tab", id: freshId("tab"), "aria-controls": this.panelId, "data-view": view };
      return button(VIEWS[view], () => this.state.set({ view }), attributes);
    });
    const list = make("div", { class: "tabs", role: "tablist", "aria-label": "Views" }, ...tabs);
    list.addEventListener("keydown", (event) => rove(tabs, event)?.click());
    return list;
  }

  get tabId() {
    return this.tabs.querySelector("[aria-selected=true]")?.id ?? "";
  }

  update(changed) {
    const { values } = this.state;
    const tabs = [...this.tabs.children];
    for (const tab of tabs) tab.setAttribute("aria-selected", String(tab.dataset.view === values.view));
    setTabStop(tabs, tabs.find((tab) => tab.dataset.view === values.view));
    if (changed.has("input") || changed.has("compare")) this.updateInputs();
    if (changed.has("input")) this.updateLayers();
    const select = this.layers.querySelector("select");
    if (select) select.value = String(values.layer);
    const isEmpty = !this.pane.input?.layers.length;
    this.layers.hidden = values.view === "heads" || isEmpty;
    this.heads.hidden = values.view === "heads" || values.view === "numbers" || isEmpty || this.pane.layer.heads < 2;
    const special = isEmpty ? 0 : this.pane.queries.special.length + this.pane.keys.special.length;
    this.special.hidden = values.view === "numbers" || special === 0;
    this.special.firstChild.checked = !values.special;
    this.search.hidden = values.view === "heads" || isEmpty;
    if (!isEmpty && (changed.has("input") || changed.has("layer"))) this.updateHeads();
    this.markHeads();
  }

  updateInputs() {
    const { inputs } = this.state.viewModel;
    if (inputs.length < 2) return this.inputs.replaceChildren();
    const { input, compare } = this.state.values;
    const focused = [...this.inputs.querySelectorAll("select")].indexOf(document.activeElement);
    const names = inputs.map(({ title }, number) => [number, `${number + 1}. ${title || "input"}`]);
    const first = labeledSelect("Input", names, input, (value) => this.state.set({ input: Number(value) }));
    const second = labeledSelect("Compare with", [["", "none"], ...names], compare ?? "", (value) => this.state.set({ compare: value === "" ? null : Number(value) }));
    this.inputs.replaceChildren(first, second);
    return this.inputs.querySelectorAll("select")[focused]?.focus();
  }

  updateLayers() {
    const { layers } = this.pane.input ?? { layers: [] };
    const options = layers.map(({ label, name }, number) => [number, label || name]);
    const field = labeledSelect("Layer", options, this.state.values.layer, (value) => this.state.set({ layer: Number(value) }));
    const step = (by) => () => this.state.set({ layer: this.state.values.layer + by });
    const steps = make("span", { class: "buttons" }, button("‹", step(-1), { "aria-label": "Previous layer", title: "Previous layer" }), button("›", step(1), { "aria-label": "Next layer", title: "Next layer" }));
    if (layers.length > 1) field.append(steps);
    this.layers.replaceChildren(...(layers.length ? [field] : []));
  }

  // ---- heads

  updateHeads() {
    const chips = this.pane.allHeads.map((head) => {
      const chip = button(String(head), () => this.toggle(head), { class: "chip", "aria-label": `Head ${head}`, title: `Head ${head}; double-click to show only this head` });
      chip.style.setProperty("--color", headColor(head));
      chip.addEventListener("dblclick", () => this.state.set({ heads: [head], mean: false }));
      return chip;
    });
    this.chips = chips;
    setTabStop(chips, chips[0]);
    const box = make("span", { class: "chips" }, ...chips);
    box.addEventListener("keydown", (event) => rove(chips, event));
    this.mean = button("mean", () => this.state.set({ mean: !this.state.values.mean }), { class: "chip mean", title: "Mean of the selected heads" });
    this.heads.replaceChildren(
      make("span", { class: "name" }, "Heads"),
      box,
      make("span", { class: "buttons" }, button("all", () => this.state.set({ heads: null })), button("none", () => this.state.set({ heads: [] }))),
      this.mean,
    );
  }

  toggle(head) {
    const { heads } = this.pane;
    const all = heads.length === this.pane.layer.heads && heads.length > 1;
    if (all) return this.state.set({ heads: [head] }); // the first click selects a single head
    return this.state.set({ heads: heads.includes(head) ? heads.filter((other) => other !== head) : [...heads, head] });
  }

  markHeads() {
    if (!this.chips || !this.pane.input?.layers.length) return;
    const { heads } = this.pane;
    const { mean, view } = this.state.values;
    for (const [head, chip] of this.chips.entries()) chip.setAttribute("aria-pressed", String(heads.includes(head)));
    this.mean.setAttribute("aria-pressed", String(mean));
    this.mean.hidden = view !== "lines"; // the matrix always shows the mean
    this.heads.classList.toggle("as-one", mean || view === "matrix");
  }

  // ---- search

  makeSearch() {
    const box = make("input", { type: "search", placeholder: "Find a token", "aria-label": "Find a token", spellcheck: "false", autocomplete: "off" });
    const status = make("span", { class: "quiet found", role: "status" });
    let matches = [];
    let current = -1;
    const step = (by) => {
      if (!matches.length) return;
      current = (current + by + matches.length) % matches.length;
      status.textContent = `${formatCount(current + 1)} of ${formatCount(matches.length)}`;
      this.goTo(matches[current]);
    };
    box.addEventListener("input", () => {
      matches = this.find(box.value);
      current = -1;
      status.textContent = box.value.trim() ? `${formatCount(matches.length)} found` : "";
      if (matches.length) step(1);
    });
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      const newMatches = this.find(box.value);
      if (JSON.stringify(newMatches) !== JSON.stringify(matches)) [matches, current] = [newMatches, -1];
      step(event.shiftKey ? -1 : 1);
    });
    const stepButton = (sign, name, by) => button(sign, () => step(by), { "aria-label": name, title: name });
    return make("span", { class: "search", role: "search" }, box, stepButton("‹", "Previous match", -1), stepButton("›", "Next match", 1), status);
  }

  // Matches in queries and keys; only in queries if both are the same text
  find(text) {
    const { pane } = this;
    if (!pane.input?.layers.length) return [];
    const queries = findPositions(pane.queries.tokens, text).map((query) => ({ query }));
    if (pane.layer.queries === pane.layer.keys) return queries;
    return [...queries, ...findPositions(pane.keys.tokens, text).map((key) => ({ key }))];
  }
}
