// The stage: a canvas that shows the world, loads the layers that come into view, and finds what is under the cursor.

import { post } from "../../shared/client.js";
import { make } from "../../shared/dom.js";
import { debounce } from "../controls.js";
import { Camera } from "./camera.js";
import { boxOf, drawWorld, makePattern } from "./draw.js";
import { addInteraction } from "./interaction.js";
import { walk } from "./nodes.js";
import { readTheme } from "./theme.js";
import { fillLayer, makeWorld } from "./world.js";

const SETTLED = 120; // milliseconds without camera movement before the new position is reported
const CELL = 52; // width of the narrowest cell at the largest scale, in pixels
const CLOSE = 0.8; // a box counts as entered if the scale is at least this fraction of the scale that fits it
const DEEPER = 1.2; // and if it is at least this multiple of the scale that fits its parent

const dark = matchMedia("(prefers-color-scheme: dark)");

// events: { hover(hit), moved(box, node), click(hit), failed(error) }; a hit is { node, row, cell, stack }, or null
export function makeStage(events, signal) {
  const canvas = make("canvas", { class: "inside-canvas", tabindex: 0, role: "application", "aria-roledescription": "zoomable picture" });
  const context = canvas.getContext("2d", { alpha: false });
  const scene = { root: null, camera: null, theme: null, pattern: null, hover: null, selected: null, predictions: null, normalize: "" };
  let [frame, request, loading] = [0, null, false];
  let arrived = null; // the box that the camera was sent to, until the user moves the camera
  let target = null; // the node that the camera shows there: the box, or a step in it
  const camera = scene.camera = new Camera(() => {
    draw();
    if (!camera.isFlying) settled();
  });

  function draw() {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      if (!scene.root || signal.aborted) return;
      context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
      drawWorld(context, scene);
      canvas.dataset.frames = Number(canvas.dataset.frames ?? 0) + 1;
    });
  }

  const settled = debounce(SETTLED, () => !signal.aborted && scene.root && events.moved(enclosing(), target ?? enclosing()));

  function resize() {
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !height) return;
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    const wasFitted = camera.isFitted;
    camera.size = { width, height };
    if (scene.root && (target || wasFitted)) camera.jump(camera.viewOf(target ?? scene.root));
    draw();
  }

  function restyle() {
    scene.theme = readTheme(canvas.parentElement);
    scene.pattern = makePattern(context, scene.theme);
    draw();
  }

  // at: id of the node to show. The camera stays where it is if the world has the same boxes
  function show(answer, layerRequest, at) {
    resize();
    if (!scene.theme) restyle();
    request = layerRequest;
    scene.normalize = answer.normalize;
    const before = scene.root ? enclosing().id : "";
    scene.root = makeWorld(answer, camera.size.width / camera.size.height);
    const narrowest = Math.min(...[...walk(scene.root)].filter(({ kind, role }) => kind === "matrix" && role !== "tokens").map(({ w, columns, fold }) => w / Math.ceil(columns / fold)));
    camera.setWorld(scene.root, CELL / narrowest);
    scene.hover = null;
    const node = find(at ?? before) ?? scene.root;
    arrived = target = node;
    camera.jump(camera.viewOf(node));
    settled.now();
    load();
  }

  const find = (id) => (id && scene.root ? [...walk(scene.root)].find((node) => node.id === id) ?? null : null);

  // Loads all layers one after another, starting with the visible ones
  async function load() {
    if (loading) return;
    loading = true;
    try {
      for (let block = nextLayer(); block; block = nextLayer()) {
        const [root, own] = [scene.root, request];
        const { steps } = await post("api/inside/layer", { ...own, stack: block.stack.name, layer: block.layer }, signal);
        if (root !== scene.root) continue; // another text is shown now
        fillLayer(block, steps);
        draw();
      }
      canvas.dataset.loaded = "true";
    } catch (error) {
      if (error.name !== "AbortError") events.failed(error);
    } finally {
      loading = false;
    }
  }

  function nextLayer() {
    canvas.dataset.loaded = "false";
    const missing = scene.root.children.filter(({ kind, loaded }) => kind === "layer" && !loaded);
    const distance = ({ x, y, w, h }) => Math.hypot(x + w / 2 - camera.x, y + h / 2 - camera.y);
    return missing.sort((a, b) => distance(a) - distance(b))[0];
  }

  // The innermost group or matrix at a point of the screen
  function hit(point) {
    const { x, y } = camera.toWorld(point.x, point.y);
    const inside = (node) => x >= node.x && x <= node.x + node.w && y >= node.y && y <= node.y + node.h;
    let node = scene.root;
    for (let child = node; child; child = node.children.find((each) => each.kind !== "operator" && inside(each))) node = child;
    if (node.kind !== "matrix" || node.role === "predictions") return { node, row: null, cell: null, stack: node.stack };
    const row = Math.min(Math.floor(((y - node.y) / node.h) * node.rows), node.rows - 1);
    if (node.role === "tokens") return { node, row, cell: null, stack: node.stack };
    const across = Math.ceil(node.columns / node.fold);
    const line = Math.min(Math.floor((((y - node.y) / node.h) * node.rows - row) * node.fold), node.fold - 1);
    const place = Math.min(Math.floor(((x - node.x) / node.w) * across), across - 1);
    const lines = node.rows * node.fold;
    const cell = { row, column: line * across + place, x: place / across, y: (row * node.fold + line) / lines, w: 1 / across, h: 1 / lines };
    const isOther = node.sublayer === "cross" && ["key", "value"].includes(node.role);
    return { node, row: isOther ? null : row, cell, stack: node.stack };
  }

  // The box that the camera was sent to; otherwise the innermost entered box around the middle of the screen
  function enclosing() {
    if (arrived) return arrived;
    const { width, height } = camera.size;
    let node = scene.root;
    for (;;) {
      if (camera.scale < DEEPER * camera.viewOf(node).scale) return node;
      const child = node.children.find((each) => {
        const box = boxOf(camera, each);
        const around = box.x <= width / 2 && box.x + box.w >= width / 2 && box.y <= height / 2 && box.y + box.h >= height / 2;
        return each.kind !== "operator" && around && camera.scale >= CLOSE * camera.viewOf(each).scale;
      });
      if (!child) return node;
      node = child;
    }
  }

  // Moves the camera to a node. box: the box whose steps are listed there
  function goTo(node, box = node) {
    [arrived, target] = [box, node];
    camera.fly(node);
  }

  // Zooms into the box under the cursor, one level at a time; inside a matrix, towards its numbers
  function enter(point) {
    const spot = point ?? { x: camera.size.width / 2, y: camera.size.height / 2 };
    const { node } = hit(spot);
    const path = [];
    for (let each = node; each; each = each.parent) path.unshift(each);
    const next = path[path.indexOf(enclosing()) + 1];
    if (next) goTo(next);
    else camera.fly({ ...camera.toWorld(spot.x, spot.y), scale: Math.min(camera.maxScale, camera.scale * 2.5) });
  }

  const leave = () => goTo(enclosing().parent ?? scene.root);

  camera.moved = () => {
    arrived = target = null;
  };
  addInteraction(canvas, camera, {
    hover: (point) => {
      scene.hover = point && scene.root ? hit(point) : null;
      draw();
      events.hover(scene.hover);
    },
    click: (point) => scene.root && events.click(hit(point)),
    enter,
    leave,
    whole: () => scene.root && goTo(scene.root),
  }, signal);
  const observer = new ResizeObserver(resize);
  observer.observe(canvas);
  dark.addEventListener("change", restyle, { signal });
  signal.addEventListener("abort", () => observer.disconnect());
  return { canvas, camera, scene, show, draw, find, goTo, leave, enter, enclosing };
}
