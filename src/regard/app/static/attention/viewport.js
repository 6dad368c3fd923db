// The visible part of a matrix: `scale` pixels per cell on each axis, starting at cell `from`.
import { clamp } from "../shared/dom.js";

const TILE_SIZE = 256; // pixels
const MAX_CELL = 56; // pixels
const MAX_RATIO = 4; // ratio of the sides beyond which each axis has its own scale

export class Viewport {
  constructor(queries, keys) {
    this.size = { x: keys, y: queries };
    this.scale = { x: 1, y: 1 };
    this.from = { x: 0, y: 0 };
    this.plot = { x: 1, y: 1 }; // size of the map in pixels
    this.gutter = { x: 0, y: 0 }; // pixels for labels
  }

  // The scales at which the whole matrix is visible; cells are square unless one side is much longer
  get fitScale() {
    const fit = { x: Math.min(this.plot.x / this.size.x, MAX_CELL), y: Math.min(this.plot.y / this.size.y, MAX_CELL) };
    const ratio = this.size.x / this.size.y;
    if (ratio > MAX_RATIO || ratio < 1 / MAX_RATIO) return fit;
    const scale = Math.min(fit.x, fit.y);
    return { x: scale, y: scale };
  }

  get isFitted() {
    return this.scale.x <= this.fitScale.x * 1.001 && this.scale.y <= this.fitScale.y * 1.001;
  }

  resize(plot, gutter) {
    const wasFitted = this.isFitted;
    this.plot = plot;
    this.gutter = gutter;
    if (wasFitted || this.scale.x < this.fitScale.x) this.fit();
    this.clampToMatrix();
  }

  fit() {
    this.scale = this.fitScale;
    this.from = { x: 0, y: 0 };
  }

  clampToMatrix() {
    for (const axis of ["x", "y"]) {
      const cells = this.plot[axis] / this.scale[axis];
      this.from[axis] = clamp(this.from[axis], 0, Math.max(this.size[axis] - cells, 0));
    }
  }

  // Zooms around the point (x, y)
  zoom(factor, x = this.gutter.x + this.plot.x / 2, y = this.gutter.y + this.plot.y / 2) {
    const at = { x: this.toCell("x", x), y: this.toCell("y", y) };
    const point = { x, y };
    for (const axis of ["x", "y"]) {
      this.scale[axis] = clamp(this.scale[axis] * factor, this.fitScale[axis], Math.max(MAX_CELL, this.fitScale[axis]));
      this.from[axis] = at[axis] - (point[axis] - this.gutter[axis]) / this.scale[axis];
    }
    this.clampToMatrix();
  }

  pan(x, y) {
    this.from.x -= x / this.scale.x;
    this.from.y -= y / this.scale.y;
    this.clampToMatrix();
  }

  toCell(axis, pixel) {
    return this.from[axis] + (pixel - this.gutter[axis]) / this.scale[axis];
  }

  toPixel(axis, cell) {
    return this.gutter[axis] + (cell - this.from[axis]) * this.scale[axis];
  }

  cellAt(x, y) {
    if (x < this.gutter.x || y < this.gutter.y) return null;
    const cell = { query: Math.floor(this.toCell("y", y)), key: Math.floor(this.toCell("x", x)) };
    return cell.query < this.size.y && cell.key < this.size.x ? cell : null;
  }

  // The visible cells: [start, stop]
  visibleRange(axis) {
    const stop = Math.ceil(this.from[axis] + this.plot[axis] / this.scale[axis]);
    return [Math.floor(this.from[axis]), Math.min(stop, this.size[axis])];
  }

  // Scrolls a cell into view, or to the center
  show({ query = null, key = null }, center = false) {
    for (const [axis, cell] of [["x", key], ["y", query]]) {
      if (cell === null) continue;
      const cells = this.plot[axis] / this.scale[axis];
      if (center) this.from[axis] = cell + 0.5 - cells / 2;
      else this.from[axis] = clamp(this.from[axis], cell + 1 - cells, cell);
    }
    this.clampToMatrix();
  }

  // log2 of the cells per pixel
  level(axis) {
    return Math.max(0, Math.floor(Math.log2(1 / this.scale[axis]) + 1e-9));
  }

  // The visible tiles, from the center outwards
  tiles() {
    const [across, down] = [this.level("x"), this.level("y")];
    const [columns, rows] = [this.tilesOn("x", across), this.tilesOn("y", down)];
    const tiles = rows.flatMap((row) => columns.map((column) => ({ down, across, row, column })));
    const distance = ({ row, column }) => Math.hypot(row - (rows[0] + rows.at(-1)) / 2, column - (columns[0] + columns.at(-1)) / 2);
    return tiles.sort((a, b) => distance(a) - distance(b));
  }

  tilesOn(axis, level) {
    const [start, stop] = this.visibleRange(axis).map((cell) => cell / (TILE_SIZE * 2 ** level));
    return Array.from({ length: Math.max(Math.ceil(stop) - Math.floor(start), 0) }, (_, index) => Math.floor(start) + index);
  }

  // The cells of a tile, and its size in pixels
  tileRange(axis, level, index) {
    const cells = TILE_SIZE * 2 ** level;
    const range = [index * cells, Math.min((index + 1) * cells, this.size[axis])];
    return { range, pixels: Math.ceil((range[1] - range[0]) / 2 ** level) };
  }
}
