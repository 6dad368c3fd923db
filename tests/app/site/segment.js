// Splits lines into tokens. Argument: a folder with vocabularies.json and lines.json

import { readFileSync, writeFileSync } from "node:fs";
import process from "node:process";

import { SentencePiece } from "../../../src/regard/app/static/local/tokenizers/sentencepiece.js";
import { WordPiece } from "../../../src/regard/app/static/local/tokenizers/wordpiece.js";

const folder = process.argv[2];
const read = (name) => JSON.parse(readFileSync(`${folder}/${name}`, "utf-8"));
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
writeFileSync(`${folder}/segmented.json`, JSON.stringify(segmented));
