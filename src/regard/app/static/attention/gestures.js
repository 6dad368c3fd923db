// What hands do on the map: drag and pinch, wheel, keys. The map itself is told: pan, zoom, point, pick, walk.

const STILL = 4; // pixels that a click may move
const STEP = 1.5; // of zoom for a key or a button

export function listenToHands(canvas, map) {
  const fingers = new Map();
  let moved = 0;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const spread = () => {
    const [one, other] = [...fingers.values()];
    return { x: (one.x + other.x) / 2, y: (one.y + other.y) / 2, length: Math.hypot(one.x - other.x, one.y - other.y) };
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, at(event));
    if (fingers.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    const now = at(event);
    if (!before) return map.point(now);
    const was = fingers.size === 2 ? spread() : null;
    fingers.set(event.pointerId, now);
    moved += Math.hypot(now.x - before.x, now.y - before.y);
    if (moved <= STILL) return undefined;
    if (!was) return map.pan(now.x - before.x, now.y - before.y);
    const is = spread();
    map.pan(is.x - was.x, is.y - was.y);
    return map.zoom(is.length / Math.max(was.length, 1), is.x, is.y);
  });
  const lift = (event) => {
    const known = fingers.delete(event.pointerId);
    if (known && event.type === "pointerup" && moved <= STILL && fingers.size === 0) map.pick(at(event));
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => fingers.size === 0 && map.point(null));
  canvas.addEventListener("wheel", (event) => {
    const { x, y } = at(event);
    const pixels = event.deltaMode === 1 ? 30 * event.deltaY : event.deltaY; // lines, or pixels
    const willing = event.ctrlKey || document.activeElement === canvas || map.eager();
    if (!willing || (pixels > 0 && map.isWhole())) return; // the page scrolls on
    event.preventDefault();
    map.zoom(Math.exp(-pixels / (event.ctrlKey ? 100 : 300)), x, y);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => map.zoom(STEP * STEP, at(event).x, at(event).y));
  canvas.addEventListener("keydown", (event) => pressed(event, map));
}

function pressed(event, map) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const deeds = {
    "+": () => map.zoomIn(),
    "=": () => map.zoomIn(),
    "-": () => map.zoomOut(),
    "−": () => map.zoomOut(),
    0: () => map.fit(),
    Enter: () => map.pickHere(),
    " ": () => map.pickHere(),
    Escape: () => map.unpick(),
    Home: () => map.walk(-Infinity, 0),
    End: () => map.walk(Infinity, 0),
    PageUp: () => map.walk(0, -10),
    PageDown: () => map.walk(0, 10),
  };
  if (event.key in ways) map.walk(...ways[event.key].map((way) => (event.shiftKey ? 10 : 1) * way));
  else if (event.key in deeds) deeds[event.key]();
  else return;
  event.preventDefault();
}
