// The state of the view (State), and the input, layer and heads shown in one pane (Pane).
import { clamp } from "../shared/dom.js";

export const VIEWS = { lines: "Lines", matrix: "Matrix", heads: "Heads", numbers: "Numbers" };

const EXPENSIVE = 2 ** 27; // above this number of weights, only one head is shown at first
const DEFAULTS = { view: "lines", input: 0, compare: null, layer: 0, heads: null, mean: false, special: true, log: null, sort: "natural", query: null, key: null };

// values: heads: a list, or null for all; special: whether special tokens are shown; log: whether the scale is logarithmic, or null for only in long texts.
export class State {
  constructor(source, viewModel, options) {
    this.source = source;
    this.viewModel = viewModel;
    this.views = (options.views ?? Object.keys(VIEWS)).filter((view) => view in VIEWS);
    this.compact = Boolean(options.compact);
    this.listeners = new Set();
    this.values = { ...DEFAULTS, view: this.views[0] };
    const first = this.validated(options);
    this.values.view = ""; // no view is open yet
    this.values = this.withVectors(first);
    if (options.heads === undefined && this.isExpensive()) this.values.heads = [0];
  }

  isExpensive() {
    const { texts = [], layers = [] } = this.viewModel.inputs[this.values.input] ?? {};
    const layer = layers[this.values.layer];
    return layer && layer.heads > 1 && layer.heads * texts[layer.queries].tokens.length * texts[layer.keys].tokens.length > EXPENSIVE;
  }

  // Returns all values after a change; unknown names are dropped, and numbers are clamped to their range
  validated(change) {
    const known = Object.fromEntries(Object.entries(change).filter(([name, value]) => name in DEFAULTS && value !== undefined));
    const next = { ...this.values, ...known };
    const { inputs } = this.viewModel;
    const index = (value, list) => clamp(Math.trunc(Number(value)) || 0, 0, Math.max(list.length - 1, 0));
    next.input = index(next.input, inputs);
    if (next.compare !== null) next.compare = index(next.compare, inputs);
    const layers = inputs[next.input]?.layers ?? [];
    next.layer = index(next.layer, layers);
    const count = layers[next.layer]?.heads ?? 0;
    if (typeof next.heads === "number") next.heads = [next.heads];
    if (next.heads !== null) next.heads = [...new Set(next.heads.map(Number))].filter((head) => head >= 0 && head < count).sort((a, b) => a - b);
    if (next.heads?.length === count) next.heads = null;
    if (next.heads?.length === 0 && known.heads === undefined) next.heads = null; // the new layer has fewer heads
    if (!this.views.includes(next.view)) next.view = this.values.view;
    if (next.input !== this.values.input && known.query === undefined) next.query = next.key = null;
    return next;
  }

  // The view Numbers needs a layer with vectors: opening it selects one, and closing it restores the previous layer
  withVectors(next) {
    const { layers = [] } = this.viewModel.inputs[next.input] ?? {};
    const entered = next.view === "numbers" && this.values.view !== "numbers";
    const left = next.view !== "numbers" && this.values.view === "numbers";
    if (entered && !layers[next.layer]?.vectors) {
      const index = ["cross", "self"].map((kind) => layers.findIndex((layer) => layer.vectors && layer.kind === kind)).find((found) => found >= 0);
      if (index !== undefined) {
        this.before = { layer: next.layer, heads: next.heads, shown: index };
        Object.assign(next, { layer: index, heads: null });
      }
    } else if (left && this.before?.shown === next.layer) Object.assign(next, { layer: this.before.layer, heads: this.before.heads });
    if (left) this.before = null;
    return next;
  }

  set(change) {
    const next = this.withVectors(this.validated(change));
    const changed = new Set(Object.keys(next).filter((name) => JSON.stringify(next[name]) !== JSON.stringify(this.values[name])));
    this.values = next;
    if (changed.size) for (const listener of [...this.listeners]) listener(changed);
  }
}

// One input with the selected layer and heads; the second pane shows the input to compare with
export class Pane {
  constructor(state, second = false) {
    this.state = state;
    this.second = second;
    this.pinned = { query: state.values.query, key: state.values.key };
  }

  get number() {
    return this.second ? this.state.values.compare : this.state.values.input;
  }

  get input() {
    return this.state.viewModel.inputs[this.number];
  }

  get layerNumber() {
    return Math.min(this.state.values.layer, this.input.layers.length - 1);
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
    return this.state.values.heads?.filter((head) => head < this.layer.heads) ?? this.allHeads;
  }

  // The argument `heads` of a question: null for all heads
  get requestedHeads() {
    return this.heads.length === this.layer.heads ? null : this.heads;
  }

  textOf(side) {
    return side === "query" ? this.queries : this.keys;
  }

  hiddenPositions(side) {
    return this.state.values.special ? new Set() : new Set(this.textOf(side).special);
  }

  // Display names of both sides
  get sides() {
    if (this.layer.kind === "words") return { query: "target", key: "source" };
    return { query: "query", key: "key" };
  }

  pin(change) {
    Object.assign(this.pinned, change);
    if (!this.second) this.state.set(change);
  }

  ask(question, rest, signal) {
    return this.state.source.ask(question, { input: this.number, layer: this.layerNumber, ...rest }, signal);
  }
}

// Asks questions and uses only the answer to the latest one
export class LatestQuestion {
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
    const done = this.pane.startLoading();
    try {
      const answer = await this.pane.ask(question, rest, this.abort.signal);
      if (turn !== this.turn) return;
      this.pane.clearError(this);
      use(answer);
    } catch (error) {
      if (turn === this.turn) this.pane.showError(this, error, () => this.ask(question, rest, use));
    } finally {
      done();
    }
  }
}
