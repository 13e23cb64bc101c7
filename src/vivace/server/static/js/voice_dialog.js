// The dialog that makes a voice of a recording or a file, its words, and the owner's consent.

import { addVoice } from "./api.js";
import { errorWords } from "./errors.js";
import { number, onLanguage, t } from "./i18n.js";
import { MOST_SECONDS, Recorder } from "./recorder.js";

const $ = (id) => document.getElementById(id);

export class VoiceDialog {
  /** @param on { saved(name) } */
  constructor(on) {
    this.on = on;
    this.dialog = $("voice-dialog");
    $("new-voice").addEventListener("click", () => this.open());
    $("voice-cancel").addEventListener("click", () => this.dialog.close());
    $("record").addEventListener("click", () => (this.recorder ? this.endRecording() : this.record()));
    $("voice-file").addEventListener("change", () => this.choose());
    this.dialog.addEventListener("close", () => this.abandon());
    $("voice-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    onLanguage(() => this.words());
  }

  words() {
    $("read-this").textContent = t("readThis");
    $("read-this").dataset.hint = t("readThisHint");
    $("record-text").textContent = t(this.recorder ? "recordStop" : "record");
    $("record").classList.toggle("recording", Boolean(this.recorder));
  }

  open() {
    $("voice-form").reset();
    this.audio = null;
    this.note("");
    this.problem("");
    $("preview").hidden = true;
    this.dialog.showModal();
  }

  note(words) {
    $("source-note").textContent = words;
  }

  problem(words, field) {
    $("voice-problem").textContent = words;
    field?.focus();
  }

  async record() {
    this.problem("");
    const recorder = new Recorder({
      level: (level, seconds) => {
        $("level").value = Math.sqrt(level);
        const words = t("recording", { n: number(Math.floor(seconds)) });
        if ($("source-note").textContent !== words) this.note(words);
      },
      full: () => this.endRecording(),
    });
    this.recorder = recorder;
    this.words();
    try {
      await recorder.start();
    } catch (error) {
      this.recorder = null;
      this.problem(errorWords(error));
    }
    if (this.recorder !== recorder) recorder.release(); // closed or stopped meanwhile
    $("level").hidden = !this.recorder;
    this.words();
  }

  endRecording() {
    const { recorder } = this;
    this.recorder = null;
    $("level").hidden = true;
    this.words();
    if (!recorder.length) return recorder.release();
    const seconds = Math.min(recorder.seconds, MOST_SECONDS);
    this.take(recorder.stop(), "recording.wav");
    this.note(t("recorded", { n: number(seconds, 1) }));
    if (!$("voice-text").value.trim()) $("voice-text").value = t("readThis");
  }

  choose() {
    const [file] = $("voice-file").files;
    if (!file) return;
    this.take(file, "recording");
    this.note(t("fileChosen", { name: file.name }));
  }

  take(audio, filename) {
    this.audio = { audio, filename };
    const preview = $("preview");
    if (preview.src) URL.revokeObjectURL(preview.src);
    preview.src = URL.createObjectURL(audio);
    preview.hidden = false;
    this.problem("");
  }

  async save() {
    const name = $("voice-name").value.trim().toLowerCase();
    const text = $("voice-text").value.trim();
    if (this.recorder) this.endRecording();
    if (!name) return this.problem(t("needName"), $("voice-name"));
    if (!this.audio) return this.problem(t("needAudio"), $("record"));
    if (!text) return this.problem(t("needText"), $("voice-text"));
    if (!$("consent").checked) return this.problem(t("needConsent"), $("consent"));
    this.problem("");
    this.note(t("saving"));
    $("voice-save").disabled = true;
    try {
      const made = await addVoice({ ...this.audio, name, text, consent: true });
      this.dialog.close();
      this.on.saved(made.id ?? made.name ?? name);
    } catch (error) {
      this.note("");
      const advice = error.message ? `\n${t("advice", { message: error.message })}` : "";
      this.problem(errorWords(error) + advice);
    } finally {
      $("voice-save").disabled = false;
    }
  }

  /** Nothing goes on behind a closed dialog. */
  abandon() {
    this.recorder?.release();
    this.recorder = null;
    $("level").hidden = true;
    $("preview").pause();
    this.words();
  }
}
