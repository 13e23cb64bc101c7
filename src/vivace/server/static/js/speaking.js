// From text to sound: whole texts, and words as they are typed.

import { ApiError } from "./api.js";
import { Utterance } from "./utterance.js";

export class Speaking {
  /**
   * @param stage what shows and plays
   * @param settings () => settings of a session
   * @param on { change(), error(ApiError), ready(event), done(event) }
   */
  constructor(stage, settings, on) {
    this.stage = stage;
    this.settings = settings;
    this.on = on;
    this.utterance = null;
    this.last = null; // what the audio on the stage was made of
    this.held = []; // typed while the sentence before was still being made
  }

  get working() {
    return this.utterance !== null;
  }

  async speak(text) {
    this.stop();
    if (!text.trim()) return this.on.error(new ApiError("empty_input"));
    this.open(false, false);
    this.say(text);
    this.utterance.done();
    return this.on.change();
  }

  /** A finished piece of typed text; `last` ends the sentence. */
  type(piece, last) {
    if (this.utterance && this.complete) {
      this.held.push([piece, last]);
      return;
    }
    if (!this.utterance) {
      if (!piece.trim()) return;
      this.open(!this.stopped, true);
    }
    if (piece) this.say(piece);
    if (last) {
      this.complete = true;
      this.utterance.done();
    }
    this.on.change();
  }

  say(text) {
    this.last.text += text;
    this.utterance.text(text);
  }

  open(keep, lenient) {
    const { stage } = this;
    const config = this.settings();
    const { model: _, ...session } = config;
    this.last = { config, text: keep && this.last ? this.last.text : "" };
    this.complete = false;
    this.stopped = false;
    stage.begin(keep, lenient);
    stage.player.prepare().catch(() => this.on.error(new ApiError("no_sound")));
    const utterance = new Utterance(session, {
      ready: (event) => this.on.ready(event),
      start: (rate) => stage.rate(rate).catch(() => this.on.error(new ApiError("no_sound"))),
      audio: (samples) => stage.audio(samples),
      timing: (event) => stage.timing(event),
      done: (event) => this.end(() => {
        stage.done(event);
        this.on.done(event);
      }),
      error: (error) => this.end(() => stage.finish(), error),
    });
    this.utterance = utterance;
  }

  end(finish, error) {
    this.utterance = null;
    finish();
    const held = error ? [] : this.held;
    this.held = [];
    for (const [piece, last] of held) this.type(piece, last);
    if (error) this.on.error(error);
    this.on.change();
  }

  stop() {
    this.held = [];
    this.utterance?.cancel();
    this.utterance = null;
    this.stopped = true;
    this.stage.stop();
    this.on.change();
  }
}
