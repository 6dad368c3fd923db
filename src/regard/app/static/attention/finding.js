// Finding a text among tokens, also where it is spread over several of them.

const joined = new WeakMap(); // from a list of tokens to its text and where each token begins in it

// Pieces are glued as their marks say: ▁ and Ġ begin a word, ## goes on with one; words without marks stand alone
function glue(tokens) {
  if (!joined.has(tokens)) {
    const marked = tokens.some((token) => /^[▁Ġ]/.test(token));
    const starts = [];
    let text = "";
    for (const token of tokens) {
      let piece = token.replace(/[▁Ġ]/g, " ");
      if (!marked) piece = token.startsWith("##") ? token.slice(2) : ` ${token}`;
      starts.push(text.length);
      text += piece.toLowerCase();
    }
    joined.set(tokens, { text, starts });
  }
  return joined.get(tokens);
}

// The places of the tokens in which the text begins
export function findPlaces(tokens, wanted, most = 10000) {
  const needle = wanted.toLowerCase().trim();
  if (!needle) return [];
  const { text, starts } = glue(tokens);
  const places = new Set();
  for (let at = text.indexOf(needle); at >= 0 && places.size < most; at = text.indexOf(needle, at + 1)) places.add(tokenAt(starts, at));
  return [...places];
}

function tokenAt(starts, at) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (starts[middle] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}
