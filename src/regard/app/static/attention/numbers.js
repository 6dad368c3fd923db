// One query and one key: their features, the products, and step by step the weight.
import { checkbox, choices, decimals, make, percent, visible } from "./dom.js";
import { Latest } from "./desk.js";
import { TokenList } from "./tokens.js";

export class NumbersView {
  constructor(pane) {
    this.pane = pane;
    this.latest = new Latest(pane);
    this.head = pane.heads[0] ?? 0;
    this.largestFirst = false;
    this.lists = { query: this.list("query"), key: this.list("key") };
    this.bar = make("div", { class: "map-bar" });
    this.result = make("div", { class: "numbers-result" });
    this.pickers = make("div", { class: "pickers" }, ...["query", "key"].map((side) => make("div", { class: "picker" }, make("h4", {}, this.pane.sides[side]), this.lists[side].node)));
    this.node = make("div", { class: "numbers-view" }, this.pickers, this.bar, this.result);
    this.update(new Set(["input"]));
  }

  list(side) {
    const on = { look: () => {}, moved: () => this.mark(), pick: (place) => this.pick(side, place) };
    return new TokenList(this.pane, side, on);
  }

  update(changed) {
    const { pane } = this;
    if (["input", "layer", "beside"].some((name) => changed.has(name))) {
      for (const list of Object.values(this.lists)) list.fill();
      this.head = Math.min(this.head, pane.layer.heads - 1);
      this.fillBar();
    }
    const [queries, keys] = [pane.queries.tokens.length, pane.keys.tokens.length];
    this.pickers.hidden = !pane.layer.vectors;
    this.bar.hidden = !pane.layer.vectors;
    if (!pane.layer.vectors) return this.refuse("This layer’s weights came without the query and key vectors they were made of, so there are no products to show; choose another layer above.");
    if (!queries || !keys) return this.refuse("There are no tokens.");
    this.pair = { query: pane.pinned.query ?? Math.min(1, queries - 1), key: pane.pinned.key ?? Math.min(1, keys - 1) };
    this.mark();
    return this.load();
  }

  refuse(text) {
    this.latest.stop();
    this.result.replaceChildren(make("p", { class: "empty" }, text));
    this.pane.say("");
  }

  fillBar() {
    const heads = this.pane.allHeads.map((head) => [head, String(head)]);
    const head = choices("Head", heads, this.head, (value) => {
      this.head = Number(value);
      this.load();
    });
    const order = checkbox("largest products first", this.largestFirst, (checked) => {
      this.largestFirst = checked;
      if (this.facts) this.show();
    });
    this.bar.replaceChildren(...(heads.length > 1 ? [head] : []), order);
  }

  pick(side, place) {
    this.pair = { ...this.pair, [side]: place };
    this.pane.pin(this.pair);
    if (this.pane.second) this.update(new Set());
  }

  reach(place) {
    for (const [side, at] of Object.entries(place)) if (at !== null) this.lists[side].reach(at);
    this.pane.pin({ ...this.pair, ...place });
    if (this.pane.second) this.update(new Set());
  }

  mark() {
    for (const [side, list] of Object.entries(this.lists)) {
      for (const [place, node] of list.nodes) {
        const chosen = this.pair?.[side] === place;
        node.classList.toggle("chosen", chosen);
        node.setAttribute("aria-pressed", String(chosen));
      }
    }
  }

  load() {
    this.latest.ask("numbers", { head: this.head, ...this.pair }, ({ facts }) => {
      this.facts = facts;
      this.show();
    });
  }

  show() {
    const { facts, pane, pair } = this;
    const name = (side) => visible(pane.textOf(side).tokens[pair[side]] ?? "");
    this.result.replaceChildren(this.features(facts, name("query"), name("key")), this.steps(facts));
    pane.say(`${name("query")} → ${name("key")}, head ${this.head}: score ${decimals(facts.score ?? NaN)}, weight ${percent(facts.weight)} %`);
  }

  // ---- the table of features: query × key = product, each with a bar

