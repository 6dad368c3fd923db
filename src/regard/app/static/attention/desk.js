// What is chosen (Desk), and what that means for one input (Pane).
import { clamp } from "./dom.js";

export const VIEWS = { lines: "Lines", matrix: "Matrix", heads: "Heads", numbers: "Numbers" };

const COSTLY = 2 ** 27; // weights of all heads, from which one head is shown first: it is there sooner
const NATURAL = { view: "lines", input: 0, beside: null, layer: 0, heads: null, mean: false, special: true, log: null, sort: "natural", query: null, key: null };

// heads: numbers, or null for all. special: whether special tokens are shown. log: null lets the length decide.
export class Desk {
  constructor(source, exhibit, options) {
    this.source = source;
    this.exhibit = exhibit;
    this.views = (options.views ?? Object.keys(VIEWS)).filter((view) => view in VIEWS);
    this.compact = Boolean(options.compact);
    this.listeners = new Set();
    this.state = { ...NATURAL, view: this.views[0] };
    this.state = { ...this.state, ...this.sound(options) };
    if (options.heads === undefined && this.costly()) this.state.heads = [0];
  }

  costly() {
    const { texts = [], layers = [] } = this.exhibit.inputs[this.state.input] ?? {};
    const layer = layers[this.state.layer];
    return layer && layer.heads > 1 && layer.heads * texts[layer.queries].tokens.length * texts[layer.keys].tokens.length > COSTLY;
  }

  // Only what is known, and in range
  sound(change) {
    const known = Object.fromEntries(Object.entries(change).filter(([name, value]) => name in NATURAL && value !== undefined));
    const next = { ...this.state, ...known };
    const inputs = this.exhibit.inputs;
    next.input = clamp(Math.trunc(Number(next.input)) || 0, 0, Math.max(inputs.length - 1, 0));
    if (next.beside !== null) next.beside = clamp(Math.trunc(Number(next.beside)) || 0, 0, Math.max(inputs.length - 1, 0));
    const layers = inputs[next.input]?.layers ?? [];
    next.layer = clamp(Math.trunc(Number(next.layer)) || 0, 0, Math.max(layers.length - 1, 0));
    const many = layers[next.layer]?.heads ?? 0;
    if (typeof next.heads === "number") next.heads = [next.heads];
    if (next.heads !== null) next.heads = [...new Set(next.heads.map(Number))].filter((head) => head >= 0 && head < many).sort((a, b) => a - b);
    if (next.heads?.length === many) next.heads = null;
    if (next.heads?.length === 0 && known.heads === undefined) next.heads = null; // another layer has fewer heads
    if (!this.views.includes(next.view)) next.view = this.state.view;
    if (next.input !== this.state.input && known.query === undefined) next.query = next.key = null;
    return next;
  }

  set(change) {
    const next = this.sound(change);
    const changed = new Set(Object.keys(next).filter((name) => JSON.stringify(next[name]) !== JSON.stringify(this.state[name])));
    this.state = next;
    if (changed.size) for (const listener of [...this.listeners]) listener(changed);
  }
}

// One input under the chosen layer and heads; the second pane is the input beside it
export class Pane {
  constructor(desk, second = false) {
    this.desk = desk;
    this.second = second;
    this.pinned = { query: desk.state.query, key: desk.state.key };
  }

  get number() {
    return this.second ? this.desk.state.beside : this.desk.state.input;
  }

  get input() {
    return this.desk.exhibit.inputs[this.number];
  }

  get layerNumber() {
    return Math.min(this.desk.state.layer, this.input.layers.length - 1);
  }

  get layer() {
    return this.input.layers[this.layerNumber];
  }

  get queries() {
    return this.input.texts[this.layer.queries];
  }

  get keys() {
    return this.input.texts[this.layer.keys];
  }

  get allHeads() {
    return Array.from({ length: this.layer.heads }, (_, head) => head);
  }

  get heads() {
    return this.desk.state.heads?.filter((head) => head < this.layer.heads) ?? this.allHeads;
  }

  // As the questions want them: null for all
  get askedHeads() {
    return this.heads.length === this.layer.heads ? null : this.heads;
  }

  textOf(side) {
    return side === "query" ? this.queries : this.keys;
  }

  hides(side) {
    return this.desk.state.special ? new Set() : new Set(this.textOf(side).special);
  }

  // What the two sides are called
  get sides() {
    if (this.layer.kind === "words") return { query: "target", key: "source" };
    return { query: "query", key: "key" };
  }

  pin(change) {
    Object.assign(this.pinned, change);
    if (!this.second) this.desk.set(change);
  }

  ask(question, rest, signal) {
    return this.desk.source.ask(question, { input: this.number, layer: this.layerNumber, ...rest }, signal);
  }
}

// Of several questions one after the other only the last is answered
export class Latest {
  constructor(pane) {
    this.pane = pane;
    this.turn = 0;
    this.abort = null;
  }

  stop() {
    this.turn += 1;
    this.abort?.abort();
  }

  async ask(question, rest, use) {
    this.stop();
    const { turn } = this;
    this.abort = new AbortController();
    const done = this.pane.waiting?.();
    try {
      const answer = await this.pane.ask(question, rest, this.abort.signal);
      if (turn !== this.turn) return;
      this.pane.well?.();
      use(answer);
    } catch (error) {
      if (turn === this.turn) this.pane.trouble?.(error, () => this.ask(question, rest, use));
    } finally {
      done?.();
    }
  }
}
