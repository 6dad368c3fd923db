// Answers the page's requests in the browser. site: { version, sections, models, formulas, order, words }, see site/build.py.

import { makeModel } from "./engine/models.js";
import { readSafetensors } from "./engine/safetensors.js";
import { look } from "./sections/heads.js";
import { inside, insideLayer, insideNext, trace } from "./sections/inside.js";
import { lookup } from "./sections/lookup.js";
import { order, positions } from "./sections/order.js";
import { Translator, translateRequest } from "./sections/translate.js";
import { SentencePiece } from "./tokenizers/sentencepiece.js";
import { WordPiece } from "./tokenizers/wordpiece.js";
import { WordTokens } from "./tokenizers/words.js";
import { ViewStore } from "./views.js";

// weights(name): the safetensors file of a model as Uint8Array. Returns answer(path, body)
export function makeBackend(site, weights) {
  const entries = new Map();
  const views = new ViewStore(site.formulas.normalizers);

  function entry(name) {
    const about = site.models.find((model) => model.info.name === name);
    if (!about) throw new Error(`Unknown model '${name}'. Available: ${site.models.map(({ info }) => info.name).join(", ") || "none"}.`);
    if (!entries.has(name)) entries.set(name, loadEntry(about, weights(name)));
    return entries.get(name);
  }

  let traced = { key: "", value: null }; // the trace of the last text
  function traceOf({ model, text, target = null }) {
    const key = JSON.stringify([model, text, target]);
    if (traced.key !== key) traced = { key, value: trace(entry(model), text, target) };
    return traced.value;
  }

  const handlers = {
    "api/health": () => ({ status: "ok", version: site.version, models: site.models.length, waiting: 0, sections: site.sections, guide: site.guide }),
    "api/models": () => ({ models: site.models.map(({ info }) => info), pending: [], demo: false, missing: "", minilm: "", folders: [], recordings: [] }),
    "api/lookup": (body) => lookup(site.formulas, body),
    "api/order": (body) => order(site.order, body),
    "api/positions": positions,
    "api/translate": (body) => translateRequest(translatorOf(entry(body.model)), views, body),
    "api/look": (body) => look(entry(body.model), views, site.words, body.texts),
    "api/inside": (body) => inside(body.model, traceOf(body)),
    "api/inside/layer": (body) => insideLayer(body.model, traceOf(body), body),
    "api/inside/next": (body) => insideNext(body.model, traceOf(body), body),
  };

  return function answer(path, body) {
    const [name, query = ""] = path.split("?");
    if (name in handlers) return handlers[name](body ?? parseQuery(query));
    const [, id, question] = /^api\/views\/([^/]+)(?:\/([a-z]+))?$/u.exec(name) ?? [];
    if (!id) throw new Error(`This page has no ${name}: it runs without a server. Use regard look instead.`);
    return question ? views.ask(decodeURIComponent(id), question, body) : views.describe(decodeURIComponent(id));
  };
}

function parseQuery(query) {
  const number = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
  return Object.fromEntries([...new URLSearchParams(query)].map(([name, value]) => [name, number(value)]));
}

function translatorOf({ name, translator }) {
  if (!translator) throw new Error(`'${name}' cannot translate. Choose a translator.`);
  return translator;
}

function loadEntry({ info, architecture, config, tokenizer, alignment, domain }, bytes) {
  const model = makeModel(architecture, config, readSafetensors(bytes));
  const entry = { name: info.name, kind: info.kind, model, maxTokens: info.max_tokens };
  if (architecture === "encoder-decoder") {
    const source = new SentencePiece(tokenizer.source);
    const target = tokenizer.target ? new SentencePiece(tokenizer.target) : source;
    const translator = new Translator({ name: info.name, model, source, target, alignment, domain, maxTokens: info.max_tokens });
    return { ...entry, kind: "translator", translator };
  }
  if (architecture === "encoder") return { ...entry, kind: "encoder", tokens: new WordPiece(tokenizer) };
  return { ...entry, tokens: new WordTokens(tokenizer) };
}
