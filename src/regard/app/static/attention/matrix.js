// The matrix as a map: a canvas of tiles with zoom and pan, a cursor, labels, and what is under the pointer in words.
import { button, checkbox, clamp, count, make, percent, visible } from "./dom.js";
import { ramp, rampWeight, themeOf } from "./colours.js";
import { Frame } from "./frame.js";
import { Tiles } from "./tiles.js";
import { listenToHands } from "./gestures.js";
import { drawLabels, drawOver, drawTiles, textWidth } from "./mapdraw.js";
import { SHORT } from "./tokens.js";
import { sidePanel } from "./side.js";

const LONG = 128; // tokens from which weights are so small that the logarithmic scale is the better one
const CLOSE = 28; // pixels of a cell after a jump

export class MatrixView {
  constructor(pane) {
    this.pane = pane;
    this.pointed = null; // the cell under the pointer
    this.cursor = null; // and that of the keyboard
    this.build();
    this.tiles = new Tiles((tile, signal) => this.fetch(tile, signal), {
      arrived: () => this.redraw(),
      failed: (error) => pane.trouble(error, () => this.retry()),
      waits: (many) => this.waits(many),
    });
    listenToHands(this.canvas, this);
    this.watch = new ResizeObserver(() => this.measure());
    this.watch.observe(this.map);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", (this.recolour = () => this.redraw()));
    this.update(new Set(["input"]));
  }

