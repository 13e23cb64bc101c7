// Short-time spectrum of speech in mel bands, one column at a time.

const SIZE = 512;
const FLOOR_DB = -88;
const CEILING_DB = -22;

/** Radix-2 FFT in place; `re` and `im` hold a power of two of values. */
export function fft(re, im) {
  const n = re.length;
  for (let i = 1, j = 0; i < n; i++) {
    let bit = n >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      [re[i], re[j]] = [re[j], re[i]];
      [im[i], im[j]] = [im[j], im[i]];
    }
  }
  for (let half = 1; half < n; half *= 2) {
    for (let k = 0; k < half; k++) {
      const angle = (-Math.PI * k) / half;
      const c = Math.cos(angle);
      const s = Math.sin(angle);
      for (let i = k; i < n; i += 2 * half) {
        const j = i + half;
        const x = re[j] * c - im[j] * s;
        const y = re[j] * s + im[j] * c;
        re[j] = re[i] - x;
        im[j] = im[i] - y;
        re[i] += x;
        im[i] += y;
      }
    }
  }
}

const mel = (hz) => 2595 * Math.log10(1 + hz / 700);
const hertz = (value) => 700 * (10 ** (value / 2595) - 1);

export class Spectrum {
  constructor(rate, bands) {
    this.bands = bands;
    this.re = new Float64Array(SIZE);
    this.im = new Float64Array(SIZE);
    this.window = Float64Array.from({ length: SIZE }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / SIZE));
    const top = mel(rate / 2);
    this.edges = Array.from({ length: bands + 1 }, (_, i) => (hertz((top * i) / bands) / rate) * SIZE);
  }

  static get size() {
    return SIZE;
  }

  /** 0 … 255 per band, lowest first, of SIZE samples (-32768 … 32767). */
  column(samples) {
    const { re, im, edges } = this;
    for (let i = 0; i < SIZE; i++) re[i] = (samples[i] / 32768) * this.window[i];
    im.fill(0);
    fft(re, im);
    const out = new Uint8Array(this.bands);
    for (let band = 0; band < this.bands; band++) {
      let power = 0;
      const last = Math.max(Math.floor(edges[band]) + 1, Math.ceil(edges[band + 1]));
      for (let k = Math.floor(edges[band]); k < last && k <= SIZE / 2; k++)
        power = Math.max(power, re[k] * re[k] + im[k] * im[k]);
      const db = 10 * Math.log10(power / (SIZE / 4) ** 2 + 1e-12);
      out[band] = Math.max(0, Math.min(255, (255 * (db - FLOOR_DB)) / (CEILING_DB - FLOOR_DB)));
    }
    return out;
  }
}