  features({ query, key }, one, other) {
    const products = query.map((feature, place) => feature * key[place]);
    const order = [...products.keys()];
    if (this.largestFirst) order.sort((a, b) => Math.abs(products[b]) - Math.abs(products[a]));
    const most = (values) => Math.max(...values.map(Math.abs), 1e-9);
    const both = Math.max(most(query), most(key));
    const table = make("table", { class: "features" });
    const titles = [["feature", ""], ["query", one], ["key", other], ["product", ""]];
    table.createTHead().insertRow().append(...titles.map(([title, token]) => make("th", { scope: "col" }, title, token ? make("span", { class: "token-name", dir: "auto" }, token) : null)));
    const body = table.createTBody();
    for (const place of order) {
      const cells = [[query[place], both], [key[place], both], [products[place], most(products)]].map(([value, largest]) => barCell(value, largest));
      body.insertRow().append(make("th", { scope: "row" }, String(place + 1)), ...cells);
    }
    const sum = products.reduce((total, product) => total + product, 0);
    table.createTFoot().insertRow().append(make("th", { scope: "row", colspan: 3 }, "sum of the products: q · k"), make("td", { class: "sum" }, decimals(sum)));
    return make("div", { class: "scrolls feature-box", tabindex: 0, role: "region", "aria-label": "Features of query and key, and their products" }, table);
  }

  // ---- from the sum to the weight, as the formula is written

  steps(facts) {
    const { query, key, scale, bias, softcap, score, masked, weight } = facts;
    const product = query.reduce((sum, feature, place) => sum + feature * key[place], 0);
    const rows = [["q · k", `the sum of ${query.length} products`, decimals(product)]];
    let now = product * scale;
    rows.push(["× scale", `${decimals(product)} × ${decimals(scale, 4)}`, decimals(now)]);
    if (softcap) {
      rows.push(["soft cap", `${softcap} · tanh(${decimals(now)} / ${softcap})`, decimals(softcap * Math.tanh(now / softcap))]);
      now = softcap * Math.tanh(now / softcap);
    }
    if (bias) rows.push(["+ bias", `${decimals(now)} ${bias < 0 ? "−" : "+"} ${decimals(Math.abs(bias))}`, decimals(now + bias)]);
    const off = score !== null && Math.abs(now + (bias || 0) - score) > 0.01 * Math.max(1, Math.abs(score));
    rows.push(["score", off ? "made of these by its own formula" : "", score === null ? "not a number" : decimals(score), "strong"]);
    if (masked) rows.push(["mask", "this query may not look at this key", "−∞", "strong"]);
    else rows.push(...this.normalized(facts));
    rows.push(["weight", masked ? "nothing is read" : "", `${percent(weight)} %`, "strong"]);
    const lines = rows.map(([name, how, value, strength = ""]) => make("div", { class: `step ${strength}` }, make("dt", {}, name), make("dd", { class: "how" }, how), make("dd", { class: "value" }, value)));
    return make("dl", { class: "steps" }, ...lines);
  }

  normalized({ score, tau, weight, normalizer, formula }) {
    const name = normalizer || "normalizer";
    if (score === null || !Number.isFinite(tau ?? NaN) || !formula?.includes("τ")) return [[name, formula || "", decimals(weight, 4)]];
    const away = score - tau;
    const rows = [["− τ", `${decimals(score)} ${tau < 0 ? "+" : "−"} ${decimals(Math.abs(tau))}, the τ of this query`, decimals(away)]];
    const plain = formula === "exp(score − τ)";
    rows.push([name, plain ? `exp(${decimals(away)})` : formula || "", decimals(weight, 4)]);
    return rows;
  }

  destroy() {
    this.latest.stop();
  }
}

// A number with a bar that begins in the middle: to the right if positive, to the left if negative
function barCell(value, most) {
  const bar = make("span", { class: value < 0 ? "bar below" : "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", Math.abs(value) / most);
  return make("td", {}, make("span", { class: "bar-box" }, bar), make("span", { class: "value" }, decimals(value)));
}
