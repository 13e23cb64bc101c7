// Which part of a text that is being typed is finished.

const BREAK = /[\s.,!?;:…、。，！？；：）」』”]/u;
const CJK = /[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]/u;

/** Characters of `text` that will not grow any more: up to the last space or punctuation mark, or up to the last
 * letter of a script without spaces. A point or comma between digits belongs to its number until more is typed. */
export function finishedLength(text) {
  for (let i = text.length; i > 0; i--) {
    const letter = text[i - 1];
    if (CJK.test(letter)) return i;
    if (!BREAK.test(letter)) continue;
    const afterDigit = /[.,:]/.test(letter) && /\d/.test(text[i - 2] ?? "");
    if (!afterDigit) return i;
    if (i < text.length && !/\d/.test(text[i])) return i;
  }
  return 0;
}
