// The page's words. Elements name theirs: data-t (text), data-t-label, data-t-title, data-t-placeholder.

import en from "./lang/en.js";
import ru from "./lang/ru.js";
import zh from "./lang/zh.js";
import { preferences } from "./store.js";

const DICTIONARIES = { en, zh, ru };
const HTML_LANG = { en: "en", zh: "zh-Hans", ru: "ru" };
const listeners = [];
let current = "en";

function firstLanguage() {
  const wanted = [preferences.get("language"), ...(navigator.languages ?? [navigator.language])];
  const known = wanted.map((tag) => (tag ?? "").slice(0, 2).toLowerCase()).find((tag) => tag in DICTIONARIES);
  return known ?? "en";
}

/** The words of a key; {name} is replaced by values.name. */
export function t(key, values = {}, code = current) {
  const words = DICTIONARIES[code][key];
  if (words === undefined) throw new Error(`no words for ${key}`);
  return words.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

export const has = (key) => key in en;
export const language = () => current;

const formats = new Map();

export function number(value, digits = 0) {
  const name = `${current} ${digits}`;
  if (!formats.has(name)) {
    const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    formats.set(name, new Intl.NumberFormat(current, options));
  }
  return formats.get(name).format(value);
}

/** Milliseconds up to a second, then seconds. */
export function duration(ms) {
  return ms < 999.5 ? t("unitMs", { n: number(ms) }) : t("unitS", { n: number(ms / 1000, 2) });
}

/** Calls back now and after each change of language. */
export function onLanguage(listener) {
  listeners.push(listener);
}

export function setLanguage(code) {
  current = code;
  const root = document.documentElement;
  root.lang = HTML_LANG[code];
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of document.querySelectorAll("[data-t-label]")) element.ariaLabel = t(element.dataset.tLabel);
  for (const element of document.querySelectorAll("[data-t-title]")) element.title = t(element.dataset.tTitle);
  for (const element of document.querySelectorAll("[data-t-placeholder]"))
    element.placeholder = t(element.dataset.tPlaceholder);
  document.title = t("title");
  for (const listener of listeners) listener();
}

export function startLanguage(select) {
  select.addEventListener("change", () => {
    preferences.set("language", select.value);
    setLanguage(select.value);
  });
  select.value = firstLanguage();
  setLanguage(select.value);
}
