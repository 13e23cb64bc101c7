// Records the microphone as plain samples: the server reads WAV, not what browsers would record by themselves.

import { ApiError } from "./api.js";
import { int16, wavFile } from "./wav.js";

export const MOST_SECONDS = 30;

export class Recorder {
  /** @param on { level(0 … 1, seconds), full() } */
  constructor(on) {
    this.on = on;
    this.parts = [];
    this.length = 0;
  }

  get seconds() {
    return this.context ? this.length / this.context.sampleRate : 0;
  }

  async start() {
    if (!navigator.mediaDevices || !globalThis.isSecureContext) throw new ApiError("mic_insecure");
    const audio = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ audio });
    } catch (error) {
      throw new ApiError(error.name === "NotFoundError" ? "mic_missing" : "mic_denied");
    }
    this.context = new AudioContext();
    await this.context.audioWorklet.addModule(new URL("./recorder_worklet.js", import.meta.url));
    const node = new AudioWorkletNode(this.context, "recorder", { numberOfOutputs: 0 });
    node.port.onmessage = ({ data }) => this.take(data);
    this.context.createMediaStreamSource(this.stream).connect(node);
  }

  take(samples) {
    if (!this.stream) return;
    this.parts.push(samples);
    this.length += samples.length;
    let peak = 0;
    for (const sample of samples) peak = Math.max(peak, Math.abs(sample));
    this.on.level(peak, this.seconds);
    if (this.seconds >= MOST_SECONDS - 0.1) this.on.full();
  }

  /** Ends the recording; a WAV file. */
  stop() {
    const rate = this.context.sampleRate;
    this.release();
    const all = new Float32Array(this.length);
    let at = 0;
    for (const part of this.parts) {
      all.set(part, at);
      at += part.length;
    }
    return wavFile(int16(all), rate);
  }

  /** Frees the microphone. */
  release() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.stream = null;
    if (this.context?.state !== "closed") this.context?.close();
  }
}
