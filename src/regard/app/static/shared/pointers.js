// Pointing, dragging, pinching and clicking on a canvas, with the mouse or fingers.

// The point of an event, relative to the canvas
export function position(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

// actions: { hover(point | null), pan(dx, dy), zoom(factor, x, y), click(point) }
// tolerance: how far the pointer may move during a click, in pixels. options: passed to the event listeners
export function addPointers(canvas, actions, tolerance, options = {}) {
  const pointers = new Map();
  let moved = 0;
  const listen = (type, listener) => canvas.addEventListener(type, listener, options);
  const spread = () => {
    const [a, b] = [...pointers.values()];
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, length: Math.hypot(a.x - b.x, a.y - b.y) };
  };

  listen("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, position(canvas, event));
    if (pointers.size === 1) moved = 0;
  });
  listen("pointermove", (event) => {
    const [before, after] = [pointers.get(event.pointerId), position(canvas, event)];
    if (!before) return actions.hover(after);
    const old = pointers.size === 2 ? spread() : null;
    pointers.set(event.pointerId, after);
    moved += Math.hypot(after.x - before.x, after.y - before.y);
    if (moved <= tolerance) return undefined;
    if (!old) return actions.pan(after.x - before.x, after.y - before.y);
    const now = spread();
    actions.pan(now.x - old.x, now.y - old.y);
    return actions.zoom(now.length / Math.max(old.length, 1), now.x, now.y);
  });
  const release = (event) => {
    const known = pointers.delete(event.pointerId);
    if (known && event.type === "pointerup" && moved <= tolerance && pointers.size === 0) actions.click(position(canvas, event));
  };
  listen("pointerup", release);
  listen("pointercancel", release);
  listen("pointerleave", () => pointers.size === 0 && actions.hover(null));
}

// The factor by which a turn of the wheel zooms; more than 1 zooms in
export function wheelFactor(event) {
  const pixels = event.deltaMode === 1 ? 30 * event.deltaY : event.deltaY; // converts lines to pixels
  return Math.exp(-pixels / (event.ctrlKey ? 100 : 300));
}
