// The page's colors as numbers, for drawing on a canvas.

import { ramp } from "../../attention/colors.js";

const NAMES = ["paper", "raised", "ink", "quiet", "rule", "edge", "accent", "warm", "green", "violet", "amber"];
const HEADS = 8;

// { paper: "rgb(…)", …, heads: […], rgb: { paper: [r, g, b], … }, ramp, dark, font, key }
export function readTheme(element) {
  const probe = document.createElement("span");
  element.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const colors = Object.fromEntries(NAMES.map((name) => [name, read(name)]));
  const heads = Array.from({ length: HEADS }, (_, head) => read(`head-${head}`));
  const font = getComputedStyle(element).fontFamily;
  probe.remove();
  const rgb = Object.fromEntries(NAMES.map((name) => [name, colors[name].match(/[\d.]+/g).slice(0, 3).map(Number)]));
  const dark = rgb.paper[0] < 128;
  return { ...colors, heads, rgb, ramp: ramp(dark), dark, font, key: dark ? "dark" : "light" };
}
