// The server: questions and answers as JSON, what went wrong as a sentence, and a watch over whether it is there.

const AGAIN = 2000; // milliseconds between looks for a server that is gone
const TRIES = 3; // of a question to a server that says it is busy

export class Problem extends Error {
  // final: the same question would get the same answer
  constructor(message, { gone = false, final = false } = {}) {
    super(message);
    this.gone = gone;
    this.final = final;
  }
}

export const watch = new EventTarget(); // tells "gone" and "back"
let gone = false;
let timer = 0;

export function get(path, signal) {
  return ask(path, { signal });
}

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function ask(path, options) {
  for (let tries = 1; ; tries++) {
    const response = await reach(path, options);
    const seconds = Number(response.headers.get("Retry-After"));
    if (response.status === 503 && seconds && tries < TRIES) {
      await pause(1000 * Math.min(seconds, 5), options.signal);
      continue;
    }
    const answer = await response.json().catch(() => null);
    if (response.ok && answer !== null) return answer;
    const final = response.status >= 400 && response.status < 500 && response.status !== 408;
    throw new Problem(answer?.error ?? `The server answered ${response.status} to ${path}.`, { final });
  }
}

async function reach(path, options) {
  try {
    const response = await fetch(path, options);
    notice(false);
    return response;
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    notice(true);
    throw new Problem("The server does not answer.", { gone: true });
  }
}

function notice(now) {
  if (now === gone) return;
  gone = now;
  watch.dispatchEvent(new Event(gone ? "gone" : "back"));
  if (gone) timer = setTimeout(look, AGAIN);
}

// Is it there again?
export async function look() {
  clearTimeout(timer);
  try {
    const response = await fetch("api/health");
    if (response.ok) notice(false);
  } catch {
    // not yet
  }
  if (gone) timer = setTimeout(look, AGAIN);
}

export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(new DOMException("left", "AbortError"));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
  });
}
