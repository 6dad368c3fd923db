// Tokens of a language model: lowercase words and punctuation marks, split as in regard.models.TextModel.

const TOKEN = /[\p{L}\p{N}_]+(?:'[\p{L}\p{N}_]+)*|[^\p{L}\p{N}_\s]/gu;
const SENTENCE_ENDS = [".", "!", "?"];
const NO_SPACE_BEFORE = [...SENTENCE_ENDS, ",", ";", ":"];
const MAX_DISTANCE = 2; // edits between a word and a suggestion; 1 for short words
const SHORT = 4; // maximum number of letters in a short word

export function splitTokens(text) {
  return text.replace(/[‘’]/gu, "'").replace(/[“”]/gu, '"').toLowerCase().match(TOKEN) ?? [];
}

export class WordTokens {
  constructor({ tokens, capitalized = [] }) {
    this.tokens = tokens;
    this.capitalized = new Set(capitalized);
    this.ids = new Map(tokens.map((token, id) => [token, id]));
  }

  // The token ids of a text, after the start token
  encode(text) {
    return [0, ...splitTokens(text).map((word) => {
      const id = this.ids.get(word);
      if (id === undefined) throw new Error(`This model does not know the word '${word.slice(0, 40)}'.${this.suggest(word)}`);
      return id;
    })];
  }

  suggest(word) {
    const limit = word.length > SHORT ? MAX_DISTANCE : 1;
    const close = this.tokens.slice(2).map((token) => [editDistance(word, token), token]).filter(([distance]) => distance <= limit);
    close.sort(([a, first], [b, second]) => a - b || commonPrefix(word, second) - commonPrefix(word, first));
    if (!close.length) return ` It knows ${this.tokens.length - 2} words and punctuation marks.`;
    return ` Did you mean ${close.slice(0, 3).map(([, token]) => `'${token}'`).join(" or ")}?`;
  }

  // The text of token ids, with capital letters and without start and end tokens
  decode(ids) {
    let [text, quoted, space, sentenceStart] = ["", false, false, true];
    for (const id of ids) {
      if (id < 2) continue;
      const token = this.tokens[id];
      const closing = quoted && token === '"';
      if (space && !closing && !NO_SPACE_BEFORE.includes(token)) text += " ";
      text += sentenceStart || this.capitalized.has(token) ? token.slice(0, 1).toUpperCase() + token.slice(1) : token;
      if (token === '"') {
        quoted = !quoted;
        sentenceStart = quoted || text.at(-2) === ".";
      } else sentenceStart = SENTENCE_ENDS.includes(token);
      space = token !== '"' || closing;
    }
    return text;
  }
}

function commonPrefix(a, b) {
  let length = 0;
  while (length < a.length && a[length] === b[length]) length += 1;
  return length;
}

function editDistance(a, b) {
  if (Math.abs(a.length - b.length) > MAX_DISTANCE) return Infinity;
  let previous = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (let i = 1; i <= a.length; i += 1) {
    const current = [i];
    for (let j = 1; j <= b.length; j += 1) {
      current.push(Math.min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + Number(a[i - 1] !== b[j - 1])));
    }
    previous = current;
  }
  return previous[b.length];
}
