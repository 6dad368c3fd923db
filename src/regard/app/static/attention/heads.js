// Every layer × head as a small picture with what the head does; they fill in layer by layer.
import { choices, enter, make, percent } from "./dom.js";
import { largest, painted, ramp, themeOf } from "./colours.js";

const SIZE = 64; // points of a picture's side
const AT_ONCE_LAYERS = 2;
const AT_ONCE_WEIGHTS = 2 ** 30; // of one question: the heads of a long text come a few at a time
const VAGUE = new Set(["", "mixed", "other"]); // labels that come last

export class HeadsView {
  constructor(pane) {
    this.pane = pane;
    this.sorting = make("div", { class: "map-bar" });
    this.grid = make("div", { class: "head-grid" });
    this.node = make("div", { class: "heads-view" }, this.sorting, this.grid);
    this.grid.addEventListener("keydown", (event) => this.key(event));
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", (this.recolour = () => this.paintAll()));
    this.load();
  }

  load() {
    this.abort?.abort();
    this.abort = new AbortController();
    const { layers } = this.pane.input;
    this.found = layers.map(() => null); // of each layer: [{ layer, head, label, measures, picture }]
    this.next = 0;
    this.show();
    for (let worker = 0; worker < AT_ONCE_LAYERS; worker += 1) this.work(this.abort.signal);
  }

  async work(signal) {
    while (this.next < this.found.length && !signal.aborted) {
      const layer = this.next;
      this.next += 1;
      await this.fetch(layer, signal);
    }
  }

  async fetch(layer, signal) {
    const { heads } = this.pane.input.layers[layer];
    try {
      while ((this.found[layer]?.length ?? 0) < heads) {
        const first = this.found[layer]?.length ?? 0;
        const asked = this.some(layer, first);
        const { facts, arrays: [{ shape, data }] } = await this.pane.desk.source.ask("heads", { input: this.pane.number, layer, size: SIZE, ...asked }, signal);
        if (signal.aborted) return;
        const [many, height, width] = shape;
        const fresh = Array.from({ length: many }, (_, place) => {
          const head = first + place;
          const told = facts.heads.find((one) => one.head === head) ?? {};
          const picture = { data: data.subarray(place * height * width, (place + 1) * height * width), height, width };
          return { layer, head, label: told.label ?? "", measures: told.measures ?? {}, picture };
        });
        this.found[layer] = [...(this.found[layer] ?? []), ...fresh];
        this.show();
      }
    } catch (error) {
      if (!signal.aborted) this.pane.trouble(error, () => this.fetch(layer, signal));
    }
  }

  // The next heads to ask for; all of them, unless the text is long
  some(layer, first) {
    const { texts, layers } = this.pane.input;
    const { heads, queries, keys } = layers[layer];
    const group = Math.max(Math.floor(AT_ONCE_WEIGHTS / (texts[queries].tokens.length * texts[keys].tokens.length)), 1);
    if (first === 0 && group >= heads) return {};
    return { heads: Array.from({ length: Math.min(group, heads - first) }, (_, place) => first + place) };
  }

  get measures() {
    return [...new Set(this.found.flatMap((heads) => (heads ?? []).flatMap(({ measures }) => Object.keys(measures))))];
  }

  update(changed) {
    if (changed.has("sort")) this.show();
  }

  // ---- the pictures

  show() {
    const { desk } = this.pane;
    const { sort } = desk.state;
    const options = [["natural", "layer"], ["label", "what they do"], ...this.measures.map((name) => [`measure ${name}`, `most “${name}”`])];
    const known = options.some(([value]) => value === sort) ? sort : "natural";
    if (this.options !== JSON.stringify([options, known])) {
      this.options = JSON.stringify([options, known]);
      const had = this.sorting.contains(document.activeElement);
      this.sorting.replaceChildren(choices("Sort by", options, known, (value) => desk.set({ sort: value })));
      if (had) this.sorting.querySelector("select").focus();
    }
    const focused = this.grid.contains(document.activeElement) ? document.activeElement.dataset.name : null;
    this.buttons = [];
    this.grid.replaceChildren(...(known === "natural" ? this.byLayer() : this.bySort(known)));
    enter(this.buttons, this.buttons.find((node) => node.dataset.name === focused) ?? this.buttons[0]);
    if (focused) this.buttons.find((node) => node.dataset.name === focused)?.focus();
    this.paintAll();
    const { layers } = this.pane.input;
    const [done, all] = [this.found.filter((heads, layer) => heads?.length === layers[layer].heads).length, this.found.length];
    this.pane.say(done < all ? `${done} of ${all} layers are here …` : "Each picture is one head: rows are queries, columns are keys. Click one to enlarge it.");
  }

