// Nodes, words and numbers. Texts may come from anywhere: they become text nodes, never markup.

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") node[name] = value;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function clamp(value, least, most) {
  return Math.max(least, Math.min(value, most));
}

// A weight in per cent: 34, 3.4, 0.34, and "< 0.01" rather than a row of zeros
export function percent(weight) {
  const share = 100 * weight;
  if (share === 0) return "0";
  if (share < 0.01) return "< 0.01";
  return share >= 9.95 ? share.toFixed(0) : share >= 0.995 ? share.toFixed(1) : share.toFixed(2);
}

export function count(number) {
  return Number(number).toLocaleString("en");
}

export function decimals(number, digits = 3) {
  return Number(number).toFixed(digits).replace("-", "−");
}

// A token as it is shown: something must be there to point at
export function visible(token) {
  if (token === "") return "∅";
  return token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +$/, (spaces) => "␣".repeat(spaces.length));
}

let ids = 0;

export function freshId(name) {
  ids += 1;
  return `regard-${name}-${ids}`;
}

// One of several nodes is in the tab order; arrow keys, Home and End move among them.
// `columns()` is how many make a row, for the arrows that cross rows.
export function rove(nodes, event, columns = () => 1) {
  if (event.ctrlKey || event.altKey || event.metaKey) return null;
  const here = nodes.indexOf(event.target.closest("button, [tabindex]"));
  if (here < 0) return null;
  const flip = getComputedStyle(nodes[here].parentElement).direction === "rtl" ? -1 : 1;
  const steps = { ArrowLeft: -flip, ArrowRight: flip, ArrowUp: -columns(), ArrowDown: columns() };
  const places = { Home: 0, End: nodes.length - 1 };
  const next = nodes[event.key in steps ? here + steps[event.key] : places[event.key]];
  if (!next) return null;
  event.preventDefault();
  enter(nodes, next);
  next.focus();
  return next;
}

export function enter(nodes, chosen) {
  for (const node of nodes) node.tabIndex = node === chosen ? 0 : -1;
}

export function choices(label, options, chosen, change) {
  const id = freshId("choice");
  const select = make("select", { id, onchange: () => change(select.value) });
  for (const [value, text] of options) select.append(make("option", { value, dir: "auto" }, text));
  select.value = String(chosen);
  return make("span", { class: "field" }, make("label", { for: id }, label), select);
}

export function checkbox(label, checked, change) {
  const box = make("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
  return make("label", { class: "check" }, box, label);
}

export function button(label, press, attributes = {}) {
  return make("button", { type: "button", onclick: press, ...attributes }, label);
}
