// Tokens of both sides, and a line for each weight between them.
import { make, percent, visible } from "./dom.js";
import { headColour } from "./colours.js";
import { Latest } from "./desk.js";
import { TokenList } from "./tokens.js";
import { sidePanel } from "./side.js";

const SVG = "http://www.w3.org/2000/svg";
const FAINT = 0.02; // of all lines, fainter ones are left out
const LEAST = 0.005; // of a token's own
const MOST_LINES = 1200;
const WIDEST = 7; // pixels of a line of weight 1

export class LinesView {
  constructor(pane) {
    this.pane = pane;
    this.latest = new Latest(pane);
    this.hovered = this.focused = null; // { side, place }
    this.weights = null;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("aria-hidden", "true");
    this.lists = { query: this.list("query"), key: this.list("key") };
    this.drawing = make("div", { class: "drawing" });
    this.scroll = make("div", { class: "scrolls links" }, this.drawing);
    this.panel = null;
    this.node = make("div", { class: "lines-view" }, make("div", { class: "map-side" }, this.scroll, pane.readout));
    this.watch = new ResizeObserver(() => this.arrange());
    this.watch.observe(this.scroll);
    this.update(new Set(["input"]));
  }

  list(side) {
    const other = side === "query" ? "key" : "query";
    return new TokenList(this.pane, side, {
      look: (place, how) => this.look(how, place === null ? null : { side, place }),
      pick: (place) => this.pick(side, place),
      moved: () => this.load(),
      across: (place, event) => {
        const [[found] = []] = this.strongest(side, place);
        if (found === undefined) return;
        event.preventDefault();
        this.lists[other].reach(found, true);
      },
    });
  }

  get long() {
    return this.lists.query.long || this.lists.key.long;
  }

  update(changed) {
    const { pane } = this;
    if (["input", "beside", "layer", "special"].some((name) => changed.has(name))) {
      this.hovered = this.focused = null;
      for (const list of Object.values(this.lists)) list.fill();
      this.weights = null;
      this.links = [];
      this.svg.replaceChildren();
      this.arrange(true);
      this.load();
    } else if (changed.has("heads") || changed.has("mean")) this.load();
    else this.draw();
    if (this.long && !this.panel && !pane.desk.compact) {
      this.panel = sidePanel(pane, (place) => this.reach(place), { found: (side, places) => this.follow(side, places) });
      this.node.append(this.panel.node);
    } else this.panel?.update(changed);
  }

  // Columns (queries left, keys right), or two rows (keys above, queries below) where words fit side by side
  arrange(again = false) {
    const room = this.scroll.clientWidth;
    const wide = (side) => this.pane.textOf(side).tokens.reduce((sum, token) => sum + 9 * token.length + 26, 30);
    const rows = this.pane.layer.kind !== "self" && Math.max(wide("query"), wide("key")) < room;
    if (again || rows !== this.rows) {
      this.rows = rows;
      this.drawing.className = rows ? "drawing across" : "drawing down";
      const { query, key } = this.lists;
      const { sides } = this.pane;
      query.node.dataset.title = sides.query === "query" ? "query (looks)" : sides.query;
      key.node.dataset.title = sides.key === "key" ? "key (is looked at)" : sides.key;
      this.drawing.replaceChildren(...(rows ? [key.node, this.svg, query.node] : [query.node, this.svg, key.node]));
    }
    this.place();
  }

  // The exact weights between the tokens that are shown
  load() {
    const { pane } = this;
    const [rows, columns] = [this.lists.query.range, this.lists.key.range];
    if (!pane.heads.length || rows[1] === 0 || columns[1] === 0) {
      this.latest.stop();
      this.weights = null;
      pane.say(pane.heads.length ? "There are no tokens." : "Choose a head to see its lines.");
      return this.draw();
    }
    const shape = { rows, columns, height: rows[1] - rows[0], width: columns[1] - columns[0] };
    this.latest.ask("tile", { heads: pane.askedHeads, mean: pane.desk.state.mean, ...shape }, ({ arrays: [array] }) => {
      this.weights = { ...array, rows, columns, heads: pane.desk.state.mean ? ["mean"] : pane.heads };
      this.name();
      this.draw();
    });
  }

  weight(at, query, key) {
    const { shape, data, rows, columns } = this.weights;
    return data[(at * shape[1] + query - rows[0]) * shape[2] + key - columns[0]];
  }

  meanWeight(query, key) {
    const many = this.weights.heads.length;
    let sum = 0;
    for (let at = 0; at < many; at += 1) sum += this.weight(at, query, key);
    return sum / many;
  }

  // [place, weight] of the tokens across, the strongest first
  strongest(side, place) {
    if (!this.weights) return [];
    const others = this.lists[side === "query" ? "key" : "query"].nodes.keys();
    const found = [...others].map((other) => [other, side === "query" ? this.meanWeight(place, other) : this.meanWeight(other, place)]);
    return found.sort(([, one], [, other]) => other - one);
  }

  spoken(side, place) {
    const other = this.pane.textOf(side === "query" ? "key" : "query").tokens;
    const told = this.strongest(side, place).slice(0, 4).filter(([, weight]) => weight >= LEAST);
    const links = told.map(([at, weight]) => `“${visible(other[at])}” ${percent(weight)} %`).join(", ");
    return `“${visible(this.pane.textOf(side).tokens[place])}”: ${links || "nothing that is shown"}`;
  }

  // What is heard of a token: itself, and what it is linked to (for long texts only once it is looked at)
  name() {
    if (this.weights.data.length > 100000) return;
    for (const [side, list] of Object.entries(this.lists)) {
      for (const [place, node] of list.nodes) node.setAttribute("aria-label", this.spoken(side, place));
    }
  }

