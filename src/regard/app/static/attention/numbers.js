// The computation of one weight: the features of a query and a key, their products, and the steps to the weight.
import { checkbox, decimals, labeledSelect, make, percent, visible } from "../shared/dom.js";
import { formatExact, formatNumber, formatShort } from "../shared/format.js";
import { LatestQuestion } from "./state.js";
import { TokenList } from "./tokens.js";

const MAX_EXPONENT = 12; // larger scores are shown relative to τ: exp(score) would be an unreadable number

export class NumbersView {
  constructor(pane) {
    this.pane = pane;
    this.latest = new LatestQuestion(pane);
    this.head = pane.heads[0] ?? 0;
    this.largestFirst = false;
    this.lists = { query: this.makeList("query"), key: this.makeList("key") };
    this.bar = make("div", { class: "map-bar" });
    this.result = make("div", { class: "numbers-result" });
    this.pickers = make("div", { class: "pickers" }, ...["query", "key"].map((side) => make("div", { class: "picker" }, make("h4", {}, this.pane.sides[side]), this.lists[side].node)));
    this.node = make("div", { class: "numbers-view" }, this.pickers, this.bar, this.result);
    this.update(new Set(["input"]));
  }

  makeList(side) {
    const on = { highlight: () => {}, scrolled: () => this.markSelected(), select: (position) => this.select({ [side]: position }) };
    return new TokenList(this.pane, side, on);
  }

  update(changed) {
    const { pane } = this;
    if (["input", "layer", "compare"].some((name) => changed.has(name))) {
      for (const list of Object.values(this.lists)) list.fill();
      this.head = Math.min(this.head, pane.layer.heads - 1);
      this.updateBar();
    }
    const [queries, keys] = [pane.queries.tokens.length, pane.keys.tokens.length];
    this.pickers.hidden = !pane.layer.vectors;
    this.bar.hidden = !pane.layer.vectors;
    if (!pane.layer.vectors) return this.showEmpty("This layer has no query and key vectors, so there are no products to show. Choose another layer above.");
    if (!queries || !keys) return this.showEmpty("There are no tokens.");
    this.pair = { query: Math.min(pane.pinned.query ?? 1, queries - 1), key: Math.min(pane.pinned.key ?? 1, keys - 1) };
    this.markSelected();
    return pane.pinned.key === null ? this.loadStrongest() : this.load();
  }

  showEmpty(text) {
    this.latest.stop();
    this.result.replaceChildren(make("p", { class: "empty" }, text));
    this.pane.setStatus("");
  }

  updateBar() {
    const heads = this.pane.allHeads.map((head) => [head, String(head)]);
    const head = labeledSelect("Head", heads, this.head, (value) => {
      this.head = Number(value);
      this.load();
    });
    const order = checkbox("largest products first", this.largestFirst, (checked) => {
      this.largestFirst = checked;
      if (this.facts) this.show();
    });
    this.bar.replaceChildren(...(heads.length > 1 ? [head] : []), order);
  }

  select(cell) {
    this.pane.pin({ ...this.pair, ...cell });
    if (this.pane.second) this.update(new Set());
  }

  goTo(cell) {
    for (const [side, position] of Object.entries(cell)) if (position !== null) this.lists[side].goTo(position);
    this.select(cell);
  }

  markSelected() {
    for (const [side, list] of Object.entries(this.lists)) {
      for (const [position, node] of list.nodes) {
        const selected = this.pair?.[side] === position;
        node.classList.toggle("selected", selected);
        node.setAttribute("aria-pressed", String(selected));
      }
    }
  }

  // The key with the largest weight, if none is selected
  loadStrongest() {
    this.latest.ask("topk", { heads: [this.head], side: "query", position: this.pair.query, k: 1 }, ({ positions }) => {
      this.pair.key = positions[0] ?? this.pair.key;
      this.markSelected();
      this.load();
    });
  }

  load() {
    this.latest.ask("numbers", { head: this.head, ...this.pair }, (facts) => {
      this.facts = facts;
      this.show();
    });
  }

  show() {
    const { facts, pane, pair } = this;
    const name = (side) => visible(pane.textOf(side).tokens[pair[side]] ?? "");
    this.result.replaceChildren(this.featureTable(facts, name("query"), name("key")), this.steps(facts));
    pane.setStatus(`${name("query")} → ${name("key")}, head ${this.head}: score ${decimals(facts.score ?? NaN, 2)}, weight ${percent(facts.weight)}%`);
  }

  // ---- the table of features: query × key = product, each with a bar

