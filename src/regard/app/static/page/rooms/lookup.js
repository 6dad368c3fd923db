// The lecture's table: queries, keys and values as numbers, and every step from scores to output.

import { post } from "../api.js";
import { announce, button, choice, count, field, later, make, plain, refill, tell } from "../dom.js";
import { DEFAULTS, MASKS, NORMALIZERS, PRESETS, SCORES, packed, unpacked } from "../lookup/presets.js";
import { editor, nameOf } from "../lookup/tables.js";
import { worked } from "../lookup/working.js";
import { matrix, scrolled } from "../matrix.js";
import { stage } from "../stage.js";

const COLDEST = -2; // of the slider: powers of ten
const HOTTEST = 2;

export function open({ element, state, keep, signal }) {
  const tables = { query: [], key: [], value: [], names: { query: [], key: [] } };
  const settings = { ...DEFAULTS };
  let row = 0;
  let answered = null;

  const steps = stage("Scores, weights and output", signal);
  const about = make("p", { class: "hint", id: "preset-about" });
  const ask = later(60, () => {
    steps.run((gone) => post("api/lookup", question(tables, settings), gone), (answer, body) => {
      answered = { answer, tables: structuredClone(tables), settings: { ...settings } };
      show(body);
      announce(`Output of ${nameOf(tables, "query", row)}: ${answer.output[row].map((number) => plain(number)).join(", ")}`);
    });
  });

  function show(body) {
    body.replaceChildren(shown(answered, row, choose));
  }

  function choose(number) {
    row = number;
    keep({ row: row ? String(row) : "" });
    table.render();
    if (answered && row < answered.tables.query.length) show(steps.body);
  }

  function changed() {
    row = Math.min(row, tables.query.length - 1);
    remember(tables, settings, state, keep);
    ask();
  }

  const table = editor(tables, { changed, chosen: () => row, choose });
  const controls = knobs(settings, changed);
  const presets = Object.entries(PRESETS).map(([name, { title }]) => button(title, () => begin(name), { id: `preset-${name}` }));

  function begin(name) {
    Object.assign(settings, DEFAULTS, pick(PRESETS[name], Object.keys(DEFAULTS)));
    keep({ preset: name, q: "", k: "", v: "", row: "" });
    row = 0;
    lay(tables, PRESETS[name]);
    furnish();
    changed();
  }

  function furnish() {
    const name = state.preset in PRESETS ? state.preset : "words";
    about.textContent = PRESETS[name].about;
    presets.forEach((node) => node.setAttribute("aria-pressed", String(node.id === `preset-${name}`)));
    controls.render();
    table.render();
  }

  restore(state, tables, settings);
  row = Math.min(Number(state.row) || 0, tables.query.length - 1);
  furnish();
  element.replaceChildren(
    make("div", { class: "flow" }, make("span", { class: "lead" }, "Begin with"), ...presets), about,
    table.element, controls.element, steps.element);
  ask.now();
}

function pick(from, names) {
  return Object.fromEntries(names.filter((name) => name in from).map((name) => [name, from[name]]));
}

function lay(tables, { query, key, value, names }) {
  Object.assign(tables, structuredClone({ query, key, value, names }));
}

// ---- the address: the preset, and whatever differs from it

function remember(tables, settings, state, keep) {
  const preset = PRESETS[state.preset in PRESETS ? state.preset : "words"];
  const usual = { ...DEFAULTS, ...pick(preset, Object.keys(DEFAULTS)) };
  const differing = Object.keys(DEFAULTS).map((name) => [name, settings[name] === usual[name] ? "" : String(settings[name])]);
  const own = ["query", "key", "value"].map((side) => [side[0], packed(tables[side]) === packed(preset[side]) ? "" : packed(tables[side])]);
  keep(Object.fromEntries([...differing, ...own]));
}

