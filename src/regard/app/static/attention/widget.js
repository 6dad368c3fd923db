// The notebook's widget (anywidget): the kernel has the weights and answers.
import { widget } from "./sources.js";
import { mount } from "./view.js";

// Notebooks have a theme of their own, whatever the browser's is
function themed(element) {
  const { body } = document;
  const light = body.dataset.jpThemeLight;
  const dark = light === "false" || body.classList.contains("vscode-dark") || document.documentElement.classList.contains("dark") || body.classList.contains("dark");
  const bright = light === "true" || body.classList.contains("vscode-light");
  element.classList.toggle("dark-theme", dark);
  element.classList.toggle("light-theme", bright && !dark);
}

function renderWidget({ model, el }) {
  const element = document.createElement("div");
  themed(element);
  el.append(element);
  const shown = mount(element, widget(model), model.get("options") ?? {});
  return () => shown.destroy();
}

export default { render: renderWidget };
