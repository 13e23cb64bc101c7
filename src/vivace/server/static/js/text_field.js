// The text field: the draft that outlives a reload, and words that are spoken as they are typed.

import { tab } from "./store.js";
import { finishedLength } from "./typing.js";

const $ = (id) => document.getElementById(id);

export class TextField {
  /** @param on { typed(): something was typed; piece(text, last): a finished piece; mode(): switched on or off } */
  constructor(on) {
    this.on = on;
    this.text = $("text");
    this.composing = false;
    this.set(tab.get("draft") ?? "");
    this.text.addEventListener("input", () => this.changed());
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.text.addEventListener("compositionstart", () => (this.composing = true));
    this.text.addEventListener("compositionend", () => {
      this.composing = false;
      this.changed();
    });
    $("typing").addEventListener("change", () => this.switched());
  }

  get value() {
    return this.text.value;
  }

  /** Words are spoken as they are typed. */
  get speaksAlong() {
    return $("typing").checked;
  }

  set(words) {
    this.text.value = words;
    this.keep();
  }

  /** Hands on what is finished, or all of it; what was handed on moves up into the log. */
  send(all) {
    const cut = all ? this.value.length : finishedLength(this.value);
    if (!cut && !all) return;
    const piece = this.value.slice(0, cut);
    const caret = Math.max(0, this.text.selectionStart - cut);
    this.text.value = this.value.slice(cut);
    this.text.setSelectionRange(caret, caret);
    this.show($("spoken").textContent + piece + (all ? "\n" : ""));
    this.keep();
    this.on.piece(piece, all);
  }

  changed() {
    this.keep();
    if (!this.speaksAlong || this.composing) return;
    this.on.typed();
    this.send(false);
  }

  key(event) {
    if (!this.speaksAlong || event.key !== "Enter" || event.isComposing || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.on.typed();
    this.send(true);
  }

  switched() {
    $("typing-hint").hidden = !this.speaksAlong;
    if (!this.speaksAlong) {
      this.set($("spoken").textContent + this.value);
      this.show("");
    }
    this.on.mode();
    this.text.focus();
  }

  show(words) {
    const spoken = $("spoken");
    spoken.textContent = words;
    spoken.hidden = !words.trim();
    spoken.scrollTop = spoken.scrollHeight;
  }

  keep() {
    tab.set("draft", $("spoken").textContent + this.value);
  }
}
