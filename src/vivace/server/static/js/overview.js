// What the pictures show of audio of any length, in bounded memory: peaks and spectrum per column. When the columns
// are full, pairs of them are merged and each then stands for twice the time.

import { Spectrum } from "./fft.js";

export const BANDS = 72;
const COLUMNS = 4096;
const HOP_SECONDS = 0.01;

export class Overview {
  constructor(rate) {
    this.rate = rate;
    this.hop = Math.round(rate * HOP_SECONDS);
    this.spectrum = new Spectrum(rate, BANDS);
    this.peaks = new Uint16Array(COLUMNS);
    this.bands = new Uint8Array(COLUMNS * BANDS);
    this.columns = 0;
    this.merged = 1; // hops per column
    this.inColumn = 0;
    this.recent = new Int16Array(Spectrum.size);
    this.queue = [];
    this.rest = new Int16Array(0);
  }

  get secondsPerColumn() {
    return (this.hop * this.merged) / this.rate;
  }

  push(samples) {
    this.queue.push({ samples, at: 0 });
  }

  /** Works through what was pushed for `budget_ms` at most; true if something changed. */
  work(budget_ms) {
    const stop = performance.now() + budget_ms;
    let changed = false;
    while (this.queue.length && performance.now() < stop) {
      const first = this.queue[0];
      const part = first.samples.subarray(first.at, first.at + this.hop - this.rest.length);
      const hop = new Int16Array(this.rest.length + part.length);
      hop.set(this.rest);
      hop.set(part, this.rest.length);
      first.at += part.length;
      if (first.at >= first.samples.length) this.queue.shift();
      if (hop.length < this.hop) {
        this.rest = hop;
      } else {
        this.rest = new Int16Array(0);
        this.add(hop);
        changed = true;
      }
    }
    return changed;
  }

  add(hop) {
    this.recent.copyWithin(0, hop.length);
    this.recent.set(hop, this.recent.length - hop.length);
    let peak = 0;
    for (const sample of hop) peak = Math.max(peak, Math.abs(sample));
    const column = this.spectrum.column(this.recent);
    if (this.inColumn === 0) {
      if (this.columns === COLUMNS) this.halve();
      this.columns += 1;
      this.peaks[this.columns - 1] = 0;
      this.bands.fill(0, (this.columns - 1) * BANDS, this.columns * BANDS);
    }
    const last = this.columns - 1;
    this.peaks[last] = Math.max(this.peaks[last], peak);
    for (let i = 0; i < BANDS; i++) this.bands[last * BANDS + i] = Math.max(this.bands[last * BANDS + i], column[i]);
    this.inColumn = (this.inColumn + 1) % this.merged;
  }

  halve() {
    const { peaks, bands } = this;
    for (let i = 0; i < COLUMNS / 2; i++) {
      peaks[i] = Math.max(peaks[2 * i], peaks[2 * i + 1]);
      for (let band = 0; band < BANDS; band++)
        bands[i * BANDS + band] = Math.max(bands[2 * i * BANDS + band], bands[(2 * i + 1) * BANDS + band]);
    }
    this.columns = COLUMNS / 2;
    this.merged *= 2;
  }
}
