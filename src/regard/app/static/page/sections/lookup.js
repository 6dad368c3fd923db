// A table of queries, keys and values, and every step from scores to output.

import { post } from "../../shared/client.js";
import { button, make, pick, select } from "../../shared/dom.js";
import { makeChart } from "../chart.js";
import { announce, debounce, field, numberInput, replaceKeepingFocus } from "../controls.js";
import { formatNumber, formatShort } from "../format.js";
import { calculation } from "../lookup/calculation.js";
import { DEFAULTS, MASKS, NORMALIZERS, PRESETS, SCORES, formatTable, parseTable } from "../lookup/presets.js";
import { nameOf, tableEditor } from "../lookup/tables.js";
import { matrix, scrollable } from "../matrix.js";
import { makePanel } from "../panel.js";

export const about = { place: 2, title: "Lookup", text: "Attention as a lookup: compare a query with every key, then average the values by their weights.", chapters: ["from-a-dictionary-to-attention", "scores-and-normalizers"] };

const MIN_TEMPERATURE = -2; // exponents of ten
const MAX_TEMPERATURE = 2;
const MAX_WINDOW = 12;
const CURVE_POINTS = 61; // the server takes up to 64 queries

export function open({ element, state, save, signal }) {
  const tables = { query: [], key: [], value: [], names: { query: [], key: [] } };
  const settings = { ...DEFAULTS };
  let row = 0;
  let latest = null; // the last answer, with its tables and settings

  const steps = makePanel("Scores, weights and output", signal);
  const about = make("p", { class: "hint", id: "preset-about" });
  const update = debounce(60, () => {
    const { query, key, value } = tables;
    const points = curvePoints(tables, settings);
    const request = async (abort) => Promise.all([query, points].map((rows) => rows && post("api/lookup", { query: rows, key, value, ...settings }, abort)));
    steps.run(request, ([answer, curve], body) => {
      latest = { answer, curve: curve && points.map(([at], index) => [at, curve.output[index][0]]), tables: structuredClone(tables), settings: { ...settings } };
      body.replaceChildren(showSteps(latest, row, selectRow, signal));
      announce(`Output of ${nameOf(tables, "query", row)}: ${answer.output[row].map((number) => formatShort(number)).join(", ")}`);
    });
  });

  function selectRow(number) {
    row = number;
    save({ row: row ? String(row) : "" });
    editor.render();
    if (latest && row < latest.tables.query.length) steps.body.replaceChildren(showSteps(latest, row, selectRow, signal));
  }

  function changed() {
    row = Math.min(row, tables.query.length - 1);
    saveSettings(tables, settings, state, save);
    update();
  }

  const editor = tableEditor(tables, { changed, selected: () => row, select: selectRow });
  const controls = makeControls(settings, changed);
  const presets = Object.entries(PRESETS).map(([name, { title }]) => button(title, () => openPreset(name), { id: `preset-${name}` }));

  function openPreset(name) {
    Object.assign(settings, DEFAULTS, pick(PRESETS[name], Object.keys(DEFAULTS)));
    save({ preset: name, q: "", k: "", v: "", row: "" });
    row = 0;
    setTables(tables, PRESETS[name]);
    render();
    changed();
  }

  function render() {
    const name = state.preset in PRESETS ? state.preset : "words";
    about.textContent = PRESETS[name].about;
    presets.forEach((node) => node.setAttribute("aria-pressed", String(node.id === `preset-${name}`)));
    controls.render();
    editor.render();
  }

  restore(state, tables, settings);
  row = Math.min(Number(state.row) || 0, tables.query.length - 1);
  render();
  element.replaceChildren(
    make("div", { class: "flow" }, make("span", { class: "lead" }, "Examples"), ...presets), about,
    editor.element, controls.element, steps.element);
  update.now();
}

function setTables(tables, { query, key, value, names }) {
  Object.assign(tables, structuredClone({ query, key, value, names }));
}

