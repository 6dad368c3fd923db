// Warnings about sentences outside a translator's domain; the same rules as in regard.translation.text.domain.

const MAX_LISTED = 5;
const MAX_LETTERS = 40; // listed words are cut to this length
const MARGIN = 0.1; // a score is low if it is below factor × the lowest score of a validation sentence − margin

const shorten = (word) => (word.length > MAX_LETTERS ? `${word.slice(0, MAX_LETTERS - 1)}…` : word);
const formatScore = (score) => score.toFixed(2).replace("-", "−");

// words: lowercase words of the training data, or null. lowest: lowest score of the validation sentences, or null.
// unseen: the largest fraction of words missing from the training data, over all validation sentences
export function domainWarning({ words, lowest, unseen = 0, factor = 2 }, source, score) {
  const sourceWords = source.match(/[\p{L}\p{N}]+/gu) ?? [];
  const unknown = words ? sourceWords.filter((word) => !words.includes(word.toLowerCase())) : [];
  if (unknown.length > unseen * sourceWords.length) {
    let named = [...new Set(unknown)].map((word) => `“${shorten(word)}”`);
    if (named.length > MAX_LISTED + 1) named = [...named.slice(0, MAX_LISTED), `${named.length - MAX_LISTED} others`];
    const list = [named.slice(0, -1).join(", "), named.at(-1)].filter(Boolean).join(" and ");
    return `Outside the training data: ${list} ${named.length === 1 ? "does" : "do"} not occur in it. Do not trust this translation.`;
  }
  if (lowest === null || score >= factor * lowest - MARGIN) return "";
  return `The model is unsure: score ${formatScore(score)} per token; validation sentences score ${formatScore(lowest)} or more.`;
}
