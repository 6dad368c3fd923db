// Editable tables of queries, keys and values.

import { button, make } from "../../shared/dom.js";
import { MAX_COLUMNS, MAX_ROWS } from "./presets.js";

const LETTERS = { query: "q", key: "k", value: "v" };

export function nameOf(tables, side, row) {
  return tables.names[side === "value" ? "key" : side][row] || `${LETTERS[side]}${row + 1}`;
}

// changed(): called after every edit. Call render() after replacing the tables.
export function tableEditor(tables, { changed, selected, select }) {
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
    body.addEventListener("keydown", (event) => moveByKey(event, body));
    const more = button(add, () => edit(() => addRow(sides)), { disabled: length >= MAX_ROWS });
    return make("div", { class: "card" },
      make("div", { class: "scroll" }, table),
      make("div", { class: "flow" }, more, ...sides.map(widthControl)),
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
    const remove = button("×", () => edit(() => removeRow(sides, row)), {
      class: "remove", "aria-label": `Remove ${name}`, title: `Remove ${name}`, disabled: tables[sides[0]].length <= 1,
    });
    return make("tr", { class: sides[0] === "query" && row === selected() ? "selected" : null }, ...cells, make("td", {}, remove));
  }

  // The label of a query selects it for the calculation below
  function label(side, row) {
    const name = nameOf(tables, side, row);
    if (side !== "query") return make("span", { dir: "auto" }, name);
    const radio = make("input", { type: "radio", name: "worked", value: row, change: () => select(row) });
    radio.checked = row === selected();
    return make("label", { title: "Show the calculation below" }, radio, make("span", { dir: "auto" }, name));
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
      node.setCustomValidity(number === null ? "Enter a number from −1,000,000 to 1,000,000." : "");
      if (number === null) return;
      tables[side][row][column] = number;
      changed();
    });
    return node;
  }

  // Queries and keys have the same width
  function widthControl(side) {
    if (side === "key") return null;
    const sides = side === "query" ? ["query", "key"] : [side];
    const current = tables[side][0].length;
    const label = side === "value" ? "features of values" : "features of queries and keys";
    const change = (by) => () => edit(() => sides.forEach((name) => resize(tables[name], current + by)));
    return make("span", { class: "stepper", role: "group", "aria-label": label },
      make("span", { class: "lead", "aria-hidden": "true" }, "features"),
      button("−", change(-1), { disabled: current <= 1, "aria-label": `Fewer ${label}` }),
      make("b", {}, String(current)),
      button("+", change(1), { disabled: current >= MAX_COLUMNS, "aria-label": `More ${label}` }),
    );
  }

  function edit(work) {
    const focused = [...element.querySelectorAll("button, input")].indexOf(document.activeElement);
    work();
    render();
    [...element.querySelectorAll("button, input")][focused]?.focus(); // restores the focus, which rendering removed
    changed();
  }

  function addRow(sides) {
    for (const side of sides) tables[side].push(tables[side][0].map(() => 0));
  }

  function removeRow(sides, row) {
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

// Moves the focus between rows, as in a spreadsheet
function moveByKey(event, body) {
  const by = { ArrowUp: -1, ArrowDown: 1, Enter: 1 }[event.key];
  const cell = event.target.closest("td");
  if (!by || !cell || event.target.type === "radio" || event.target.tagName !== "INPUT") return;
  event.preventDefault();
  body.rows[cell.parentElement.sectionRowIndex + by]?.cells[cell.cellIndex]?.querySelector("input")?.focus();
}
