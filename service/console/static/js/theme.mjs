// Light and dark theme: follows the system until the user chooses.

import { byId } from "./dom.mjs";

const THEME = "openworld.theme";
const systemDark = matchMedia("(prefers-color-scheme: dark)");

const systemTheme = () => (systemDark.matches ? "dark" : "light");
const currentTheme = () => localStorage.getItem(THEME) ?? systemTheme();

function apply() {
  const dark = currentTheme() === "dark";
  document.documentElement.dataset.theme = currentTheme();
  const control = byId("theme");
  control.textContent = dark ? "☀" : "☾";
  control.title = dark ? "Use light colours" : "Use dark colours";
  control.setAttribute("aria-label", control.title);
}

export function toggleTheme() {
  const chosen = currentTheme() === "dark" ? "light" : "dark";
  // The system's own theme is not stored, so that the page follows the system again.
  if (chosen === systemTheme()) localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, chosen);
  apply();
}

systemDark.addEventListener("change", apply);
apply();
