// Two ways to the sound device. Both: push(Float32Array), end(), goOn(), reset(), `played` samples since reset, and
// `lenient`: gaps come from slow typing, so that there is nothing to learn from them.

/** A jitter buffer on the audio thread (player_worklet.js). */
export class WorkletOutput {
  static async open(context, on) {
    await context.audioWorklet.addModule(new URL("./player_worklet.js", import.meta.url));
    return new WorkletOutput(context, on);
  }

  constructor(context, on) {
    this.played = 0;
    this.generation = 0;
    this.node = new AudioWorkletNode(context, "player", { numberOfInputs: 0, outputChannelCount: [1] });
    this.node.connect(context.destination);
    this.node.port.onmessage = ({ data }) => {
      if (data.generation !== this.generation) return;
      this.played = data.played;
      on[data.type]();
    };
  }

  push(samples) {
    this.node.port.postMessage({ type: "samples", samples }, [samples.buffer]);
  }

  end() {
    this.node.port.postMessage({ type: "end" });
  }

  goOn() {
    this.node.port.postMessage({ type: "goOn" });
  }

  set lenient(lenient) {
    this.node.port.postMessage({ type: "lenient", lenient });
  }

  reset() {
    this.played = 0;
    this.generation += 1;
    this.node.port.postMessage({ type: "reset", generation: this.generation });
  }
}

/** Buffers laid end to end on the context's clock: for pages that are not on https or localhost, where browsers
 * offer no worklet, and for when it cannot be loaded. */
export class ScheduledOutput {
  constructor(context, on) {
    this.context = context;
    this.on = on;
    this.reset();
    setInterval(() => this.watch(), 50);
  }

  reset() {
    for (const { node } of this.pending ?? []) {
      node.onended = null;
      node.stop();
    }
    this.pending = [];
    this.finished = 0;
    this.next = 0;
    this.ended = false;
    this.state = "waiting";
  }

  push(samples) {
    if (!samples.length) return;
    const { context } = this;
    const buffer = context.createBuffer(1, samples.length, context.sampleRate);
    buffer.copyToChannel(samples, 0);
    const node = context.createBufferSource();
    node.buffer = buffer;
    node.connect(context.destination);
    const at = Math.max(this.next, context.currentTime + 0.05);
    node.start(at);
    this.next = at + buffer.duration;
    this.pending.push({ node, at, length: samples.length });
    if (this.state === "dry") {
      this.state = "running";
      this.on.gap();
    }
  }

  end() {
    this.ended = true;
  }

  goOn() {
    this.ended = false;
    if (this.state === "over") this.state = "dry";
  }

  get played() {
    const now = this.context.currentTime;
    while (this.pending.length && now >= this.pending[0].at + this.pending[0].length / this.context.sampleRate)
      this.finished += this.pending.shift().length;
    const first = this.pending[0];
    return this.finished + (first ? Math.max(0, Math.round((now - first.at) * this.context.sampleRate)) : 0);
  }

  watch() {
    const { played } = this;
    if (played > 0 && this.state === "waiting") {
      this.state = "running";
      this.on.heard();
    }
    if (this.state !== "running") return;
    if (this.pending.length) {
      this.on.moved();
    } else {
      this.state = this.ended ? "over" : "dry";
      if (this.ended) this.on.drained();
    }
  }
}
