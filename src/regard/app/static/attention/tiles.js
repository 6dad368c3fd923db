// Tiles of a matrix: asked for when they come into sight, few at a time, and the last used ones kept.
import { largest, painted } from "./colours.js";

const AT_ONCE = 4;
const KEPT = 160; // about half a megabyte each

export class Tiles {
  // ask(tile, signal): an answer with a matrix; on: { arrived(), failed(error), waits(many) }
  constructor(ask, on) {
    this.ask = ask;
    this.on = on;
    this.kept = new Map(); // the last used last
    this.flying = new Map();
    this.wanted = [];
    this.broken = new Set();
    this.most = new Map(); // the largest weight of each level
  }

  nameOf(which, { down, across, row, column }) {
    return `${which} ${down} ${across} ${row} ${column}`;
  }

  // All tiles that should be there, the most urgent first; what is no longer wanted is dropped
  want(which, tiles) {
    const named = tiles.map((tile) => ({ ...tile, which, name: this.nameOf(which, tile) }));
    const names = new Set(named.map(({ name }) => name));
    for (const [name, abort] of this.flying) {
      if (names.has(name)) continue;
      this.flying.delete(name);
      abort.abort();
    }
    this.wanted = named.filter(({ name }) => !this.kept.has(name) && !this.flying.has(name) && !this.broken.has(name));
    this.start();
  }

  start() {
    while (this.wanted.length && this.flying.size < AT_ONCE) this.fetch(this.wanted.shift());
    this.on.waits(this.wanted.length + this.flying.size);
  }

  async fetch(tile) {
    const abort = new AbortController();
    this.flying.set(tile.name, abort);
    try {
      const { facts, arrays: [{ shape, data }] } = await this.ask(tile, abort.signal);
      if (abort.signal.aborted) return;
      this.keep(tile, { ...tile, facts, height: shape[1], width: shape[2], data });
      this.on.arrived();
    } catch (error) {
      if (abort.signal.aborted) return;
      this.broken.add(tile.name);
      this.on.failed(error);
    } finally {
      if (this.flying.get(tile.name) === abort) this.flying.delete(tile.name);
    }
    this.start();
  }

  keep(tile, found) {
    this.kept.set(tile.name, found);
    const level = this.levelOf(found);
    this.most.set(level, Math.max(this.most.get(level) ?? 0, largest(found.data)));
    for (const name of this.kept.keys()) {
      if (this.kept.size <= KEPT) break;
      this.kept.delete(name);
    }
  }

  levelOf({ which, down, across }) {
    return `${which} ${down} ${across}`;
  }

  get(which, tile) {
    const name = this.nameOf(which, tile);
    const found = this.kept.get(name);
    if (found) {
      this.kept.delete(name);
      this.kept.set(name, found);
    }
    return found;
  }

  // Coarser tiles of the same matrix, the coarsest first: they stand in for what is still to come
  coarser(which, { down, across }) {
    const found = [...this.kept.values()].filter((tile) => tile.which === which && tile.down >= down && tile.across >= across && tile.down + tile.across > down + across);
    return found.sort((one, other) => other.down + other.across - one.down - one.across);
  }

  // The tile as an image, painted again only when its colours change
  image(tile, { log, table, dark }) {
    const most = this.most.get(this.levelOf(tile));
    const colours = `${most} ${log} ${dark}`;
    if (tile.colours !== colours) {
      tile.canvas = painted(tile.data, tile.height, tile.width, { most, log, table }, tile.canvas);
      tile.colours = colours;
    }
    return tile.canvas;
  }

  again() {
    this.broken.clear();
  }

  destroy() {
    this.wanted = [];
    for (const abort of this.flying.values()) abort.abort();
    this.flying.clear();
    this.kept.clear();
  }
}
