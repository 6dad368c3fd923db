// A place where an answer appears: it waits, shows it, or says what went wrong and, if that may help, offers to try again.

import { watch } from "./api.js";
import { button, make } from "./dom.js";

const PATIENCE = 150; // milliseconds before waiting is shown at all

// { element, body, run(work, show), clear() }; `signal` ends with the room
export function stage(label, signal) {
  const body = make("div", { class: "answer" });
  const trouble = make("div", { class: "trouble" });
  const element = make("section", { class: "stage", "aria-label": label }, make("div", { class: "wait" }), trouble, body);
  let current = null;
  let timer = 0;

  function busy(now) {
    clearTimeout(timer);
    element.setAttribute("aria-busy", String(now));
    if (now) timer = setTimeout(() => element.classList.add("busy"), PATIENCE);
    else element.classList.remove("busy");
  }

  async function run(work, show) {
    const mine = begin();
    busy(true);
    let answer;
    let problem = null;
    try {
      answer = await work(AbortSignal.any([mine.signal, signal]));
    } catch (caught) {
      problem = caught;
    }
    if (mine.signal.aborted || signal.aborted) return;
    busy(false);
    if (problem) fail(problem, mine, () => run(work, show));
    else {
      trouble.replaceChildren();
      body.classList.remove("stale");
      show(answer, body);
    }
  }

  function begin() {
    current?.abort();
    current = new AbortController();
    return current;
  }

  function fail(problem, mine, again) {
    if (problem.gone) watch.addEventListener("back", again, { once: true, signal: mine.signal });
    body.classList.add("stale");
    trouble.replaceChildren(note(problem.message, ...(problem.final ? [] : [button("Try again", again)])));
  }

  function clear() {
    begin().abort();
    busy(false);
    trouble.replaceChildren();
    body.replaceChildren();
  }

  return { element, body, run, clear };
}

export function note(message, ...actions) {
  return make("div", { class: "notice", role: "alert" }, make("p", { dir: "auto" }, message), ...actions);
}

// Where there is nothing yet: what is missing, and how to get it
export function empty(title, text, ...commands) {
  const lines = commands.map((command) => make("pre", {}, make("code", {}, command)));
  return make("div", { class: "vacant" }, make("h2", {}, title), make("p", {}, text), ...lines);
}

// Of a model that is being trained: the room opens by itself when it is there
export function expected([name]) {
  return make("div", { class: "vacant" }, make("h2", {}, "The translator is being trained"),
    make("p", {}, "That takes about two minutes; this room opens by itself when ", make("b", { dir: "auto" }, name), " is ready. Meanwhile see it learn under ",
      make("a", { href: "#training" }, "Training"), ", or try ", make("a", { href: "#lookup" }, "Lookup"), " and ", make("a", { href: "#order" }, "Order"), ", which need no model."));
}

// A model in a line: its name, its languages and what it is
export function about({ name, about: what, languages }) {
  const more = what.startsWith(`${name}, `) ? what.slice(name.length + 2) : what;
  return make("p", { class: "about-model" }, make("b", { dir: "auto" }, name), ` ${[languages, more].filter(Boolean).join(" · ")}`);
}
