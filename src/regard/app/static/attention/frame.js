// Which part of a matrix is in sight: `scale` pixels for a cell on each axis, from the cell at `from`.
import { clamp } from "./dom.js";

export const TILE = 256; // pixels of a tile's side
const LARGEST_CELL = 56; // pixels; and of the fit of a small matrix
const ALIKE = 4; // times longer one side may be before it gets a scale of its own

export class Frame {
  constructor(queries, keys) {
    this.size = { x: keys, y: queries };
    this.scale = { x: 1, y: 1 };
    this.from = { x: 0, y: 0 };
    this.plot = { x: 1, y: 1 }; // pixels
    this.gutter = { x: 0, y: 0 }; // pixels before the plot, for labels
  }

  // The scales at which all is in sight, cells square unless one side is much the longer
  get whole() {
    const fit = { x: Math.min(this.plot.x / this.size.x, LARGEST_CELL), y: Math.min(this.plot.y / this.size.y, LARGEST_CELL) };
    const ratio = this.size.x / this.size.y;
    if (ratio > ALIKE || ratio < 1 / ALIKE) return fit;
    const both = Math.min(fit.x, fit.y);
    return { x: both, y: both };
  }

  get isWhole() {
    return this.scale.x <= this.whole.x * 1.001 && this.scale.y <= this.whole.y * 1.001;
  }

  resize(plot, gutter) {
    const wasWhole = this.isWhole;
    this.plot = plot;
    this.gutter = gutter;
    if (wasWhole || this.scale.x < this.whole.x) this.fit();
    this.settle();
  }

  fit() {
    this.scale = this.whole;
    this.from = { x: 0, y: 0 };
  }

  settle() {
    for (const axis of ["x", "y"]) {
      const room = this.plot[axis] / this.scale[axis];
      this.from[axis] = clamp(this.from[axis], 0, Math.max(this.size[axis] - room, 0));
    }
  }

  // The point under (x, y) stays where it is
  zoom(factor, x = this.gutter.x + this.plot.x / 2, y = this.gutter.y + this.plot.y / 2) {
    const at = { x: this.toCell("x", x), y: this.toCell("y", y) };
    const point = { x, y };
    for (const axis of ["x", "y"]) {
      this.scale[axis] = clamp(this.scale[axis] * factor, this.whole[axis], Math.max(LARGEST_CELL, this.whole[axis]));
      this.from[axis] = at[axis] - (point[axis] - this.gutter[axis]) / this.scale[axis];
    }
    this.settle();
  }

  pan(x, y) {
    this.from.x -= x / this.scale.x;
    this.from.y -= y / this.scale.y;
    this.settle();
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

  // First and behind the last cell in sight
  sight(axis) {
    const last = Math.ceil(this.from[axis] + this.plot[axis] / this.scale[axis]);
    return [Math.floor(this.from[axis]), Math.min(last, this.size[axis])];
  }

  // Brings a cell into sight with as little movement as can be, or to the middle
  show({ query = null, key = null }, middle = false) {
    for (const [axis, cell] of [["x", key], ["y", query]]) {
      if (cell === null) continue;
      const room = this.plot[axis] / this.scale[axis];
      if (middle) this.from[axis] = cell + 0.5 - room / 2;
      else this.from[axis] = clamp(this.from[axis], cell + 1 - room, cell);
    }
    this.settle();
  }

  // The power of two of cells that make a pixel
  level(axis) {
    return Math.max(0, Math.floor(Math.log2(1 / this.scale[axis]) + 1e-9));
  }

  // The tiles in sight, from the middle outwards
  tiles() {
    const [across, down] = [this.level("x"), this.level("y")];
    const [columns, rows] = [this.tilesOn("x", across), this.tilesOn("y", down)];
    const tiles = rows.flatMap((row) => columns.map((column) => ({ down, across, row, column })));
    const middle = ({ row, column }) => Math.hypot(row - (rows[0] + rows.at(-1)) / 2, column - (columns[0] + columns.at(-1)) / 2);
    return tiles.sort((one, other) => middle(one) - middle(other));
  }

  tilesOn(axis, level) {
    const [first, last] = this.sight(axis).map((cell) => cell / (TILE * 2 ** level));
    return Array.from({ length: Math.max(Math.ceil(last) - Math.floor(first), 0) }, (_, at) => Math.floor(first) + at);
  }

  // The cells of a tile, and how many pixels it has
  tileRange(axis, level, place) {
    const cells = TILE * 2 ** level;
    const range = [place * cells, Math.min((place + 1) * cells, this.size[axis])];
    return { range, pixels: Math.ceil((range[1] - range[0]) / 2 ** level) };
  }
}
