// The camera: the visible part of the world, and its scale.

import { clamp } from "../../shared/dom.js";

const FLIGHT = 650; // milliseconds of a camera flight
const MARGIN = 0.06; // around a fitted box, as a fraction of the screen
const SHRINK = 0.6; // smallest scale, relative to the scale that fits the whole world

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Camera {
  constructor(changed) {
    this.changed = changed; // called after every change
    this.moved = () => {}; // called before the user pans or zooms
    this.size = { width: 1, height: 1 };
    this.world = { x: 0, y: 0, w: 1, h: 1 };
    this.x = this.y = 0; // the point of the world in the middle of the screen
    this.scale = 1; // pixels per unit
    this.maxScale = 100;
    this.frame = 0;
  }

  setWorld(world, maxScale) {
    this.world = world;
    this.maxScale = maxScale;
  }

  toScreen(x, y) {
    return { x: (x - this.x) * this.scale + this.size.width / 2, y: (y - this.y) * this.scale + this.size.height / 2 };
  }

  toWorld(x, y) {
    return { x: (x - this.size.width / 2) / this.scale + this.x, y: (y - this.size.height / 2) / this.scale + this.y };
  }

  // The view that shows a whole box
  viewOf({ x, y, w, h }) {
    const inner = 1 - 2 * MARGIN;
    const scale = Math.min((inner * this.size.width) / w, (inner * this.size.height) / h, this.maxScale);
    return { x: x + w / 2, y: y + h / 2, scale };
  }

  get fittedScale() {
    return this.viewOf(this.world).scale;
  }

  get isFitted() {
    return this.scale <= this.fittedScale * 1.001;
  }

  jump(view) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    Object.assign(this, { x: view.x, y: view.y, scale: view.scale });
    this.keepInside();
    this.changed();
  }

  pan(dx, dy) {
    this.moved();
    this.jump({ x: this.x - dx / this.scale, y: this.y - dy / this.scale, scale: this.scale });
  }

  // Zooms by a factor; the point (x, y) of the screen stays where it is
  zoom(factor, x = this.size.width / 2, y = this.size.height / 2) {
    this.moved();
    const before = this.toWorld(x, y);
    const scale = clamp(this.scale * factor, SHRINK * this.fittedScale, this.maxScale);
    this.jump({
      x: before.x - (x - this.size.width / 2) / scale,
      y: before.y - (y - this.size.height / 2) / scale,
      scale,
    });
  }

  keepInside() {
    const { x, y, w, h } = this.world;
    this.x = clamp(this.x, x, x + w);
    this.y = clamp(this.y, y, y + h);
  }

  // Animates the camera to a box, or to a view { x, y, scale }
  fly(target) {
    const to = "scale" in target ? target : this.viewOf(target);
    if (still.matches) return this.jump(to);
    cancelAnimationFrame(this.frame);
    const from = { x: this.x, y: this.y, scale: this.scale };
    const start = performance.now();
    const step = (now) => {
      const time = clamp((now - start) / FLIGHT, 0, 1);
      const eased = time < 0.5 ? 4 * time ** 3 : 1 - (2 - 2 * time) ** 3 / 2;
      this.frame = time < 1 ? requestAnimationFrame(step) : 0;
      Object.assign(this, between(from, to, eased));
      this.changed();
    };
    this.frame = requestAnimationFrame(step);
  }

  get isFlying() {
    return this.frame !== 0;
  }
}

// Interpolates between two views: the scale changes by constant factors, and the target moves in a straight line on the screen
function between(from, to, progress) {
  const scale = from.scale * (to.scale / from.scale) ** progress;
  const ratio = to.scale / from.scale;
  // the fraction of the distance in the world that keeps the speed on the screen constant
  const fraction = Math.abs(ratio - 1) < 1e-3 ? progress : (1 - ratio ** -progress) / (1 - ratio ** -1);
  return { x: from.x + fraction * (to.x - from.x), y: from.y + fraction * (to.y - from.y), scale };
}
