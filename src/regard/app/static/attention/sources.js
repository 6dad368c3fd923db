// Where answers come from. A source has describe() and ask(question, arguments, signal): {facts, arrays}.
import { EmbeddedLayer, decodeFloats } from "./embedded.js";

const TRIES = 3; // of a question to a server that is busy
const LONGEST = 5; // seconds before the next

// Everything is inside the page
export function embedded(data) {
  const layers = new Map();
  const layerOf = (input, layer) => {
    const name = `${input} ${layer}`;
    if (!layers.has(name)) {
      const { texts, layers: described } = data.exhibit.inputs[input];
      const { queries, keys } = described[layer];
      const stored = data.inputs[input].layers[layer];
      layers.set(name, new EmbeddedLayer(stored, texts[queries].tokens.length, texts[keys].tokens.length));
    }
    return layers.get(name);
  };
  return {
    async describe() {
      return data.exhibit;
    },
    async ask(question, { input, layer, ...rest }) {
      const held = layerOf(input, layer);
      return question === "heads" ? held.thumbnails(rest) : held[question](rest);
    },
  };
}

// A server answers; `exhibit`, when it is already known, saves the first question
export function http(base, exhibit = null) {
  return {
    async describe(signal) {
      return exhibit ?? answered(await reach(base, { signal }));
    },
    async ask(question, body, signal) {
      const headers = { "Content-Type": "application/json" };
      const response = await reach(`${base}/${question}`, { method: "POST", headers, body: JSON.stringify(body), signal });
      const { facts, arrays } = await answered(response);
      return { facts, arrays: arrays.map(({ shape, data }) => ({ shape, data: decodeFloats(data) })) };
    },
  };
}

// A server that is busy says when to ask again
async function reach(address, options) {
  for (let tries = 1; ; tries += 1) {
    const response = await fetch(address, options);
    const seconds = Number(response.headers.get("Retry-After"));
    if (response.status !== 503 || !seconds || tries === TRIES) return response;
    await pause(1000 * Math.min(seconds, LONGEST), options.signal);
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}

async function answered(response) {
  const body = await response.json().catch(() => null);
  if (response.ok) return body;
  const error = new Error(body?.error ?? `the server answered ${response.status} ${response.statusText}`);
  error.final = response.status >= 400 && response.status < 500 && response.status !== 408; // it would answer the same again
  throw error;
}

// A notebook's kernel answers, through the messages of anywidget
export function widget(model) {
  const waiting = new Map();
  let last = 0;
  const receive = (message, buffers) => {
    const promise = waiting.get(message?.id);
    if (!promise) return;
    waiting.delete(message.id);
    if (message.error) promise.reject(new Error(message.error));
    else promise.resolve({ facts: message.facts, arrays: message.shapes.map((shape, place) => ({ shape, data: floatsOf(buffers[place]) })) });
  };
  model.on("msg:custom", receive);
  return {
    async describe() {
      return model.get("exhibit");
    },
    ask(question, body) {
      last += 1;
      const id = last;
      return new Promise((resolve, reject) => {
        waiting.set(id, { resolve, reject });
        model.send({ id, question, arguments: body });
      });
    },
    close() {
      model.off("msg:custom", receive);
    },
  };
}

// Buffers come as DataViews, and not always at a multiple of four bytes
function floatsOf(buffer) {
  const { buffer: bytes, byteOffset = 0, byteLength } = buffer instanceof ArrayBuffer ? { buffer, byteLength: buffer.byteLength } : buffer;
  return new Float32Array(bytes.slice(byteOffset, byteOffset + byteLength));
}
