"use strict";

// Sentences may come from anywhere: they are set as textContent, and nothing here makes markup of text.

const FAINT = 0.02; // of all lines, fainter ones are left out; of a word's own, none with a number
const LEAST = 0.01; // what is less has no number
const WIDEST = 7; // pixels of a line of weight 1

const { pairs } = JSON.parse(byId("data").textContent);

let chosen = null; // the pair that is shown, and its nodes
let hovered = null; // the words that the pointer is on, { source, target } or one of them
let focused = null; // and those that have the focus

function byId(id) {
  return document.getElementById(id);
}

function make(tag, text = "", attributes = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function percent(weight) {
  return weight >= LEAST ? String(Math.round(100 * weight)) : "";
}

function across(side) {
  return side === "source" ? "target" : "source";
}

// ---- the list of sentences

function listPairs() {
  const options = pairs.map((pair, number) => {
    const option = make("div", "", { role: "option", class: "pair" });
    option.append(
      make("div", pair.source || "(empty)", { dir: "auto" }),
      make("div", pair.text || "(empty)", { dir: "auto", class: "text" }),
    );
    option.addEventListener("click", () => choose(number));
    return option;
  });
  byId("pairs").replaceChildren(...options);
  byId("pairs").addEventListener("keydown", (event) => {
    const last = pairs.length - 1;
    const places = { ArrowUp: chosen.number - 1, ArrowDown: chosen.number + 1, Home: 0, End: last };
    if (!(event.key in places) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    choose(Math.min(Math.max(places[event.key], 0), last));
  });
}

function choose(number) {
  history.replaceState(null, "", `#${number + 1}`);
  show(number);
  byId("pairs").children[number].focus();
}

// The pair that the address names, page.html#3, or the first; the list is scrolled to it, and not the page
function showAddressed() {
  const number = Number(location.hash.slice(1)) - 1;
  show(number in pairs ? number : 0);
  const list = byId("pairs");
  list.scrollTop = list.children[chosen.number].offsetTop - list.clientHeight / 3;
}

// ---- one pair

function show(number) {
  const pair = pairs[number];
  chosen = { number, pair, source: [], target: [], lines: [], cells: [] };
  hovered = focused = null;
  for (const [other, option] of [...byId("pairs").children].entries()) {
    option.setAttribute("aria-selected", String(other === number));
    option.tabIndex = other === number ? 0 : -1;
  }
  byId("reason").textContent = pair.reason;
  byId("reason").hidden = !pair.reason;
  byId("attended").hidden = !pair.weights;
  byId("links").tabIndex = pair.weights ? -1 : 0; // to scroll, where no word can have the focus
  byId("lines").classList.toggle("none", !pair.weights);
  showFacts(pair);
  showWords("source");
  showWords("target");
  byId("links").scrollLeft = byId("matrix").scrollLeft = 0;
  byId("lines").replaceChildren();
  byId("matrix").replaceChildren();
  if (!pair.weights) return;
  showLines(pair.weights);
  showMatrix(pair);
  look();
}

function showFacts({ score, note }) {
  const facts = [];
  if (score !== null) facts.push(["score", score.toFixed(3).replace("-", "−")]);
  if (note) facts.push(["note", note]);
  const nodes = facts.map(([name, value]) => {
    const node = make("div");
    node.append(make("dt", name), make("dd", value, { dir: "auto" }));
    return node;
  });
  byId("facts").replaceChildren(...nodes);
}

function showWords(side) {
  const { pair } = chosen;
  chosen[side] = pair[`${side}_words`].map((word, place) => {
    if (!pair.weights) return make("span", word, { class: "word" });
    const label = spoken(side, place);
    const node = make("button", word, { class: "word", type: "button", "aria-label": label });
    node.tabIndex = place === 0 ? 0 : -1;
    node.addEventListener("focus", () => look({ focused: { [side]: place } }));
    node.addEventListener("blur", () => look({ focused: null }));
    node.addEventListener("click", () => node.focus()); // which not every browser does
    node.addEventListener("keydown", (event) => move(event, side, place));
    return hover(node, { [side]: place });
  });
  byId(side).replaceChildren(...chosen[side]);
}

// [place, weight] of every word across
function weightsOf(side, place) {
  const { weights } = chosen.pair;
  return side === "target" ? [...weights[place].entries()] : weights.map((row, target) => [target, row[place]]);
}

function strongest(side, place) {
  return weightsOf(side, place).sort(([, one], [, other]) => other - one);
}

// What is heard of a word: itself, and what it is linked to
function spoken(side, place) {
  const { pair } = chosen;
  const others = pair[`${across(side)}_words`];
  const linked = strongest(side, place).slice(0, 4).filter(([, weight]) => weight >= LEAST);
  const told = linked.map(([other, weight]) => `${others[other]} ${percent(weight)} %`);
  return [pair[`${side}_words`][place], ...told].join(", ");
}

// Left and right along the words, up and down to the word across that has the largest weight
function move(event, side, place) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape") event.currentTarget.blur();
  const words = chosen[side];
  const step = getComputedStyle(byId(side)).direction === "rtl" ? -1 : 1;
  const places = { ArrowLeft: place - step, ArrowRight: place + step, Home: 0, End: words.length - 1 };
  let next = words[places[event.key]];
  if (event.key === (side === "source" ? "ArrowDown" : "ArrowUp")) {
    next = chosen[across(side)][strongest(side, place)[0]?.[0]];
  }
  if (!next) return;
  event.preventDefault();
  for (const word of next.parentElement.children) word.tabIndex = word === next ? 0 : -1;
  next.focus();
}

function hover(node, words) {
  node.addEventListener("pointerenter", () => look({ hovered: words }));
  node.addEventListener("pointerleave", () => look({ hovered: null }));
  return node;
}

// ---- the lines

function showLines(weights) {
  for (const [target, row] of weights.entries()) {
    for (const [source, weight] of row.entries()) {
      if (weight < LEAST) continue;
      const node = document.createElementNS("http://www.w3.org/2000/svg", "path");
      node.setAttribute("stroke-width", Math.max(WIDEST * weight, 1));
      chosen.lines.push({ node, source, target, weight });
    }
  }
  chosen.lines.sort((one, other) => one.weight - other.weight); // the strongest on top
  byId("lines").append(...chosen.lines.map(({ node }) => node));
  place();
}

// Lines lead from the middle of one word to that of another, wherever these are now
function place() {
  const box = byId("lines").getBoundingClientRect();
  const middle = (node) => {
    const { left, width } = node.getBoundingClientRect();
    return left + width / 2 - box.left;
  };
  const [from, to] = [chosen.source.map(middle), chosen.target.map(middle)];
  const half = box.height / 2;
  for (const { node, source, target } of chosen.lines) {
    const [x, y] = [from[source], to[target]];
    node.setAttribute("d", `M${x} 0C${x} ${half} ${y} ${half} ${y} ${box.height}`);
  }
}

// ---- the matrix

function showMatrix({ source_words, target_words, weights }) {
  const table = make("table");
  const head = table.createTHead().insertRow();
  head.append(make("td", "", { class: "corner" }));
  for (const [source, word] of source_words.entries()) {
    const node = make("th", "", { scope: "col", title: word });
    node.append(make("span", word));
    head.append(hover(node, { source }));
    chosen.cells.push({ node, source });
  }
  const body = table.createTBody();
  for (const [target, row] of weights.entries()) {
    const line = body.insertRow();
    const node = make("th", target_words[target], { scope: "row", title: target_words[target] });
    line.append(hover(node, { target }));
    chosen.cells.push({ node, target });
    for (const [source, weight] of row.entries()) {
      const cell = make("td", percent(weight));
      cell.style.setProperty("--weight", weight);
      line.append(hover(cell, { source, target }));
      chosen.cells.push({ node: cell, source, target });
    }
  }
  byId("matrix").append(table);
}

// ---- what is looked at: the word under the pointer, or else that with the focus, or else all

function look(change = {}) {
  if ("hovered" in change) ({ hovered } = change);
  if ("focused" in change) ({ focused } = change);
  const { source, target } = hovered ?? focused ?? {};
  const aside = (one) =>
    (source !== undefined && one.source !== undefined && one.source !== source) ||
    (target !== undefined && one.target !== undefined && one.target !== target);
  const all = source === undefined && target === undefined;
  for (const cell of chosen.cells) cell.node.classList.toggle("aside", aside(cell));
  for (const { node, weight, ...words } of chosen.lines) {
    node.classList.toggle("aside", aside(words) || (all && weight < FAINT));
    node.setAttribute("stroke-opacity", all ? weight : Math.max(weight, 0.25));
  }
  lookAtWords("source", source, target);
  lookAtWords("target", target, source);
}

// The word itself is marked, and every word across that it is linked to has the weight beside it
function lookAtWords(side, own, other) {
  const { weights } = chosen.pair;
  for (const [place, node] of chosen[side].entries()) {
    const weight = side === "source" ? weights[other]?.[place] : weights[place][other];
    const share = weight === undefined || (own !== undefined && own !== place) ? "" : percent(weight);
    node.classList.toggle("chosen", place === own);
    node.classList.toggle("aside", place !== own && !share && (own ?? other) !== undefined);
    if (share) node.dataset.share = share;
    else delete node.dataset.share;
  }
}

// ---- begin

byId("shown").hidden = !pairs.length;
byId("nothing").hidden = Boolean(pairs.length);
if (pairs.length) {
  listPairs();
  showAddressed();
  addEventListener("hashchange", showAddressed);
  new ResizeObserver(place).observe(byId("drawing"));
}
