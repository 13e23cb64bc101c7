// Hands on what the microphone hears, in blocks of about 40 ms.

const BLOCK = 2048;

class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Float32Array(BLOCK);
    this.filled = 0;
  }

  process([[channel]]) {
    if (!channel) return true;
    this.block.set(channel, this.filled);
    this.filled += channel.length;
    if (this.filled === BLOCK) {
      this.port.postMessage(this.block.slice());
      this.filled = 0;
    }
    return true;
  }
}

registerProcessor("recorder", Recorder);
