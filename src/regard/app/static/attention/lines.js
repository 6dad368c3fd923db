// The tokens of both sides, and a line for each weight between them.
import { make, makeSvg, percent, visible } from "../shared/dom.js";
import { headColor } from "./colors.js";
import { makeRankings } from "./rankings.js";
import { LatestQuestion } from "./state.js";
import { TokenList } from "./tokens.js";

const MIN_WEIGHT = 0.02; // lines with smaller weights are hidden
const MIN_SELECTED_WEIGHT = 0.005; // the same limit for lines of a selected token
const STRONG_WEIGHT = 0.05; // smaller weights of a selected token are labeled less prominently
const MAX_LINES = 1200;
const MAX_LINE_WIDTH = 7; // pixels, at weight 1

export class LinesView {
  constructor(pane) {
    this.pane = pane;
    this.latest = new LatestQuestion(pane);
    this.hovered = this.focused = null; // { side, position }
    this.weights = null;
    this.svg = makeSvg("svg", { "aria-hidden": "true" });
    this.lists = { query: this.makeList("query"), key: this.makeList("key") };
    this.drawing = make("div", { class: "drawing" });
    this.scroll = make("div", { class: "scrolls links" }, this.drawing);
    this.rankings = null;
    this.node = make("div", { class: "lines-view" }, make("div", { class: "map-side" }, this.scroll, pane.readout));
    this.observer = new ResizeObserver(() => this.arrange());
    this.observer.observe(this.scroll);
    for (const [side, list] of Object.entries(this.lists)) list.center(pane.pinned[side]);
    this.update(new Set(["input"]));
  }

  makeList(side) {
    const other = side === "query" ? "key" : "query";
    return new TokenList(this.pane, side, {
      highlight: (position, cause) => this.highlight(cause, position === null ? null : { side, position }),
      select: (position) => this.togglePin(side, position),
      scrolled: () => this.load(),
      cross: (position, event) => {
        const [[strongest] = []] = this.rank(side, position);
        if (strongest === undefined) return;
        event.preventDefault();
        this.lists[other].goTo(strongest, true);
      },
    });
  }

  get long() {
    return this.lists.query.long || this.lists.key.long;
  }

  update(changed) {
    const { pane } = this;
    if (["input", "compare", "layer", "special"].some((name) => changed.has(name))) {
      this.hovered = this.focused = null;
      for (const list of Object.values(this.lists)) list.fill();
      this.weights = null;
      this.links = [];
      this.svg.replaceChildren();
      this.arrange(true);
      this.load();
    } else if (changed.has("heads") || changed.has("mean")) this.load();
    else this.draw();
    if (this.long && !this.rankings && !pane.state.compact) {
      this.rankings = makeRankings(pane, (cell) => this.goTo(cell), { ranked: (side, positions) => this.scrollToRanked(side, positions) });
      this.node.append(this.rankings.node);
    } else this.rankings?.update();
  }

  // Shows two rows if the words fit, else two columns. The source comes first; in self-attention, queries are on the left
  arrange(force = false) {
    const textWidth = (side) => this.pane.textOf(side).tokens.reduce((sum, token) => sum + 9 * token.length + 26, 30);
    const rows = this.pane.layer.kind !== "self" && Math.max(textWidth("query"), textWidth("key")) < this.scroll.clientWidth;
    if (force || rows !== this.rows) {
      this.rows = rows;
      this.drawing.className = rows ? "drawing across" : "drawing down";
      const { query, key } = this.lists;
      const { sides } = this.pane;
      query.node.dataset.title = sides.query;
      key.node.dataset.title = sides.key;
      this.keysFirst = this.pane.layer.kind !== "self";
      this.drawing.replaceChildren(...(this.keysFirst ? [key.node, this.svg, query.node] : [query.node, this.svg, key.node]));
    }
    this.positionLines();
  }

