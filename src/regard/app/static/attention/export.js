// The page that stands alone: its exhibit is inside it.
import { embedded } from "./sources.js";
import { mount } from "./view.js";

export function openExport() {
  const data = JSON.parse(document.getElementById("exhibit").textContent);
  return mount(document.getElementById("exhibit-view"), embedded(data), data.options ?? {});
}

openExport();
