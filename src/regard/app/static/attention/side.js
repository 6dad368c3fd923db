// Beside the map: what a chosen query reads most, who reads a chosen key most, and the most read keys of all.
import { count, make, percent, visible } from "./dom.js";
import { Latest } from "./desk.js";

const MOST = 8; // in each list
const BINS = 120; // bars of the most read places

// go(cell): goes there; waits: the most read keys are asked for only after release(); found(side, places): the
// strongest places across from what is pinned on a side
export function sidePanel(pane, go, { waits = false, found = () => {} } = {}) {
  const lists = {
    query: rankedList(pane, "key", (key) => go({ query: pane.pinned.query, key })),
    key: rankedList(pane, "query", (query) => go({ query, key: pane.pinned.key })),
    received: rankedList(pane, "key", (key) => go({ key }), () => pane.queries.tokens.length), // summed over all queries
  };
  const bars = make("canvas", { class: "received-bars", width: BINS, height: 36, "aria-hidden": "true" });
  lists.received.node.querySelector("h4").after(bars);
  const node = make("aside", { class: "panel", "aria-label": "The strongest weights" }, lists.query.node, lists.key.node, lists.received.node);
  let asked = "";
  let held = waits; // the most read keys wait for the map: both take their time

  function update(changed = new Set()) {
    const { query, key } = pane.pinned;
    const heads = pane.askedHeads;
    const { sides } = pane;
    const which = JSON.stringify([pane.number, pane.layerNumber, heads]);
    for (const list of [lists.query, lists.key, lists.received]) list.node.hidden = !pane.heads.length;
    if (!pane.heads.length) return;
    for (const [side, place] of [["query", query], ["key", key]]) {
      const token = place === null ? "" : visible(pane.textOf(side).tokens[place] ?? "");
      const title = side === "query" ? `“${token}” (${sides.query} ${count(place + 1)}) reads` : `“${token}” (${sides.key} ${count(place + 1)}) is read by`;
      lists[side].node.hidden = place === null;
      if (place !== null) lists[side].ask(title, "top", { heads, side, place, most: MOST }, which, ({ facts }) => found(side, facts.places));
    }
    if (which === asked || held) return;
    asked = which;
    lists.received.ask(`Most read ${sides.key === "key" ? "keys" : "words"}`, "received", { heads, most: MOST, bins: BINS }, which, ({ arrays }) => drawBars(bars, arrays[0].data));
  }

  update();
  return {
    node,
    update,
    hold() {
      held = true;
    },
    release() {
      if (!held) return;
      held = false;
      update();
    },
    destroy: () => Object.values(lists).forEach((list) => list.stop()),
  };
}

// whole(): what the weights are a part of
function rankedList(pane, side, pick, whole = () => 1) {
  const latest = new Latest(pane);
  const heading = make("h4", { dir: "auto" });
  const list = make("ol", {});
  const node = make("section", {}, heading, list);
  let asked = "";
  const row = (place, weight, most) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", most > 0 ? weight / most : 0);
    const token = visible(pane.textOf(side).tokens[place] ?? "");
    const text = make("span", { class: "text", dir: "auto" }, token);
    const where = make("span", { class: "where" }, count(place + 1));
    const share = make("span", { class: "share" }, `${percent(weight / whole())} %`);
    const title = `Go to ${token}, ${pane.sides[side]} ${count(place + 1)}`;
    return make("li", {}, make("button", { type: "button", class: "row", title, onclick: () => pick(place) }, bar, text, where, share));
  };
  return {
    node,
    stop: () => latest.stop(),
    ask(name, question, body, which, use = () => {}) {
      heading.textContent = name;
      const now = which + JSON.stringify(body);
      if (now === asked) return;
      asked = now;
      list.classList.add("waits");
      latest.ask(question, body, (answer) => {
        const { places, weights } = answer.facts;
        const rows = places.map((place, at) => row(place, weights[at], weights[0]));
        list.replaceChildren(...rows);
        if (!rows.length) list.append(make("li", { class: "empty" }, "nothing"));
        list.classList.remove("waits");
        use(answer);
      });
    },
  };
}

// How much each part of the text is read: bars from the bottom
function drawBars(canvas, received) {
  canvas.width = received.length;
  const context = canvas.getContext("2d");
  const most = Math.max(...received, 1e-30);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = getComputedStyle(canvas).color;
  for (const [place, weight] of received.entries()) {
    const height = Math.max((canvas.height * Math.sqrt(weight / most)), 1);
    context.fillRect(place, canvas.height - height, 1, height);
  }
}
