// Makes the page answer its own requests: the data of the site is embedded in the document.

import { useBackend } from "../shared/client.js";
import { makeBackend } from "./backend.js";

export function startBackend() {
  if (window.parent !== window) embed();
  const site = JSON.parse(document.getElementById("site-data").textContent);
  const index = new Map(site.models.map(({ info }, number) => [info.name, number]));
  useBackend(makeBackend(site, (name) => decode(document.getElementById(`weights-${index.get(name)}`).textContent)));
}

// In a frame of another page, shows only the section and reports its height to that page
function embed() {
  document.documentElement.classList.add("embedded");
  const main = document.querySelector("main");
  const report = () => window.parent.postMessage({ regardHeight: Math.ceil(main.getBoundingClientRect().height) }, "*");
  new ResizeObserver(report).observe(main);
}

function decode(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index); // much faster than Uint8Array.from
  return bytes;
}

startBackend();