// ---- the URL stores the preset and all changes to it

function saveSettings(tables, settings, state, save) {
  const preset = PRESETS[state.preset in PRESETS ? state.preset : "words"];
  const defaults = { ...DEFAULTS, ...pick(preset, Object.keys(DEFAULTS)) };
  const changed = Object.keys(DEFAULTS).map((name) => [name, settings[name] === defaults[name] ? "" : String(settings[name])]);
  const edited = ["query", "key", "value"].map((side) => [side[0], formatTable(tables[side]) === formatTable(preset[side]) ? "" : formatTable(tables[side])]);
  save(Object.fromEntries([...changed, ...edited]));
}

function restore(state, tables, settings) {
  const preset = PRESETS[state.preset in PRESETS ? state.preset : "words"];
  const saved = { query: parseTable(state.q), key: parseTable(state.k), value: parseTable(state.v) };
  const all = { ...preset, ...Object.fromEntries(Object.entries(saved).filter(([, rows]) => rows)) };
  const fits = all.query[0].length === all.key[0].length && all.key.length === all.value.length;
  setTables(tables, fits ? all : preset);
  Object.assign(settings, DEFAULTS, pick(preset, Object.keys(DEFAULTS)));
  for (const [name, options] of Object.entries({ score: SCORES, normalize: NORMALIZERS, mask: MASKS })) {
    if (options.some(([option]) => option === state[name])) settings[name] = state[name];
  }
  const temperature = Number(state.temperature);
  if (temperature >= 10 ** MIN_TEMPERATURE && temperature <= 10 ** MAX_TEMPERATURE) settings.temperature = temperature;
  const window = Number(state.window);
  if (window >= 1 && window <= MAX_WINDOW) settings.window = Math.round(window);
}

// ---- score, normalizer, temperature, mask

function makeControls(settings, changed) {
  const element = make("div", { class: "controls knobs" });
  const change = (name) => (value) => {
    settings[name] = value;
    render();
    changed();
  };

  function temperatureSlider() {
    const value = make("output", {}, formatShort(settings.temperature, 2));
    const slide = () => {
      settings.temperature = Number((10 ** Number(node.value)).toPrecision(3));
      value.textContent = formatShort(settings.temperature, 2);
      node.setAttribute("aria-valuetext", value.textContent);
      changed();
    };
    const node = make("input", { type: "range", min: MIN_TEMPERATURE, max: MAX_TEMPERATURE, step: 0.05, id: "temperature", input: slide });
    node.value = Math.log10(settings.temperature);
    node.setAttribute("aria-valuetext", value.textContent);
    const label = make("label", { for: node.id }, "Temperature ", value);
    return make("div", { class: "entry" }, label, make("div", { class: "ends" }, "hard", node, "soft"));
  }

  function render() {
    const nodes = [
      field("Score", select(SCORES, settings.score, change("score")), "", "score"),
      field("Normalizer, hard to soft", select(NORMALIZERS, settings.normalize, change("normalize")), "", "normalize"),
      temperatureSlider(),
      field("Mask", select(MASKS, settings.mask, change("mask")), "", "mask"),
    ];
    if (settings.mask === "window") {
      const node = field("Window", numberInput(settings.window, 1, MAX_WINDOW, change("window")), "", "window");
      node.classList.add("small");
      nodes.push(node);
    }
    replaceKeepingFocus(element, ...nodes);
  }

  return { element, render };
}

// ---- keys that are points on a line: the weight of each key, the values, and the output for every query

const isLine = ({ key, value }) => key.length > 1 && key[0].length === 1 && value[0].length === 1;

