// Translation with word alignments and a view of every attention layer.

import { describeAlignment, insertWords, mergeWords, replaceUnknown, tokenWeights, untranslatedWords } from "../alignment.js";
import { domainWarning } from "../domain.js";
import { zeros } from "../engine/ops.js";
import { END, START, beamSearch } from "../engine/search.js";
import { attentionLayers } from "../views.js";

const MAX_LISTED = 5; // copied words listed in a note
const [START_MARK, END_MARK] = ["[START]", "[END]"];

export class Translator {
  constructor({ name, model, source, target, alignment, domain, maxTokens }) {
    this.name = name;
    this.model = model;
    this.source = source;
    this.target = target;
    this.maxTokens = maxTokens;
    this.head = alignment ?? {};
    this.domain = domain ?? { words: null, lowest: null };
  }

  // The best translation, with the others as its alternatives
  translate(sentence, { beam = 5, best = 1 } = {}) {
    const source = this.source.segment(sentence);
    if (source.ids.length > this.maxTokens) {
      throw new Error(`Too long: ${source.ids.length} tokens; the model reads at most ${this.maxTokens}. Shorten the sentence.`);
    }
    if (!source.ids.length) return { source, text: "", score: 0, ids: [], pieces: [], words: [], note: "", alternatives: [], steps: null };
    const hypotheses = beamSearch(this.model, [...source.ids, END], { beam, best, maxTokens: 2 * source.ids.length + 10, anyUnknown: this.target.kind === "words" });
    const [first, ...others] = hypotheses.map((hypothesis) => this.finish(source, hypothesis));
    return { ...first, alternatives: others };
  }

  // Converts token ids to text, copies unknown words and aligns all words
  finish(source, { tokens, score, finished }) {
    const { stacks } = this.model.run([...source.ids, END], [START, ...tokens]);
    const weights = tokenWeights(stacks[1].steps, this.head, tokens.length, source.ids.length);
    const { texts, copied } = replaceUnknown(tokens, source, weights, this.target.kind);
    const segmentation = this.target.decode(tokens, texts);
    const merged = mergeWords(source, segmentation, weights);
    const words = insertWords(segmentation.words, source, untranslatedWords(source, copied), merged);
    const wordWeights = words.map(({ own, copied: from }) => (own === null ? source.words.map((_, index) => Number(index === from)) : merged[own]));
    return {
      source, score, stacks, wordWeights, ids: segmentation.ids, pieces: segmentation.pieces,
      words: words.map(({ text }) => text), text: words.map(({ text }) => text).join(" "), note: noteOf(finished, words) };
  }
}

// A note about text that regard translate handles specially and this page does not
function unhandled(sentence, { words }) {
  const known = (pattern) => words?.some((word) => pattern.test(word)) ?? false; // whether a word in the training data matches
  const cases = [
    ["several sentences", /[.!?…]["'»“”’)]*\s+["'„“«(]*\p{Lu}/u.test(sentence)],
    ["numbers", /\p{Nd}/u.test(sentence) && !known(/\p{Nd}/u)],
    ["addresses", /:\/\/|\bwww\.|\S@\S+\.\S/u.test(sentence)],
    ["tags", /<\/?[A-Za-z][^<>]*>/u.test(sentence)],
    ["capitals", /\p{Lu}.*\p{Lu}/u.test(sentence) && !/\p{Ll}/u.test(sentence)],
  ];
  const names = cases.filter(([, applies]) => applies).map(([name]) => name);
  return names.length ? `this page runs the model alone; regard translate also handles ${names.join(", ")}` : "";
}

function noteOf(finished, words) {
  const copied = words.filter((word) => word.copied !== null).map(({ text }) => `'${text}'`);
  const list = `unknown words copied: ${copied.slice(0, MAX_LISTED).join(", ")}${copied.length > MAX_LISTED ? " …" : ""}`;
  return [finished ? "" : "cut off at the maximum length", copied.length ? list : ""].filter(Boolean).join("; ");
}

// The input of a view: the word alignment, then every attention layer
export function translationInput(sentence, translation) {
  const { source, words, wordWeights, stacks, pieces, note, text } = translation;
  const texts = [{ tokens: source.words, special: [] }, { tokens: words, special: [] }];
  const layers = [];
  if (source.words.length && words.length) layers.push({ name: "alignment", label: "words", kind: "words", queries: 1, keys: 0, weights: toMatrix(wordWeights) });
  if (stacks) {
    texts.push({ tokens: [...source.pieces, END_MARK], special: [source.pieces.length] }, { tokens: [START_MARK, ...pieces], special: [0] });
    layers.push(...attentionLayers(stacks, { encoder: 2, decoder: 3 }));
  }
  return { title: `${sentence} → ${text}`, note, texts, layers };
}

function toMatrix(rows) {
  const result = zeros(rows.length, rows[0].length);
  rows.forEach((values, index) => result.data.set(values.map((value) => Math.min(Math.max(value, 0), 1)), index * result.columns));
  return result;
}

// The answer to /api/translate
export function translateRequest(translator, views, { sentences, beam = 5, n_best: best = 1, alignment = true, view = false }) {
  const translations = sentences.map((sentence) => translator.translate(sentence, { beam, best }));
  const inputs = () => translations.map((translation, index) => translationInput(sentences[index], translation));
  return {
    translations: translations.map((translation, index) => ({
      source: sentences[index], text: translation.text, score: translation.score, tokens: translation.pieces,
      note: [translation.note, unhandled(sentences[index], translator.domain)].filter(Boolean).join("; "),
      alternatives: translation.alternatives.map(({ text, score }) => ({ text, score })),
      alignment: alignment ? describeAlignment(translation.source.words, translation.words, translation.wordWeights ?? []) : null,
      reason: "",
      warning: domainWarning(translator.domain, sentences[index], translation.score),
    })),
    view: view ? views.add(translator.name, inputs(), translator.model.config.normalize) : null,
  };
}