  featureTable({ query, key }, queryToken, keyToken) {
    const products = query.map((feature, index) => feature * key[index]);
    const order = [...products.keys()];
    if (this.largestFirst) order.sort((a, b) => Math.abs(products[b]) - Math.abs(products[a]));
    const maxAbs = (values) => Math.max(...values.map(Math.abs), 1e-9);
    const featureMax = Math.max(maxAbs(query), maxAbs(key));
    const table = make("table", { class: "features" });
    const titles = [["feature", ""], ["query", queryToken], ["key", keyToken], ["product", ""]];
    table.createTHead().insertRow().append(...titles.map(([title, token]) => make("th", { scope: "col" }, title, token ? make("span", { class: "token-name", dir: "auto" }, token) : null)));
    const body = table.createTBody();
    for (const index of order) {
      const cells = [barCell(query[index], featureMax), barCell(key[index], featureMax), barCell(products[index], maxAbs(products))];
      body.insertRow().append(make("th", { scope: "row" }, String(index)), ...cells);
    }
    const sum = products.reduce((total, product) => total + product, 0);
    table.createTFoot().insertRow().append(make("th", { scope: "row", colspan: 3 }, "sum of the products: q · k"), make("td", { class: "sum", title: formatExact(sum) }, decimals(sum, 2)));
    return make("div", { class: "scrolls feature-box", tabindex: 0, role: "region", "aria-label": "Features of query and key, and their products" }, table);
  }

  // ---- the steps from the product to the weight

  steps(facts) {
    const { query, key, scale, bias, softcap, score, masked, weight } = facts;
    const product = query.reduce((sum, feature, index) => sum + feature * key[index], 0);
    const rows = [["q · k", `sum of ${query.length} products`, product]];
    let current = product * scale;
    rows.push(["× scale", `${formatShort(product, 4)} × ${formatShort(scale, 4)}`, current]);
    if (softcap) {
      const capped = softcap * Math.tanh(current / softcap);
      rows.push(["softcap", `${softcap} · tanh(${formatShort(current, 4)} / ${softcap})`, capped]);
      current = capped;
    }
    if (bias) rows.push(["+ bias", `${formatShort(current, 4)} ${bias < 0 ? "−" : "+"} ${formatShort(Math.abs(bias), 4)}`, current + bias]);
    const differs = score !== null && Math.abs(current + (bias || 0) - score) > 0.01 * Math.max(1, Math.abs(score));
    rows.push(["score", differs ? "computed with a different formula" : "", score ?? "not a number", "strong"]);
    if (masked) rows.push(["mask", "the mask excludes this key", "−∞", "strong"]);
    else rows.push(...this.normalizerSteps(facts));
    rows.push(["weight", masked ? "masked" : "", `${percent(weight)}%`, "strong"]);
    const lines = rows.map(([name, how, value, strength = ""]) => make("div", { class: `step ${strength}` }, make("dt", {}, name), make("dd", { class: "how" }, how), valueCell(value)));
    return make("dl", { class: "steps" }, ...lines);
  }

  normalizerSteps({ score, tau, weight, normalizer, formula }) {
    const name = normalizer || "normalizer";
    if (formula === "exp(score − τ)" && name === "Softmax" && score !== null && Math.max(Math.abs(score), Math.abs(tau ?? Infinity)) < MAX_EXPONENT) {
      const [part, sum] = [Math.exp(score), Math.exp(tau)];
      return [
        ["exp", `exp(${formatShort(score, 4)})`, part],
        ["Σ exp", "over all keys of this query", sum],
        ["softmax", `${formatShort(part, 4)} / ${formatShort(sum, 4)}`, weight],
      ];
    }
    if (score === null || !Number.isFinite(tau ?? NaN) || !formula?.includes("τ")) return [[name, formula || "", weight]];
    const difference = score - tau;
    const rows = [["− τ", `${formatShort(score, 4)} ${tau < 0 ? "+" : "−"} ${formatShort(Math.abs(tau), 4)}; τ ${name === "Softmax" ? "= log Σ exp(score) over all keys" : "makes the weights of this query sum to 1"}`, difference]];
    rows.push([name, formula === "exp(score − τ)" ? `exp(${formatShort(difference, 4)})` : formula, weight]);
    return rows;
  }

  destroy() {
    this.latest.stop();
  }
}

// A number with a bar from the center: to the right if positive, to the left if negative
function barCell(value, max) {
  const bar = make("span", { class: value < 0 ? "bar negative" : "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", Math.abs(value) / max);
  return make("td", { title: formatExact(value) }, make("span", { class: "bar-box" }, bar), make("span", { class: "value" }, formatNumber(value)));
}

// A number with two decimals and its exact value as tooltip, or a text
function valueCell(value) {
  if (typeof value !== "number") return make("dd", { class: "value" }, value);
  return make("dd", { class: "value", title: formatExact(value) }, decimals(value, 2));
}
