// BERT's WordPiece tokenizer (Devlin et al. 2019): lowercase words without accents, split into the longest pieces.

const MAX_LETTERS = 100; // longer words are unknown
const IGNORED = /[\0\ufffd]|(?![\t\n\r])[\p{Cc}\p{Cf}\p{Cn}\p{Co}]/gu;
const HAN = /[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]/gu;
const PUNCTUATION = /([!-/:-@[-`{-~\p{P}])/gu;

export class WordPiece {
  // tokens: the tokens by id. special: the tokens { cls, sep, unknown }. lowercase: whether to lowercase letters and remove accents
  constructor({ tokens, special, lowercase = true }) {
    this.tokens = tokens;
    this.special = special;
    this.lowercase = lowercase;
    this.ids = new Map(tokens.map((token, id) => [token, id]));
  }

  // Returns { ids, tokens, special: positions of special tokens }
  encode(text) {
    const { cls, sep } = this.special;
    const tokens = [cls, ...this.words(text).flatMap((word) => this.pieces(word)), sep];
    return { ids: tokens.map((token) => this.ids.get(token)), tokens, special: [0, tokens.length - 1] };
  }

  words(text) {
    let clean = text.replace(IGNORED, "").replace(HAN, " $& ");
    if (this.lowercase) clean = clean.normalize("NFD").replace(/\p{Mn}/gu, "").toLowerCase();
    return clean.replace(PUNCTUATION, " $1 ").split(/\s+/u).filter(Boolean);
  }

  // Splits a word into its longest known prefix, then the longest known continuation, …
  pieces(word) {
    const letters = [...word];
    if (letters.length > MAX_LETTERS) return [this.special.unknown];
    const pieces = [];
    for (let start = 0; start < letters.length; ) {
      let stop = letters.length;
      const piece = () => (start ? "##" : "") + letters.slice(start, stop).join("");
      while (stop > start && !this.ids.has(piece())) stop -= 1;
      if (stop === start) return [this.special.unknown];
      pieces.push(piece());
      start = stop;
    }
    return pieces;
  }
}