  build() {
    const { pane } = this;
    const help = "Arrow keys move the cursor, plus and minus zoom, 0 shows all, Enter keeps a cell, Escape lets it go.";
    this.canvas = make("canvas", { tabindex: 0, role: "application", "aria-roledescription": "map", "aria-label": `Map of the weights: rows are ${pane.sides.query}, columns are ${pane.sides.key}. ${help}` });
    this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.walk(0, 0));
    this.canvas.addEventListener("blur", () => this.redraw());
    this.tip = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
    this.map = make("div", { class: "map" }, this.canvas, this.tip);
    this.legend = make("canvas", { width: 128, height: 1, "aria-hidden": "true" });
    this.ends = [make("span"), make("span")];
    this.log = checkbox("logarithmic", false, (log) => pane.desk.set({ log }));
    const press = (sign, name, deed) => button(sign, deed, { "aria-label": name, title: name });
    const zooms = make("span", { class: "buttons" }, press("−", "Zoom out", () => this.zoomOut()), press("+", "Zoom in", () => this.zoomIn()), press("All", "Show all", () => this.fit()));
    const scale = make("span", { class: "legend" }, this.ends[0], this.legend, this.ends[1]);
    this.note = make("span", { class: "quiet" });
    const bar = make("div", { class: "map-bar" }, zooms, scale, this.log, this.note);
    this.panel = pane.desk.compact ? null : sidePanel(pane, (cell) => this.reach(cell), { waits: true });
    this.node = make("div", { class: "matrix-view" }, make("div", { class: "map-side" }, bar, this.map, pane.readout), this.panel?.node);
  }

  get which() {
    return JSON.stringify([this.pane.number, this.pane.layerNumber, this.pane.askedHeads]);
  }

  get isLog() {
    return this.pane.desk.state.log ?? Math.max(this.pane.queries.tokens.length, this.pane.keys.tokens.length) > LONG;
  }

  fetch({ down, across, row, column }, signal) {
    const [tall, wide] = [this.frame.tileRange("y", down, row), this.frame.tileRange("x", across, column)];
    const body = { heads: this.pane.askedHeads, mean: true, rows: tall.range, columns: wide.range, height: tall.pixels, width: wide.pixels };
    return this.pane.ask("tile", body, signal);
  }

  waits(many) {
    this.map.classList.toggle("waits", many > 0);
    if (many === 0) this.panel?.release();
  }

  retry() {
    this.pane.well();
    this.tiles.again();
    this.redraw();
  }

  update(changed) {
    const { pane } = this;
    const [queries, keys] = [pane.queries.tokens.length, pane.keys.tokens.length];
    if (!this.frame || this.frame.size.y !== queries || this.frame.size.x !== keys || changed.has("input")) {
      this.frame = new Frame(Math.max(queries, 1), Math.max(keys, 1));
      this.cursor = this.pointed = null;
      this.fresh = true;
    }
    if (["input", "layer", "heads", "beside"].some((name) => changed.has(name))) this.tiles.again();
    this.log.firstChild.checked = this.isLog;
    const empty = !queries || !keys ? "There are no tokens." : pane.heads.length ? "" : "Choose a head to see its weights.";
    this.node.classList.toggle("nothing", Boolean(empty));
    pane.say(empty || this.hint());
    this.empty = Boolean(empty);
    this.panel?.hold();
    this.measure();
    this.panel?.update(changed);
  }

  hint() {
    const heads = this.pane.heads.length;
    const what = heads > 1 ? `The mean of ${heads} heads. ` : "";
    return `${what}Drag to move, wheel or + − to zoom, click a cell to see what its row and column hold.`;
  }

  // ---- size

  measure() {
    const room = this.map.clientWidth;
    if (!room || this.empty) return;
    const context = this.canvas.getContext("2d");
    const { font } = themeOf(this.map);
    const most = room < 520 || Math.max(this.frame.size.x, this.frame.size.y) > SHORT ? 78 : 120;
    const gutter = {
      x: Math.ceil(clamp(textWidth(context, this.pane.queries.tokens, font), 34, most)) + 14,
      y: Math.ceil(clamp(textWidth(context, this.pane.keys.tokens, font), 34, most)) + 14,
    };
    const plot = { x: room - gutter.x - 2, y: Math.max(0.72 * innerHeight, 260) - gutter.y };
    const { size } = this.frame;
    const square = plot.x * Math.max(size.y / size.x, 0.25);
    plot.y = Math.max(Math.min(plot.y, square, size.y * 56), Math.min(size.y * 18, 60));
    this.frame.resize(plot, gutter);
    if (this.fresh) this.frame.fit();
    this.fresh = false;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [room, gutter.y + plot.y + 2];
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
    this.tiles.want(this.which, frame.tiles());
    drawTiles(context, frame, this.tiles, this.which, { ...this.shades, log: this.isLog });
    const hidden = { query: pane.hides("query"), key: pane.hides("key") };
    const cursor = document.activeElement === canvas ? this.cursor : null;
    drawOver(context, frame, theme, { hidden, pinned: pane.pinned, cursor, block: this.block });
    const strong = this.pointed ?? cursor ?? pane.pinned;
    drawLabels(context, frame, theme, { query: pane.queries, key: pane.keys }, { strong, hidden });
    canvas.style.touchAction = frame.isWhole ? "pan-y" : "none";
    this.drawLegend();
    this.tell();
  }

  drawLegend() {
    const [tile] = this.frame.tiles();
    const most = tile ? this.tiles.most.get(this.tiles.levelOf({ which: this.which, ...tile })) : undefined;
    this.ends[0].textContent = most ? `${percent(rampWeight(0, most, this.isLog))} %` : "";
    this.ends[1].textContent = most ? `${percent(most)} %` : "";
    const image = new ImageData(128, 1);
    for (let at = 0; at < 128; at += 1) image.data.set(this.shades.table.subarray(8 * at, 8 * at + 4), 4 * at);
    this.legend.getContext("2d").putImageData(image, 0, 0);
    const { x, y } = this.block;
    const kept = tile && this.tiles.get(this.which, tile);
    this.note.textContent = kept?.facts?.note || (x * y > 1 ? `a point is the mean of ${y} × ${x} weights` : "");
  }

  // ---- cells in words

  get block() {
    return { x: 2 ** this.frame.level("x"), y: 2 ** this.frame.level("y") };
  }

  // The weight that the map shows at a cell: its own, or the mean of its block
  shownAt({ query, key }) {
    const tile = this.frame.tiles().map((one) => this.tiles.get(this.which, one)).find((one) => {
      if (!one) return false;
      const [rows, columns] = this.rangesOf(one);
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

  inWords(cell) {
    const { pane, block } = this;
    const weight = this.shownAt(cell);
    const name = (side, place) => `${pane.sides[side]} ${count(place + 1)} “${visible(pane.textOf(side).tokens[place] ?? "")}”`;
    const value = weight === null ? "…" : `${percent(weight)} %`;
    const pooled = block.x * block.y > 1 ? ` (mean of ${block.y} × ${block.x})` : "";
    return `${name("query", cell.query)} → ${name("key", cell.key)}: ${value}${pooled}`;
  }

  tell() {
    const cell = this.pointed ?? (document.activeElement === this.canvas ? this.cursor : null);
    this.tip.hidden = !this.pointed;
    if (!cell) return;
    const words = this.inWords(cell);
    this.pane.say(words);
    if (!this.pointed) return;
    this.tip.textContent = words;
    const { x, y } = this.pointer;
    const beyond = x > this.map.clientWidth / 2;
    this.tip.style.left = beyond ? "auto" : `${x + 14}px`;
    this.tip.style.right = beyond ? `${this.map.clientWidth - x + 14}px` : "auto";
    this.tip.style.top = `${Math.max(y - 34, 0)}px`;
  }

  // ---- what hands do (gestures.js)

  eager() {
    return Math.max(this.frame.size.x, this.frame.size.y) > 64;
  }

  isWhole() {
    return this.frame.isWhole;
  }

  pan(x, y) {
    this.pointed = null;
    this.frame.pan(x, y);
    this.redraw();
  }

  zoom(factor, x, y) {
    this.frame.zoom(factor, x, y);
    this.redraw();
  }

  // Around the cursor if there is one in sight
  zoomAround(factor) {
    if (document.activeElement !== this.canvas || !this.cursor) return this.zoom(factor);
    const { key, query } = this.cursor;
    this.frame.zoom(factor, this.frame.toPixel("x", key + 0.5), this.frame.toPixel("y", query + 0.5));
    this.frame.show(this.cursor);
    return this.redraw();
  }

  zoomIn() {
    this.zoomAround(2);
  }

  zoomOut() {
    this.zoomAround(0.5);
  }

  fit() {
    this.frame.fit();
    this.redraw();
  }

  point(point) {
    this.pointer = point;
    this.pointed = point && this.frame.cellAt(point.x, point.y);
    this.redraw();
  }

  pick(point) {
    const cell = this.frame.cellAt(point.x, point.y);
    if (!cell) return;
    this.cursor = cell;
    this.choose(cell);
  }

  choose(cell) {
    this.pane.pin(cell);
    this.panel?.update(new Set(["query"]));
    this.redraw();
  }

  pickHere() {
    if (this.cursor) this.choose(this.cursor);
  }

  unpick() {
    this.choose({ query: null, key: null });
  }

  // Moves the cursor by as many points of the map
  walk(right, down) {
    const { pinned } = this.pane;
    this.cursor ??= { query: pinned.query ?? this.frame.sight("y")[0], key: pinned.key ?? this.frame.sight("x")[0] };
    const step = (place, by, size) => clamp(by === 0 ? place : place + by, 0, size - 1);
    this.cursor = {
      query: step(this.cursor.query, down * this.block.y, this.frame.size.y),
      key: step(this.cursor.key, right * this.block.x, this.frame.size.x),
    };
    this.pointed = null;
    this.frame.show(this.cursor);
    this.redraw();
  }

  // Goes to a row, a column or a cell, near enough to read it
  reach({ query = null, key = null }) {
    const near = Math.min(CLOSE / this.frame.scale.x, CLOSE / this.frame.scale.y);
    if (near > 1) this.frame.zoom(near);
    this.frame.show({ query, key }, true);
    this.cursor = { query: query ?? this.frame.sight("y")[0], key: key ?? this.frame.sight("x")[0] };
    this.choose({ query, key });
  }

  destroy() {
    this.tiles.destroy();
    this.watch.disconnect();
    this.scheme.removeEventListener("change", this.recolour);
    cancelAnimationFrame(this.frameRequest);
    this.panel?.destroy();
  }
}
