// Light and dark: the system's preference until the switch is used.

import { preferences } from "./store.js";

/** Runs `changed` after each change of colours. */
export function startTheme(button, changed) {
  const root = document.documentElement;
  const show = (theme) => {
    root.dataset.theme = theme;
    button.setAttribute("aria-pressed", String(theme === "dark"));
    changed();
  };
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    preferences.set("theme", theme);
    show(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
    if (!preferences.get("theme")) show(event.matches ? "dark" : "light");
  });
  show(root.dataset.theme);
}
