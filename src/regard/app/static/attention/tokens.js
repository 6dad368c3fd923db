// The tokens of one side as buttons with a roving tabindex. For a long text, only a window is shown.
import { button, clamp, formatCount, make, setTabStop, visible } from "../shared/dom.js";

export const MAX_TOKENS = 300; // for longer texts, only a window is shown
const WINDOW = 40; // tokens in the window

export class TokenList {
  // on: { highlight(position or null, cause), select(position), scrolled(), cross(position, event): called when an arrow key moves to the other side }
  constructor(pane, side, on) {
    this.pane = pane;
    this.side = side;
    this.on = on;
    this.start = 0;
    this.box = make("div", { class: "tokens", role: "group", dir: "auto", "aria-label": `Tokens: ${pane.sides[side]}` });
    this.box.addEventListener("keydown", (event) => this.handleKey(event));
    this.pager = make("div", { class: "pager", hidden: true });
    this.node = make("div", { class: `side ${side}` }, this.pager, this.box);
    this.fill();
  }

  get length() {
    return this.pane.textOf(this.side).tokens.length;
  }

  get long() {
    return this.length > MAX_TOKENS;
  }

  // The positions shown: [start, stop]
  get range() {
    return this.long ? [this.start, Math.min(this.start + WINDOW, this.length)] : [0, this.length];
  }

  fill() {
    const { tokens, special } = this.pane.textOf(this.side);
    const [specials, hidden] = [new Set(special), this.pane.hiddenPositions(this.side)];
    const [start, stop] = this.range;
    this.nodes = new Map();
    for (let position = start; position < stop; position += 1) {
      if (!hidden.has(position)) this.nodes.set(position, this.makeToken(position, tokens[position], specials.has(position)));
    }
    const nodes = [...this.nodes.values()];
    setTabStop(nodes, nodes[0]);
    this.box.replaceChildren(...nodes);
    if (!nodes.length) this.box.append(make("span", { class: "empty" }, "(no tokens)"));
    this.updatePager();
  }

  makeToken(position, text, special) {
    const className = special ? "token special" : "token";
    const title = `${visible(text)}: ${this.pane.sides[this.side]} ${position}`;
    const node = button(make("span", { class: "text" }, visible(text)), () => this.on.select(position), { class: className, title, "aria-pressed": "false" });
    node.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && this.on.highlight(position, "hovered"));
    node.addEventListener("pointerleave", () => this.on.highlight(null, "hovered"));
    node.addEventListener("focus", () => {
      setTabStop([...this.nodes.values()], node);
      if (node.matches(":focus-visible")) this.on.highlight(position, "focused");
    });
    node.addEventListener("blur", () => this.on.highlight(null, "focused"));
    return node;
  }

  updatePager() {
    this.pager.hidden = !this.long;
    if (!this.long) return;
    const [start, stop] = this.range;
    const step = (by) => () => this.scrollTo(start + by);
    const number = make("input", { type: "number", min: 0, max: this.length - 1, value: start, "aria-label": `First visible ${this.pane.sides[this.side]}, from 0 to ${this.length - 1}` });
    number.addEventListener("change", () => this.scrollTo(Number(number.value)));
    this.pager.replaceChildren(
      button("‹", step(-WINDOW), { "aria-label": "Previous tokens", disabled: start === 0 }),
      number,
      make("span", {}, `–${formatCount(stop - 1)} of ${formatCount(this.length)}`),
      button("›", step(WINDOW), { "aria-label": "Next tokens", disabled: stop >= this.length }),
    );
  }

  // Centers the window of a long text around a position before the window is filled
  center(position) {
    if (position !== null && this.long) this.start = clamp(position - WINDOW / 2, 0, this.length - WINDOW);
  }

  scrollTo(start) {
    const next = clamp(Math.trunc(start) || 0, 0, Math.max(this.length - WINDOW, 0));
    if (next === this.start) return;
    this.start = next;
    this.fill();
    this.on.scrolled();
  }

  // Scrolls a token into view and optionally focuses it
  goTo(position, focus = false) {
    const [start, stop] = this.range;
    if (position < start || position >= stop) this.scrollTo(position - WINDOW / 2);
    const node = this.nodes.get(position);
    if (focus) {
      node?.focus({ preventScroll: true });
      if (node) this.on.highlight(position, "focused");
    }
    scrollWithin(node, !focus);
  }

  handleKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const positions = [...this.nodes.keys()];
    const current = positions.findIndex((position) => this.nodes.get(position) === event.target);
    if (current < 0) return;
    const vertical = getComputedStyle(this.box).flexDirection === "column";
    const right = getComputedStyle(this.box).direction === "rtl" ? -1 : 1;
    const steps = vertical ? { ArrowUp: -1, ArrowDown: 1 } : { ArrowLeft: -right, ArrowRight: right };
    steps.PageUp = -10;
    steps.PageDown = 10;
    let next = null;
    if (event.key in steps) next = this.step(positions, current, steps[event.key]);
    else if (event.key === "Home") next = this.long ? 0 : positions[0];
    else if (event.key === "End") next = this.long ? this.length - 1 : positions.at(-1);
    else if (event.key.startsWith("Arrow")) return this.on.cross?.(positions[current], event);
    if (next === null) return;
    event.preventDefault();
    this.goTo(next, true);
  }

  step(positions, current, by) {
    if (!this.long) return positions[clamp(current + by, 0, positions.length - 1)];
    return clamp(positions[current] + by, 0, this.length - 1);
  }
}

// Scrolls the nearest scrollable box, but not the page: as little as possible, or to the center
function scrollWithin(node, center = false) {
  const box = node?.closest(".scrolls");
  if (!box) return;
  const [inner, outer] = [node.getBoundingClientRect(), box.getBoundingClientRect()];
  for (const [start, end, scroll] of [["top", "bottom", "scrollTop"], ["left", "right", "scrollLeft"]]) {
    const [before, after] = [outer[start] - inner[start] + 8, inner[end] - outer[end] + 8];
    if (before <= 8 && after <= 8) continue;
    if (center) box[scroll] += (inner[start] + inner[end] - outer[start] - outer[end]) / 2;
    else box[scroll] += before > 8 ? -before : after;
  }
}
