// The choice of voices. A few are buttons; many are a list.

import { deleteVoice, listVoices } from "./api.js";
import { onLanguage, t } from "./i18n.js";
import { preferences } from "./store.js";

const MOST_PILLS = 12;
const $ = (id) => document.getElementById(id);

export class Voices {
  /** @param on { error(ApiError), deleted() } */
  constructor(on) {
    this.on = on;
    this.list = [];
    this.chosen = preferences.get("voice");
    $("voice-pills").addEventListener("change", (event) => this.choose(event.target.value));
    $("voice-select").addEventListener("change", (event) => this.choose(event.target.value));
    $("delete-voice").addEventListener("click", () => this.ask());
    onLanguage(() => this.show());
  }

  /** The chosen voice's name; undefined leaves the choice to the server. */
  get current() {
    return this.list.some(({ name }) => name === this.chosen) ? this.chosen : undefined;
  }

  async load(choose = this.chosen) {
    this.list = await listVoices();
    const [first] = this.list;
    const usual = this.list.find(({ isDefault }) => isDefault) ?? first;
    this.choose(this.list.some(({ name }) => name === choose) ? choose : usual?.name);
    this.show();
  }

  choose(name) {
    this.chosen = name ?? null;
    preferences.set("voice", this.chosen);
    const isStored = this.list.some((voice) => voice.name === name && voice.stored);
    $("delete-voice").hidden = !isStored;
  }

  show() {
    const many = this.list.length > MOST_PILLS;
    $("voice-pills").hidden = many;
    $("voice-select").hidden = !many;
    if (many) this.showSelect();
    else $("voice-pills").replaceChildren(...this.list.map((voice) => this.pill(voice)));
  }

  pill({ name, stored }) {
    const label = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { type: "radio", name: "voice", value: name, checked: name === this.chosen });
    const words = document.createElement("span");
    words.textContent = name;
    words.dir = "auto";
    label.className = stored ? "pill stored" : "pill";
    label.append(input, words);
    return label;
  }

  showSelect() {
    const groups = ["builtin", "stored"].map((kind) => {
      const group = document.createElement("optgroup");
      group.label = t(kind);
      const names = this.list.filter((voice) => voice.stored === (kind === "stored"));
      group.append(...names.map(({ name }) => new Option(name, name, false, name === this.chosen)));
      return group;
    });
    $("voice-select").replaceChildren(...groups.filter((group) => group.childElementCount));
  }

  ask() {
    const name = this.chosen;
    $("confirm-text").textContent = t("confirmDelete", { name });
    const dialog = $("confirm");
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => dialog.returnValue === "yes" && this.remove(name), { once: true });
    dialog.showModal();
  }

  async remove(name) {
    try {
      await deleteVoice(name);
      this.on.deleted();
    } catch (error) {
      this.on.error(error);
    }
    await this.load().catch((error) => this.on.error(error));
    document.querySelector("#voice-pills input:checked, #voice-select:not([hidden])")?.focus();
  }
}
