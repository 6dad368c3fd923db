// The interactive view of a view model stored on the server.

import { http } from "../attention/sources.js";
import { mount } from "../attention/view.js";
import { make, pick } from "../shared/dom.js";

const SELECTION = ["view", "layer", "heads"]; // kept when the next view is shown

// A container that shows one view at a time: show(view), clear()
export function viewer(options, signal) {
  const element = make("div", { class: "viewer" });
  let handle = null;
  let layers = "";

  function show(view) {
    const names = view.inputs.map((input) => input.layers.map(({ name, heads }) => `${name} ${heads}`).join()).join(";");
    const previous = pick(handle?.state, names === layers ? SELECTION : ["view"]);
    const compare = view.inputs.length > 1 ? { compare: 1 } : {}; // show the first two inputs side by side
    clear();
    layers = names;
    handle = mount(element, http(`api/views/${encodeURIComponent(view.id)}`, view), { ...options, ...compare, ...previous });
  }

  function clear() {
    handle?.destroy();
    handle = null;
    element.replaceChildren();
  }

  signal.addEventListener("abort", clear);
  return { element, show, clear };
}
