// The interactive view of an exhibit that the server keeps.

import { http } from "../attention/sources.js";
import { mount } from "../attention/view.js";
import { make } from "./dom.js";

const KEPT = ["view", "layer", "heads"]; // what stays chosen when the next exhibit comes

// A place for one exhibit after another: show({ id, exhibit }), clear()
export function exhibitor(options, signal) {
  const element = make("div", { class: "exhibit" });
  let handle = null;
  let layers = "";

  function show({ id, exhibit }) {
    const names = exhibit.inputs.map((input) => input.layers.map(({ name, heads }) => `${name} ${heads}`).join()).join(";");
    const before = handle && names === layers ? kept(handle.state) : kept(handle?.state, ["view"]);
    clear();
    layers = names;
    handle = mount(element, http(`api/exhibits/${encodeURIComponent(id)}`, exhibit), { ...options, ...several(exhibit), ...before });
  }

  function clear() {
    handle?.destroy();
    handle = null;
    element.replaceChildren();
  }

  signal.addEventListener("abort", clear);
  return { element, show, clear };
}

// The first two inputs beside each other
function several({ inputs }) {
  return inputs.length > 1 ? { beside: 1 } : {};
}

function kept(state, names = KEPT) {
  return Object.fromEntries(names.filter((name) => state?.[name] !== undefined).map((name) => [name, state[name]]));
}