  byLayer() {
    return this.pane.input.layers.map(({ label, name, heads }, layer) => {
      const found = this.found[layer] ?? [];
      const cells = Array.from({ length: heads }, (_, head) => found[head] ? this.thumbnail(found[head], `head ${head}`) : make("span", { class: "thumbnail still", "aria-hidden": "true" }, make("span", { class: "picture" }), make("span", { class: "what" }, "…")));
      return make("section", { class: "head-row", "aria-label": label || name }, make("h4", {}, label || name), make("div", { class: "thumbnails" }, ...cells));
    });
  }

  // All heads that are here, in one row; under a heading for each thing that heads do
  bySort(sort) {
    const all = this.found.flatMap((heads) => heads ?? []);
    const name = ({ layer, head }) => `${this.pane.input.layers[layer].label || layer} · ${head}`;
    if (sort !== "label") {
      const measure = sort.slice("measure ".length);
      const ranked = [...all].sort((one, other) => (other.measures[measure] ?? 0) - (one.measures[measure] ?? 0));
      const cells = ranked.map((one) => this.thumbnail(one, name(one), `${percent(one.measures[measure] ?? 0)} %`));
      return [make("section", { class: "head-row" }, make("div", { class: "thumbnails" }, ...cells))];
    }
    const labels = [...new Set(all.map(({ label }) => label))].sort((one, other) => VAGUE.has(one) - VAGUE.has(other) || one.localeCompare(other));
    return labels.map((label) => {
      const cells = all.filter((one) => one.label === label).map((one) => this.thumbnail(one, name(one), ""));
      return make("section", { class: "head-row", "aria-label": label }, make("h4", {}, `${label || "other"} (${cells.length})`), make("div", { class: "thumbnails" }, ...cells));
    });
  }

  thumbnail(one, name, what = one.label) {
    const canvas = make("canvas", { class: "picture", "aria-hidden": "true" });
    const told = Object.entries(one.measures).map(([measure, value]) => `${measure} ${percent(value)} %`).join(", ");
    const { label } = this.pane.input.layers[one.layer];
    const node = make("button", {
      type: "button",
      class: "thumbnail",
      "data-name": `${one.layer} ${one.head}`,
      title: `${label}, head ${one.head}: ${one.label}${told ? ` (${told})` : ""}`,
      "aria-label": `${label}, head ${one.head}: ${one.label}`,
      onclick: () => this.enlarge(one),
    }, canvas, make("span", { class: "name" }, name), make("span", { class: "what" }, what));
    this.buttons.push(node);
    node.picture = one.picture;
    return node;
  }

  paintAll() {
    const table = ramp(themeOf(this.node.isConnected ? this.node : document.documentElement).dark);
    for (const node of this.buttons) {
      const { data, height, width } = node.picture;
      painted(data, height, width, { most: largest(data), log: false, table }, node.querySelector("canvas"));
    }
  }

  begin() {
    this.paintAll();
  }

  enlarge({ layer, head }) {
    const { desk } = this.pane;
    const view = ["matrix", "lines"].find((name) => desk.views.includes(name)) ?? desk.state.view;
    desk.set({ layer, heads: [head], mean: false, view });
  }

  // Arrows move along the row, and to the nearest picture above or below
  key(event) {
    const here = event.target.closest("button.thumbnail");
    if (!here || event.ctrlKey || event.altKey || event.metaKey) return;
    const at = this.buttons.indexOf(here);
    const simple = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.buttons.length - 1 };
    let next = this.buttons[simple[event.key]];
    if (event.key === "ArrowUp" || event.key === "ArrowDown") next = this.vertically(here, event.key === "ArrowDown");
    if (!next) return;
    event.preventDefault();
    enter(this.buttons, next);
    next.focus();
  }

  vertically(here, down) {
    const from = here.getBoundingClientRect();
    let [best, nearest] = [null, Infinity];
    for (const node of this.buttons) {
      const box = node.getBoundingClientRect();
      const away = down ? box.top - from.top : from.top - box.top;
      const far = away + Math.abs(box.left - from.left) / 10;
      if (away > 8 && far < nearest) [best, nearest] = [node, far];
    }
    return best;
  }

  destroy() {
    this.abort.abort();
    this.scheme.removeEventListener("change", this.recolour);
  }
}