  get pinned() {
    const { query, key } = this.pane.pinned;
    if (query !== null) return { side: "query", place: query };
    return key === null ? null : { side: "key", place: key };
  }

  look(how, chosen) {
    this[how] = chosen;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  pick(side, place) {
    const same = this.pane.pinned[side] === place;
    const other = side === "query" ? "key" : "query";
    this.pane.pin({ [side]: same ? null : place, [other]: null });
    if (this.pane.second) this.draw();
    this.panel?.update(new Set(["query"]));
  }

  reach({ query = null, key = null }) {
    if (query !== null) this.lists.query.reach(query);
    if (key !== null) this.lists.key.reach(key);
    this.pane.pin(query !== null ? { query, key: null } : { query: null, key });
    this.draw();
    this.panel?.update(new Set(["query"]));
  }

  // A window that shows none of what was found moves to the first of it
  follow(side, places) {
    const list = this.lists[side === "query" ? "key" : "query"];
    const [first, last] = list.range;
    if (places.length && !places.some((place) => place >= first && place < last)) list.reach(places[0]);
  }

  // ---- drawing

  draw() {
    const chosen = this.hovered ?? this.focused ?? this.pinned;
    this.links = this.weights ? this.linksOf(chosen) : [];
    this.svg.replaceChildren(...this.links.map((link) => link.node));
    this.place();
    this.mark(chosen);
    if (chosen && this.weights && this.lists[chosen.side].nodes.has(chosen.place)) {
      this.pane.say(`${this.pane.sides[chosen.side]} ${this.spoken(chosen.side, chosen.place)}`);
    } else if (this.weights) this.pane.say("Point at a token, or go to it with Tab and the arrow keys, for its lines alone; a click keeps it.");
  }

  linksOf(chosen) {
    const links = [];
    const only = (side) => (chosen?.side === side ? [chosen.place].filter((place) => this.lists[side].nodes.has(place)) : [...this.lists[side].nodes.keys()]);
    const [queries, keys] = [only("query"), only("key")];
    for (const [at, head] of this.weights.heads.entries()) {
      for (const query of queries) {
        for (const key of keys) {
          const weight = this.weight(at, query, key);
          if (weight >= (chosen ? LEAST : FAINT)) links.push({ at, head, query, key, weight });
        }
      }
    }
    links.sort((one, other) => other.weight - one.weight);
    links.length = Math.min(links.length, MOST_LINES);
    links.reverse(); // the strongest on top
    for (const link of links) link.node = this.line(link, Boolean(chosen));
    return links;
  }

  line({ head, weight }, alone) {
    const node = document.createElementNS(SVG, "path");
    node.style.stroke = head === "mean" ? "var(--accent)" : headColour(head);
    node.setAttribute("stroke-width", Math.max((this.rows ? WIDEST : 0.7 * WIDEST) * weight, 1));
    node.setAttribute("stroke-opacity", alone ? 0.35 + 0.65 * weight : weight);
    return node;
  }

  // Lines lead from one token to another, wherever these are now; those of several heads lie side by side
  place() {
    if (!this.links?.length || !this.weights) return;
    const box = this.svg.getBoundingClientRect();
    const middle = (side) => {
      const found = new Map();
      for (const [place, node] of this.lists[side].nodes) {
        const { left, width, top, height } = node.getBoundingClientRect();
        found.set(place, this.rows ? left + width / 2 - box.left : top + height / 2 - box.top);
      }
      return found;
    };
    const [from, to] = [middle("query"), middle("key")];
    const many = this.weights.heads.length;
    const apart = Math.min(2, 14 / many);
    for (const { node, at, query, key } of this.links) {
      const aside = (at - (many - 1) / 2) * apart;
      const [a, b] = [from.get(query) + aside, to.get(key) + aside];
      if (this.rows) node.setAttribute("d", `M${b} 0C${b} ${box.height / 2} ${a} ${box.height / 2} ${a} ${box.height}`);
      else node.setAttribute("d", `M0 ${a}C${box.width / 2} ${a} ${box.width / 2} ${b} ${box.width} ${b}`);
    }
  }

  // The token itself is marked, and every token across has its weight beside it, and a stripe for each head
  mark(chosen) {
    for (const [side, list] of Object.entries(this.lists)) {
      for (const [place, node] of list.nodes) {
        const own = chosen?.side === side && chosen.place === place;
        const across = chosen && this.weights && chosen.side !== side && this.lists[chosen.side].nodes.has(chosen.place);
        const pair = side === "query" ? [place, chosen?.place] : [chosen?.place, place];
        const weight = across ? this.meanWeight(...pair) : 0;
        node.classList.toggle("chosen", own);
        node.classList.toggle("aside", Boolean(chosen) && !own && weight < LEAST);
        node.setAttribute("aria-pressed", String(this.pane.pinned[side] === place));
        if (weight >= LEAST) node.dataset.share = percent(weight);
        else delete node.dataset.share;
        node.style.backgroundImage = weight >= LEAST && this.weights.heads.length > 1 ? this.stripes(pair) : "";
      }
    }
  }

  stripes(pair) {
    const { heads } = this.weights;
    const parts = heads.map((head, at) => {
      const strength = Math.round(100 * Math.min(1, Math.sqrt(this.weight(at, ...pair))));
      const colour = `color-mix(in srgb, ${headColour(head)} ${strength}%, transparent)`;
      return `${colour} ${(100 * at) / heads.length}% ${(100 * (at + 1)) / heads.length}%`;
    });
    return `linear-gradient(90deg, ${parts.join(", ")})`;
  }

  destroy() {
    this.latest.stop();
    this.watch.disconnect();
    cancelAnimationFrame(this.frame);
    this.panel?.destroy();
  }
}
