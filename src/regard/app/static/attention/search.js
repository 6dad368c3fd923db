// Text search in tokens; a match can span several tokens.

const joinedTexts = new WeakMap(); // tokens → their joined text, and the start of each token in it

// Joins subwords: ▁ and Ġ start a word, ## continues one; tokens without such marks are words
function joinTokens(tokens) {
  if (!joinedTexts.has(tokens)) {
    const marked = tokens.some((token) => /^[▁Ġ]/.test(token));
    const starts = [];
    let text = "";
    for (const token of tokens) {
      let piece = token.replace(/[▁Ġ]/g, " ");
      if (!marked) piece = token.startsWith("##") ? token.slice(2) : ` ${token}`;
      starts.push(text.length);
      text += piece.toLowerCase();
    }
    joinedTexts.set(tokens, { text, starts });
  }
  return joinedTexts.get(tokens);
}

// Returns the positions of the tokens in which a match starts
export function findPositions(tokens, query, limit = 10000) {
  const needle = query.toLowerCase().trim();
  if (!needle) return [];
  const { text, starts } = joinTokens(tokens);
  const positions = new Set();
  for (let at = text.indexOf(needle); at >= 0 && positions.size < limit; at = text.indexOf(needle, at + 1)) positions.add(tokenAt(starts, at));
  return [...positions];
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
