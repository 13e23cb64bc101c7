// Speed, seed, language and instructions.

import { language, number, onLanguage, t } from "./i18n.js";
import { preferences } from "./store.js";

const LANGUAGES = ["zh", "en", "ja", "ko", "de", "es", "fr", "it", "ru"];
const $ = (id) => document.getElementById(id);

/** What a request may hold; settings that are not made are left out. */
export function settings() {
  const config = { speed: Number($("speed").value), seed: Number($("seed").value) || 0 };
  if ($("language").value) config.language = $("language").value;
  if ($("instructions").value.trim()) config.instructions = $("instructions").value.trim();
  return config;
}

function showSpeed() {
  const words = `${number(Number($("speed").value), 2)} ×`;
  $("speed-value").textContent = $("speed").ariaValueText = words;
}

function showLanguages() {
  const chosen = $("language").value;
  const names = new Intl.DisplayNames([language()], { type: "language" });
  const options = LANGUAGES.map((code) => new Option(names.of(code), code));
  $("language").replaceChildren(new Option(t("languageAuto"), ""), ...options);
  $("language").value = chosen;
}

export function startSettings() {
  $("speed").value = preferences.get("speed") ?? "1";
  $("speed").addEventListener("input", () => {
    preferences.set("speed", $("speed").value);
    showSpeed();
  });
  $("dice").addEventListener("click", () => {
    $("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % 1_000_000;
  });
  onLanguage(() => {
    showSpeed();
    showLanguages();
  });
}
