// The tokens of one side as buttons: one tab stop, arrow keys among them, and for long texts a window of them.
import { button, clamp, count, enter, make, visible } from "./dom.js";

export const SHORT = 300; // tokens of a side that are shown all at once
const WINDOW = 40; // and of longer ones as many

export class TokenList {
  // on: { look(place or null), pick(place), moved(), across(place): where the arrow to the other side leads }
  constructor(pane, side, on) {
    this.pane = pane;
    this.side = side;
    this.on = on;
    this.start = 0;
    this.box = make("div", { class: "tokens", role: "group", dir: "auto", "aria-label": `Tokens: ${pane.sides[side]}` });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.pager = make("div", { class: "pager", hidden: true });
    this.node = make("div", { class: `side ${side}` }, this.pager, this.box);
    this.fill();
  }

  get length() {
    return this.pane.textOf(this.side).tokens.length;
  }

  get long() {
    return this.length > SHORT;
  }

  // The places that are shown, from the first to behind the last
  get range() {
    return this.long ? [this.start, Math.min(this.start + WINDOW, this.length)] : [0, this.length];
  }

  fill() {
    const { tokens, special } = this.pane.textOf(this.side);
    const [marked, hidden] = [new Set(special), this.pane.hides(this.side)];
    const [first, last] = this.range;
    this.nodes = new Map();
    for (let place = first; place < last; place += 1) {
      if (!hidden.has(place)) this.nodes.set(place, this.token(place, tokens[place], marked.has(place)));
    }
    const nodes = [...this.nodes.values()];
    enter(nodes, nodes[0]);
    this.box.replaceChildren(...nodes);
    if (!nodes.length) this.box.append(make("span", { class: "empty" }, "(no tokens)"));
    this.page();
  }

  token(place, text, special) {
    const name = special ? "token special" : "token";
    const title = `${visible(text)}: ${this.pane.sides[this.side]} ${place + 1}`;
    const node = button(make("span", { class: "text" }, visible(text)), () => this.on.pick(place), { class: name, title, "aria-pressed": "false" });
    node.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && this.on.look(place, "hovered"));
    node.addEventListener("pointerleave", () => this.on.look(null, "hovered"));
    node.addEventListener("focus", () => {
      enter([...this.nodes.values()], node);
      if (node.matches(":focus-visible")) this.on.look(place, "focused");
    });
    node.addEventListener("blur", () => this.on.look(null, "focused"));
    return node;
  }

  page() {
    this.pager.hidden = !this.long;
    if (!this.long) return;
    const [first, last] = this.range;
    const step = (places) => () => this.slide(this.start + places);
    const where = make("input", { type: "number", min: 1, max: this.length, value: first + 1, "aria-label": `First ${this.pane.sides[this.side]} shown, of ${this.length}` });
    where.addEventListener("change", () => this.slide(Number(where.value) - 1));
    this.pager.replaceChildren(
      button("‹", step(-WINDOW), { "aria-label": "Earlier tokens", disabled: first === 0 }),
      where,
      make("span", {}, `–${count(last)} of ${count(this.length)}`),
      button("›", step(WINDOW), { "aria-label": "Later tokens", disabled: last >= this.length }),
    );
  }

  slide(start) {
    const next = clamp(Math.trunc(start) || 0, 0, Math.max(this.length - WINDOW, 0));
    if (next === this.start) return;
    this.start = next;
    this.fill();
    this.on.moved();
  }

  // Brings a token into sight; the focus goes there if asked to
  reach(place, focus = false) {
    const [first, last] = this.range;
    if (place < first || place >= last) this.slide(place - WINDOW / 2);
    const node = this.nodes.get(place);
    if (focus) {
      node?.focus({ preventScroll: true });
      if (node) this.on.look(place, "focused");
    }
    scrollWithin(node, !focus);
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const places = [...this.nodes.keys()];
    const here = places.findIndex((place) => this.nodes.get(place) === event.target);
    if (here < 0) return;
    const vertical = getComputedStyle(this.box).flexDirection === "column";
    const flip = getComputedStyle(this.box).direction === "rtl" ? -1 : 1;
    const steps = vertical ? { ArrowUp: -1, ArrowDown: 1 } : { ArrowLeft: -flip, ArrowRight: flip };
    steps.PageUp = -10;
    steps.PageDown = 10;
    let next = null;
    if (event.key in steps) next = this.beyond(places, here, steps[event.key]);
    else if (event.key === "Home") next = this.long ? 0 : places[0];
    else if (event.key === "End") next = this.long ? this.length - 1 : places.at(-1);
    else if (event.key.startsWith("Arrow")) return this.on.across?.(places[here], event);
    if (next === null) return;
    event.preventDefault();
    this.reach(next, true);
  }

  beyond(places, here, step) {
    if (!this.long) return places[clamp(here + step, 0, places.length - 1)];
    return clamp(places[here] + step, 0, this.length - 1);
  }
}

// Scrolls the nearest box that scrolls, and never the page around it: as little as can be, or to the middle
export function scrollWithin(node, middle = false) {
  const box = node?.closest(".scrolls");
  if (!box) return;
  const [inner, outer] = [node.getBoundingClientRect(), box.getBoundingClientRect()];
  for (const [start, end, scroll] of [["top", "bottom", "scrollTop"], ["left", "right", "scrollLeft"]]) {
    const [before, after] = [outer[start] - inner[start] + 8, inner[end] - outer[end] + 8];
    if (before <= 8 && after <= 8) continue;
    if (middle) box[scroll] += (inner[start] + inner[end] - outer[start] - outer[end]) / 2;
    else box[scroll] += before > 8 ? -before : after;
  }
}
