// Makes the page answer its own requests: the data of the site is embedded in the document.

import { useBackend } from "../shared/client.js";
import { makeBackend } from "./backend.js";

export function startBackend() {
  document.documentElement.classList.toggle("embedded", window.parent !== window); // in a frame
  const site = JSON.parse(document.getElementById("site-data").textContent);
  const index = new Map(site.models.map(({ info }, number) => [info.name, number]));
  useBackend(makeBackend(site, (name) => decode(document.getElementById(`weights-${index.get(name)}`).textContent)));
}

function decode(base64) {
  return Uint8Array.from(atob(base64.trim()), (character) => character.charCodeAt(0));
}

startBackend();
