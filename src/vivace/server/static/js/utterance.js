// One utterance over the WebSocket /v1/audio/speech/stream: text goes in, audio and figures come out.

import { ApiError, asBytes, key, socketUrl } from "./api.js";

export const MOST_CHARACTERS = 8_000; // of one utterance: the server takes 32 KiB of text that waits
const PING_MS = 20_000;
const JOINTS = [/\n(?!.*\n)/s, /[.!?…。！？]\s*(?!.*[.!?…。！？])/s, /\s(?!.*\s)/s];

/** Cuts a long text at the end of a line, a sentence, or a word; never inside a character. */
export function pieces(text, limit = MOST_CHARACTERS) {
  const found = [];
  let rest = text;
  while (rest.length > limit) {
    const cut = joint(rest.slice(0, limit));
    found.push(rest.slice(0, cut));
    rest = rest.slice(cut);
  }
  if (rest) found.push(rest);
  return found;
}

function joint(part) {
  for (const pattern of JOINTS) {
    const match = pattern.exec(part);
    if (match && match.index + match[0].length > part.length / 2) return match.index + match[0].length;
  }
  return /[\ud800-\udbff]$/.test(part) ? part.length - 1 : part.length;
}

export class Utterance {
  /**
   * @param config settings of session.config
   * @param on { ready(event), start(rate), audio(Int16Array), timing(event), done(event), error(ApiError) }.
   *   Exactly one of done and error ends an utterance, unless cancel ends it silently.
   */
  constructor(config, on) {
    this.on = on;
    this.ended = false;
    this.started = false;
    this.waiting = [];
    this.carry = null;
    // A browser cannot set headers here: the key travels as a subprotocol.
    const protocols = key.get() ? ["vivace", `vivace.key.${encodeKey(key.get())}`] : [];
    this.socket = new WebSocket(socketUrl("v1/audio/speech/stream"), protocols);
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = ({ data }) => (typeof data === "string" ? this.event(data) : this.audio(data));
    this.socket.onclose = () => this.fail(new ApiError(this.started ? "cut" : "socket_failed"));
    this.socket.onopen = () => {
      for (const message of this.waiting.splice(0)) this.socket.send(message);
    };
    this.write({ type: "session.config", response_format: "pcm", timing: true, ...config });
    this.pings = setInterval(() => this.write({ type: "ping" }), PING_MS);
  }

  text(text) {
    this.write({ type: "input.text", text });
  }

  done() {
    this.write({ type: "input.done" });
  }

  /** Ends it at once; nothing more is called. */
  cancel() {
    this.write({ type: "cancel" });
    this.close();
  }

  write(message) {
    const words = JSON.stringify(message);
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(words);
    else if (this.socket.readyState === WebSocket.CONNECTING) this.waiting.push(words);
  }

  close() {
    if (this.ended) return;
    this.ended = true;
    clearInterval(this.pings);
    this.write({ type: "session.close" });
    this.socket.onmessage = this.socket.onclose = null;
    if (this.socket.readyState === WebSocket.CONNECTING) this.socket.onopen = () => this.socket.close(1000);
    else this.socket.close(1000);
  }

  fail(error) {
    if (this.ended) return;
    this.close();
    this.on.error(error);
  }

  event(words) {
    const event = JSON.parse(words);
    switch (event.type) {
      case "session.ready":
        this.on.ready(event);
        break;
      case "audio.start":
        this.started = true;
        this.on.start(event.sample_rate);
        break;
      case "audio.timing":
        this.on.timing(event);
        break;
      case "audio.done":
        this.close();
        this.on.done(event);
        break;
      case "error":
        this.fail(new ApiError(event.code ?? "other", { message: event.message, incomplete: this.started }));
        break;
      default: // pong, audio.cancelled, and what later versions add
    }
  }

  /** A frame may end in the middle of a sample. */
  audio(buffer) {
    let bytes = new Uint8Array(buffer);
    if (this.carry !== null) {
      const joined = new Uint8Array(bytes.length + 1);
      joined[0] = this.carry;
      joined.set(bytes, 1);
      bytes = joined;
    }
    const even = bytes.length & ~1;
    this.carry = even < bytes.length ? bytes[even] : null;
    const view = new DataView(bytes.buffer, bytes.byteOffset, even);
    const samples = new Int16Array(even / 2);
    for (let i = 0; i < samples.length; i++) samples[i] = view.getInt16(2 * i, true);
    this.on.audio(samples);
  }
}

/** A key in the letters that a subprotocol may have (base64url). */
function encodeKey(words) {
  return btoa(asBytes(words)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}
