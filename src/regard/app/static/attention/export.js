// The script of a standalone page, which contains its data.
import { embedded } from "./sources.js";
import { mount } from "./view.js";

export function openExport() {
  const data = JSON.parse(document.getElementById("view-data").textContent);
  return mount(document.getElementById("view"), embedded(data), data.options ?? {});
}

openExport();
