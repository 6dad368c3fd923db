// Reads safetensors files. Argument: a folder with 0.safetensors, 1.safetensors, … and count.json

import { readFileSync, writeFileSync } from "node:fs";
import process from "node:process";

import { readSafetensors } from "../../../src/regard/app/static/local/engine/safetensors.js";

const folder = process.argv[2];
const count = JSON.parse(readFileSync(`${folder}/count.json`, "utf-8"));
const results = Array.from({ length: count }, (_, number) => {
  try {
    const tensors = readSafetensors(readFileSync(`${folder}/${number}.safetensors`));
    return Object.fromEntries([...tensors].map(([name, { shape, data }]) => [name, { shape, data: Array.from(data, String) }]));
  } catch (error) {
    return { error: error.message };
  }
});
writeFileSync(`${folder}/read.json`, JSON.stringify(results));
