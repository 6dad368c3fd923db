// Drag, pinch, wheel, double click and keys on the canvas.

const CLICK_TOLERANCE = 5; // pixels
const PAN_STEP = 60; // pixels
const ZOOM_STEP = 1.35;

// actions: { hover(point | null), click(point), enter(point | null), leave() }
export function addInteraction(canvas, camera, actions, signal) {
  const pointers = new Map();
  let moved = 0;
  const listen = (type, listener, options = {}) => canvas.addEventListener(type, listener, { signal, ...options });
  const position = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const spread = () => {
    const [a, b] = [...pointers.values()];
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, length: Math.hypot(a.x - b.x, a.y - b.y) };
  };

  listen("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, position(event));
    if (pointers.size === 1) moved = 0;
  });
  listen("pointermove", (event) => {
    const [before, after] = [pointers.get(event.pointerId), position(event)];
    if (!before) return actions.hover(after);
    const old = pointers.size === 2 ? spread() : null;
    pointers.set(event.pointerId, after);
    moved += Math.hypot(after.x - before.x, after.y - before.y);
    if (moved <= CLICK_TOLERANCE) return undefined;
    if (!old) return camera.pan(after.x - before.x, after.y - before.y);
    const now = spread();
    camera.pan(now.x - old.x, now.y - old.y);
    return camera.zoom(now.length / Math.max(old.length, 1), now.x, now.y);
  });
  const release = (event) => {
    const known = pointers.delete(event.pointerId);
    if (known && event.type === "pointerup" && moved <= CLICK_TOLERANCE && pointers.size === 0) actions.click(position(event));
  };
  listen("pointerup", release);
  listen("pointercancel", release);
  listen("pointerleave", () => pointers.size === 0 && actions.hover(null));
  listen("dblclick", (event) => actions.enter(position(event)));
  listen("wheel", (event) => {
    const pixels = event.deltaMode === 1 ? 30 * event.deltaY : event.deltaY; // lines, or pixels
    const zooms = event.ctrlKey || event.metaKey || document.activeElement === canvas;
    if (!zooms || (pixels > 0 && camera.isFitted)) return; // scroll the page
    event.preventDefault();
    const { x, y } = position(event);
    camera.zoom(Math.exp(-pixels / (event.ctrlKey ? 100 : 300)), x, y);
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
