// Colours: one for each head (Okabe and Ito 2008), and a ramp for weights that is even in lightness and goes from
// blue to yellow, which all kinds of colour vision tell apart (as cividis: Nuñez, Anderton and Renslow 2018).

const ON_DARK = [[15, 24, 41], [8, 48, 104], [62, 77, 109], [109, 112, 117], [152, 147, 118], [203, 187, 105], [255, 234, 70]];
const ON_LIGHT = [[253, 251, 240], [247, 231, 148], [205, 189, 110], [153, 149, 122], [103, 111, 121], [45, 70, 112], [0, 28, 72]];
const DECADES = 4; // that the logarithmic scale shows below its largest weight

export const HEAD_COLOURS = 8; // as many as attention.css has; then they begin again

export function headColour(head) {
  return `var(--head-${head % HEAD_COLOURS})`;
}

export function themeOf(node) {
  const style = getComputedStyle(node);
  const names = ["paper", "raised", "ink", "quiet", "rule", "accent"];
  const theme = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return { ...theme, dark: style.getPropertyValue("--scheme").trim() === "dark", font: style.fontFamily };
}

export function ramp(dark) {
  const anchors = dark ? ON_DARK : ON_LIGHT;
  const table = new Uint8ClampedArray(256 * 4);
  for (let shade = 0; shade < 256; shade += 1) {
    const at = (shade / 255) * (anchors.length - 1);
    const low = Math.min(Math.floor(at), anchors.length - 2);
    for (let channel = 0; channel < 3; channel += 1) {
      const [one, other] = [anchors[low][channel], anchors[low + 1][channel]];
      table[4 * shade + channel] = one + (at - low) * (other - one);
    }
    table[4 * shade + 3] = 255;
  }
  return table;
}

// Where a weight is on the ramp, 0 to 1
export function rampPlace(weight, most, log) {
  if (!(weight > 0) || !(most > 0)) return 0;
  const place = log ? 1 + Math.log10(weight / most) / DECADES : weight / most;
  return Math.max(0, Math.min(place, 1));
}

// And back: the weight that a place on the ramp stands for
export function rampWeight(place, most, log) {
  return log ? most * 10 ** (DECADES * (place - 1)) : most * place;
}

// Weights (height × width) as an image
export function paint(weights, height, width, { most, log, table }) {
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const shades = new Uint32Array(table.buffer);
  for (let place = 0; place < pixels.length; place += 1) {
    pixels[place] = shades[Math.round(255 * rampPlace(weights[place], most, log))];
  }
  return image;
}

export function painted(weights, height, width, scale, canvas = document.createElement("canvas")) {
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(paint(weights, height, width, scale), 0, 0);
  return canvas;
}

export function largest(weights) {
  let most = 0;
  for (const weight of weights) if (weight > most) most = weight;
  return most;
}
