// Drag, pinch, wheel and keys on the map; calls the methods of MatrixView.

const CLICK_TOLERANCE = 4; // pixels
const ZOOM_STEP = 1.5;

export function addGestures(canvas, map) {
  const pointers = new Map();
  let moved = 0;
  const position = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const spread = () => {
    const [a, b] = [...pointers.values()];
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, length: Math.hypot(a.x - b.x, a.y - b.y) };
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, position(event));
    if (pointers.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    const after = position(event);
    if (!before) return map.hover(after);
    const oldSpread = pointers.size === 2 ? spread() : null;
    pointers.set(event.pointerId, after);
    moved += Math.hypot(after.x - before.x, after.y - before.y);
    if (moved <= CLICK_TOLERANCE) return undefined;
    if (!oldSpread) return map.pan(after.x - before.x, after.y - before.y);
    const newSpread = spread();
    map.pan(newSpread.x - oldSpread.x, newSpread.y - oldSpread.y);
    return map.zoom(newSpread.length / Math.max(oldSpread.length, 1), newSpread.x, newSpread.y);
  });
  const release = (event) => {
    const known = pointers.delete(event.pointerId);
    if (known && event.type === "pointerup" && moved <= CLICK_TOLERANCE && pointers.size === 0) map.pinAt(position(event));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => pointers.size === 0 && map.hover(null));
  canvas.addEventListener("wheel", (event) => {
    const { x, y } = position(event);
    const pixels = event.deltaMode === 1 ? 30 * event.deltaY : event.deltaY; // lines, or pixels
    const zooms = event.ctrlKey || document.activeElement === canvas || map.zoomsOnWheel();
    if (!zooms || (pixels > 0 && map.frame.isFitted)) return; // scroll the page
    event.preventDefault();
    map.zoom(Math.exp(-pixels / (event.ctrlKey ? 100 : 300)), x, y);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => map.zoom(ZOOM_STEP * ZOOM_STEP, position(event).x, position(event).y));
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
