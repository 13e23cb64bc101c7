// The server's REST interface. Every failure is an ApiError with a code of the error contract.

import { tab } from "./store.js";

const BASE = new URL(".", document.baseURI);

export class ApiError extends Error {
  /** @param incomplete audio had begun, and ended too early. */
  constructor(code, { message = "", status = 0, incomplete = false } = {}) {
    super(message);
    this.code = code;
    this.status = status;
    this.incomplete = incomplete;
  }
}

export const key = {
  get: () => tab.get("key"),
  set: (value) => tab.set("key", value),
};

/** Words as a string of their UTF-8 bytes, which is what headers and btoa take. */
export function asBytes(words) {
  return String.fromCharCode(...new TextEncoder().encode(words));
}

/** Address of a WebSocket route. */
export function socketUrl(path) {
  const url = new URL(path, BASE);
  url.protocol = url.protocol.replace("http", "ws");
  return url.href;
}

const BY_STATUS = { 401: "invalid_api_key", 404: "not_found", 413: "payload_too_large", 429: "rate_limited" };
const BY_HEALTH = { starting: "starting", draining: "draining" };

async function errorOf(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // Not ours: a proxy's page, or nothing.
  }
  const error = body.error ?? {};
  const health = body.status && (BY_HEALTH[body.status] ?? "engine_restarting"); // of /health/ready
  const other = response.status >= 502 ? "connection_lost" : "other";
  const code = error.code ?? health ?? BY_STATUS[response.status] ?? other;
  return new ApiError(code, { message: error.message, status: response.status });
}

/** One request; the response, or an ApiError. */
async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${asBytes(key.get())}`;
  let response;
  try {
    response = await fetch(new URL(path, BASE), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("connection_lost");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** True once the engine takes requests; otherwise an ApiError says why. */
export async function readiness() {
  await call("health/ready", { signal: AbortSignal.timeout?.(5000) }).catch((error) => {
    throw error instanceof ApiError ? error : new ApiError("connection_lost");
  });
}

export async function listModels() {
  const body = await (await call("v1/models")).json();
  return (body.data ?? []).map((model) => model.id);
}

/** Voices as { name, stored, isDefault }. */
export async function listVoices() {
  const found = [];
  for (let after = "", more = true; more; after = found.at(-1)?.name) {
    const body = await (await call(`v1/audio/voices?after=${encodeURIComponent(after)}`)).json();
    const voices = body.data.map((voice) => ({
      name: voice.id,
      stored: voice.kind === "stored",
      isDefault: voice.default === true,
    }));
    found.push(...voices);
    more = body.has_more === true && body.data.length > 0;
  }
  return found;
}

export async function addVoice({ name, audio, filename, text, consent }) {
  const form = new FormData();
  form.append("name", name);
  form.append("ref_text", text);
  form.append("consent", String(consent));
  form.append("audio_sample", audio, filename);
  return (await call("v1/audio/voices", { method: "POST", body: form })).json();
}

export async function deleteVoice(name) {
  await call(`v1/audio/voices/${encodeURIComponent(name)}`, { method: "DELETE" });
}

/** The same speech as a file of another format. */
export async function speechFile(config, text, format) {
  const body = { model: config.model, input: text, voice: config.voice, response_format: format, speed: config.speed };
  for (const name of ["seed", "language", "instructions"]) if (config[name] !== undefined) body[name] = config[name];
  const response = await call("v1/audio/speech", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  try {
    return await response.blob();
  } catch {
    throw new ApiError("cut");
  }
}
