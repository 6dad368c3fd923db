// How a model learns: curves that grow while it does, the numbers of now, and a sample's changing alignment.

import { get, pause } from "../api.js";
import { chart } from "../chart.js";
import { announce, choice, field, grouped, make, plain, tell } from "../dom.js";
import { matrix, scrolled } from "../matrix.js";
import { empty, stage } from "../stage.js";

const EVERY = 2000; // milliseconds between looks
const AT_REST = 5000; // at one that does not run: it may be resumed any time
const STATES = { running: "Running.", finished: "Finished.", stopped: "Stopped before its end; regard train --resume goes on with it." };
const COMMAND = "regard train SOURCE TARGET --output FOLDER";

export function open({ element, state, keep, pending, signal }) {
  const place = stage("Trainings", signal);
  element.replaceChildren(place.element);
  const begin = () => place.run((gone) => get("api/training", gone), ({ trainings }, body) => {
    if (!trainings.length) return nothing(body, pending, begin, signal);
    const known = trainings.some(({ name }) => name === state.name);
    const chosen = known ? state.name : (trainings.find(({ state: now }) => now === "running") ?? trainings[0]).name;
    const room = make("div");
    let leave = new AbortController();
    const show = (name) => {
      leave.abort();
      leave = new AbortController();
      keep({ name });
      const own = [...pick.options].find(({ value }) => value === name);
      const news = (steps, now) => (own.textContent = labelled({ name, steps, state: now }));
      follow(room, name, news, state, keep, AbortSignal.any([leave.signal, signal]));
    };
    const pick = choice(trainings.map((one) => [one.name, labelled(one)]), chosen, show);
    body.replaceChildren(make("div", { class: "controls" }, field("Training", pick)), room);
    show(chosen);
  });
  begin();
}

// Looks again by itself: a training may begin any time
function nothing(body, pending, again, signal) {
  const without = () => empty("No training to look at", "Start one, and name its folder when you open the page; its curves appear here while it learns.", COMMAND, "regard look FOLDER");
  const begun = () => empty("The training begins", "Its data and vocabulary are being prepared; its curves appear here after the first updates.");
  body.replaceChildren(pending.length ? begun() : without());
  pause(EVERY, signal).then(again, () => {});
}

function labelled({ name, steps, state }) {
  return `${name}: ${grouped(steps)} updates, ${state}`;
}

// ---- one training

function follow(room, name, news, state, keep, signal) {
  const rows = [];
  const samples = [];
  const loss = chart({ label: "Loss over updates", x: "updates", whole: true, zero: true, signal });
  const bleu = chart({ label: "Dev BLEU over updates", x: "updates", whole: true, zero: true, signal });
  const now = make("dl", { class: "numbers" });
  const live = make("p", { class: "live", "aria-live": "off" });
  const player = playback(state, keep);
  const place = stage(name, signal);
  let running = true;
  let again = false; // at once

  function show(answer, body) {
    if (answer.steps < (rows.at(-1)?.step ?? 0)) { // it went back to a checkpoint, or began anew
      rows.length = samples.length = 0;
      again = true;
      return;
    }
    const fresh = answer.rows.filter(({ step }) => step > (rows.at(-1)?.step ?? -1));
    rows.push(...fresh);
    samples.push(...answer.samples.filter(({ step, source }) => !samples.some((one) => one.step === step && one.source === source)));
    if (!body.hasChildNodes()) body.replaceChildren(...furniture(loss, bleu, now, live, player));
    const line = (column) => rows.filter((row) => row[column] !== null).map((row) => [row.step, row[column]]);
    loss.update([{ name: "loss", points: line("loss") }, { name: "dev loss", points: line("dev_loss"), dots: true }]);
    bleu.update([{ name: "dev BLEU", points: line("dev_bleu"), dots: true, tone: 2 }]);
    now.replaceChildren(...current(rows));
    running = answer.state === "running";
    news(answer.steps, answer.state);
    live.textContent = STATES[answer.state];
    live.classList.toggle("on", running);
    player.update(samples);
  }

  // From the last judgement on once more: its sample may be written after its row
  const after = () => (rows.findLast((row) => row.dev_bleu !== null)?.step ?? 0) - 1;
  const work = (gone) => get(`api/training/${encodeURIComponent(name)}?after=${after()}`, gone);

  async function poll() {
    while (!signal.aborted) {
      again = false;
      await place.run(work, show);
      if (!again) await pause(running ? EVERY : AT_REST, signal);
    }
  }

  room.replaceChildren(place.element);
  poll().catch(() => {}); // left
  announce(`Training ${name}`);
}

