// The order of words: what changes when they are shuffled, without positions and with each encoding of them.

import { get, post } from "../api.js";
import { announce, button, choice, field, later, make, plain, tell } from "../dom.js";
import { bars, heat, matrix, scrolled } from "../matrix.js";
import { chips } from "../chips.js";
import { stage } from "../stage.js";

const KINDS = {
  none: ["no positions", "Attention alone: a set of words."],
  sinusoidal: ["sinusoidal", "Waves of many lengths, added to the words."],
  learned: ["learned", "A vector for each place, added to the words; here before any learning."],
  rotary: ["rotary", "Query and key are turned by an angle that grows with the place: the cosine of it."],
  alibi: ["ALiBi", "A score falls with the distance, in each head at another rate."],
  t5: ["T5", "A learned number for each range of distances; here before any learning."],
};
const SAME = 1e-9; // float64: what is less is rounding
const MOST = 24; // words
const WORD = /\p{Script=Han}|(?:(?!\p{Script=Han})[\p{L}\p{M}\p{N}])+(?:['’-][\p{L}\p{N}]+)*/gu; // without punctuation

export function open({ element, state, keep, signal }) {
  const set = { sentence: state.sentence ?? "the dog chased the cat", positions: state.positions in KINDS ? state.positions : "none" };
  const words = () => (set.sentence.match(WORD) ?? []).slice(0, MOST);
  let order = restored(state.order, words().length);

  const result = stage("What the new order changes", signal);
  const drawn = stage("The encodings drawn", signal);
  const hand = chips({ changed: (next) => reorder(next) });
  const text = make("input", { maxlength: 400, dir: "auto", autocomplete: "off", spellcheck: "false", input: () => {
    set.sentence = text.value;
    order = words().map((_, place) => place);
    hand.lay(words(), order);
    soon();
  } });
  text.value = set.sentence;

  function reorder(next, focus) {
    order = next;
    hand.lay(words(), order, focus);
    ask();
  }

  function choose(kind) {
    set.positions = kind;
    pick.value = kind;
    mark();
    ask();
  }

  function ask() {
    soon.stop();
    keep({ sentence: set.sentence, positions: set.positions, order: order.every((place, here) => place === here) ? "" : order.join(".") });
    if (!order.length) return result.clear();
    const sentence = words().join(" ");
    const kinds = Object.keys(KINDS);
    const work = (gone) => Promise.all(kinds.map((positions) => post("api/order", { sentence, order, positions, seed: 0 }, gone)));
    result.run(work, (answers, body) => {
      const found = Object.fromEntries(kinds.map((kind, place) => [kind, answers[place]]));
      body.replaceChildren(...shown(found, set.positions, order, signal));
      announce(verdict(found[set.positions], set.positions, order));
    });
  }

  const soon = later(400, ask);
  const pick = choice(Object.entries(KINDS).map(([kind, [title]]) => [kind, title]), set.positions, choose);
  const mark = () => drawn.body.querySelectorAll("button").forEach((node) => node.setAttribute("aria-pressed", String(node.dataset.kind === set.positions)));

  hand.lay(words(), order);
  element.replaceChildren(
    make("div", { class: "controls" }, wide(field("Sentence", text)), field("Positions", pick)),
    make("div", { class: "card" }, make("h2", {}, "Move the words"), hand.element,
      make("div", { class: "flow" }, button("Shuffle", () => reorder(shuffled(order))), button("Reverse", () => reorder([...order].reverse())),
        button("As it was", () => reorder(words().map((_, place) => place)))),
      make("p", { class: "hint" }, `Drag a word, or go to it with Tab and move it with the arrow keys. Up to ${MOST} words, without punctuation.`)),
    result.element,
    make("div", { class: "card" }, make("h2", {}, "The encodings, drawn"), drawn.element),
  );
  signal.addEventListener("abort", () => soon.stop());
  if (order.every((place, here) => place === here)) reorder(shuffled(order));
  else ask();
  gallery(drawn, choose, mark, signal);
}

function wide(node) {
  node.classList.add("grow");
  return node;
}

function restored(text, length) {
  const order = (text ?? "").split(".").map(Number);
  const whole = order.length === length && new Set(order).size === length && order.every((place) => place >= 0 && place < length);
  return text && whole ? order : Array.from({ length }, (_, place) => place);
}

// Another order than now, if there is one
function shuffled(order) {
  const next = [...order];
  for (let tries = 0; tries < 20; tries++) {
    for (let last = next.length - 1; last > 0; last--) {
      const other = Math.floor(Math.random() * (last + 1));
      [next[last], next[other]] = [next[other], next[last]];
    }
    if (next.some((place, here) => place !== order[here])) break;
  }
  return next;
}

// ---- what changes

const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
const sizeOf = (rows) => mean(rows.map((row) => Math.hypot(...row)));

function verdict({ change, before }, kind, order) {
  const most = Math.max(...change);
  const [title] = KINDS[kind];
  if (order.every((place, here) => place === here)) return "The words are in their own order: move one.";
  if (most < SAME) return `With ${title}, nothing changes but the order: each word's output is the same as before, and the largest difference is ${most === 0 ? "0" : tell(most)}.`;
  return `With ${title} positions, each word's output changes: by ${plain(mean(change))} on average, where outputs are ${plain(sizeOf(before))} long.`;
}

function shown(found, kind, order, signal) {
  const answer = found[kind];
  const still = Math.max(...answer.change) < SAME;
  const all = Object.entries(found).map(([name, { change, before }]) => [KINDS[name][0], mean(change) / sizeOf(before), told(mean(change), mean(change) / sizeOf(before))]);
  const most = Math.max(...answer.change, SAME);
  const each = answer.words.map((word, place) => [`${word}  ${place + 1} → ${order.indexOf(place) + 1}`, answer.change[place], tell(answer.change[place], 3)]);
  return [
    make("div", { class: `notice ${still ? "calm" : ""}` }, make("p", { id: "verdict" }, verdict(answer, kind, order))),
    make("div", { class: "pair" },
      make("div", { class: "card" }, make("h2", {}, "How far each word's output moved"), bars(each, { label: "Change of each word", most: still ? 1 : most })),
      make("div", { class: "card" }, make("h2", {}, "The same order, with each encoding"), bars(all, { label: "Mean change with each encoding", chosen: KINDS[kind][0] }),
        make("p", { class: "hint" }, "The mean change, in per cent of an output's length."))),
    make("div", { class: "pair" },
      weights("Weights before", answer.words, answer.weights_before),
      weights("Weights after", answer.shuffled, answer.weights_after)),
    make("div", { class: "pair" },
      outputs("Outputs before", answer.words, answer.before, signal),
      outputs("Outputs after", answer.shuffled, answer.after, signal)),
  ];
}

function told(change, share) {
  return change < SAME ? "nothing" : `${plain(100 * share, 0)} %`;
}

function weights(title, names, values) {
  return make("div", { class: "card" }, make("h2", {}, title),
    scrolled(title, matrix({ label: title, rows: names, columns: names, values, most: 1, small: true })));
}

// A row for each word, with its name beside it
function outputs(title, names, values, signal) {
  const rows = values.map((row, place) => make("div", { class: "strip" },
    make("span", { dir: "auto", title: names[place] }, names[place]), heat([row], { label: `${title}: ${names[place]}`, ratio: "auto", signal })));
  return make("div", { class: "card" }, make("h2", {}, title), make("div", { class: "strips" }, ...rows));
}

// ---- the encodings

function gallery(drawn, choose, mark, signal) {
  const kinds = Object.keys(KINDS).filter((kind) => kind !== "none");
  const address = (kind) => `api/positions?kind=${kind}&length=64&width=${kind === "alibi" || kind === "t5" ? 8 : 64}`;
  drawn.run((gone) => Promise.all(kinds.map((kind) => get(address(kind), gone))), (answers, body) => {
    const figures = answers.map(({ values, rows, columns }, place) => {
      const [title, about] = KINDS[kinds[place]];
      const label = `${title}: ${rows} downwards, ${columns} across`;
      return make("figure", {}, heat(values, { label, ratio: "1", signal }),
        make("figcaption", {}, make("span", {}, `↓ ${rows}, → ${columns}. `), about),
        button(title, () => choose(kinds[place]), { "data-kind": kinds[place] }));
    });
    body.replaceChildren(make("div", { class: "gallery" }, ...figures));
    mark();
  });
}
