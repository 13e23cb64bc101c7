// When speech LM, flow and vocoder worked, chunk by chunk, on the engine's clock.

import { duration, number, t } from "./i18n.js";
import { fitted } from "./pictures.js";

const STAGES = ["lm", "flow", "vocoder"];
const MOST_ROWS = 500;

/** Bars of one chunk from the times of two chunks, which add up over the request.
 * A stage ends where the next one begins; the vocoder ends when the chunk is ready. */
export function bars(event, before) {
  const took = (stage) => event.times[`${stage}_ms`] - (before ? before.times[`${stage}_ms`] : 0);
  const found = {};
  let end = event.elapsed_ms;
  for (const stage of [...STAGES].reverse()) {
    const ms = Math.max(0, took(stage));
    found[stage] = { start: Math.max(0, end - ms), ms };
    end = found[stage].start;
  }
  return found;
}

/** A round distance between ticks, so that about `count` of them fit. */
export function tick(total_ms, count) {
  const rough = total_ms / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find((step) => step * power >= rough) ?? 10);
}

export class Timeline {
  constructor(canvas, note, rows) {
    this.canvas = canvas;
    this.note = note;
    this.rows = rows;
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.describe(this.chunks.length - 1));
    this.begin();
  }

  begin() {
    this.chunks = [];
    this.rows.replaceChildren();
    this.show();
  }

  add(event) {
    const before = this.chunks.at(-1)?.event;
    const chunk = { event, bars: bars(event, before) };
    this.chunks.push(chunk);
    if (this.chunks.length <= MOST_ROWS) this.rows.append(this.row(chunk, this.chunks.length));
    this.draw();
    this.describe(this.chunks.length - 1);
  }

  /** After a change of words, colours or size. */
  show() {
    this.rows.replaceChildren(...this.chunks.slice(0, MOST_ROWS).map((chunk, i) => this.row(chunk, i + 1)));
    this.draw();
    this.describe(this.chunks.length - 1);
  }

  row({ event, bars: stages }, n) {
    const row = document.createElement("tr");
    const seconds = (value) => t("unitS", { n: number(value, 2) });
    const cells = [number(n), seconds(event.start_s), seconds(event.duration_s), duration(event.elapsed_ms)];
    for (const stage of STAGES) cells.push(duration(stages[stage].ms));
    for (const [i, words] of cells.entries()) {
      const cell = document.createElement(i ? "td" : "th");
      if (!i) cell.scope = "row";
      cell.textContent = words;
      row.append(cell);
    }
    return row;
  }

  get total() {
    return this.chunks.at(-1)?.event.elapsed_ms ?? 0;
  }

  draw() {
    const { context, width, height } = fitted(this.canvas);
    const style = getComputedStyle(document.documentElement);
    const pen = (name) => style.getPropertyValue(name).trim();
    const axis = 18;
    const lane = (height - axis) / STAGES.length;
    context.fillStyle = pen("--lane");
    for (let i = 0; i < STAGES.length; i++) context.fillRect(0, i * lane + 2, width, lane - 4);
    if (!this.total) return;
    const x = (ms) => (ms / this.total) * width;
    for (const { bars: stages } of this.chunks) {
      for (const [i, stage] of STAGES.entries()) {
        context.fillStyle = pen(`--${stage}`);
        const { start, ms } = stages[stage];
        const gap = x(ms) > 3 ? 1 : 0; // neighbours stay apart where there is room
        context.fillRect(x(start), i * lane + 2, Math.max(0.75, x(ms) - gap), lane - 4);
      }
    }
    context.fillStyle = pen("--muted");
    context.font = `11px ${style.fontFamily}`;
    context.textBaseline = "bottom";
    const step = tick(this.total, Math.max(2, width / 110));
    for (let ms = 0; ms <= this.total; ms += step) {
      const words = duration(ms);
      const fits = Math.min(x(ms) + 3, width - context.measureText(words).width);
      context.fillRect(x(ms), height - axis + 2, 1, 4);
      context.fillText(words, ms ? fits : 0, height);
    }
    const sum = (stage) => duration(this.chunks.reduce((all, chunk) => all + chunk.bars[stage].ms, 0));
    this.canvas.ariaLabel = t("timelineLabel", {
      n: this.chunks.length,
      wall: duration(this.total),
      lm: sum("lm"),
      flow: sum("flow"),
      vocoder: sum("vocoder"),
    });
  }

  point(x) {
    const ms = (x / this.canvas.clientWidth) * this.total;
    const found = this.chunks.findIndex(({ event }) => event.elapsed_ms >= ms);
    this.describe(found);
  }

  describe(index) {
    const chunk = this.chunks[index];
    if (!chunk) {
      this.note.textContent = "";
      this.canvas.ariaLabel = t("timelineEmpty");
      return;
    }
    this.note.textContent = t("chunkNote", {
      n: index + 1,
      lm: duration(chunk.bars.lm.ms),
      flow: duration(chunk.bars.flow.ms),
      vocoder: duration(chunk.bars.vocoder.ms),
      length: t("unitS", { n: number(chunk.event.duration_s, 2) }),
    });
  }
}