  // Loads the weights between the tokens shown
  load() {
    const { pane } = this;
    const [rows, columns] = [this.lists.query.range, this.lists.key.range];
    if (!pane.heads.length || rows[1] === 0 || columns[1] === 0) {
      this.latest.stop();
      this.weights = null;
      pane.setStatus(pane.heads.length ? "There are no tokens." : "Select a head to see its lines.");
      return this.draw();
    }
    const shape = { rows, columns, height: rows[1] - rows[0], width: columns[1] - columns[0] };
    this.latest.ask("tile", { heads: pane.requestedHeads, mean: pane.state.values.mean, ...shape }, (tile) => {
      this.weights = { ...tile, rows, columns, heads: pane.state.values.mean ? ["mean"] : pane.heads };
      this.updateLabels();
      this.draw();
    });
  }

  weight(index, query, key) {
    const { shape, data, rows, columns } = this.weights;
    return data[(index * shape[1] + query - rows[0]) * shape[2] + key - columns[0]];
  }

  meanWeight(query, key) {
    const count = this.weights.heads.length;
    let sum = 0;
    for (let index = 0; index < count; index += 1) sum += this.weight(index, query, key);
    return sum / count;
  }

  // [position, weight] of the tokens on the other side, the strongest first
  rank(side, position) {
    if (!this.weights) return [];
    const others = [...this.lists[side === "query" ? "key" : "query"].nodes.keys()];
    const weights = others.map((other) => [other, side === "query" ? this.meanWeight(position, other) : this.meanWeight(other, position)]);
    return weights.sort(([, a], [, b]) => b - a);
  }

  describe(side, position) {
    const others = this.pane.textOf(side === "query" ? "key" : "query").tokens;
    const strongest = this.rank(side, position).slice(0, 4).filter(([, weight]) => weight >= MIN_SELECTED_WEIGHT);
    const links = strongest.map(([other, weight]) => `“${visible(others[other])}” ${percent(weight)}%`).join(", ");
    return `“${visible(this.pane.textOf(side).tokens[position])}”: ${links || "no visible links"}`;
  }

  // Labels for screen readers: each token with its strongest links; not for long texts
  updateLabels() {
    if (this.weights.data.length > 100000) return;
    for (const [side, list] of Object.entries(this.lists)) {
      for (const [position, node] of list.nodes) node.setAttribute("aria-label", this.describe(side, position));
    }
  }

  get pinned() {
    const { query, key } = this.pane.pinned;
    if (query !== null) return { side: "query", position: query };
    return key === null ? null : { side: "key", position: key };
  }

