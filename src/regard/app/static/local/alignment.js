// Word alignments from cross-attention, and copies of unknown words, computed as in regard.translation.

import { UNKNOWN } from "./engine/search.js";
import { SPACE } from "./tokenizers/sentencepiece.js";

const MIN_KNOWN = 3; // minimum number of known characters by which a copied word is recognized

// The mean of the selected heads, excluding special tokens: rows of target tokens, columns of source tokens
// steps: steps of the decoder. head: { layer, heads, shift } of the alignment
export function tokenWeights(steps, { layer = -1, heads = null, shift = "input" }, targets, sources) {
  const { weights } = steps.at(layer).find(({ kind, name }) => kind === "attention" && name === "cross");
  const selected = (heads ?? weights.map((_, index) => index)).map((index) => weights[index]);
  const first = shift === "input" ? 1 : 0; // row i belongs to the step that reads token i − 1
  const { columns } = weights[0];
  return Array.from({ length: targets }, (_, i) => Array.from({ length: sources }, (_, j) =>
    selected.reduce((sum, matrix) => sum + matrix.data[(first + i) * columns + j], 0) / selected.length));
}

// Sums the weights over the tokens of a source word, and averages them over the tokens of a target word
export function mergeWords(source, target, weights) {
  const result = target.words.map(() => source.words.map(() => 0));
  const sizes = target.words.map((_, word) => Math.max(target.wordOf.filter((other) => other === word).length, 1));
  weights.forEach((line, i) => line.forEach((weight, j) => {
    result[target.wordOf[i]][source.wordOf[j]] += weight / sizes[target.wordOf[i]];
  }));
  return result;
}

// The text of each unknown target token: { texts: Map position → text, copied: Set of source tokens }
export function replaceUnknown(ids, source, weights, kind) {
  const targets = ids.flatMap((id, position) => (id === UNKNOWN ? [position] : []));
  const pairs = match(targets, [...source.unknown.keys()], weights);
  const texts = new Map(pairs.map(([target, token]) => [target, printable(source.unknown.get(token))]));
  if (kind === "words" && source.ids.length) {
    for (const target of targets) {
      if (texts.has(target)) continue;
      const line = weights[target];
      texts.set(target, printable(source.words[source.wordOf[line.indexOf(Math.max(...line))]]));
    }
  }
  if (kind !== "words") {
    for (const [target, token] of pairs) texts.set(target, asWord(texts.get(target), source, token));
    for (const target of targets) if (!texts.has(target)) texts.set(target, ""); // nothing to copy
  }
  return { texts, copied: new Set(pairs.map(([, token]) => token)) };
}

// The text of a copied token: ▁ marks where it begins or ends a word, unless it is a piece of a longer one
function asWord(text, { pieces, wordOf, unknown }, token) {
  if (pieces[token] !== unknown.get(token)) return text;
  const joined = wordOf[token - 1] === wordOf[token] && /[\p{L}\p{N}/-]$/u.test(pieces[token - 1]);
  const continued = wordOf[token + 1] === wordOf[token] && /^[\p{L}\p{N}]/u.test(pieces[token + 1]);
  return `${joined ? "" : SPACE}${text}${continued ? "" : SPACE}`;
}

// Matches targets to sources greedily by descending weight; each target and source is used at most once
function match(targets, sources, weights) {
  const candidates = targets.flatMap((target) => sources.map((source) => [target, source]));
  candidates.sort(([a, b], [c, d]) => weights[c][d] - weights[a][b]);
  const [rows, columns, pairs] = [new Set(), new Set(), []];
  for (const [target, source] of candidates) {
    if (rows.has(target) || columns.has(source)) continue;
    rows.add(target);
    columns.add(source);
    pairs.push([target, source]);
  }
  return pairs;
}

// Words with unknown tokens, unless one of these tokens was copied
export function untranslatedWords(source, copied) {
  const translated = new Set([...copied].map((token) => source.wordOf[token]));
  const words = new Set([...source.unknown].filter(([, text]) => printable(text)).map(([token]) => source.wordOf[token]));
  return [...words].filter((word) => !translated.has(word)).sort((a, b) => a - b);
}

// Inserts copies of the missing source words: [{ text, own: target word or null, copied: source word or null }]
export function insertWords(words, source, missing, weights) {
  const own = words.map((text, index) => ({ text, own: index, copied: null }));
  const inserted = new Map(); // target word → the copies inserted after it; −1 for the start
  for (const word of missing) {
    const { core, known } = coreOf(source, word);
    if ([...known].length >= MIN_KNOWN && words.includes(known)) own[words.indexOf(known)] = { text: core, own: null, copied: word };
    else {
      const previous = precedingWord(word, words.length, missing, weights);
      inserted.set(previous, [...(inserted.get(previous) ?? []), { text: core, own: null, copied: word }]);
    }
  }
  return [...(inserted.get(-1) ?? []), ...own.flatMap((word, index) => [word, ...(inserted.get(index) ?? [])])];
}

// A source word without surrounding punctuation, and its known characters
function coreOf(source, word) {
  const letters = [...printable(source.words[word])];
  const unknown = new Set([...source.unknown].filter(([token]) => source.wordOf[token] === word).flatMap(([, text]) => [...text]));
  const kept = letters.flatMap((letter, at) => (unknown.has(letter) || /[\p{L}\p{N}]/u.test(letter) ? [at] : []));
  const core = kept.length ? letters.slice(kept[0], kept.at(-1) + 1) : letters;
  return { core: core.join(""), known: core.filter((letter) => !unknown.has(letter)).join("") };
}

function precedingWord(word, targets, missing, weights) {
  const known = Array.from({ length: word }, (_, index) => index).filter((other) => !missing.includes(other));
  if (!known.length || !targets) return -1;
  const column = weights.map((line) => line[known.at(-1)]);
  return column.indexOf(Math.max(...column));
}

const printable = (text) => text.replace(/\p{Cc}/gu, "");

// { source_words, target_words, links, weights }: links from each target word to its best source word
export function describeAlignment(sourceWords, targetWords, weights) {
  const clamped = weights.map((line) => line.map((weight) => Math.min(Math.max(weight, 0), 1)));
  const links = clamped.flatMap((line, target) => {
    const largest = Math.max(...line);
    return largest > 0 ? [[line.indexOf(largest), target]] : [];
  });
  links.sort(([a, b], [c, d]) => a - c || b - d);
  return {
    source_words: sourceWords, target_words: targetWords,
    links: links.map(([source, target]) => `${source}-${target}`).join(" "),
    weights: clamped.map((line) => line.map((weight) => Math.round(weight * 1e4) / 1e4)),
  };
}
