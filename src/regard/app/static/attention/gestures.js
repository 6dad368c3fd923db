// Drag, pinch, wheel and keys on the map; calls the methods of MatrixView.

import { addPointers, position, wheelFactor } from "../shared/pointers.js";

const CLICK_TOLERANCE = 4; // pixels
const ZOOM_STEP = 1.5;

export function addGestures(canvas, map) {
  addPointers(canvas, {
    hover: (point) => map.hover(point),
    pan: (dx, dy) => map.pan(dx, dy),
    zoom: (factor, x, y) => map.zoom(factor, x, y),
    click: (point) => map.pinAt(point),
  }, CLICK_TOLERANCE);
  canvas.addEventListener("wheel", (event) => {
    const { x, y } = position(canvas, event);
    const factor = wheelFactor(event);
    const zooms = event.ctrlKey || document.activeElement === canvas || map.zoomsOnWheel();
    if (!zooms || (factor < 1 && map.frame.isFitted)) return; // scroll the page
    event.preventDefault();
    map.zoom(factor, x, y);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => {
    const { x, y } = position(canvas, event);
    map.zoom(ZOOM_STEP * ZOOM_STEP, x, y);
  });
  canvas.addEventListener("keydown", (event) => handleKey(event, map));
}

function handleKey(event, map) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const actions = {
    "+": () => map.zoomAtCursor(2),
    "=": () => map.zoomAtCursor(2),
    "-": () => map.zoomAtCursor(0.5),
    "−": () => map.zoomAtCursor(0.5),
    0: () => map.fit(),
    Enter: () => map.pinCursor(),
    " ": () => map.pinCursor(),
    Escape: () => map.unpin(),
    Home: () => map.moveCursor(-Infinity, 0),
    End: () => map.moveCursor(Infinity, 0),
    PageUp: () => map.moveCursor(0, -10),
    PageDown: () => map.moveCursor(0, 10),
  };
  if (event.key in directions) map.moveCursor(...directions[event.key].map((step) => (event.shiftKey ? 10 : 1) * step));
  else if (event.key in actions) actions[event.key]();
  else return;
  event.preventDefault();
}