// Returns queries along the line; null if the keys are not on a line, or if a mask makes the order of queries matter
function curvePoints(tables, { mask }) {
  if (!isLine(tables) || mask !== "none") return null;
  const positions = [...tables.key, ...tables.query].map(([position]) => position);
  const [low, high] = [Math.min(...positions), Math.max(...positions)];
  return Array.from({ length: CURVE_POINTS }, (_, index) => [Number((low + ((high - low) * index) / (CURVE_POINTS - 1)).toPrecision(6))]);
}

function lineOfKeys(tables, answer, curve, row, signal) {
  if (!isLine(tables)) return [];
  const sorted = (numbers) => tables.key.map(([key], index) => [key, numbers[index]]).sort(([a], [b]) => a - b);
  const [at] = tables.query[row];
  const chart = makeChart({ label: "Weight and value of each key", x: "key", height: 220, signal });
  const title = make("h2", {}, "Weights over the keys: ", make("span", { dir: "auto" }, nameOf(tables, "query", row)));
  const hint = make("p", { class: "hint" }, "The weights peak at the keys closest to the query; the output is the average of the values, weighted accordingly.");
  chart.update([
    { name: "weight of each key", points: sorted(answer.weights[row]), dots: true, color: 0 },
    { name: "value of each key", points: sorted(tables.value.map(([value]) => value)), dots: true, line: false, color: 1 },
    ...(curve ? [{ name: "output for every query", points: curve, color: 2 }] : []),
    { name: `output at ${formatShort(at)}`, points: [[at, answer.output[row][0]]], dots: true, line: false, color: 3 },
  ]);
  return [make("div", { class: "card line-of-keys" }, title, chart.element, hint)];
}

// ---- the steps

function showSteps({ answer, curve, tables, settings }, row, selectRow, signal) {
  const queries = tables.query.map((_, number) => nameOf(tables, "query", number));
  const keys = tables.key.map((_, number) => nameOf(tables, "key", number));
  const masked = answer.masked.flat().some(Boolean) ? answer.masked : undefined;
  const isSoftmax = settings.normalize === "softmax";
  const scaled = settings.temperature === 1 ? "s" : `s / ${formatShort(settings.temperature)}`;
  const formula = isSoftmax ? `exp(${scaled}) / Σ exp(${scaled})` : answer.formula.normalize;
  const tau = isSoftmax ? null : { name: "τ", values: answer.tau.map((number) => formatNumber(number)) };
  const values = tables.value[0].map((_, number) => `v${number + 1}`);
  const common = { rows: queries, selected: row };
  const nodes = [
    step("Scores", "s", answer.formula.score, { ...common, columns: keys, values: answer.scores }),
    masked && step("Masked scores", "s′", "s if the mask allows the key, else −∞", { ...common, columns: keys, values: answer.scores, masked }),
    step("Weights", "w", formula, { ...common, columns: keys, values: answer.weights, max: Math.max(1, ...answer.weights.flat()), extra: tau }),
    step("Output", "o", answer.formula.output, { ...common, columns: values, values: answer.output }),
  ].filter(Boolean);
  for (const node of nodes) {
    node.addEventListener("click", (event) => {
      const line = event.target.closest("tbody tr");
      if (line) selectRow(line.sectionRowIndex);
    });
  }
  if (isSoftmax) nodes.find((node) => node.querySelector("h2").textContent === "Weights").append(
    make("p", { class: "hint" }, "The same value, numerically stable for large scores: exp(s − τ), where τ = log Σ exp(s)."));
  const numbers = make("div", { class: "card" },
    make("h2", {}, "Step by step: ", make("span", { dir: "auto" }, queries[row])), calculation(tables, settings, answer, row));
  return make("div", {}, ...lineOfKeys(tables, answer, curve, row, signal), make("div", { class: "lookup-steps" }, ...nodes), numbers);
}

function step(title, letter, formula, options) {
  return make("section", { class: "card calculation" },
    make("h2", {}, title), make("p", { class: "formula" }, make("var", {}, letter), ` = ${formula}`),
    scrollable(`${title} as a table`, matrix({ label: title, ...options })));
}
