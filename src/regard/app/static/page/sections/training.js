// Live training curves, current values, and sample translations with their alignment.

import { get, sleep } from "../../shared/client.js";
import { formatCount, make, select } from "../../shared/dom.js";
import { makeChart } from "../chart.js";
import { announce, field } from "../controls.js";
import { formatNumber, formatShort } from "../format.js";
import { matrix } from "../matrix.js";
import { demoButton, emptyState, makePanel } from "../panel.js";

export const about = { place: 7, title: "Training", text: "Live training curves and sample translations.", chapters: ["attention-for-translation", "transformer"] };

const POLL_INTERVAL = 2000; // milliseconds
const IDLE_INTERVAL = 5000; // milliseconds, for an inactive run, which may be resumed at any time
const STATES = { running: "Running.", finished: "Finished.", stopped: "Stopped. Resume with regard train --resume." };

export function open({ element, state, save, pending, demo, missing, signal }) {
  const panel = makePanel("Training runs", signal);
  element.replaceChildren(panel.element);
  const load = () => panel.run((abort) => get("api/training", abort), ({ trainings }, body) => {
    if (!trainings.length) return showEmpty(body, pending, demo && !missing, load, signal);
    const known = trainings.some(({ name }) => name === state.name);
    const first = known ? state.name : (trainings.find((training) => training.state === "running") ?? trainings[0]).name;
    const container = make("div");
    let closing = new AbortController();
    const show = (name) => {
      closing.abort();
      closing = new AbortController();
      save({ name });
      const option = [...runs.options].find(({ value }) => value === name);
      const updateLabel = (steps, current) => (option.textContent = runLabel({ name, steps, state: current }));
      follow(container, name, updateLabel, state, save, AbortSignal.any([closing.signal, signal]));
    };
    const runs = select(trainings.map((training) => [training.name, runLabel(training)]), first, show);
    body.replaceChildren(make("div", { class: "controls" }, field("Training run", runs)), container);
    show(first);
  });
  load();
}

// Checks repeatedly for runs, because one may start at any time
function showEmpty(body, pending, demo, load, signal) {
  if (body.querySelector(".empty-state")?.dataset.pending !== String(pending.length)) { // unchanged: the button keeps the focus
    const empty = pending.length
      ? emptyState("Training is starting", "Data and vocabulary are being prepared. Curves appear after the first updates.")
      : emptyState("No training runs", "Start one and open its folder; its curves appear here during training.", "regard train SOURCE TARGET --output FOLDER", "regard look FOLDER");
    if (demo && !pending.length) empty.append(demoButton());
    empty.dataset.pending = String(pending.length);
    body.replaceChildren(empty);
  }
  sleep(POLL_INTERVAL, signal).then(load, () => {});
}

function runLabel({ name, steps, state }) {
  return `${name}: ${formatCount(steps)} ${steps === 1 ? "update" : "updates"}, ${state}`;
}

// ---- one run

function follow(container, name, updateLabel, state, save, signal) {
  const rows = [];
  const samples = [];
  const loss = makeChart({ label: "Loss by update", x: "updates", integers: true, fromZero: true, signal });
  const bleu = makeChart({ label: "Validation BLEU by update", x: "updates", integers: true, fromZero: true, signal });
  const waiting = make("p", { class: "hint" }, "No values yet. They appear at the first validation.");
  const values = make("dl", { class: "numbers" });
  const status = make("p", { class: "live", "aria-live": "off" });
  const player = makePlayer(state, save);
  const panel = makePanel(name, signal);
  let running = true;
  let reload = false; // whether to request again without waiting

  function show(answer, body) {
    if (answer.steps < (rows.at(-1)?.step ?? 0)) { // the run was resumed from a checkpoint, or restarted
      rows.length = samples.length = 0;
      reload = true;
      return;
    }
    rows.push(...answer.rows.filter(({ step }) => step > (rows.at(-1)?.step ?? -1)));
    samples.push(...answer.samples.filter(({ step, source }) => !samples.some((sample) => sample.step === step && sample.source === source)));
    if (!body.hasChildNodes()) body.replaceChildren(...layout(loss, bleu, waiting, values, status, player));
    const points = (column) => rows.filter((row) => row[column] !== null).map((row) => [row.step, row[column]]);
    loss.update([{ name: "training loss", points: points("loss") }, { name: "validation loss", points: points("dev_loss"), dots: true }]);
    bleu.update([{ name: "validation BLEU", points: points("dev_bleu"), dots: true, color: 2 }]);
    waiting.hidden = rows.some((row) => row.dev_bleu !== null);
    [loss.element.hidden, bleu.element.hidden] = [!rows.length, !waiting.hidden]; // axes without a curve would look like a result
    values.replaceChildren(...currentValues(rows));
    running = answer.state === "running";
    updateLabel(answer.steps, answer.state);
    status.textContent = STATES[answer.state] + (running && !rows.length ? " Curves appear after the first updates." : "");
    status.classList.toggle("on", running);
    player.update(samples);
  }

  // Requests the last validation again, because its samples may be written after its row
  const after = () => (rows.findLast((row) => row.dev_bleu !== null)?.step ?? 0) - 1;
  const request = (abort) => get(`api/training/${encodeURIComponent(name)}?after=${after()}`, abort);

  async function poll() {
    while (!signal.aborted) {
      reload = false;
      await panel.run(request, show, { polled: true });
      if (!reload) await sleep(running ? POLL_INTERVAL : IDLE_INTERVAL, signal);
    }
  }

  container.replaceChildren(panel.element);
  poll().catch(() => {}); // the section was closed
  announce(`Training run ${name}`);
}

