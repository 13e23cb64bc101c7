// A WAV file of 16-bit mono samples.

export function wavFile(samples, rate) {
  const bytes = samples.length * 2;
  const head = new DataView(new ArrayBuffer(44));
  const words = (at, text) => [...text].forEach((letter, i) => head.setUint8(at + i, letter.charCodeAt(0)));
  words(0, "RIFF");
  head.setUint32(4, 36 + bytes, true);
  words(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true); // PCM
  head.setUint16(22, 1, true); // mono
  head.setUint32(24, rate, true);
  head.setUint32(28, 2 * rate, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  words(36, "data");
  head.setUint32(40, bytes, true);
  const data = new DataView(new ArrayBuffer(bytes));
  samples.forEach((sample, i) => data.setInt16(2 * i, sample, true));
  return new Blob([head, data], { type: "audio/wav" });
}

/** Float samples as 16-bit ones. */
export function int16(samples) {
  return Int16Array.from(samples, (value) => Math.max(-32768, Math.min(32767, Math.round(value * 32767))));
}

/** Hands a file to the browser's downloads. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
