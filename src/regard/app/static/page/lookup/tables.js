// The tables of queries, keys and values: every number can be changed, rows and columns come and go.

import { button, make } from "../dom.js";
import { MOST, WIDEST } from "./presets.js";

const LETTERS = { query: "q", key: "k", value: "v" };

export function nameOf(tables, side, row) {
  return tables.names[side === "value" ? "key" : side][row] || `${LETTERS[side]}${row + 1}`;
}

// element, and render() after the tables were replaced; `changed` is called after every edit
export function editor(tables, { changed, chosen, choose }) {
  const element = make("div", { class: "tables" });

  function render() {
    element.replaceChildren(
      block("Queries", ["query"], tables.query.length, "Add a query"),
      block("Keys and their values", ["key", "value"], tables.key.length, "Add a key"),
    );
  }

  function block(title, sides, length, add) {
    const table = make("table", { class: "edit" }, caption(title));
    table.append(head(sides));
    const body = table.createTBody();
    for (let row = 0; row < length; row++) body.append(line(sides, row));
    body.addEventListener("keydown", (event) => move(event, body));
    const more = button(add, () => edit(() => grow(sides)), { disabled: length >= MOST });
    return make("div", { class: "card" },
      make("div", { class: "scroll" }, table),
      make("div", { class: "flow" }, more, ...sides.map(width)),
    );
  }

  const caption = (title) => make("caption", {}, make("h2", {}, title));

  function head(sides) {
    const cells = sides.flatMap((side, number) => [
      number ? make("td", { class: "arrow" }) : make("td"),
      make("th", { scope: "colgroup", colspan: tables[side][0].length }, side),
    ]);
    return make("thead", {}, make("tr", {}, ...cells, make("td")));
  }

  function line(sides, row) {
    const cells = sides.flatMap((side, number) => [
      number ? make("td", { class: "arrow", "aria-hidden": "true" }, "→") : make("th", { scope: "row" }, label(side, row)),
      ...tables[side][row].map((_, column) => make("td", {}, input(side, row, column))),
    ]);
    const name = nameOf(tables, sides[0], row);
    const less = button("×", () => edit(() => shrink(sides, row)), {
      class: "less", "aria-label": `Remove ${name}`, title: `Remove ${name}`, disabled: tables[sides[0]].length <= 1,
    });
    return make("tr", { class: sides[0] === "query" && row === chosen() ? "chosen" : null }, ...cells, make("td", {}, less));
  }

  // The query that is worked out in numbers is chosen by its name
  function label(side, row) {
    const name = nameOf(tables, side, row);
    if (side !== "query") return make("span", { dir: "auto" }, name);
    const radio = make("input", { type: "radio", name: "worked", value: row, change: () => choose(row) });
    radio.checked = row === chosen();
    return make("label", { title: "Work this one out below" }, radio, make("span", { dir: "auto" }, name));
  }

  function input(side, row, column) {
    const name = `${side} of ${nameOf(tables, side, row)}, number ${column + 1}`;
    const node = make("input", { inputmode: "decimal", autocomplete: "off", "aria-label": name });
    node.value = String(tables[side][row][column]);
    node.addEventListener("focus", () => node.select());
    node.addEventListener("change", () => node.reportValidity());
    node.addEventListener("input", () => {
      const number = parse(node.value);
      node.setAttribute("aria-invalid", String(number === null));
      node.setCustomValidity(number === null ? "Give a number from −1,000,000 to 1,000,000." : "");
      if (number === null) return;
      tables[side][row][column] = number;
      changed();
    });
    return node;
  }

  // Queries and keys are as wide as each other
  function width(side) {
    const both = side === "query" ? ["query", "key"] : [side];
    const now = tables[side][0].length;
    if (side === "key") return null;
    const what = side === "value" ? "features of values" : "features of queries and keys";
    const to = (by) => () => edit(() => both.forEach((one) => resize(tables[one], now + by)));
    return make("span", { class: "stepper", role: "group", "aria-label": what },
      make("span", { class: "lead", "aria-hidden": "true" }, "features"),
      button("−", to(-1), { disabled: now <= 1, "aria-label": `Fewer ${what}` }),
      make("b", {}, String(now)),
      button("+", to(1), { disabled: now >= WIDEST, "aria-label": `More ${what}` }),
    );
  }

  function edit(work) {
    const place = [...element.querySelectorAll("button, input")].indexOf(document.activeElement);
    work();
    render();
    [...element.querySelectorAll("button, input")][place]?.focus(); // or the keyboard would start all over
    changed();
  }

  function grow(sides) {
    for (const side of sides) tables[side].push(tables[side][0].map(() => 0));
  }

  function shrink(sides, row) {
    for (const side of sides) tables[side].splice(row, 1);
    tables.names[sides[0]].splice(row, 1);
  }

  return { element, render };
}

function resize(rows, width) {
  for (const row of rows) {
    if (row.length > width) row.length = width;
    else row.push(0);
  }
}

function parse(text) {
  const cleaned = text.trim().replace("−", "-").replace(",", ".");
  const number = Number(cleaned);
  return cleaned && Number.isFinite(number) && Math.abs(number) <= 1e6 ? number : null;
}

// Up and down between the rows, as in a spreadsheet
function move(event, body) {
  const by = { ArrowUp: -1, ArrowDown: 1, Enter: 1 }[event.key];
  const cell = event.target.closest("td");
  if (!by || !cell || event.target.type === "radio" || event.target.tagName !== "INPUT") return;
  event.preventDefault();
  body.rows[cell.parentElement.sectionRowIndex + by]?.cells[cell.cellIndex]?.querySelector("input")?.focus();
}
