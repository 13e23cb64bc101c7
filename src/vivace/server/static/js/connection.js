// Knows whether the server takes requests. After a failure it asks again, ever more slowly, until it does.

import { ApiError, readiness } from "./api.js";

const FIRST_MS = 400;
const MOST_MS = 5_000;
const IDLE_MS = 10_000;

export class Connection {
  /** @param on { changed(state, before) }; state: "starting", "ready", "away", "restarts", "draining" or "key". */
  constructor(on) {
    this.on = on;
    this.state = "starting";
    this.wait = FIRST_MS;
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
    addEventListener("online", () => this.check());
  }

  /** There is a new key to try. */
  async newKey() {
    this.enter("starting");
    await this.check();
  }

  /** Asks now; not while a key is missing, which only the user can change. */
  async check() {
    if (this.state === "key") return;
    clearTimeout(this.timer);
    const round = (this.round = (this.round ?? 0) + 1);
    let state = "ready";
    try {
      await readiness();
    } catch (error) {
      state = stateOf(error);
    }
    if (round !== this.round) return; // a later question is under way
    this.enter(state);
  }

  /** A request failed with `error`: true if that says something about the server. */
  failed(error) {
    const state = stateOf(error);
    if (state === "ready") return false;
    this.wait = FIRST_MS;
    this.enter(state);
    return true;
  }

  enter(state) {
    const before = this.state;
    this.state = state;
    clearTimeout(this.timer);
    if (state === "ready") this.wait = FIRST_MS;
    const wait = state === "ready" ? IDLE_MS : this.wait;
    if (state !== "ready") this.wait = Math.min(2 * this.wait, MOST_MS);
    // A page that nobody sees asks nothing; it asks at once when it is seen again.
    if (state !== "key") this.timer = setTimeout(() => document.hidden || this.check(), wait);
    if (state !== before) this.on.changed(state, before);
  }
}

function stateOf(error) {
  if (!(error instanceof ApiError)) return "ready";
  if (error.status === 401 || error.code === "invalid_api_key") return "key";
  if (error.code === "draining") return "draining";
  if (error.code === "engine_restarting") return "restarts";
  if (error.code === "starting") return "starting";
  if (error.code === "connection_lost") return "away";
  return error.status === 503 && error.code !== "overloaded" ? "restarts" : "ready";
}
