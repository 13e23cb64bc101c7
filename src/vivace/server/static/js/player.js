// Plays audio that is still being made, and keeps all of it: for hearing again, for seeking, for the file.

import { ScheduledOutput, WorkletOutput } from "./outputs.js";

const AHEAD_SECONDS = 20;

/** The worklet where there is one, and where the server can be reached to load it. */
async function openOutput(context, on) {
  if (context.audioWorklet) {
    try {
      return await WorkletOutput.open(context, on);
    } catch {
      // The plain way needs nothing more from the server.
    }
  }
  return new ScheduledOutput(context, on);
}

export class Player {
  /** @param on { heard(latency_ms), gap(), drained() } */
  constructor(on) {
    this.on = on;
    this.rate = 24_000;
    this.context = null;
    this.output = null;
    this.slowText = false;
    this.begin();
  }

  /** Forgets the last audio and waits for new. */
  begin() {
    this.chunks = [];
    this.length = 0;
    this.ended = false;
    this.restart(0);
    this.playing = true;
    this.paused = false;
  }

  /** Opens the sound device; call it from a click or a key. Audio may be pushed before it is ready. */
  async prepare(rate = this.rate) {
    if (this.context && rate !== this.context.sampleRate) {
      this.output = this.opening = null;
      await this.context.close();
      this.context = null;
    }
    this.rate = rate;
    this.context ??= new AudioContext({ sampleRate: rate, latencyHint: "interactive" });
    const context = this.context;
    if (context.state !== "running") context.resume(); // not awaited: it hangs while autoplay is forbidden
    if (this.output) return;
    const on = {
      heard: () => this.on.heard(1000 * (context.outputLatency || context.baseLatency || 0)),
      gap: () => this.on.gap(),
      moved: () => this.feed(),
      drained: () => {
        this.playing = false;
        this.on.drained();
      },
    };
    this.opening ??= openOutput(context, on);
    const output = await this.opening;
    if (context !== this.context || this.output) return; // another call was faster
    this.output = output;
    this.lenient = this.slowText;
    this.restart(this.origin);
    this.feed();
  }

  /** Text comes as slowly as somebody types. */
  set lenient(lenient) {
    this.slowText = lenient;
    if (this.output) this.output.lenient = lenient;
  }

  push(samples) {
    this.chunks.push(samples);
    this.length += samples.length;
    this.feed();
  }

  /** More audio follows what was thought complete. */
  goOn() {
    this.ended = this.toldEnd = false;
    this.playing = true;
    this.paused = false;
    this.output?.goOn();
  }

  /** No more audio comes. */
  finish() {
    this.ended = true;
    this.feed();
  }

  /** Plays on; from the start after the end. */
  play() {
    if (!this.playing) this.restart(this.position >= this.seconds - 0.05 ? 0 : this.played());
    this.playing = true;
    this.paused = false;
    this.context?.resume();
    this.feed();
  }

  pause() {
    this.paused = true;
    this.context?.suspend();
  }

  seek(seconds) {
    this.restart(Math.min(Math.round(seconds * this.rate), this.length));
    this.feed();
  }

  /** Falls silent at once; what there is can be played again. */
  stop() {
    this.ended = true;
    this.playing = this.paused = false;
    this.restart(0);
  }

  get seconds() {
    return this.length / this.rate;
  }

  /** Where the ear is, in seconds. */
  get position() {
    return Math.min(this.played(), this.length) / this.rate;
  }

  /** All samples in one array. */
  samples() {
    const all = new Int16Array(this.length);
    let at = 0;
    for (const chunk of this.chunks) {
      all.set(chunk, at);
      at += chunk.length;
    }
    return all;
  }

  played() {
    return this.origin + (this.output?.played ?? 0);
  }

  restart(origin) {
    this.origin = origin;
    this.fed = origin;
    this.toldEnd = false;
    this.output?.reset();
  }

  /** Hands the output what it needs for the next seconds. */
  feed() {
    if (!this.output || !this.playing) return;
    const until = Math.min(this.length, this.played() + AHEAD_SECONDS * this.rate);
    let start = 0;
    for (const chunk of this.chunks) {
      const end = start + chunk.length;
      if (end > this.fed && start < until) {
        const part = chunk.subarray(this.fed - start);
        this.output.push(Float32Array.from(part, (value) => value / 32768));
        this.fed = end;
      }
      start = end;
    }
    if (this.ended && this.fed === this.length && !this.toldEnd) {
      this.toldEnd = true;
      this.output.end();
    }
  }
}
