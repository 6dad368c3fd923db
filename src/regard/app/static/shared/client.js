// HTTP client: JSON and binary answers, retries while the server is busy, detection of a lost connection.
// In a static site, a backend in the browser answers instead of a server.

const RECONNECT_INTERVAL = 2000; // milliseconds
const MAX_TRIES = 3; // maximum number of tries if the server is busy
const MAX_RETRY_DELAY = 5; // seconds

class RequestError extends Error {
  // final: whether repeating the request would fail again
  constructor(message, { disconnected = false, final = false } = {}) {
    super(message);
    this.disconnected = disconnected;
    this.final = final;
  }
}

export const connection = new EventTarget(); // dispatches "lost" and "restored"
let isLost = false;
let reconnectTimer = 0;
let backend = null; // answer(path, body), instead of a server

export function useBackend(answer) {
  backend = answer;
}

export function get(path, signal) {
  return backend ? askBackend(path, undefined, signal) : sendRequest(path, { signal });
}

export function post(path, body, signal) {
  if (backend) return askBackend(path, body, signal);
  const headers = { "Content-Type": "application/json" };
  return sendRequest(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

// Computes an answer in the browser, after the page has been drawn
async function askBackend(path, body, signal) {
  await sleep(0, signal);
  try {
    return backend(path, body);
  } catch (error) {
    throw new RequestError(error.message, { final: true });
  }
}

async function sendRequest(path, options) {
  for (let tries = 1; ; tries += 1) {
    const response = await fetchOrFail(path, options);
    const seconds = Number(response.headers.get("Retry-After"));
    if (response.status === 503 && seconds && tries < MAX_TRIES) {
      await sleep(1000 * Math.min(seconds, MAX_RETRY_DELAY), options.signal);
      continue;
    }
    const binary = response.headers.get("Content-Type") === "application/octet-stream";
    const answer = await (binary ? response.arrayBuffer() : response.json()).catch(() => null);
    if (response.ok && answer !== null) return answer;
    const final = response.status >= 400 && response.status < 500 && response.status !== 408;
    throw new RequestError(answer?.error ?? `The server returned status ${response.status} for ${path}.`, { final });
  }
}

async function fetchOrFail(path, options) {
  try {
    const response = await fetch(path, options);
    setLost(false);
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    setLost(true);
    throw new RequestError("The server is not responding.", { disconnected: true });
  }
}

function setLost(lost) {
  if (lost === isLost) return;
  isLost = lost;
  connection.dispatchEvent(new Event(lost ? "lost" : "restored"));
  if (lost) reconnectTimer = setTimeout(reconnect, RECONNECT_INTERVAL);
}

// Tries to reach the server until it responds
export async function reconnect() {
  clearTimeout(reconnectTimer);
  try {
    const response = await fetch("api/health");
    if (response.ok) setLost(false);
  } catch {
    // still lost
  }
  if (isLost) reconnectTimer = setTimeout(reconnect, RECONNECT_INTERVAL);
}

export function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(new DOMException("aborted", "AbortError"));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
  });
}
