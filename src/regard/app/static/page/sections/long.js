// Attention over a long text: pasted, read from a file, or the sample text.

import { post } from "../../shared/client.js";
import { button, formatCount, make, select } from "../../shared/dom.js";
import { announce, debounce, field } from "../controls.js";
import { makePanel, notice } from "../panel.js";
import { sampleText } from "../sample_text.js";
import { describeLink, viewer } from "../viewer.js";

export const about = { place: 6, title: "Long text", text: "A model’s attention over a whole document, exact at every zoom level.", chapters: ["how-it-is-fast"] };

const MAX_CHARACTERS = 1_000_000; // the limit of the server
const CO_OCCURRENCE = "co-occurrence"; // not a model: similarity of words in the text itself
const SAMPLE_WORDS = { stories: 4_000, poem: 32_000 };
const MAX_SHARED = 1500; // texts of up to this many characters are stored in the URL

export function open({ element, state, save, models, signal }) {
  const encoders = models.filter(({ attends, kind }) => attends && kind === "encoder");
  const options = [
    ...encoders.map(({ name, max_tokens: limit }) => [name, limit ? `${name}, in passages of ${formatCount(limit)} tokens` : name]),
    ...(encoders.some(({ name }) => name === "stories") ? [] : [["stories", "stories, a small model with its own vocabulary"]]),
    [CO_OCCURRENCE, "no model: co-occurrence of words"],
  ];
  const [[first]] = options;
  let model = options.some(([name]) => name === state.model) ? state.model : first;
  let sample = null; // the sample text that was inserted last

  const panel = makePanel("Attention map", signal);
  const view = viewer({ view: "matrix" }, signal);
  const size = make("span", { class: "text-size" });
  const text = make("textarea", { rows: 6, dir: "auto", spellcheck: "false", placeholder: "Paste text here" });
  const sampleButton = button("", showSample);
  const file = make("input", { type: "file", accept: ".txt,.md,.csv,.tex,.srt,.json,text/*", change: () => read(file.files[0]) });

  const showSize = () => {
    const words = text.value.match(/\S+/g)?.length ?? 0;
    const nouns = [words === 1 ? "word" : "words", text.value.length === 1 ? "character" : "characters"];
    size.textContent = `${formatCount(words)} ${nouns[0]}, ${formatCount(text.value.length)} ${nouns[1]}`;
    return words;
  };
  const showSizeSoon = debounce(200, showSize);

  async function read(chosen) {
    if (!chosen) return;
    if (chosen.size > 4 * MAX_CHARACTERS) return refuse(`${chosen.name} is too large: ${formatCount(chosen.size)} bytes. The limit is ${formatCount(MAX_CHARACTERS)} characters.`);
    const content = await chosen.text();
    if (content.includes("\0")) return refuse(`${chosen.name} is not a text file.`);
    setText(content);
    file.value = ""; // allows choosing the same file again
  }

  function refuse(message) {
    file.value = "";
    panel.clear();
    panel.body.replaceChildren(notice(message));
  }

  function setText(content) {
    text.value = content;
    update();
  }

  function update() {
    const words = showSize();
    const isSample = sample !== null && text.value === sample;
    const shared = text.value.length <= MAX_SHARED && !isSample;
    save({ model: model === first ? "" : model, text: shared ? text.value : "", example: isSample ? "1" : "" });
    if (!text.value.trim()) return showEmpty();
    if (text.value.length > MAX_CHARACTERS) return refuse(`The text is too long: ${formatCount(text.value.length)} characters. The limit is ${formatCount(MAX_CHARACTERS)}.`);
    panel.run((abort) => post("api/long", { model, text: text.value }, abort), (answer, body) => {
      const link = model === CO_OCCURRENCE ? [] : describeLink(answer);
      body.replaceChildren(make("div", { class: "card" }, ...link, view.element));
      view.show(answer, model === CO_OCCURRENCE ? null : answer.first);
      announce(`Attention map of ${formatCount(words)} words`);
    });
  }

  // Stories for a model; a poem with invented names, whose repetitions show as diagonals, for the co-occurrence map
  const sampleKind = () => (model === CO_OCCURRENCE ? "poem" : "stories");

  function showSample() {
    const kind = sampleKind();
    const load = kind === "poem" ? () => sampleText(SAMPLE_WORDS.poem) : async (abort) => (await post("api/long/sample", { words: SAMPLE_WORDS.stories }, abort)).text;
    panel.run(load, (content) => {
      sample = content;
      setText(content);
    });
  }

  function labelSample() {
    sampleButton.textContent = `Sample of ${formatCount(SAMPLE_WORDS[sampleKind()])} words`;
  }

  function showEmpty() {
    view.clear();
    panel.clear();
    panel.body.replaceChildren(make("div", { class: "empty-state" }, make("h2", {}, "No text yet"),
      make("p", {}, "Paste some text, choose a file, or try the sample. The model reads the text in passages; each appears as a square on the diagonal.")));
  }

  const wide = (node) => {
    node.classList.add("wide");
    return node;
  };
  text.addEventListener("input", showSizeSoon);
  element.replaceChildren(
    make("div", { class: "long-text" }, field("Text", text, "A model reads up to 16,384 tokens. Files are sent only to your own server.")),
    make("div", { class: "flow below" },
      make("label", { class: "upload" }, "Choose a text file", file),
      sampleButton, size),
    make("div", { class: "controls" },
      wide(field("Model", select(options, model, (value) => {
        const replaced = sample !== null && text.value === sample && (value === CO_OCCURRENCE) !== (model === CO_OCCURRENCE);
        model = value;
        labelSample();
        if (replaced) showSample();
        else update();
      }))),
      button("Show the map", update, { class: "primary" })),
    panel.element,
  );
  labelSample();
  signal.addEventListener("abort", () => showSizeSoon.stop());
  if (state.example || (!state.text && model !== CO_OCCURRENCE)) showSample();
  else setText(state.text ?? "");
}
