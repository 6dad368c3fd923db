// SentencePiece tokenizers: unigram, BPE, words and characters.
// vocabulary: { kind, pieces: [[text, score], …] by id; ids below 4 are special tokens }

export const SPACE = "▁"; // marks the beginning of a word
const SPECIAL_TOKENS = 4;
const UNKNOWN = 3;
const UNKNOWN_PENALTY = 10; // an unknown character scores this much less than the lowest piece
// deno-lint-ignore no-control-regex
const WHITESPACE = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/u; // like str.split in Python
// SentencePiece's nmt_nfkc rules: control characters are removed, and these become spaces
// deno-lint-ignore no-control-regex
const REMOVED = /[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]/gu;
const SPACES = /[\t\n\f\r\u1680\u200b\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd]/gu;
const KEPT = "～"; // kept as it is, although NFKC would replace it

export function splitWords(text) {
  return text.split(WHITESPACE).filter(Boolean);
}

export class SentencePiece {
  constructor({ kind, pieces }) {
    this.kind = kind;
    this.pieces = pieces.map(([text]) => text);
    this.scores = pieces.map(([, score]) => score);
    this.ids = new Map(this.pieces.map((text, id) => [text, id]).slice(SPECIAL_TOKENS));
    const known = this.scores.slice(SPECIAL_TOKENS);
    this.unknownScore = Math.fround(known.reduce((a, b) => Math.min(a, b), Infinity) - UNKNOWN_PENALTY);
    this.longest = this.pieces.reduce((max, text) => Math.max(max, [...text].length), 1);
  }

  get size() {
    return this.pieces.length;
  }

  // Returns { words, ids, pieces, wordOf, unknown: Map position → text }
  segment(text) {
    const words = splitWords(text);
    const result = { words, ids: [], pieces: [], wordOf: [], unknown: new Map() };
    words.forEach((word, index) => {
      const tokens = this.encodeWord(word);
      for (const [piece, id] of tokens) {
        if (id === UNKNOWN) {
          const surface = this.kind === "words" && tokens.length === 1 ? word : piece;
          result.unknown.set(result.ids.length, surface.startsWith(SPACE) ? surface.slice(1) : surface);
        }
        result.ids.push(id);
        result.pieces.push(piece);
        result.wordOf.push(index);
      }
    });
    return result;
  }

  // The tokens of a word as [piece, id]; adjacent unknown tokens are merged
  encodeWord(word) {
    const normalized = normalize(word);
    if (!normalized) return [];
    const split = { unigram: this.viterbi, bpe: this.mergePairs, words: splitAtSpaces, characters: (letters) => letters }[this.kind];
    const tokens = [];
    for (const piece of split.call(this, [...normalized])) {
      const id = this.ids.get(piece) ?? UNKNOWN;
      if (id === UNKNOWN && tokens.at(-1)?.[1] === UNKNOWN) tokens.at(-1)[0] += piece;
      else tokens.push([piece, id]);
    }
    return tokens;
  }

  // The segmentation with the largest sum of scores (Kudo 2018)
  viterbi(letters) {
    const best = Array.from({ length: letters.length + 1 }, () => ({ score: 0, start: -1 }));
    for (let start = 0; start < letters.length; start += 1) {
      let single = false;
      const extend = (stop, score) => {
        const total = Math.fround(score + best[start].score);
        if (best[stop].start === -1 || total > best[stop].score) best[stop] = { score: total, start };
      };
      for (let stop = start + 1; stop <= Math.min(letters.length, start + this.longest); stop += 1) {
        const id = this.ids.get(letters.slice(start, stop).join(""));
        if (id === undefined) continue;
        single ||= stop === start + 1;
        extend(stop, this.scores[id]);
      }
      if (!single) extend(start + 1, this.unknownScore);
    }
    const pieces = [];
    for (let stop = letters.length; stop > 0; stop = best[stop].start) pieces.unshift(letters.slice(best[stop].start, stop).join(""));
    return pieces;
  }

  // Joins the adjacent pair with the highest score until no pair is in the vocabulary (Sennrich et al. 2016)
  mergePairs(letters) {
    const symbols = [...letters];
    for (;;) {
      let [at, highest] = [-1, -Infinity];
      for (let index = 0; index + 1 < symbols.length; index += 1) {
        const id = this.ids.get(symbols[index] + symbols[index + 1]);
        if (id !== undefined && this.scores[id] > highest) [at, highest] = [index, this.scores[id]];
      }
      if (at < 0) return symbols;
      symbols.splice(at, 2, symbols[at] + symbols[at + 1]);
    }
  }

  // ids → { words, ids, pieces, wordOf }; unknown: Map position → text of an unknown token. Text that begins with ▁ begins
  // a new word; text that ends with ▁ ends its word
  decode(ids, unknown = new Map()) {
    const words = [];
    const result = { words, ids: [...ids], pieces: [], wordOf: [] };
    let ended = false;
    ids.forEach((id, position) => {
      let piece = this.pieceOf(id, unknown.get(position) ?? "⁇");
      if (piece.startsWith(SPACE) || !words.length || (ended && /^[\p{L}\p{N}]/u.test(piece))) words.push("");
      ended = id === UNKNOWN && piece.endsWith(SPACE) && this.kind !== "words";
      if (ended) piece = piece.slice(0, -1);
      words[words.length - 1] += piece.startsWith(SPACE) ? piece.slice(1) : piece;
      result.pieces.push(piece);
      result.wordOf.push(words.length - 1);
    });
    return dropEmptyWords(result);
  }

  pieceOf(id, surface) {
    if (id === UNKNOWN) return (this.kind === "words" && !surface.startsWith(SPACE) ? SPACE : "") + surface;
    return id < SPECIAL_TOKENS ? "" : this.pieces[id];
  }
}

function normalize(word) {
  const replaced = word.replace(REMOVED, "").replace(SPACES, " ").split(KEPT).map((part) => part.normalize("NFKC")).join(KEPT);
  const parts = replaced.split(/ +/u).filter(Boolean);
  return parts.map((part) => SPACE + part).join("");
}

function splitAtSpaces(letters) {
  return letters.join("").split(SPACE).filter(Boolean).map((word) => SPACE + word);
}

// Removes empty words, which a model can generate; their tokens are assigned to the next word
function dropEmptyWords(segmentation) {
  const words = segmentation.words.filter(Boolean);
  if (words.length === segmentation.words.length) return segmentation;
  let index = 0;
  const indices = segmentation.words.map((word) => {
    const at = Math.min(index, Math.max(words.length - 1, 0));
    if (word) index += 1;
    return at;
  });
  return { ...segmentation, words, wordOf: segmentation.wordOf.map((word) => indices[word]) };
}
