// Rankings next to the map: the largest weights of the pinned query and key, and the keys that receive the most attention.
import { formatCount, make, makeSvg, percent, visible } from "../shared/dom.js";
import { LatestQuestion } from "./state.js";

const LIST_LENGTH = 8;
const BINS = 120;
const MIN_FACTOR = 1.5; // list the keys only if the most attended one receives at least this multiple of the average
const MIN_AVERAGE = 0.002; // below this average (long texts), show multiples of it: 3.0 × instead of 0.06%

// goTo(cell): shows a cell. deferred: load the received attention only after release().
// ranked(side, positions): called with the ranking of the token pinned on a side.
export function makeRankings(pane, goTo, { deferred = false, ranked = (_side, _positions) => {} } = {}) {
  const lists = {
    query: makeRanking(pane, "key", (key) => goTo({ query: pane.pinned.query, key })),
    key: makeRanking(pane, "query", (query) => goTo({ query, key: pane.pinned.key })),
    received: makeRanking(pane, "key", (key) => goTo({ key }), () => pane.queries.tokens.length, () => 1 / pane.keys.tokens.length), // divided by the number of queries, because the weights are summed over them
  };
  const histogram = makeSvg("svg", { class: "received-bars", preserveAspectRatio: "none", "aria-hidden": "true" });
  lists.received.node.querySelector("h4").after(histogram);
  const node = make("aside", { class: "rankings", "aria-label": "Strongest links" }, lists.query.node, lists.key.node, lists.received.node);
  let loaded = "";
  let held = deferred; // true until the map has loaded

  function update() {
    const { query, key } = pane.pinned;
    const heads = pane.requestedHeads;
    const { sides } = pane;
    const selection = JSON.stringify([pane.number, pane.layerNumber, heads]);
    for (const list of [lists.query, lists.key, lists.received]) list.node.hidden = !pane.heads.length;
    if (!pane.heads.length) return;
    for (const [side, position] of [["query", query], ["key", key]]) {
      const token = position === null ? "" : visible(pane.textOf(side).tokens[position] ?? "");
      const title = `“${token}” (${sides[side]} ${formatCount(position)}) ${side === "query" ? "attends to" : "is attended to by"}`;
      lists[side].node.hidden = position === null;
      if (position !== null) lists[side].load(title, "topk", { heads, side, position, k: LIST_LENGTH }, selection, ({ positions }) => ranked(side, positions));
    }
    if (selection === loaded || held) return;
    loaded = selection;
    const unit = isSmall(1 / pane.keys.tokens.length) ? ", × average" : "";
    lists.received.load(`Most attended ${sides.key === "key" ? "keys" : "words"}${unit}`, "received", { heads, k: LIST_LENGTH, bins: BINS }, selection, ({ bins }) => drawHistogram(histogram, bins));
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

function isSmall(average) {
  return average > 0 && average < MIN_AVERAGE;
}

// total(): divisor of the weights. average(): the mean weight, or 0 to always list the weights
function makeRanking(pane, side, select, total = () => 1, average = () => 0) {
  const latest = new LatestQuestion(pane);
  const heading = make("h4", { dir: "auto" });
  const list = make("ol", {});
  const node = make("section", {}, heading, list);
  let loaded = "";
  const makeRow = (position, weight, max) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", max > 0 ? weight / max : 0);
    const token = visible(pane.textOf(side).tokens[position] ?? "");
    const text = make("span", { class: "text", dir: "auto" }, token);
    const where = make("span", { class: "where" }, formatCount(position));
    const share = make("span", { class: "share" }, isSmall(average()) ? `${(weight / total() / average()).toFixed(1)} ×` : `${percent(weight / total())}%`);
    const title = `Go to ${token}, ${pane.sides[side]} ${formatCount(position)}`;
    return make("li", {}, make("button", { type: "button", class: "row", title, click: () => select(position) }, bar, text, where, share));
  };
  return {
    node,
    stop: () => latest.stop(),
    load(title, question, body, selection, use = (_answer) => {}) {
      heading.textContent = title;
      const request = selection + JSON.stringify(body);
      if (request === loaded) return;
      loaded = request;
      list.classList.add("loading");
      list.inert = true; // these rows belong to the previous token
      latest.ask(question, body, (answer) => {
        const { positions, weights } = answer;
        const flat = average() > 0 && weights[0] / total() < MIN_FACTOR * average();
        const rows = flat ? [] : positions.map((position, index) => makeRow(position, weights[index], weights[0]));
        list.replaceChildren(...rows);
        if (!rows.length) list.append(make("li", { class: "empty" }, flat ? `All keys receive about the same attention: ${percent(average())}% each.` : "none"));
        list.classList.remove("loading");
        list.inert = false;
        use(answer);
      });
    },
  };
}

function drawHistogram(svg, received) {
  const max = Math.max(...received, 1e-30);
  const bars = received.map((weight, bin) => `M${bin} 1h1v${-Math.max(Math.sqrt(weight / max), 0.03)}h-1z`);
  svg.setAttribute("viewBox", `0 0 ${received.length} 1`);
  svg.replaceChildren(makeSvg("path", { d: bars.join("") }));
  svg.toggleAttribute("hidden", Math.min(...received) > 0.9 * max); // hide a flat histogram
}
