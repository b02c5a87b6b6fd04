// Light or dark: as the system has it, until somebody says otherwise.

import { byId } from "./dom.mjs";

const THEME = "openworld.theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;

const isDark = () => (localStorage.getItem(THEME) ?? (system.matches ? "dark" : "light")) === "dark";

function draw() {
  root.dataset.theme = isDark() ? "dark" : "light";
  const control = byId("theme");
  control.textContent = isDark() ? "☀" : "☾";
  control.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  control.title = control.getAttribute("aria-label");
}

export function toggleTheme() {
  const wanted = isDark() ? "light" : "dark";
  // What the system says anyway need not be remembered: then the page goes on following it.
  if (wanted === (system.matches ? "dark" : "light")) localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, wanted);
  draw();
}

system.addEventListener("change", draw);
draw();
