// The frame of the page: the rooms, the address, and the server's presence.

import { get, look, pause, watch } from "./api.js";
import { announce, button, make } from "./dom.js";
import { stage } from "./stage.js";

const ROOMS = {
  translate: ["Translate", "Type a sentence; see its translation, and which word came from which."],
  lookup: ["Lookup", "Attention is a lookup in a table: a query is compared with every key, and the values are mixed by how well they fit."],
  heads: ["Heads", "Any text through a model: what each head of each layer looks at."],
  words: ["Words in context", "The same word in two sentences: how alike it is, layer by layer, and what it attends to."],
  order: ["Order", "Attention by itself does not see the order of words. Shuffle them, with and without positions."],
  long: ["Long text", "A whole text as a map of who looks at whom, exact at every zoom."],
  training: ["Training", "How a model learns, while it does."],
};

const EVERY = 3000; // milliseconds between looks for a model that is being trained

const byId = (id) => document.getElementById(id);
const wide = matchMedia("(min-width: 60rem)");

let leave = new AbortController(); // ends what the room that is shown has begun
let shown = "";

// "#words?first=…" → ["words", { first: "…" }]
function address() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return [name in ROOMS ? name : "translate", Object.fromEntries(new URLSearchParams(query))];
}

function link(name, state) {
  const kept = Object.entries(state).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const query = new URLSearchParams(kept).toString();
  return query ? `#${name}?${query}` : `#${name}`;
}

function furnish() {
  const items = Object.entries(ROOMS).map(([name, [title]]) =>
    make("li", {}, make("a", { href: `#${name}`, id: `to-${name}`, click: () => unfold(false) }, title)),
  );
  byId("rooms").append(make("ul", {}, ...items));
  byId("menu").addEventListener("click", () => unfold(byId("menu").getAttribute("aria-expanded") !== "true"));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address belongs to the rooms
    byId("main").focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("menu").getAttribute("aria-expanded") !== "true") return;
    unfold(false);
    byId("menu").focus();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".masthead")) unfold(false);
  });
}

function unfold(open) {
  byId("menu").setAttribute("aria-expanded", String(open));
}

// ---- rooms

async function enter(moved = true) {
  const [name, state] = address();
  leave.abort();
  leave = new AbortController();
  const { signal } = leave;
  const [title, about] = ROOMS[name];
  document.title = `${title} · regard`;
  byId("title").textContent = byId("here").textContent = title;
  byId("about").textContent = about;
  for (const other of Object.keys(ROOMS)) {
    if (other === name) byId(`to-${other}`).setAttribute("aria-current", "page");
    else byId(`to-${other}`).removeAttribute("aria-current");
  }
  if (moved && shown !== name) scrollTo(0, 0);
  if (moved && shown && shown !== name) announce(title);
  shown = name;
  const place = stage(title, signal);
  byId("room").replaceChildren(place.element);
  const work = async () => [await import(`./rooms/${name}.js`), await get("api/models", signal)];
  place.run(work, ([room, { models, pending = [], folders, recordings = [] }]) => {
    const keep = (change) => remember(name, Object.assign(state, change), signal);
    room.open({ element: place.body, state, keep, models, pending, folders, recordings, signal });
    if (pending.length && place.body.querySelector(".vacant")) arrival(pending, signal).catch(() => {}); // left
  });
}

// Opens the room again when a model that is being trained has come, or will not come
async function arrival(pending, signal) {
  for (;;) {
    await pause(EVERY, signal);
    const now = await get("api/models", signal).catch(() => null);
    if (signal.aborted) return;
    if (now && now.pending?.length !== pending.length) return enter(false);
  }
}

// The room's state is in the address, to be shared, and in its link, to be come back to
function remember(name, state, signal) {
  if (signal.aborted) return;
  const hash = link(name, state);
  byId(`to-${name}`).setAttribute("href", hash);
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

// ---- the server

function gone() {
  const text = make("p", {}, "The server does not answer: was ", make("code", {}, "regard look"), " stopped? The page goes on by itself when it is back.");
  byId("banner").replaceChildren(text, button("Look now", look));
  byId("banner").hidden = false;
}

function back() {
  byId("banner").hidden = true;
  byId("banner").replaceChildren();
  announce("The server is back.");
}

async function sign() {
  const { version } = await get("api/health");
  byId("foot").textContent = `regard ${version}`;
}

furnish();
watch.addEventListener("gone", gone);
watch.addEventListener("back", back);
wide.addEventListener("change", () => unfold(false));
addEventListener("hashchange", () => enter());
enter(false);
sign().catch(() => {}); // the banner says it