function layout(loss, bleu, waiting, values, status, player) {
  return [
    make("div", { class: "card" }, make("div", { class: "headline" }, make("h2", {}, "Current values"), status), values),
    make("div", { class: "pair" },
      make("div", { class: "card" }, make("h2", {}, "Loss"), loss.element),
      make("div", { class: "card" }, make("h2", {}, "Validation BLEU"), waiting, bleu.element)),
    player.element,
  ];
}

function currentValues(rows) {
  const last = (column) => rows.findLast((row) => row[column] !== null)?.[column] ?? null;
  const seconds = last("seconds");
  const values = [
    ["updates", rows.length ? formatCount(last("step")) : "–"],
    ["training loss", formatNumber(last("loss"))],
    ["validation loss", formatNumber(last("dev_loss"))],
    ["validation BLEU", last("dev_bleu") === null ? "–" : last("dev_bleu").toFixed(1)],
    ["tokens per second", last("tokens_per_second") === null ? "–" : formatCount(last("tokens_per_second"))],
    ["learning rate", last("learning_rate") === null ? "–" : formatShort(last("learning_rate"), 5)],
    ["time", seconds === null ? "–" : formatTime(seconds)],
  ];
  return values.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
}

function formatTime(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.round(seconds)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// ---- samples by validation

function makePlayer(state, save) {
  const element = make("div", { class: "card" });
  const slider = make("input", { type: "range", min: 0, step: 1, id: "validation" });
  const step = make("output");
  const sentences = make("select", { change: () => save({ sample: sentences.value === "0" ? "" : sentences.value }) });
  const view = make("div");
  let groups = []; // pairs of a source sentence and its samples by step
  let atEnd = true; // whether to follow new validations

  slider.addEventListener("input", () => {
    atEnd = Number(slider.value) === Number(slider.max);
    show();
  });
  sentences.addEventListener("change", () => {
    atEnd = true;
    update(groups.flatMap(([, samples]) => samples));
  });

  function update(samples) {
    const bySource = Map.groupBy(samples, ({ source }) => source);
    const sources = [...bySource.keys()];
    if (sources.length !== groups.length) {
      sentences.replaceChildren(...sources.map((source, index) => make("option", { value: index }, source)));
      sentences.value = sources[Number(state.sample)] === undefined ? "0" : state.sample;
    }
    groups = [...bySource].map(([source, list]) => [source, list.sort((a, b) => a.step - b.step)]);
    if (!groups.length) return element.replaceChildren(make("h2", {}, "Sample translations"), make("p", { class: "hint" }, "No samples yet. They appear at each validation."));
    const last = selectedSamples().length - 1;
    slider.max = last;
    if (atEnd) slider.value = last;
    if (!element.contains(slider)) build();
    show();
  }

  const selectedSamples = () => groups[Number(sentences.value)]?.[1] ?? groups[0][1];

  function build() {
    element.replaceChildren(make("h2", {}, "Sample translations"),
      make("div", { class: "controls" }, field("Sentence", sentences),
        make("div", { class: "entry grow" }, make("label", { for: slider.id }, "After ", step), slider)), view);
  }

  function show() {
    const sample = selectedSamples()[Number(slider.value)];
    step.textContent = `${formatCount(sample.step)} updates`;
    slider.setAttribute("aria-valuetext", step.textContent);
    view.replaceChildren(...showSample(sample));
  }

  return { element, update };
}

function showSample({ source, text, reference, alignment }) {
  const lines = [["source", source], ["translation", text || "(empty)"], ["reference", reference]].filter(([, value]) => value);
  const list = make("dl", { class: "sample" }, ...lines.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", { dir: "auto" }, value))));
  const reason = text ? "This model has no attention, so there is no alignment to show." : "The translation is empty, so there is no alignment to show.";
  if (!alignment?.weights?.length) return [list, make("p", { class: "hint" }, reason)];
  const { source_words: columns, target_words: rows, weights } = alignment;
  const table = matrix({ label: "Alignment", rows, columns, values: weights, max: 1, small: true, fit: true });
  return [list, make("p", { class: "hint" }, "Alignment: rows are the words of the translation, columns the words of the source."), table];
}
