// The link that a view shows first; the same rules as in regard.app.first_link.

const MAX_TOKENS = 128; // the link is between two of the first tokens
const MIN_DISTANCE = 2; // links between neighbors are uninformative: some heads have them in every text

// words: { pronoun, function_word }, regular expressions. Returns { layer, head, query, key, weight } or null
export function firstLink(words, { layers, texts }) {
  if (!layers.length || layers.some(({ kind, queries, keys }) => kind !== "self" || queries !== keys)) return null;
  const allowed = allowedLinks(words, texts[layers[0].queries]);
  let best = null;
  layers.forEach(({ step }, layer) => step.weights.forEach((matrix, head) => {
    for (const [query, key] of allowed) {
      const weight = matrix.data[query * matrix.columns + key];
      if (weight > (best?.weight ?? 0)) best = { layer, head, query, key, weight };
    }
  }));
  return best;
}

// The links that may be shown first, as [query, key]
function allowedLinks({ pronoun, function_word: functionWord }, { tokens: all, special }) {
  const tokens = all.slice(0, MAX_TOKENS);
  const [isPronoun, isFunctionWord] = [pronoun, functionWord].map((pattern) => new RegExp(`^(?:${pattern})$`, "iu"));
  const isContent = (token, position) => !special.includes(position) && /^\p{L}+$/u.test(token) && !isFunctionWord.test(token);
  const content = tokens.flatMap((token, position) => (isContent(token, position) ? [position] : []));
  const earlier = (position) => content.filter((word) => word <= position - MIN_DISTANCE);
  const query = tokens.findIndex((token, position) => isPronoun.test(token) && earlier(position).length);
  if (query >= 0) return earlier(query).map((key) => [query, key]);
  return content.flatMap((from) => content.filter((key) => Math.abs(from - key) >= MIN_DISTANCE).map((key) => [from, key]));
}
