// Beam search. A finished hypothesis keeps its slot, so the beam shrinks.
// score = log probability / length (Wu et al. 2016, eq. 14, with exponent 1 and without the constant 5)

import { logSumExp, topIndices } from "./ops.js";

export const [PADDING, START, END, UNKNOWN] = [0, 1, 2, 3];

// Returns the `best` hypotheses { tokens, score, finished }: finished before unfinished, then by score. Unless `anyUnknown`
// is true, a translation has no more unknown tokens than its source
export function beamSearch(model, source, { beam = 5, best = 1, maxTokens, anyUnknown = false }) {
  const done = [];
  const maxUnknown = anyUnknown ? Infinity : count(source);
  let slots = beam;
  let live = [{ tokens: [], total: 0, last: START, state: model.start(source) }];
  for (let length = 1; live.length && slots > 0 && length <= maxTokens; length += 1) {
    const next = [];
    for (const extended of bestExtensions(model, live, slots, maxUnknown)) {
      if (extended.last === END) {
        done.push({ tokens: extended.tokens.slice(0, -1), score: extended.total / length, finished: true });
        slots -= 1;
      } else if (length === maxTokens) done.push({ tokens: extended.tokens, score: extended.total / length, finished: false });
      else next.push(extended);
    }
    const threshold = done.filter(({ finished }) => finished).map(({ score }) => score).sort((a, b) => b - a)[best - 1] ?? -Infinity;
    live = next.filter(({ total }) => total / maxTokens > threshold); // others cannot win: log probabilities only decrease
  }
  done.sort((a, b) => Number(b.finished) - Number(a.finished) || b.score - a.score);
  return done.slice(0, best);
}

function count(tokens) {
  return tokens.filter((token) => token === UNKNOWN).length;
}

function bestExtensions(model, live, slots, maxUnknown) {
  const candidates = [];
  for (const { tokens, total, last, state: before } of live) {
    const { logits, state } = model.step(last, before);
    const normalizer = logSumExp(logits);
    const allowed = Float64Array.from(logits, (logit) => logit - normalizer);
    allowed[PADDING] = allowed[START] = -Infinity;
    if (count(tokens) >= maxUnknown) allowed[UNKNOWN] = -Infinity;
    for (const token of topIndices(allowed, slots)) candidates.push({ tokens: [...tokens, token], total: total + allowed[token], last: token, state });
  }
  candidates.sort((a, b) => b.total - a.total);
  return candidates.slice(0, slots);
}
