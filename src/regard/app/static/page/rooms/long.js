// A whole text as a map: pasted, or read from a file in the browser, or made up on the spot.

import { post } from "../api.js";
import { announce, button, choice, field, grouped, later, make } from "../dom.js";
import { exhibitor } from "../exhibit.js";
import { song } from "../song.js";
import { note, stage } from "../stage.js";

const LONGEST = 1_000_000; // characters, and what the server takes
const TOKENS = 40_000;
const EXAMPLE = 32_000; // words
const SHARED = 1500; // characters of a text that still fits into an address

export function open({ element, state, keep, models, signal }) {
  const looking = models.filter(({ attends, kind }) => attends && kind === "encoder");
  const names = [["words", "words of this text"], ...looking.map(({ name, longest }) => [name, longest ? `${name}: up to ${grouped(longest)} tokens` : name])];
  const set = { model: names.some(([name]) => name === state.model) ? state.model : "words" };

  const place = stage("The map", signal);
  const view = exhibitor({ view: "matrix" }, signal);
  const tally = make("span", { class: "tally" });
  const text = make("textarea", { rows: 6, dir: "auto", spellcheck: "false", placeholder: "Paste a text here" });
  const picked = make("input", { type: "file", accept: ".txt,.md,.csv,.tex,.srt,.json,text/*", change: () => read(picked.files[0]) });

  const counted = () => {
    const words = text.value.match(/\S+/g)?.length ?? 0;
    tally.textContent = `${grouped(words)} words, ${grouped(text.value.length)} characters`;
    return words;
  };
  const recount = later(200, counted);

  async function read(file) {
    if (!file) return;
    if (file.size > 4 * LONGEST) return refuse(`${file.name} has ${grouped(file.size)} bytes, and a text may have ${grouped(LONGEST)} characters. Choose a shorter one.`);
    const content = await file.text();
    if (content.includes("\0")) return refuse(`${file.name} is no text file. Choose one with plain text in it.`);
    lay(content);
    picked.value = ""; // the same file can be chosen again
  }

  function refuse(message) {
    picked.value = "";
    place.clear();
    place.body.replaceChildren(note(message));
  }

  function lay(content) {
    text.value = content;
    ask();
  }

  function ask() {
    const words = counted();
    keep({ model: set.model === "words" ? "" : set.model, text: text.value.length <= SHARED && !made() ? text.value : "", example: made() ? "1" : "" });
    if (!text.value.trim()) return nothing();
    if (text.value.length > LONGEST) return refuse(`The text has ${grouped(text.value.length)} characters; up to ${grouped(LONGEST)} can be shown. Cut it.`);
    const question = { model: set.model, text: text.value };
    place.run((gone) => post("api/long", question, gone), (answer, body) => {
      body.replaceChildren(make("div", { class: "card" }, view.element));
      view.show(answer);
      announce(`The map of ${grouped(words)} words is shown.`);
    });
  }

  let epic = null;
  const made = () => epic !== null && text.value === epic;

  function example() {
    epic ??= song(EXAMPLE);
    lay(epic);
  }

  function nothing() {
    view.clear();
    place.clear();
    place.body.replaceChildren(make("div", { class: "vacant" }, make("h2", {}, "No text yet"),
      make("p", {}, "Paste one, choose a file, or try the example: an epic whose cantos return, which shows as diagonals in the map, as what is said twice looks at itself.")));
  }

  text.addEventListener("input", recount);
  element.replaceChildren(
    make("div", { class: "long-text" }, field("Text", text, `Up to ${grouped(TOKENS)} words; a file is read in the browser and goes nowhere but to your own server.`)),
    make("div", { class: "flow below" },
      make("label", { class: "upload" }, "Choose a text file", picked),
      button("An example of 32,000 words", example), tally),
    make("div", { class: "controls" },
      field("Attention of", choice(names, set.model, (value) => {
        set.model = value;
        ask();
      })),
      button("Show the map", ask, { class: "primary" })),
    place.element,
  );
  signal.addEventListener("abort", () => recount.stop());
  if (state.example) example();
  else lay(state.text ?? "");
}
