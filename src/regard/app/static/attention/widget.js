// The notebook widget (anywidget). The kernel holds the weights.
import { widget } from "./sources.js";
import { mount } from "./view.js";

// Notebooks have their own theme, independent of the browser
function applyTheme(element) {
  const { body } = document;
  const light = body.dataset.jpThemeLight;
  const isDark = light === "false" || body.classList.contains("vscode-dark") || document.documentElement.classList.contains("dark") || body.classList.contains("dark");
  const isLight = light === "true" || body.classList.contains("vscode-light");
  element.classList.toggle("dark-theme", isDark);
  element.classList.toggle("light-theme", isLight && !isDark);
}

function renderWidget({ model, el }) {
  const element = document.createElement("div");
  applyTheme(element);
  el.append(element);
  const mounted = mount(element, widget(model), model.get("options") ?? {});
  return () => mounted.destroy();
}

export default { render: renderWidget };
