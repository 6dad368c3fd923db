// A panel shows the response to a request, a loading bar, or an error with a button to retry.

import { connection, post } from "../shared/client.js";
import { button, make } from "../shared/dom.js";

const LOADING_DELAY = 150; // milliseconds before the loading bar appears

// Returns { element, body, run(work, show), clear(), markStale() }. `signal` aborts when the section is closed
export function makePanel(label, signal) {
  const body = make("div", { class: "answer" });
  const errors = make("div", { class: "errors" });
  const element = make("section", { class: "panel", "aria-label": label }, make("div", { class: "progress" }), errors, body);
  let current = null;
  let timer = 0;

  function setBusy(busy, polled = false) {
    clearTimeout(timer);
    element.setAttribute("aria-busy", String(busy));
    if (busy) timer = setTimeout(showBusy, LOADING_DELAY, polled);
    else element.classList.remove("busy");
  }

  // Dims the displayed answer, which belongs to an earlier request, unless the request is polled
  function showBusy(polled) {
    element.classList.add("busy");
    body.classList.toggle("stale", !polled);
  }

  // polled: whether the request is repeated regularly; the displayed answer then stays valid
  async function run(work, show, { polled = false } = {}) {
    const request = start();
    setBusy(true, polled);
    let answer;
    let error = null;
    try {
      answer = await work(AbortSignal.any([request.signal, signal]));
    } catch (caught) {
      error = caught;
    }
    if (request.signal.aborted || signal.aborted) return;
    setBusy(false);
    if (error) fail(error, request, () => run(work, show, { polled }));
    else {
      errors.replaceChildren();
      body.classList.remove("stale");
      show(answer, body);
    }
  }

  function start() {
    current?.abort();
    current = new AbortController();
    return current;
  }

  function fail(error, request, retry) {
    if (error.disconnected) connection.addEventListener("restored", retry, { once: true, signal: request.signal });
    body.classList.add("stale");
    errors.replaceChildren(notice(error.message, ...(error.final ? [] : [button("Try again", retry)])));
  }

  function clear() {
    start().abort();
    setBusy(false);
    errors.replaceChildren();
    body.classList.remove("stale");
    body.replaceChildren();
  }

  // Dims the answer, which no longer matches the input
  function markStale() {
    start().abort();
    setBusy(false);
    errors.replaceChildren();
    body.classList.add("stale");
  }

  return { element, body, run, clear, markStale };
}

export function notice(message, ...actions) {
  return make("div", { class: "notice", role: "alert" }, make("p", { dir: "auto" }, message), ...actions);
}

// A message that something is missing, and the commands that provide it
export function emptyState(title, text, ...commands) {
  const lines = commands.map((command) => make("pre", {}, make("code", {}, command)));
  return make("div", { class: "empty-state" }, make("h2", {}, title), make("p", {}, text), ...lines);
}

// A button that trains the demo translator in the background; Training shows its progress
export function demoButton() {
  const node = button("Train the demo translator (two minutes)", async () => {
    node.disabled = true;
    try {
      await post("api/demo", {});
      location.hash = "#training";
      if (location.hash === "#training") dispatchEvent(new HashChangeEvent("hashchange")); // Training is already open
    } catch (error) {
      node.disabled = false;
      node.after(notice(error.message));
    }
  }, { class: "primary" });
  return make("p", {}, node);
}

// A message that a model is in training; the section opens when the model is ready
export function inTraining([name]) {
  return make("div", { class: "empty-state" }, make("h2", {}, "The translator is being trained"),
    make("p", {}, "This takes about two minutes. This section opens automatically when ", make("b", { dir: "auto" }, name), " is ready. Meanwhile, watch its progress under ",
      make("a", { href: "#training" }, "Training"), ", or try ", make("a", { href: "#lookup" }, "Lookup"), " and ", make("a", { href: "#order" }, "Order"), ", which need no model."));
}

// Name, languages and description of a model
export function modelLine({ name, about, languages }) {
  const description = about.startsWith(`${name}, `) ? about.slice(name.length + 2) : about;
  return make("p", { class: "about-model" }, make("b", { dir: "auto" }, name), ` ${[languages, description].filter(Boolean).join(" · ")}`);
}