function restore(state, tables, settings) {
  const preset = PRESETS[state.preset in PRESETS ? state.preset : "words"];
  const given = { query: unpacked(state.q), key: unpacked(state.k), value: unpacked(state.v) };
  const own = Object.fromEntries(Object.entries(given).filter(([, rows]) => rows));
  const all = { ...preset, ...own };
  const fits = all.query[0].length === all.key[0].length && all.key.length === all.value.length;
  lay(tables, fits ? all : preset);
  Object.assign(settings, DEFAULTS, pick(preset, Object.keys(DEFAULTS)));
  const known = { score: SCORES, normalize: NORMALIZERS, mask: MASKS };
  for (const [name, options] of Object.entries(known)) {
    if (options.some(([option]) => option === state[name])) settings[name] = state[name];
  }
  const heat = Number(state.temperature);
  if (heat >= 10 ** COLDEST && heat <= 10 ** HOTTEST) settings.temperature = heat;
  const window = Number(state.window);
  if (window >= 1 && window <= 12) settings.window = Math.round(window);
}

// ---- score, normalizer, temperature, mask

function knobs(settings, changed) {
  const element = make("div", { class: "controls knobs" });
  const set = (name) => (value) => {
    settings[name] = value;
    render();
    changed();
  };

  function temperature() {
    const told = make("output", {}, plain(settings.temperature, 2));
    const slide = () => {
      settings.temperature = Number((10 ** Number(node.value)).toPrecision(3));
      told.textContent = plain(settings.temperature, 2);
      node.setAttribute("aria-valuetext", told.textContent);
      changed();
    };
    const node = make("input", { type: "range", min: COLDEST, max: HOTTEST, step: 0.05, id: "temperature", input: slide });
    node.value = Math.log10(settings.temperature);
    node.setAttribute("aria-valuetext", told.textContent);
    const label = make("label", { for: node.id }, "Temperature ", told);
    return make("div", { class: "entry" }, label, make("div", { class: "ends" }, "hard", node, "soft"));
  }

  function render() {
    const nodes = [
      field("Score", choice(SCORES, settings.score, set("score")), "", "score"),
      field("Normalizer, hard to soft", choice(NORMALIZERS, settings.normalize, set("normalize")), "", "normalize"),
      temperature(),
      field("Mask", choice(MASKS, settings.mask, set("mask")), "", "mask"),
    ];
    if (settings.mask === "window") {
      const node = field("Window", count(settings.window, 1, 12, set("window")), "", "window");
      node.classList.add("small");
      nodes.push(node);
    }
    refill(element, ...nodes);
  }

  return { element, render };
}

function question({ query, key, value }, settings) {
  return { query, key, value, ...settings };
}

// ---- the steps

function shown({ answer, tables, settings }, row, choose) {
  const queries = tables.query.map((_, number) => nameOf(tables, "query", number));
  const keys = tables.key.map((_, number) => nameOf(tables, "key", number));
  const masked = answer.masked.flat().some(Boolean) ? answer.masked : undefined;
  const tau = { name: "τ", values: answer.tau.map((number) => tell(number)) };
  const values = tables.value[0].map((_, number) => `v${number + 1}`);
  const common = { rows: queries, chosen: row };
  const nodes = [
    step("Scores", "s", answer.formula.score, { ...common, columns: keys, values: answer.scores }),
    masked && step("Masked", "s", "s where the query may look, else −∞", { ...common, columns: keys, values: answer.scores, masked }),
    step("Weights", "w", answer.formula.normalize, { ...common, columns: keys, values: answer.weights, most: Math.max(1, ...answer.weights.flat()), aside: tau }),
    step("Output", "o", answer.formula.output, { ...common, columns: values, values: answer.output }),
  ].filter(Boolean);
  for (const node of nodes) {
    node.addEventListener("click", (event) => {
      const line = event.target.closest("tbody tr");
      if (line) choose(line.sectionRowIndex);
    });
  }
  const numbers = make("div", { class: "card" },
    make("h2", {}, "In numbers: ", make("span", { dir: "auto" }, queries[row])), worked(tables, settings, answer, row));
  return make("div", {}, make("div", { class: "stages" }, ...nodes), numbers);
}

function step(title, letter, formula, options) {
  return make("section", { class: "card calculation" },
    make("h2", {}, title), make("p", { class: "formula" }, make("var", {}, letter), ` = ${formula}`),
    scrolled(`${title} as a table`, matrix({ label: title, ...options })));
}
