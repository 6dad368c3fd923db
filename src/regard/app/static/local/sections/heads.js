// Every layer and head of a model for one or more texts.

import { firstLink } from "../first_link.js";
import { attentionLayers } from "../views.js";
import { translationInput } from "./translate.js";

const MAX_TOKENS = 256; // tokens per text
const MAX_TITLE = 80; // characters

// words: see firstLink
export function look(entry, views, words, texts) {
  const inputs = texts.map((text) => inputOf(entry, text));
  const view = views.add(entry.name, inputs, entry.model.config.normalize);
  return { ...view, first: firstLink(words, inputs[0]) };
}

function inputOf(entry, text) {
  if (entry.kind === "translator") return translationInput(text, entry.translator.translate(text));
  const { ids, tokens, special } = entry.kind === "encoder" ? entry.tokens.encode(text) : encodeWords(entry.tokens, text);
  const limit = Math.min(MAX_TOKENS, entry.maxTokens ?? MAX_TOKENS);
  if (ids.length > limit) throw new Error(`The text has ${ids.length} tokens; at most ${limit} can be shown here. Shorten it.`);
  const { stacks } = entry.model.run(ids);
  const title = text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE - 1).trimEnd()}…` : text;
  const layers = attentionLayers(stacks, { encoder: 0, decoder: 0 }, (_, index) => `layer ${index}`);
  return { title, note: "", texts: [{ tokens, special }], layers };
}

function encodeWords(tokens, text) {
  const ids = tokens.encode(text);
  return { ids, tokens: ids.map((id) => tokens.tokens[id]), special: [0] };
}
