// Data sources. A source has describe() and ask(question, arguments, signal).
// A tile is { shape: [heads, height, width], data }; the other answers are objects.
import { get, post } from "../shared/client.js";
import { EmbeddedLayer } from "./embedded.js";

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
      return layerOf(input, layer)[question](rest);
    },
  };
}

// The server answers questions at the URL `base`. viewModel: the description of the view, if already known
export function http(base, viewModel = null) {
  return {
    async describe(signal) {
      return viewModel ?? get(base, signal);
    },
    async ask(question, body, signal) {
      const answer = await post(`${base}/${question}`, body, signal);
      return question === "tile" ? decodeTile(answer) : answer;
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
    else promise.resolve(message.answer ?? decodeTile(bytesOf(buffers[0])));
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

// The bytes are three uint32 (heads, height and width), then the weights as float32
function decodeTile(bytes) {
  return { shape: [...new Uint32Array(bytes, 0, 3)], data: new Float32Array(bytes, 12) };
}

// Copies a buffer: it may be a DataView that is not aligned to four bytes
function bytesOf(view) {
  return view instanceof ArrayBuffer ? view : view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
}
