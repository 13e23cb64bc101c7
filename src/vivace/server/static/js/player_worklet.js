// Runs on the audio thread. After a gap it waits for more than before, so that a slow server gives few long pauses,
// not many short ones; the next audio starts with what was learned, and forgets it bit by bit.

const FIRST_SECONDS = 0.04;
const MOST_SECONDS = 2;
const REPORT_BLOCKS = 4;

class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    this.wanted = FIRST_SECONDS * sampleRate;
    this.reset(0);
    this.port.onmessage = ({ data }) => this.receive(data);
  }

  reset(generation) {
    this.generation = generation;
    this.queue = [];
    this.offset = 0;
    this.buffered = 0;
    this.played = 0;
    this.blocks = 0;
    this.running = false;
    this.gaps = 0;
    this.ended = false;
    this.heard = false;
    this.over = false;
  }

  receive(data) {
    if (data.type === "reset") this.reset(data.generation);
    else if (data.type === "end") this.ended = true;
    else if (data.type === "goOn") this.ended = this.over = false;
    else if (data.type === "lenient") this.lenient = data.lenient;
    else {
      this.queue.push(data.samples);
      this.buffered += data.samples.length;
    }
  }

  tell(type) {
    this.port.postMessage({ type, generation: this.generation, played: this.played });
  }

  process(_, outputs) {
    if (this.over) return true;
    if (!this.running) this.start();
    if (this.running) this.fill(outputs[0][0]);
    if (this.ended && this.buffered === 0) {
      this.over = true;
      if (!this.gaps) this.wanted = Math.max(FIRST_SECONDS * sampleRate, this.wanted / 2);
      this.tell("drained");
    }
    return true;
  }

  start() {
    this.running = this.buffered > 0 && (this.ended || this.buffered >= this.wanted);
    if (!this.running || !this.played) return;
    this.gaps += 1;
    this.tell("gap"); // told now: silence after the last sample is none
  }

  fill(out) {
    let filled = 0;
    while (filled < out.length && this.queue.length) {
      const part = this.queue[0].subarray(this.offset, this.offset + out.length - filled);
      out.set(part, filled);
      filled += part.length;
      this.offset += part.length;
      if (this.offset === this.queue[0].length) {
        this.queue.shift();
        this.offset = 0;
      }
    }
    this.buffered -= filled;
    this.played += filled;
    if (!this.heard && out.some((sample) => sample !== 0)) {
      this.heard = true;
      this.tell("heard");
    }
    if (filled < out.length && !this.ended) {
      this.running = false;
      const more = Math.min(MOST_SECONDS * sampleRate, Math.max(2 * this.wanted, 0.2 * sampleRate));
      this.wanted = this.lenient ? FIRST_SECONDS * sampleRate : more;
    } else if (++this.blocks % REPORT_BLOCKS === 0) {
      this.tell("moved");
    }
  }
}

registerProcessor("player", Player);
