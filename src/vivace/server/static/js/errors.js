// Says in the page's language what went wrong, with the server's own advice below it.

import { has, onLanguage, t } from "./i18n.js";

const $ = (id) => document.getElementById(id);
let shown = null;

export function errorWords(error) {
  return t(has(`error.${error.code}`) ? `error.${error.code}` : "error.other");
}

function words() {
  $("alert").hidden = shown === null;
  if (shown === null) return;
  const text = errorWords(shown) + (shown.incomplete ? ` ${t("error.cut")}` : "");
  if ($("alert-text").textContent !== text) $("alert-text").textContent = text;
  $("alert-advice").textContent = shown.message ? t("advice", { message: shown.message }) : "";
}

export function showError(error) {
  if (!error.code) console.error(error); // a fault of the page itself
  const message = error.code ? error.message : String(error);
  shown = { code: error.code ?? "other", message, incomplete: Boolean(error.incomplete) };
  words();
}

export function clearError() {
  shown = null;
  words();
}

/** Clears what is no longer true once the server is back. */
export function clearServerError() {
  if (!["connection_lost", "draining", "engine_restarting", "starting"].includes(shown?.code)) return;
  shown = shown.incomplete ? { code: "cut" } : null;
  words();
}

export function startErrors() {
  $("alert-close").addEventListener("click", () => {
    clearError();
    $("text").focus();
  });
  onLanguage(words);
}