  // cause: "hovered" or "focused"
  highlight(cause, token) {
    this[cause] = token;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  togglePin(side, position) {
    const isPinned = this.pane.pinned[side] === position;
    const other = side === "query" ? "key" : "query";
    this.pane.pin({ [side]: isPinned ? null : position, [other]: null });
    if (this.pane.second) this.draw();
    this.rankings?.update();
  }

  goTo({ query = null, key = null }) {
    if (query !== null) this.lists.query.goTo(query);
    if (key !== null) this.lists.key.goTo(key);
    this.pane.pin(query !== null ? { query, key: null } : { query: null, key });
    this.draw();
    this.rankings?.update();
  }

  // Scrolls to the first ranked token if none is visible, unless a token of that side is pinned
  scrollToRanked(side, positions) {
    const other = side === "query" ? "key" : "query";
    if (this.pane.pinned[other] !== null) return;
    const list = this.lists[other];
    const [start, stop] = list.range;
    if (positions.length && !positions.some((position) => position >= start && position < stop)) list.goTo(positions[0]);
  }

  // ---- drawing

  draw() {
    const selected = this.hovered ?? this.focused ?? this.pinned;
    this.links = this.weights ? this.makeLinks(selected) : [];
    this.svg.replaceChildren(...this.links.map((link) => link.node));
    this.positionLines();
    this.markTokens(selected);
    if (selected && this.weights && this.lists[selected.side].nodes.has(selected.position)) {
      this.pane.setStatus(`${this.pane.sides[selected.side]} ${this.describe(selected.side, selected.position)}`);
    } else if (this.weights) this.pane.setStatus("Hover over a token, or select it with Tab and the arrow keys, to see only its lines. Click to pin it.");
  }

  makeLinks(selected) {
    const links = [];
    const positions = (side) => (selected?.side === side ? [selected.position].filter((position) => this.lists[side].nodes.has(position)) : [...this.lists[side].nodes.keys()]);
    const [queries, keys] = [positions("query"), positions("key")];
    for (const [index, head] of this.weights.heads.entries()) {
      for (const query of queries) {
        for (const key of keys) {
          const weight = this.weight(index, query, key);
          if (weight >= (selected ? MIN_SELECTED_WEIGHT : MIN_WEIGHT)) links.push({ index, head, query, key, weight, node: null });
        }
      }
    }
    links.sort((a, b) => b.weight - a.weight);
    links.length = Math.min(links.length, MAX_LINES);
    links.reverse(); // the strongest on top
    for (const link of links) link.node = this.makeLine(link, Boolean(selected));
    return links;
  }

  makeLine({ head, weight }, isSelected) {
    const width = Math.max((this.rows ? MAX_LINE_WIDTH : 0.7 * MAX_LINE_WIDTH) * weight, 1);
    const node = makeSvg("path", { "stroke-width": width, "stroke-opacity": isSelected ? 0.35 + 0.65 * weight : weight ** 0.7 });
    node.style.stroke = head === "mean" ? "var(--accent)" : headColor(head);
    return node;
  }

  // Connects the current positions of the tokens; lines of several heads are offset
  positionLines() {
    if (!this.links?.length || !this.weights) return;
    const box = this.svg.getBoundingClientRect();
    const centers = (side) => {
      const pixels = new Map();
      for (const [position, node] of this.lists[side].nodes) {
        const { left, width, top, height } = node.getBoundingClientRect();
        pixels.set(position, this.rows ? left + width / 2 - box.left : top + height / 2 - box.top);
      }
      return pixels;
    };
    const [from, to] = [centers("query"), centers("key")];
    const count = this.weights.heads.length;
    const spacing = Math.min(2, 14 / count);
    for (const { node, index, query, key } of this.links) {
      const offset = (index - (count - 1) / 2) * spacing;
      const [a, b] = [from.get(query) + offset, to.get(key) + offset];
      const [start, end] = this.keysFirst ? [b, a] : [a, b];
      if (this.rows) node.setAttribute("d", `M${start} 0C${start} ${box.height / 2} ${end} ${box.height / 2} ${end} ${box.height}`);
      else node.setAttribute("d", `M0 ${start}C${box.width / 2} ${start} ${box.width / 2} ${end} ${box.width} ${end}`);
    }
  }

  // Marks the selected token; tokens on the other side show their weight and a stripe per head
  markTokens(selected) {
    for (const [side, list] of Object.entries(this.lists)) {
      for (const [position, node] of list.nodes) {
        const isSelected = selected?.side === side && selected.position === position;
        const isOpposite = selected && this.weights && selected.side !== side && this.lists[selected.side].nodes.has(selected.position);
        const pair = side === "query" ? [position, selected?.position] : [selected?.position, position];
        const weight = isOpposite ? this.meanWeight(...pair) : 0;
        node.classList.toggle("selected", isSelected);
        node.classList.toggle("aside", Boolean(selected) && !isSelected && weight < MIN_SELECTED_WEIGHT);
        node.classList.toggle("weak", weight < STRONG_WEIGHT);
        node.setAttribute("aria-pressed", String(this.pane.pinned[side] === position));
        if (weight >= MIN_SELECTED_WEIGHT) node.dataset.share = `${percent(weight)}%`;
        else delete node.dataset.share;
        node.style.backgroundImage = weight >= MIN_SELECTED_WEIGHT && this.weights.heads.length > 1 ? this.stripes(pair) : "";
      }
    }
  }

  stripes(pair) {
    const { heads } = this.weights;
    const parts = heads.map((head, index) => {
      const strength = Math.round(100 * Math.min(1, Math.sqrt(this.weight(index, ...pair))));
      const color = `color-mix(in srgb, ${headColor(head)} ${strength}%, transparent)`;
      return `${color} ${(100 * index) / heads.length}% ${(100 * (index + 1)) / heads.length}%`;
    });
    return `linear-gradient(90deg, ${parts.join(", ")})`;
  }

  destroy() {
    this.latest.stop();
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
    this.rankings?.destroy();
  }
}
