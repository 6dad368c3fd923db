// Head colors (Okabe and Ito 2008), and a color ramp for weights: the blue of all tables and charts, in even
// lightness steps from the background to its opposite. Only lightness encodes the weight, so it is readable with any color vision.

const ON_DARK = [[15, 24, 32], [17, 51, 76], [23, 81, 122], [37, 116, 172], [76, 156, 217], [145, 200, 244], [222, 241, 255]];
const ON_LIGHT = [[247, 251, 253], [190, 222, 248], [134, 192, 239], [78, 158, 219], [27, 119, 181], [7, 81, 127], [0, 46, 77]];
const DECADES = 4; // range of the logarithmic scale below the largest weight

const HEAD_COLORS = 8; // number of head colors in attention.css

export function headColor(head) {
  return `var(--head-${head % HEAD_COLORS})`;
}

export function themeOf(node) {
  const style = getComputedStyle(node);
  const [paper, raised, ink, quiet, accent] = ["paper", "raised", "ink", "quiet", "accent"].map((name) => style.getPropertyValue(`--${name}`));
  const dark = Number(paper.match(/\d+/)?.[0] ?? 255) < 128; // the red component of the background
  return { paper, raised, ink, quiet, accent, dark, font: style.fontFamily };
}

export function ramp(dark) {
  const anchors = dark ? ON_DARK : ON_LIGHT;
  const table = new Uint8ClampedArray(256 * 4);
  for (let shade = 0; shade < 256; shade += 1) {
    const at = (shade / 255) * (anchors.length - 1);
    const low = Math.min(Math.floor(at), anchors.length - 2);
    for (let channel = 0; channel < 3; channel += 1) {
      const [start, end] = [anchors[low][channel], anchors[low + 1][channel]];
      table[4 * shade + channel] = start + (at - low) * (end - start);
    }
    table[4 * shade + 3] = 255;
  }
  return table;
}

// Position of a weight on the ramp, 0 to 1
function rampPosition(weight, max, log) {
  if (!(weight > 0) || !(max > 0)) return 0;
  const position = log ? 1 + Math.log10(weight / max) / DECADES : weight / max;
  return Math.max(0, Math.min(position, 1));
}

// Weight at a position on the ramp
export function rampWeight(position, max, log) {
  return log ? max * 10 ** (DECADES * (position - 1)) : max * position;
}

// Weights (height × width) as an image
function toImage(weights, height, width, { max, log, table }) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const shades = new Uint32Array(table.buffer);
  for (let index = 0; index < pixels.length; index += 1) {
    pixels[index] = shades[Math.round(255 * rampPosition(weights[index], max, log))];
  }
  return image;
}

export function paint(weights, height, width, scale, canvas = document.createElement("canvas")) {
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(toImage(weights, height, width, scale), 0, 0);
  return canvas;
}

export function largest(weights) {
  let max = 0;
  for (const weight of weights) if (weight > max) max = weight;
  return max;
}
