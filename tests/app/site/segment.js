// Splits lines into tokens. Argument: a folder with vocabularies.json and lines.json

import { SentencePiece } from "../../../src/regard/app/static/local/tokenizers/sentencepiece.js";
import { WordPiece } from "../../../src/regard/app/static/local/tokenizers/wordpiece.js";

const [folder] = Deno.args;
const read = (name) => JSON.parse(Deno.readTextFileSync(`${folder}/${name}`));
const lines = read("lines.json");
const segmented = read("vocabularies.json").map((vocabulary) => {
  if (!vocabulary.pieces) {
    const tokenizer = new WordPiece(vocabulary);
    return lines.map((line) => tokenizer.encode(line));
  }
  const tokenizer = new SentencePiece(vocabulary);
  return lines.map((line) => {
    const { unknown, ...rest } = tokenizer.segment(line);
    return { ...rest, unknown: [...unknown], decoded: tokenizer.decode(rest.ids, unknown).words };
  });
});
Deno.writeTextFileSync(`${folder}/segmented.json`, JSON.stringify(segmented));
