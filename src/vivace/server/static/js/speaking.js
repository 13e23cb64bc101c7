// From text to sound: whole texts, and words as they are typed.

import { ApiError } from "./api.js";
import { MOST_CHARACTERS, Utterance, pieces } from "./utterance.js";

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
    this.complete = false; // the utterance takes no more text
    this.stopped = true;
    this.held = []; // [text, whether it ends the utterance] that waits for the utterance before
  }

  get working() {
    return this.utterance !== null;
  }

  speak(text) {
    this.stop();
    if (!text.trim()) return this.on.error(new ApiError("empty_input"));
    for (const piece of pieces(text)) this.held.push([piece, true]);
    return this.go(false);
  }

  /** A finished piece of typed text; `last` ends the sentence. */
  type(text, last) {
    const all = pieces(text);
    for (const piece of all.slice(0, -1)) this.held.push([piece, true]);
    this.held.push([all.at(-1) ?? "", last]);
    this.go(true);
  }

  /** Sends what is held, as far as the utterance that is being made takes it. */
  go(lenient) {
    while (this.held.length && !this.complete) {
      const [piece, last] = this.held[0];
      if (this.utterance && this.characters + piece.length > MOST_CHARACTERS) {
        this.finish(); // the rest follows in an utterance of its own
        break;
      }
      this.held.shift();
      if (!this.utterance && !piece.trim()) continue;
      if (!this.utterance) this.open(!this.stopped, lenient);
      if (piece) this.say(piece);
      if (last) this.finish();
    }
    this.on.change();
  }

  say(text) {
    this.last.text += text;
    this.characters += text.length;
    this.utterance.text(text);
  }

  finish() {
    this.complete = true;
    this.utterance.done();
  }

  open(keep, lenient) {
    const { stage } = this;
    const config = this.settings();
    const { model: _, ...session } = config;
    this.last = { config, text: keep && this.last ? this.last.text : "" };
    this.stopped = false;
    this.characters = 0;
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
    this.complete = false;
    finish();
    if (error) {
      this.held = [];
      this.on.error(error);
    }
    this.go(this.stage.lenient);
  }

  stop() {
    this.held = [];
    this.complete = false;
    this.utterance?.cancel();
    this.utterance = null;
    this.stopped = true;
    this.stage.stop();
    this.on.change();
  }
}
