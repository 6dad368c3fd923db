// Answers requests as the static site does. Arguments: a folder with site.json, 0.safetensors, …, requests.json

import { readFileSync, writeFileSync } from "node:fs";
import process from "node:process";

import { makeBackend } from "../../../src/regard/app/static/local/backend.js";

const folder = process.argv[2];
const read = (name) => JSON.parse(readFileSync(`${folder}/${name}`, "utf-8"));
const site = read("site.json");
const weights = (name) => readFileSync(`${folder}/${site.models.findIndex(({ info }) => info.name === name)}.safetensors`);
const answer = makeBackend(site, weights);
const results = read("requests.json").map(([path, body]) => {
  try {
    return answer(path, body);
  } catch (error) {
    return { error: error.message };
  }
});
const plain = (_, value) => (value instanceof ArrayBuffer ? [...new Float32Array(value, 12)] : value);
writeFileSync(`${folder}/answers.json`, JSON.stringify(results, plain));
