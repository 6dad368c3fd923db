// The interactive view of a view model stored on the server.

import { http } from "../attention/sources.js";
import { mount } from "../attention/view.js";
import { make, percent, pick, visible } from "../shared/dom.js";

const SELECTION = ["view", "layer", "heads", "special"]; // state that is kept when the next view is shown

// A container that shows one view at a time: show(view, first), clear().
// first: { layer, head, query, key } of the link to show first, unless the user has selected another layer or head.
export function viewer(options, signal) {
  const element = make("div", { class: "viewer" });
  let handle = null;
  let layers = "";
  let suggested = null;

  // Whether the suggested layer and head are still selected; true before the first view
  function isUntouched() {
    if (!handle || !suggested) return !handle;
    const { layer, heads } = handle.state;
    return layer === suggested.layer && heads?.length === 1 && heads[0] === suggested.head;
  }

  function show(view, first = null) {
    const names = view.inputs.map((input) => input.layers.map(({ name, heads }) => `${name} ${heads}`).join()).join(";");
    const previous = pick(handle?.state, names === layers ? SELECTION : ["view", "special"]);
    if (first && (isUntouched() || names !== layers)) Object.assign(previous, { layer: first.layer, heads: [first.head], query: first.query, key: first.key });
    suggested = first;
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

// The link that is shown first, in words
export function describeLink({ first, inputs }) {
  if (!first) return [];
  const { texts, layers } = inputs[0];
  const { label, queries } = layers[first.layer];
  const token = (position) => make("b", { dir: "auto" }, visible(texts[queries].tokens[position]));
  return [make("p", { class: "first-link" }, `In ${label}, head ${first.head}, `, token(first.query), ` gives ${percent(first.weight)}% of its attention to `, token(first.key), ", more than in any other head.")];
}
