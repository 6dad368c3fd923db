// The matrix as a map with zoom and pan, a keyboard cursor, labels, and a tooltip.
import { button, checkbox, clamp, formatCount, make, percent, visible } from "../shared/dom.js";
import { ramp, rampWeight, themeOf } from "./colors.js";
import { Viewport } from "./viewport.js";
import { addGestures } from "./gestures.js";
import { drawLabels, drawOverlay, drawTiles, textWidth } from "./map_drawing.js";
import { makeRankings } from "./rankings.js";
import { Tiles } from "./tiles.js";
import { MAX_TOKENS } from "./tokens.js";

const LOG_LENGTH = 128; // texts with more tokens use the logarithmic scale by default
const READABLE_CELL = 28; // minimum cell size in pixels after a jump to a cell

export class MatrixView {
  constructor(pane) {
    this.pane = pane;
    this.hovered = null; // the cell under the pointer
    this.cursor = null; // the cell of the keyboard cursor
    this.build();
    this.tiles = new Tiles((tile, signal) => this.fetch(tile, signal), {
      loaded: () => this.redraw(),
      failed: (error) => pane.showError(this, error, () => this.retry()),
      progress: (remaining) => this.setLoading(remaining > 0),
    });
    addGestures(this.canvas, this);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.map);
    this.closing = new AbortController();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw(), { signal: this.closing.signal });
    this.update(new Set(["input"]));
  }

  build() {
    const { pane } = this;
    const help = "Arrow keys move the cursor, plus and minus zoom, 0 shows all, Enter pins a cell, Escape unpins it.";
    this.canvas = make("canvas", { tabindex: 0, role: "application", "aria-roledescription": "map", "aria-label": `Attention weights. Rows: ${pane.sides.query}, columns: ${pane.sides.key}. ${help}` });
    this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.moveCursor(0, 0));
    this.canvas.addEventListener("blur", () => this.redraw());
    this.tip = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.map = make("div", { class: "map" }, this.canvas, this.tip);
    this.legend = make("canvas", { width: 128, height: 1, "aria-hidden": "true" });
    this.ends = [make("span"), make("span")];
    this.log = checkbox("logarithmic", false, (log) => pane.state.set({ log }));
    const control = (sign, name, click) => button(sign, click, { "aria-label": name, title: name });
    const zoom = make("span", { class: "buttons" }, control("−", "Zoom out", () => this.zoomAtCursor(0.5)), control("+", "Zoom in", () => this.zoomAtCursor(2)), control("All", "Show all", () => this.fit()));
    const scale = make("span", { class: "legend" }, this.ends[0], this.legend, this.ends[1]);
    this.note = make("span", { class: "quiet" });
    const bar = make("div", { class: "map-bar" }, zoom, scale, this.log, this.note);
    this.rankings = pane.state.compact ? null : makeRankings(pane, (cell) => this.goTo(cell), { deferred: true });
    this.node = make("div", { class: "matrix-view" }, make("div", { class: "map-side" }, bar, this.map, pane.readout), this.rankings?.node);
  }

  get selection() {
    return JSON.stringify([this.pane.number, this.pane.layerNumber, this.pane.requestedHeads]);
  }

  get isLog() {
    return this.pane.state.values.log ?? Math.max(this.pane.queries.tokens.length, this.pane.keys.tokens.length) > LOG_LENGTH;
  }

  fetch({ down, across, row, column }, signal) {
    const [rows, columns] = [this.frame.tileRange("y", down, row), this.frame.tileRange("x", across, column)];
    const body = { heads: this.pane.requestedHeads, mean: true, rows: rows.range, columns: columns.range, height: rows.pixels, width: columns.pixels };
    return this.pane.ask("tile", body, signal);
  }

  setLoading(loading) {
    this.map.classList.toggle("loading", loading);
    if (!loading) this.rankings?.release();
  }

  retry() {
    this.tiles.retry();
    this.redraw();
  }

  update(changed) {
    const { pane } = this;
    const [queries, keys] = [pane.queries.tokens.length, pane.keys.tokens.length];
    if (!this.frame || this.frame.size.y !== queries || this.frame.size.x !== keys || changed.has("input")) {
      this.frame = new Viewport(Math.max(queries, 1), Math.max(keys, 1));
      this.cursor = this.hovered = null;
      this.isNewFrame = true;
    }
    if (["input", "layer", "heads", "compare"].some((name) => changed.has(name))) {
      this.tiles.retry();
      pane.clearError(this);
    }
    this.log.firstChild.checked = this.isLog;
    const empty = !queries || !keys ? "There are no tokens." : pane.heads.length ? "" : "Select a head to see its weights.";
    this.node.classList.toggle("nothing", Boolean(empty));
    pane.setStatus(empty || this.hint());
    this.empty = Boolean(empty);
    this.rankings?.hold();
    this.resize();
    this.rankings?.update();
  }

  hint() {
    const heads = this.pane.heads.length;
    const mean = heads > 1 ? `Mean of ${heads} heads. ` : "";
    return `${mean}Drag to move, use the wheel or + − to zoom, click a cell to rank its row and column.`;
  }

  // ---- size

  resize() {
    const width = this.map.clientWidth;
    if (!width || this.empty) return;
    const context = this.canvas.getContext("2d");
    const { font } = themeOf(this.map);
    const maxLabel = width < 520 || Math.max(this.frame.size.x, this.frame.size.y) > MAX_TOKENS ? 78 : 120;
    const gutter = {
      x: Math.ceil(clamp(textWidth(context, this.pane.queries.tokens, font), 34, maxLabel)) + 14,
      y: Math.ceil(clamp(textWidth(context, this.pane.keys.tokens, font), 34, maxLabel)) + 14,
    };
    const plot = { x: width - gutter.x - 2, y: Math.max(0.72 * innerHeight, 260) - gutter.y };
    const { size } = this.frame;
    const square = plot.x * Math.max(size.y / size.x, 0.25);
    plot.y = Math.max(Math.min(plot.y, square, size.y * 56), Math.min(size.y * 18, 60));
    this.frame.resize(plot, gutter);
    if (this.isNewFrame) this.frame.fit();
    this.isNewFrame = false;
    const ratio = window.devicePixelRatio || 1;
    const height = gutter.y + plot.y + 2;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.draw();
  }

  // ---- drawing

  redraw() {
    cancelAnimationFrame(this.frameRequest);
    this.frameRequest = requestAnimationFrame(() => this.draw());
  }

  draw() {
    if (this.empty || !this.canvas.width) return;
    const { frame, pane, canvas } = this;
    const theme = themeOf(this.map);
    if (this.shades?.dark !== theme.dark) this.shades = { dark: theme.dark, table: ramp(theme.dark) };
    const context = canvas.getContext("2d");
    const ratio = window.devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = theme.raised;
    const [right, bottom] = [frame.toPixel("x", frame.size.x), frame.toPixel("y", frame.size.y)];
    context.fillRect(frame.gutter.x, frame.gutter.y, Math.min(right - frame.gutter.x, frame.plot.x), Math.min(bottom - frame.gutter.y, frame.plot.y));
    this.tiles.request(this.selection, frame.tiles());
    drawTiles(context, frame, this.tiles, this.selection, { ...this.shades, log: this.isLog });
    const hidden = { query: pane.hiddenPositions("query"), key: pane.hiddenPositions("key") };
    const cursor = document.activeElement === canvas ? this.cursor : null;
    drawOverlay(context, frame, theme, { hidden, pinned: pane.pinned, cursor, block: this.block });
    const highlighted = this.hovered ?? cursor ?? pane.pinned;
    drawLabels(context, frame, theme, { query: pane.queries, key: pane.keys }, { highlighted, hidden });
    canvas.style.touchAction = frame.isFitted ? "pan-y" : "none";
    this.drawLegend();
    this.describeCell();
  }

  drawLegend() {
    const [tile] = this.frame.tiles();
    const max = tile ? this.tiles.maxima.get(this.tiles.levelOf({ selection: this.selection, ...tile })) : undefined;
    this.ends[0].textContent = max ? `${percent(rampWeight(0, max, this.isLog))}%` : "";
    this.ends[1].textContent = max ? `${percent(max)}%` : "";
    const image = new ImageData(128, 1);
    for (let at = 0; at < 128; at += 1) image.data.set(this.shades.table.subarray(8 * at, 8 * at + 4), 4 * at);
    this.legend.getContext("2d").putImageData(image, 0, 0);
    const { x, y } = this.block;
    const loaded = tile && this.tiles.get(this.selection, tile);
    this.note.textContent = loaded?.note || (x * y > 1 ? `each pixel is the mean of ${y} × ${x} weights` : "");
  }

  // ---- descriptions of cells

  get block() {
    return { x: 2 ** this.frame.level("x"), y: 2 ** this.frame.level("y") };
  }

  // The weight shown at a cell, or the mean of its block
  weightAt({ query, key }) {
    const tile = this.frame.tiles().map((visibleTile) => this.tiles.get(this.selection, visibleTile)).find((loaded) => {
      if (!loaded) return false;
      const [rows, columns] = this.rangesOf(loaded);
      return query >= rows[0] && query < rows[1] && key >= columns[0] && key < columns[1];
    });
    if (!tile) return null;
    const [rows, columns] = this.rangesOf(tile);
    const row = Math.floor(((query - rows[0]) * tile.height) / (rows[1] - rows[0]));
    const column = Math.floor(((key - columns[0]) * tile.width) / (columns[1] - columns[0]));
    return tile.data[row * tile.width + column];
  }

  rangesOf(tile) {
    return [this.frame.tileRange("y", tile.down, tile.row).range, this.frame.tileRange("x", tile.across, tile.column).range];
  }

  describe(cell) {
    const { pane, block } = this;
    const weight = this.weightAt(cell);
    const name = (side, position) => `${pane.sides[side]} ${formatCount(position)} “${visible(pane.textOf(side).tokens[position] ?? "")}”`;
    const value = weight === null ? "…" : `${percent(weight)}%`;
    const pooled = block.x * block.y > 1 ? ` (mean of ${block.y} × ${block.x})` : "";
    return `${name("query", cell.query)} → ${name("key", cell.key)}: ${value}${pooled}`;
  }

  describeCell() {
    const cell = this.hovered ?? (document.activeElement === this.canvas ? this.cursor : null);
    this.tip.hidden = !this.hovered;
    if (!cell) return;
    const text = this.describe(cell);
    this.pane.setStatus(text);
    if (!this.hovered) return;
    this.tip.textContent = text;
    const { x, y } = this.pointer;
    const onRight = x > this.map.clientWidth / 2;
    this.tip.style.left = onRight ? "auto" : `${x + 14}px`;
    this.tip.style.right = onRight ? `${this.map.clientWidth - x + 14}px` : "auto";
    this.tip.style.top = `${Math.max(y - 34, 0)}px`;
  }

  // ---- called by gestures.js

  // Large maps zoom with the wheel even without focus
  zoomsOnWheel() {
    return Math.max(this.frame.size.x, this.frame.size.y) > 64;
  }

  pan(x, y) {
    this.hovered = null;
    this.frame.pan(x, y);
    this.redraw();
  }

  zoom(factor, x, y) {
    this.frame.zoom(factor, x, y);
    this.redraw();
  }

  // Zooms around the cursor, if there is one
  zoomAtCursor(factor) {
    if (document.activeElement !== this.canvas || !this.cursor) return this.zoom(factor);
    const { key, query } = this.cursor;
    this.frame.zoom(factor, this.frame.toPixel("x", key + 0.5), this.frame.toPixel("y", query + 0.5));
    this.frame.show(this.cursor);
    return this.redraw();
  }

  fit() {
    this.frame.fit();
    this.redraw();
  }

  hover(point) {
    this.pointer = point;
    this.hovered = point && this.frame.cellAt(point.x, point.y);
    this.redraw();
  }

  pinAt(point) {
    const cell = this.frame.cellAt(point.x, point.y);
    if (!cell) return;
    this.cursor = cell;
    this.pin(cell);
  }

  pin(cell) {
    this.pane.pin(cell);
    this.rankings?.update();
    this.redraw();
  }

  pinCursor() {
    if (this.cursor) this.pin(this.cursor);
  }

  unpin() {
    this.pin({ query: null, key: null });
  }

  // Moves the cursor by a number of map pixels
  moveCursor(right, down) {
    const { pinned } = this.pane;
    this.cursor ??= { query: pinned.query ?? this.frame.visibleRange("y")[0], key: pinned.key ?? this.frame.visibleRange("x")[0] };
    const step = (position, by, size) => clamp(by === 0 ? position : position + by, 0, size - 1);
    this.cursor = {
      query: step(this.cursor.query, down * this.block.y, this.frame.size.y),
      key: step(this.cursor.key, right * this.block.x, this.frame.size.x),
    };
    this.hovered = null;
    this.frame.show(this.cursor);
    this.redraw();
  }

  // Shows a row, a column or a cell at a readable zoom
  goTo({ query = null, key = null }) {
    const factor = Math.min(READABLE_CELL / this.frame.scale.x, READABLE_CELL / this.frame.scale.y);
    if (factor > 1) this.frame.zoom(factor);
    this.frame.show({ query, key }, true);
    this.cursor = { query: query ?? this.frame.visibleRange("y")[0], key: key ?? this.frame.visibleRange("x")[0] };
    this.pin({ query, key });
  }

  destroy() {
    this.tiles.destroy();
    this.observer.disconnect();
    this.closing.abort();
    cancelAnimationFrame(this.frameRequest);
    this.rankings?.destroy();
  }
}
