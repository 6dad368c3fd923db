// Thumbnails of every layer and head with their labels, loaded layer by layer.
import { labeledSelect, make, percent, setTabStop } from "../shared/dom.js";
import { largest, paint, ramp, themeOf } from "./colors.js";

const THUMBNAIL_SIZE = 64;
const MAX_LAYER_REQUESTS = 2;
const MAX_REQUEST_WEIGHTS = 2 ** 30; // heads of long texts are loaded a few at a time
const UNSPECIFIC = new Set(["", "mixed", "other"]); // labels whose group comes last
const spaced = (measure) => measure.replaceAll("_", " ");
const formatMeasure = (measure, value) => measure === "distance" ? `${value.toFixed(1)} tokens` : `${percent(value)}%`;

export class HeadsView {
  constructor(pane) {
    this.pane = pane;
    this.sorting = make("div", { class: "map-bar" });
    this.buttons = [];
    this.grid = make("div", { class: "head-grid" });
    this.node = make("div", { class: "heads-view" }, this.sorting, this.grid);
    this.grid.addEventListener("keydown", (event) => this.handleKey(event));
    this.abort = new AbortController();
    const { signal } = this.abort;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paintAll(), { signal });
    this.loaded = pane.input.layers.map(() => []); // by layer: [{ layer, head, label, measures, picture }]
    this.nextLayer = 0;
    this.show();
    for (let worker = 0; worker < MAX_LAYER_REQUESTS; worker += 1) this.loadLayers(signal);
  }

  async loadLayers(signal) {
    while (this.nextLayer < this.loaded.length && !signal.aborted) {
      const layer = this.nextLayer;
      this.nextLayer += 1;
      await this.loadLayer(layer, signal);
    }
  }

  async loadLayer(layer, signal) {
    const { heads } = this.pane.input.layers[layer];
    try {
      while (this.loaded[layer].length < heads) {
        const first = this.loaded[layer].length;
        const { source } = this.pane.state;
        const request = { input: this.pane.number, layer, ...this.nextHeads(layer, first) };
        const size = { height: THUMBNAIL_SIZE, width: THUMBNAIL_SIZE };
        const [statistics, { shape: [count, height, width], data }] = await Promise.all([
          source.ask("heads", request, signal), source.ask("tile", { ...request, ...size }, signal)]);
        if (signal.aborted) return;
        this.loaded[layer].push(...Array.from({ length: count }, (_, index) => {
          const head = first + index;
          const { label = "", measures = {} } = statistics.heads.find((info) => info.head === head) ?? {};
          const picture = { data: data.subarray(index * height * width, (index + 1) * height * width), height, width };
          return { layer, head, label, measures, picture };
        }));
        this.show();
      }
    } catch (error) {
      if (!signal.aborted) this.pane.showError(layer, error, () => this.loadLayer(layer, signal));
    }
  }

  // The next heads to load: all heads of the layer, or a few if the text is long
  nextHeads(layer, first) {
    const { texts, layers } = this.pane.input;
    const { heads, queries, keys } = layers[layer];
    const group = Math.max(Math.floor(MAX_REQUEST_WEIGHTS / (texts[queries].tokens.length * texts[keys].tokens.length)), 1);
    if (first === 0 && group >= heads) return {};
    return { heads: Array.from({ length: Math.min(group, heads - first) }, (_, index) => first + index) };
  }

  get measures() {
    return [...new Set(this.loaded.flat().flatMap(({ measures }) => Object.keys(measures)))];
  }

  update(changed) {
    if (changed.has("sort") || changed.has("special")) this.show();
    else this.markCurrent();
  }

  // Outlines the selected head
  markCurrent() {
    const { layer, heads } = this.pane.state.values;
    for (const node of this.buttons) {
      if (heads?.length === 1 && node.dataset.name === `${layer} ${heads[0]}`) node.setAttribute("aria-current", "true");
      else node.removeAttribute("aria-current");
    }
  }

  // ---- thumbnails

  show() {
    const { state } = this.pane;
    const { sort } = state.values;
    const options = [["natural", "layer"], ["label", "label"], ...this.measures.map((name) => [`measure ${name}`, `largest ${spaced(name)}`])];
    const known = options.some(([value]) => value === sort) ? sort : "natural";
    if (this.options !== JSON.stringify([options, known])) {
      this.options = JSON.stringify([options, known]);
      const hadFocus = this.sorting.contains(document.activeElement);
      this.sorting.replaceChildren(labeledSelect("Sort by", options, known, (value) => state.set({ sort: value })));
      if (hadFocus) this.sorting.querySelector("select").focus();
    }
    const focused = this.buttons.find((node) => node === document.activeElement)?.dataset.name;
    this.buttons = [];
    this.grid.replaceChildren(...(known === "natural" ? this.byLayer() : this.bySort(known)));
    setTabStop(this.buttons, this.buttons.find((node) => node.dataset.name === focused) ?? this.buttons[0]);
    if (focused) this.buttons.find((node) => node.dataset.name === focused)?.focus();
    this.markCurrent();
    this.paintAll();
    const { layers } = this.pane.input;
    const complete = this.loaded.filter((heads, layer) => heads.length === layers[layer].heads).length;
    this.pane.setStatus(complete < layers.length ? `Loading layers: ${complete} of ${layers.length} …` : "Each thumbnail is one head: rows are queries, columns are keys. Click to enlarge.");
  }

  byLayer() {
    return this.pane.input.layers.map(({ label, name, heads }, layer) => {
      const infos = this.loaded[layer];
      const cells = Array.from({ length: heads }, (_, head) => infos[head] ? this.thumbnail(infos[head], `head ${head}`) : make("span", { class: "thumbnail still", "aria-hidden": "true" }, make("span", { class: "picture" }), make("span", { class: "what" }, "…")));
      return make("section", { class: "head-row", "aria-label": label || name }, make("h4", {}, label || name), make("div", { class: "thumbnails" }, ...cells));
    });
  }

  // All loaded heads sorted by a measure, or grouped by label
  bySort(sort) {
    const all = this.loaded.flat();
    const name = ({ layer, head }) => `${this.pane.input.layers[layer].label || layer} · ${head}`;
    if (sort !== "label") {
      const measure = sort.slice("measure ".length);
      const ranked = [...all].sort((a, b) => (b.measures[measure] ?? 0) - (a.measures[measure] ?? 0));
      const cells = ranked.map((info) => this.thumbnail(info, name(info), formatMeasure(measure, info.measures[measure] ?? 0)));
      return [make("section", { class: "head-row" }, make("div", { class: "thumbnails" }, ...cells))];
    }
    const labels = [...new Set(all.map(({ label }) => label))].sort((a, b) => Number(UNSPECIFIC.has(a)) - Number(UNSPECIFIC.has(b)) || a.localeCompare(b));
    return labels.map((label) => {
      const cells = all.filter((info) => info.label === label).map((info) => this.thumbnail(info, name(info), ""));
      return make("section", { class: "head-row", "aria-label": label }, make("h4", {}, `${label || "other"} (${cells.length})`), make("div", { class: "thumbnails" }, ...cells));
    });
  }

  thumbnail({ layer, head, label, measures, picture }, name, caption = label) {
    const canvas = make("canvas", { class: "picture", "aria-hidden": "true" });
    const details = Object.entries(measures).map(([measure, value]) => `${spaced(measure)} ${formatMeasure(measure, value)}`).join(", ");
    const title = `${this.pane.input.layers[layer].label}, head ${head}: ${label}`;
    const node = make("button", {
      type: "button",
      class: "thumbnail",
      "data-name": `${layer} ${head}`,
      title: details ? `${title} (${details})` : title,
      "aria-label": title,
      click: () => this.enlarge(layer, head),
    }, canvas, make("span", { class: "name" }, name), make("span", { class: "what" }, caption));
    this.buttons.push(node);
    node.picture = picture;
    return node;
  }

  paintAll() {
    const table = ramp(themeOf(this.node.isConnected ? this.node : document.documentElement).dark);
    for (const node of this.buttons) {
      const { data, height, width } = this.withoutSpecial(node.picture, Number(node.dataset.name.split(" ")[0]));
      paint(data, height, width, { max: largest(data), log: false, table }, node.querySelector("canvas"));
    }
  }

  // Drops special tokens from a picture if they are hidden and the picture is not pooled
  withoutSpecial(picture, layer) {
    const { data, height, width } = picture;
    const { texts, layers } = this.pane.input;
    const [queries, keys] = [texts[layers[layer].queries], texts[layers[layer].keys]];
    if (this.pane.state.values.special || height !== queries.tokens.length || width !== keys.tokens.length) return picture;
    const ordinary = ({ tokens, special }) => [...tokens.keys()].filter((position) => !special.includes(position));
    const [rows, columns] = [ordinary(queries), ordinary(keys)];
    if (!rows.length || !columns.length) return picture;
    return { data: Float32Array.from(rows.flatMap((row) => columns.map((column) => data[row * width + column]))), height: rows.length, width: columns.length };
  }

  shown() {
    this.paintAll();
  }

  enlarge(layer, head) {
    const { state } = this.pane;
    const view = ["matrix", "lines"].find((name) => state.views.includes(name)) ?? state.values.view;
    state.set({ layer, heads: [head], mean: false, view });
  }

  // Arrow keys move along the row, and to the nearest thumbnail above or below
  handleKey(event) {
    const current = event.target.closest("button.thumbnail");
    if (!current || event.ctrlKey || event.altKey || event.metaKey) return;
    const index = this.buttons.indexOf(current);
    const targets = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: this.buttons.length - 1 };
    let next = this.buttons[targets[event.key]];
    if (event.key === "ArrowUp" || event.key === "ArrowDown") next = this.nearestInColumn(current, event.key === "ArrowDown");
    if (!next) return;
    event.preventDefault();
    setTabStop(this.buttons, next);
    next.focus();
  }

  nearestInColumn(current, down) {
    const from = current.getBoundingClientRect();
    let [nearest, minDistance] = [null, Infinity];
    for (const node of this.buttons) {
      const box = node.getBoundingClientRect();
      const height = down ? box.top - from.top : from.top - box.top;
      const distance = height + Math.abs(box.left - from.left) / 10;
      if (height > 8 && distance < minDistance) [nearest, minDistance] = [node, distance];
    }
    return nearest;
  }

  destroy() {
    this.abort.abort();
  }
}
