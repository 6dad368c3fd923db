// Drag, pinch, wheel, double click and keys on the canvas.

import { addPointers, position, wheelFactor } from "../../shared/pointers.js";

const CLICK_TOLERANCE = 5; // pixels
const PAN_STEP = 60; // pixels
const ZOOM_STEP = 1.35;

// actions: { hover(point | null), click(point), enter(point | null), leave(), whole() }
export function addInteraction(canvas, camera, actions, signal) {
  const listen = (type, listener, options = {}) => canvas.addEventListener(type, listener, { signal, ...options });
  const { hover, click } = actions;
  addPointers(canvas, { hover, click, pan: (dx, dy) => camera.pan(dx, dy), zoom: (factor, x, y) => camera.zoom(factor, x, y) }, CLICK_TOLERANCE, { signal });
  listen("dblclick", (event) => actions.enter(position(canvas, event)));
  listen("wheel", (event) => {
    const factor = wheelFactor(event);
    const zooms = event.ctrlKey || event.metaKey || document.activeElement === canvas;
    if (!zooms || (factor < 1 && camera.isFitted)) return; // scroll the page
    event.preventDefault();
    const { x, y } = position(canvas, event);
    camera.zoom(factor, x, y);
  }, { passive: false });
  listen("keydown", (event) => handleKey(event, camera, actions));
}

function handleKey(event, camera, actions) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const step = event.shiftKey ? 4 * PAN_STEP : PAN_STEP;
  const keys = {
    ArrowLeft: () => camera.pan(step, 0),
    ArrowRight: () => camera.pan(-step, 0),
    ArrowUp: () => camera.pan(0, step),
    ArrowDown: () => camera.pan(0, -step),
    "+": () => camera.zoom(ZOOM_STEP),
    "=": () => camera.zoom(ZOOM_STEP),
    "-": () => camera.zoom(1 / ZOOM_STEP),
    "−": () => camera.zoom(1 / ZOOM_STEP),
    0: () => actions.whole(),
    Enter: () => actions.enter(null),
    Escape: () => actions.leave(),
  };
  if (!(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
}