function furniture(loss, bleu, now, live, player) {
  return [
    make("div", { class: "card" }, make("div", { class: "headline" }, make("h2", {}, "Now"), live), now),
    make("div", { class: "pair" },
      make("div", { class: "card" }, make("h2", {}, "Loss"), loss.element),
      make("div", { class: "card" }, make("h2", {}, "BLEU on the dev data"), bleu.element)),
    player.element,
  ];
}

function current(rows) {
  const last = (column) => rows.findLast((row) => row[column] !== null)?.[column] ?? null;
  const seconds = last("seconds");
  const facts = [
    ["updates", rows.length ? grouped(last("step")) : "–"],
    ["loss", tell(last("loss"))],
    ["dev loss", tell(last("dev_loss"))],
    ["dev BLEU", tell(last("dev_bleu"), 1)],
    ["tokens per second", last("tokens_per_second") === null ? "–" : grouped(last("tokens_per_second"))],
    ["learning rate", last("learning_rate") === null ? "–" : plain(last("learning_rate"), 5)],
    ["time", seconds === null ? "–" : time(seconds)],
  ];
  return facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
}

function time(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.round(seconds)} s`;
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// ---- a sample, judgement by judgement

function playback(state, keep) {
  const element = make("div", { class: "card" });
  const slider = make("input", { type: "range", min: 0, step: 1 });
  const told = make("output");
  const pick = make("select", { change: () => keep({ sample: pick.value === "0" ? "" : pick.value }) });
  const view = make("div");
  let groups = []; // [source, its samples by step]
  let following = true;

  slider.addEventListener("input", () => {
    following = Number(slider.value) === Number(slider.max);
    show();
  });
  pick.addEventListener("change", () => {
    following = true;
    update(groups.flatMap(([, own]) => own));
  });

  function update(samples) {
    const bySource = Map.groupBy(samples, ({ source }) => source);
    const names = [...bySource.keys()];
    if (names.length !== groups.length) {
      pick.replaceChildren(...names.map((source, place) => make("option", { value: place }, source)));
      pick.value = names[Number(state.sample)] === undefined ? "0" : state.sample;
    }
    groups = [...bySource].map(([source, own]) => [source, own.sort((one, other) => one.step - other.step)]);
    if (!groups.length) return element.replaceChildren(make("h2", {}, "A sample"), make("p", { class: "hint" }, "The training has not written any sample yet: it does so each time it is judged on the dev data."));
    const last = own().length - 1;
    slider.max = last;
    if (following) slider.value = last;
    if (!element.contains(slider)) furnish();
    show();
  }

  const own = () => groups[Number(pick.value)]?.[1] ?? groups[0][1];

  function furnish() {
    slider.id = "judgement";
    element.replaceChildren(make("h2", {}, "A sample, as it was translated on the way"),
      make("div", { class: "controls" }, field("Sentence", pick),
        make("div", { class: "entry grow" }, make("label", { for: slider.id }, "After ", told), slider)), view);
  }

  function show() {
    const sample = own()[Number(slider.value)];
    told.textContent = `${grouped(sample.step)} updates`;
    slider.setAttribute("aria-valuetext", told.textContent);
    view.replaceChildren(...sampled(sample));
  }

  return { element, update };
}

function sampled({ source, text, reference, alignment }) {
  const lines = [["source", source], ["translation", text || "(nothing)"], ["reference", reference]].filter(([, value]) => value);
  const facts = make("dl", { class: "sample" }, ...lines.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", { dir: "auto" }, value))));
  const why = text ? "This model does not say where its words come from." : "It had no words yet.";
  if (!alignment?.weights?.length) return [facts, make("p", { class: "hint" }, why)];
  const { source_words, target_words, weights } = alignment;
  const table = matrix({ label: "Alignment", rows: target_words, columns: source_words, values: weights, most: 1, small: true });
  return [facts, scrolled("Alignment: a row for each word of the translation", table)];
}
