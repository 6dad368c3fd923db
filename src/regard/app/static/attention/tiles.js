// Tiles of a matrix, loaded a few at a time when they become visible; recently used tiles are cached.
import { largest, paint } from "./colors.js";

const MAX_REQUESTS = 4;
const CACHE_SIZE = 160; // tiles of about half a megabyte each

export class Tiles {
  // ask(tile, signal): returns the weights of a tile. on: { loaded(), failed(error), progress(remaining) }
  constructor(ask, on) {
    this.ask = ask;
    this.on = on;
    this.cache = new Map(); // most recently used last
    this.loading = new Map();
    this.queue = [];
    this.failed = new Set();
    this.maxima = new Map(); // the largest weight of each level
  }

  nameOf(selection, { down, across, row, column }) {
    return `${selection} ${down} ${across} ${row} ${column}`;
  }

  // Sets the tiles to load, most urgent first; requests for other tiles are cancelled
  request(selection, tiles) {
    const named = tiles.map((tile) => ({ ...tile, selection, name: this.nameOf(selection, tile) }));
    const names = new Set(named.map(({ name }) => name));
    for (const [name, abort] of this.loading) {
      if (names.has(name)) continue;
      this.loading.delete(name);
      abort.abort();
    }
    this.queue = named.filter(({ name }) => !this.cache.has(name) && !this.loading.has(name) && !this.failed.has(name));
    this.start();
  }

  start() {
    while (this.queue.length && this.loading.size < MAX_REQUESTS) this.fetch(this.queue.shift());
    this.on.progress(this.queue.length + this.loading.size);
  }

  async fetch(tile) {
    const abort = new AbortController();
    this.loading.set(tile.name, abort);
    try {
      const { shape, data, note } = await this.ask(tile, abort.signal);
      if (abort.signal.aborted) return;
      this.store(tile, { ...tile, note, height: shape[1], width: shape[2], data });
      this.on.loaded();
    } catch (error) {
      if (abort.signal.aborted) return;
      this.failed.add(tile.name);
      this.on.failed(error);
    } finally {
      if (this.loading.get(tile.name) === abort) this.loading.delete(tile.name);
    }
    this.start();
  }

  store(tile, content) {
    this.cache.set(tile.name, content);
    const level = this.levelOf(content);
    this.maxima.set(level, Math.max(this.maxima.get(level) ?? 0, largest(content.data)));
    for (const name of this.cache.keys()) {
      if (this.cache.size <= CACHE_SIZE) break;
      this.cache.delete(name);
    }
  }

  levelOf({ selection, down, across }) {
    return `${selection} ${down} ${across}`;
  }

  get(selection, tile) {
    const name = this.nameOf(selection, tile);
    const content = this.cache.get(name);
    if (content) {
      this.cache.delete(name);
      this.cache.set(name, content);
    }
    return content;
  }

  // Coarser cached tiles, the coarsest first; drawn until the finer ones are loaded
  coarser(selection, { down, across }) {
    const coarser = [...this.cache.values()].filter((tile) => tile.selection === selection && tile.down >= down && tile.across >= across && tile.down + tile.across > down + across);
    return coarser.sort((a, b) => b.down + b.across - a.down - a.across);
  }

  // The tile as an image, repainted only if its colors change
  image(tile, { log, table, dark }) {
    const max = this.maxima.get(this.levelOf(tile));
    const colors = `${max} ${log} ${dark}`;
    if (tile.colors !== colors) {
      tile.canvas = paint(tile.data, tile.height, tile.width, { max, log, table }, tile.canvas);
      tile.colors = colors;
    }
    return tile.canvas;
  }

  retry() {
    this.failed.clear();
  }

  destroy() {
    this.queue = [];
    for (const abort of this.loading.values()) abort.abort();
    this.loading.clear();
    this.cache.clear();
  }
}
