// Normalizers: scores of one row → { weights, tau }. Masked scores are −∞; their weight is 0.

const visibleCount = (scores) => Math.max(scores.filter((score) => score > -Infinity).length, 1);
const maximum = (scores) => scores.reduce((a, b) => Math.max(a, b), -Infinity);
const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);
const mapVisible = (scores, f) => scores.map((score) => (score === -Infinity ? 0 : f(score)));

// τ = log Σ exp(s), including the score of the sink if there is one
function softmax(scores, sink = -Infinity) {
  const max = Math.max(maximum(scores), sink);
  if (max === -Infinity) return { weights: scores.map(() => 0), tau: 0 };
  const tau = max + Math.log(sumOf(scores.map((score) => Math.exp(score - max))) + Math.exp(sink - max));
  return { weights: mapVisible(scores, (score) => Math.exp(score - tau)), tau };
}

// max((α − 1)(s − τ), 0)^(1/(α − 1)); τ is the root of a decreasing function, found by bisection
function entmax(scores, alpha) {
  const max = maximum(scores);
  if (max === -Infinity) return { weights: scores.map(() => 0), tau: 0 };
  const weigh = (tau) => mapVisible(scores, (score) => Math.max((alpha - 1) * (score - tau), 0) ** (1 / (alpha - 1)));
  let [low, high] = [max - 1 / (alpha - 1), max];
  for (let step = 0; step < 100; step += 1) {
    const middle = (low + high) / 2;
    if (sumOf(weigh(middle)) >= 1) low = middle;
    else high = middle;
  }
  return { weights: weigh(low), tau: low };
}

function hard(scores) {
  const max = maximum(scores);
  const ties = scores.filter((score) => score === max && score > -Infinity).length;
  return { weights: scores.map((score) => (ties && score === max ? 1 / ties : 0)), tau: ties ? max : 0 };
}

function sigmoid(scores) {
  const tau = Math.log(visibleCount(scores));
  return { weights: mapVisible(scores, (score) => 1 / (1 + Math.exp(tau - score))), tau };
}

export const NORMALIZERS = {
  softmax: (scores) => softmax(scores),
  softmax1: (scores) => softmax(scores, 0),
  sparsemax: (scores) => entmax(scores, 2),
  entmax15: (scores) => entmax(scores, 1.5),
  hard,
  mean: (scores) => ({ weights: mapVisible(scores, (score) => score / visibleCount(scores)), tau: 0 }),
  sigmoid,
  relu: (scores) => ({ weights: mapVisible(scores, (score) => Math.max(score, 0) / visibleCount(scores)), tau: 0 }),
};
