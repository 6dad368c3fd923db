// The prediction: logits and probabilities of the most probable next tokens, as bars.

import { format, plain } from "./draw_matrix.js";

const ROWS = 10;

// The rows scale with the world, so zooming in makes them readable
export function drawPredictions(pen, box) {
  const { context, theme, scene } = pen;
  const { top, temperature } = scene.predictions ?? {};
  if (!top) return;
  const count = Math.min(ROWS, top.length);
  const lane = box.h / (count + 1.4);
  const size = Math.min(lane * 0.62, 40);
  if (size < 3.2) return drawBlock(pen, box, top, count);
  const columns = { token: box.x + 0.3 * box.w, logit: box.x + 0.33 * box.w, probability: box.x + 0.6 * box.w, end: box.x + box.w };
  context.textBaseline = "middle";
  context.fillStyle = theme.quiet;
  context.font = `${size * 0.8}px ${theme.font}`;
  context.textAlign = "left";
  context.fillText("logit", columns.logit, box.y + lane * 0.6);
  context.fillText(temperature === 1 ? "probability" : `probability, T = ${temperature}`, columns.probability, box.y + lane * 0.6);
  const [low, high] = [Math.min(0, ...top.slice(0, count).map(({ logit }) => logit)), Math.max(...top.map(({ logit }) => logit))];
  top.slice(0, count).forEach((candidate, index) => {
    const y = box.y + (index + 1.2) * lane;
    drawCandidate(pen, candidate, { y, lane, size, columns, low, high, first: index === 0 });
  });
  return undefined;
}

function drawCandidate({ context, theme }, { token, logit, probability }, { y, lane, size, columns, low, high, first }) {
  context.font = `${first ? "600 " : ""}${size}px ${theme.font}`;
  context.textAlign = "right";
  context.fillStyle = theme.ink;
  context.fillText(plain(token), columns.token, y + lane / 2, 0.29 * (columns.end - columns.logit) / 0.67);
  const room = columns.probability - columns.logit;
  const share = high > low ? (logit - low) / (high - low) : 1;
  bar(context, theme.violet, columns.logit, y, Math.max(share, 0) * room * 0.55, lane);
  bar(context, theme.accent, columns.probability, y, probability * (columns.end - columns.probability) * 0.62, lane);
  context.textAlign = "left";
  context.font = `${size * 0.85}px ${theme.font}`;
  context.fillStyle = theme.quiet;
  context.fillText(format(logit), columns.logit + Math.max(share, 0) * room * 0.55 + lane * 0.2, y + lane / 2);
  context.fillText(`${(100 * probability).toFixed(probability > 0.0995 ? 0 : 1)}%`, columns.probability + probability * (columns.end - columns.probability) * 0.62 + lane * 0.2, y + lane / 2);
}

function bar(context, color, x, y, width, lane) {
  context.fillStyle = color;
  context.fillRect(x, y + lane * 0.18, Math.max(width, 1), lane * 0.64);
}

function drawBlock({ context, theme }, box, top, count) {
  const lane = box.h / (count + 1.4);
  top.slice(0, count).forEach(({ probability }, index) => bar(context, theme.accent, box.x + 0.3 * box.w, box.y + (index + 1.2) * lane, probability * 0.6 * box.w, lane));
}
