// The page: navigation, the URL, and the connection to the server.

import { connection, get, reconnect, sleep } from "../shared/client.js";
import { button, make } from "../shared/dom.js";
import { announce } from "./controls.js";
import { chapterLinks } from "./guide.js";
import { makePanel } from "./panel.js";

const POLL_INTERVAL = 3000; // milliseconds between checks for a model in training

const byId = (id) => document.getElementById(id);
const wide = matchMedia("(min-width: 60rem)");

const sections = new Map(); // name → module of sections/, in the order of the navigation
let closing = new AbortController(); // aborts the work of the open section when it is closed
let current = "";
let home = ""; // the section to open if the URL names none
let guide = ""; // the address of the guide

// "#words?first=…" → { name: "words", state: { first: "…" } }
function parseAddress() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return { name: sections.has(name) ? name : home, state: Object.fromEntries(new URLSearchParams(query)) };
}

function formatAddress(name, state) {
  const set = Object.entries(state).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const query = new URLSearchParams(set).toString();
  return query ? `#${name}?${query}` : `#${name}`;
}

function buildNavigation() {
  const items = [...sections].map(([name, { about }]) =>
    make("li", {}, make("a", { href: `#${name}`, id: `to-${name}`, click: () => expandMenu(false) }, about.title)),
  );
  byId("sections").replaceChildren(make("ul", {}, ...items));
}

function addMenuListeners() {
  byId("menu").addEventListener("click", () => expandMenu(byId("menu").getAttribute("aria-expanded") !== "true"));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the link must not change the URL hash, which stores the section
    byId("main").focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("menu").getAttribute("aria-expanded") !== "true") return;
    expandMenu(false);
    byId("menu").focus();
  });
  document.addEventListener("pointerdown", (event) => {
    if (event.target instanceof Element && !event.target.closest(".masthead")) expandMenu(false);
  });
}

function expandMenu(open) {
  byId("menu").setAttribute("aria-expanded", String(open));
}

// The section to open first, depending on the loaded models; Lookup needs no model
async function chooseHome() {
  const { models, recordings = [] } = await get("api/models");
  if (recordings.length || models.some(({ kind, attends }) => kind === "encoder" && attends)) return "heads";
  if (models.some(({ kind }) => kind === "language") && sections.has("inside")) return "inside";
  if (models.some(({ kind }) => kind === "translator")) return "translate";
  return sections.has("lookup") ? "lookup" : [...sections.keys()][0];
}

// ---- sections

async function openSection(navigated = true) {
  const { name, state } = parseAddress();
  closing.abort();
  closing = new AbortController();
  const { signal } = closing;
  const { about: { title, text, chapters = [] }, open } = sections.get(name);
  document.title = `${title} · regard`;
  byId("title").textContent = byId("current").textContent = title;
  byId("about").textContent = text;
  byId("chapters").replaceChildren(...chapterLinks(guide, chapters));
  for (const other of sections.keys()) {
    if (other === name) byId(`to-${other}`).setAttribute("aria-current", "page");
    else byId(`to-${other}`).removeAttribute("aria-current");
  }
  if (navigated && current !== name) scrollTo(0, 0);
  if (navigated && current && current !== name) announce(title);
  current = name;
  const panel = makePanel(title, signal);
  byId("section").replaceChildren(panel.element);
  panel.run(() => get("api/models", signal), ({ models, pending = [], demo = false, missing = "", minilm = "", recordings = [] }) => {
    const save = (change) => saveState(name, Object.assign(state, change), signal);
    byId("no-model").hidden = !minilm || models.length > 0 || recordings.length > 0;
    byId("no-model").replaceChildren("No model is loaded. For a pretrained one, run ", make("code", {}, minilm), " and restart regard look.");
    open({ element: panel.body, state, save, models, pending, demo, missing, minilm, recordings, signal });
    if (pending.length && panel.body.querySelector(".empty-state")) waitForModel(pending, signal).catch(() => {}); // the section was closed
  });
}

// Reopens the section when a model in training is ready or has failed
async function waitForModel(pending, signal) {
  for (;;) {
    await sleep(POLL_INTERVAL, signal);
    const answer = await get("api/models", signal).catch(() => null);
    if (signal.aborted) return;
    if (answer && answer.pending?.length !== pending.length) return openSection(false);
  }
}

// Stores the state of a section in the URL and in its navigation link
function saveState(name, state, signal) {
  if (signal.aborted) return;
  const hash = formatAddress(name, state);
  byId(`to-${name}`).setAttribute("href", hash);
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

// ---- connection

function showBanner() {
  const text = make("p", {}, "Connection lost. Is ", make("code", {}, "regard look"), " still running? The page reconnects automatically.");
  byId("banner").replaceChildren(text, button("Retry now", reconnect));
  byId("banner").hidden = false;
}

function hideBanner() {
  byId("banner").hidden = true;
  byId("banner").replaceChildren();
  announce("Connection restored.");
}

// Loads the sections. If the connection is lost meanwhile, runs again once the connection is restored
async function start() {
  const { version, sections: names, guide: address = "" } = await get("api/health");
  guide = address;
  byId("version").textContent = `regard ${version}`;
  const modules = await Promise.all(names.map(async (name) => [name, await import(`./sections/${name}.js`)]));
  modules.sort(([, a], [, b]) => a.about.place - b.about.place);
  for (const [name, section] of modules) sections.set(name, section);
  home = sections.has(location.hash.slice(1).split("?")[0]) ? [...sections.keys()][0] : await chooseHome();
  byId("home").setAttribute("href", `#${home}`);
  buildNavigation();
  openSection(false);
}

addMenuListeners();
connection.addEventListener("lost", showBanner);
connection.addEventListener("restored", () => {
  hideBanner();
  if (!sections.size) start().catch(() => {});
});
wide.addEventListener("change", () => expandMenu(false));
addEventListener("hashchange", () => sections.size && openSection());
start().catch(() => {}); // the banner shows the error
