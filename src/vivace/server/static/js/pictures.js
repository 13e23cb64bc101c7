// Draws an Overview: the waveform as bars, the spectrogram below it on the same axis of time.

import { BANDS } from "./overview.js";

const SHORTEST_SECONDS = 6;

/** A colour of the style sheet as [red, green, blue]. */
function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

const css = (rgb) => `rgb(${rgb.join(" ")})`;

/** Fits a canvas to its place on a screen of any density; returns its context in CSS pixels. */
export function fitted(canvas) {
  const ratio = globalThis.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Seconds that the width shows. While audio comes, 6, 8, 12, 16, 24 … so that the picture moves seldom; all of it at
 * the end. */
export function span(seconds, complete) {
  if (complete && seconds) return seconds;
  let shown = SHORTEST_SECONDS;
  for (let step = 0; shown < seconds; step++) shown *= step % 2 ? 3 / 2 : 4 / 3;
  return shown;
}

export class Pictures {
  constructor(wave, spectrogram) {
    this.wave = wave;
    this.spectrogram = spectrogram;
    this.offscreen = document.createElement("canvas");
    this.offscreen.height = BANDS;
    this.colours();
  }

  /** Reads the colours of the theme. */
  colours() {
    this.bar = css(colour("--wave"));
    this.played = css(colour("--accent"));
    const stops = ["--heat-0", "--heat-1", "--heat-2", "--heat-3"].map(colour);
    this.heat = new Uint8ClampedArray(256 * 3);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (stops.length - 1);
      const left = Math.min(Math.floor(at), stops.length - 2);
      for (let c = 0; c < 3; c++)
        this.heat[3 * i + c] = stops[left][c] + (at - left) * (stops[left + 1][c] - stops[left][c]);
    }
    this.painted = 0;
  }

  /** @param shown seconds that the width stands for. */
  draw(overview, shown, position) {
    this.drawWave(overview, shown, position);
    this.drawSpectrogram(overview, shown, position);
  }

  drawWave(overview, shown, position) {
    const { context, width, height } = fitted(this.wave);
    const step = 4;
    const columnsPerBar = (shown / overview.secondsPerColumn / width) * step;
    const now = (position / shown) * width;
    context.lineWidth = 2;
    context.lineCap = "round";
    const [played, coming] = [new Path2D(), new Path2D()];
    for (let x = 2, bar = 0; x < width; x += step, bar++) {
      const from = Math.floor(bar * columnsPerBar);
      const to = Math.min(overview.columns, Math.max(from + 1, Math.floor((bar + 1) * columnsPerBar)));
      if (from >= overview.columns) break;
      let peak = 0;
      for (let i = from; i < to; i++) peak = Math.max(peak, overview.peaks[i]);
      const half = Math.max(0.5, 0.5 * (height - 4) * (peak / 32768) ** 0.7);
      const path = x <= now ? played : coming;
      path.moveTo(x, height / 2 - half);
      path.lineTo(x, height / 2 + half);
    }
    context.strokeStyle = this.bar;
    context.stroke(coming);
    context.strokeStyle = this.played;
    context.stroke(played);
    this.drawCursor(context, now, height);
  }

  drawCursor(context, x, height) {
    if (x <= 0) return;
    context.fillStyle = this.played;
    context.fillRect(x - 0.75, 0, 1.5, height);
  }

  drawSpectrogram(overview, shown, position) {
    this.paint(overview);
    const { context, width, height } = fitted(this.spectrogram);
    if (!overview.columns) return;
    const end = ((overview.columns * overview.secondsPerColumn) / shown) * width;
    context.drawImage(this.offscreen, 0, 0, overview.columns, BANDS, 0, 0, end, height);
    this.drawCursor(context, (position / shown) * width, height);
  }

  /** Brings the picture of columns up to date; only new ones are painted. */
  paint(overview) {
    const { offscreen } = this;
    const capacity = overview.peaks.length;
    const isNew = this.overview !== overview || this.merged !== overview.merged || offscreen.width !== capacity;
    if (isNew) {
      this.overview = overview;
      this.merged = overview.merged;
      offscreen.width = capacity;
      this.painted = 0;
    }
    const from = Math.max(0, this.painted - 1); // the last column may still have been growing
    const count = overview.columns - from;
    if (count <= 0) return;
    const context = offscreen.getContext("2d");
    const image = context.createImageData(count, BANDS);
    for (let x = 0; x < count; x++) {
      for (let band = 0; band < BANDS; band++) {
        const heat = 3 * overview.bands[(from + x) * BANDS + band];
        const at = 4 * ((BANDS - 1 - band) * count + x);
        image.data[at] = this.heat[heat];
        image.data[at + 1] = this.heat[heat + 1];
        image.data[at + 2] = this.heat[heat + 2];
        image.data[at + 3] = 255;
      }
    }
    context.putImageData(image, from, 0);
    this.painted = overview.columns;
  }
}
