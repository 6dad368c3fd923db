// Matrices of numbers: colors, folding of long vectors, and images for drawing.

const ASPECT = 1.8; // width / height of a cell in which a number is easy to read
const PALEST = 0.06; // color intensity of zero, so that a matrix stands out from the background
const SATURATION = 0.98; // quantile of |value| with the strongest color: a few features are much larger than the rest

// rows: arrays of numbers. kind: "signed", or "weights" for numbers between 0 and 1. allowed: false where masked
export function makeMatrix(rows, { kind = "signed", allowed = null } = {}) {
  const columns = rows[0]?.length ?? 0;
  const values = new Float32Array(rows.length * columns);
  rows.forEach((row, index) => values.set(row, index * columns));
  return { kind, rows: rows.length, columns, values, allowed, limit: kind === "weights" ? 1 : saturation(values), images: new Map() };
}

function saturation(values) {
  const sizes = Float32Array.from(values, Math.abs).sort();
  return sizes[Math.floor(SATURATION * (sizes.length - 1))] || sizes.at(-1) || 1;
}

export function valueAt(matrix, row, column) {
  return matrix.values[row * matrix.columns + column];
}

export function isMasked(matrix, row, column) {
  return matrix.allowed !== null && !matrix.allowed[row][column];
}

// The number of lines into which a vector of `columns` numbers is folded in a box
export function foldOf(columns, width, height) {
  let best = 1;
  let error = Infinity;
  for (let fold = 1; fold <= columns; fold += 1) {
    if (columns % fold) continue;
    const difference = Math.abs(Math.log((width / (columns / fold)) / (height / fold) / ASPECT));
    if (difference < error) [best, error] = [fold, difference];
  }
  return best;
}

// The position of a value on the color scale, −1 to 1
function depthOf(matrix, value) {
  return Math.max(-1, Math.min(value / matrix.limit, 1));
}

// An image with one pixel per cell; the folded lines of a row are below each other. Masked cells are transparent
export function imageOf(matrix, fold, theme) {
  const key = `${theme.key}-${fold}`;
  const known = matrix.images.get(key);
  if (known) return known;
  const width = Math.ceil(matrix.columns / fold);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(width, 1);
  canvas.height = Math.max(matrix.rows * fold, 1);
  const image = new ImageData(canvas.width, canvas.height);
  for (let row = 0; row < matrix.rows; row += 1) {
    for (let column = 0; column < matrix.columns; column += 1) {
      if (isMasked(matrix, row, column)) continue;
      const pixel = 4 * ((row * fold + Math.floor(column / width)) * width + (column % width));
      image.data.set(colorOf(matrix, valueAt(matrix, row, column), theme), pixel);
      image.data[pixel + 3] = 255;
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  matrix.images.set(key, canvas);
  return canvas;
}

// [r, g, b] of a value: from paper to blue or orange, or on the ramp of weights
export function colorOf(matrix, value, { rgb, ramp }) {
  const depth = depthOf(matrix, value);
  if (matrix.kind === "weights") {
    const shade = 4 * Math.round(255 * Math.max(depth, 0));
    return ramp.subarray(shade, shade + 3);
  }
  const end = depth < 0 ? rgb.warm : rgb.accent;
  const strength = PALEST + (1 - PALEST) * Math.abs(depth);
  return rgb.paper.map((channel, index) => channel + strength * (end[index] - channel));
}
