// Data sources. A source has describe() and ask(question, arguments, signal), which returns { facts, arrays }.
import { get, post } from "../shared/client.js";
import { EmbeddedLayer, decodeFloats } from "./embedded.js";

// All data is embedded in the page
export function embedded(data) {
  const layers = new Map();
  const layerOf = (input, layer) => {
    const name = `${input} ${layer}`;
    if (!layers.has(name)) {
      const { texts, layers: described } = data.view.inputs[input];
      const { queries, keys } = described[layer];
      const stored = data.inputs[input].layers[layer];
      layers.set(name, new EmbeddedLayer(stored, texts[queries].tokens.length, texts[keys].tokens.length));
    }
    return layers.get(name);
  };
  return {
    async describe() {
      return data.view;
    },
    async ask(question, { input, layer, ...rest }) {
      const layerData = layerOf(input, layer);
      return question === "heads" ? layerData.thumbnails(rest) : layerData[question](rest);
    },
  };
}

// The server answers questions at the URL `base`; viewModel: its description, if already known
export function http(base, viewModel = null) {
  return {
    async describe(signal) {
      return viewModel ?? get(base, signal);
    },
    async ask(question, body, signal) {
      const { facts, arrays } = await post(`${base}/${question}`, body, signal);
      return { facts, arrays: arrays.map(({ shape, data }) => ({ shape, data: decodeFloats(data) })) };
    },
  };
}

// The notebook kernel answers through anywidget messages
export function widget(model) {
  const waiting = new Map();
  let lastId = 0;
  const receive = (message, buffers) => {
    const promise = waiting.get(message?.id);
    if (!promise) return;
    waiting.delete(message.id);
    if (message.error) promise.reject(new Error(message.error));
    else promise.resolve({ facts: message.facts, arrays: message.shapes.map((shape, index) => ({ shape, data: floatsOf(buffers[index]) })) });
  };
  model.on("msg:custom", receive);
  return {
    async describe() {
      return model.get("view");
    },
    ask(question, body) {
      lastId += 1;
      const id = lastId;
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

// Buffers are DataViews, not always aligned to four bytes
function floatsOf(buffer) {
  const { buffer: bytes, byteOffset = 0, byteLength } = buffer instanceof ArrayBuffer ? { buffer, byteLength: buffer.byteLength } : buffer;
  return new Float32Array(bytes.slice(byteOffset, byteOffset + byteLength));
}
