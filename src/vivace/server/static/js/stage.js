// Everything below the text: playback, pictures, figures, timeline, download.

import { duration, number, onLanguage, t } from "./i18n.js";
import { Overview } from "./overview.js";
import { Pictures, span } from "./pictures.js";
import { Player } from "./player.js";
import { Timeline } from "./timeline.js";

const WORK_MS = 8;
const FRAME_MS = 30; // often enough for the eye; the engine may need the same processor
const FIGURES = ["ttfb", "heard", "rtf", "tps", "audio"];
const $ = (id) => document.getElementById(id);

export class Stage {
  /** @param on { change() }: something starts or stops being heard. */
  constructor(on) {
    this.on = on;
    this.player = new Player({
      heard: (latency) => this.heard(latency),
      gap: () => this.gap(),
      drained: () => this.changed(),
    });
    this.pictures = new Pictures($("wave"), $("spectrogram"));
    this.timeline = new Timeline($("timeline"), $("chunk-note"), $("chunk-rows"));
    this.reset(false);
    this.receiving = false;
    this.drawn = 0; // when, on the clock of frames
    $("play").addEventListener("click", () => this.toggle());
    $("position").addEventListener("input", () => this.seek());
    new ResizeObserver(() => this.redraw()).observe($("stage"));
    onLanguage(() => this.words());
  }

  /** @param keep the new audio follows what is there.
   * @param lenient pauses are the typist's, not the engine's. */
  begin(keep, lenient) {
    this.lenient = this.player.lenient = lenient;
    $("stage").classList.remove("fresh");
    this.reset(keep);
    this.changed();
  }

  reset(keep) {
    this.clicked = performance.now();
    this.figures = {};
    this.gaps = 0;
    this.timeline.begin();
    if (!keep) {
      this.player.begin();
      this.overview = new Overview(this.player.rate);
    } else {
      this.player.goOn();
    }
    this.receiving = true;
  }

  /** The engine said how many samples a second it makes. */
  async rate(rate) {
    if (rate !== this.overview.rate) this.overview = new Overview(rate);
    await this.player.prepare(rate);
  }

  audio(samples) {
    this.player.push(samples);
    this.overview.push(samples);
    this.schedule();
    this.buttons();
  }

  timing(event) {
    const { figures } = this;
    figures.ttfb ??= event.elapsed_ms;
    figures.audio = event.start_s + event.duration_s;
    figures.rtf = event.elapsed_ms / 1000 / figures.audio;
    if (event.speech_tokens && event.times.lm_ms) figures.tps = (1000 * event.speech_tokens) / event.times.lm_ms;
    this.timeline.add(event);
    this.showFigures();
  }

  done(event) {
    Object.assign(this.figures, { ttfb: event.ttfb_ms, rtf: event.rtf, tps: event.tps, audio: event.audio_seconds });
    this.finish();
  }

  /** No more audio comes, whatever the reason. */
  finish() {
    this.receiving = false;
    this.player.finish();
    this.showFigures();
    this.changed();
  }

  stop() {
    this.receiving = false;
    this.player.stop();
    this.changed();
  }

  get sounding() {
    return this.player.playing && (this.receiving || this.player.length > 0);
  }

  heard(latency) {
    this.figures.heard ??= performance.now() - this.clicked + latency;
    this.showFigures();
    this.changed();
  }

  gap() {
    this.gaps += 1;
    this.showFigures();
  }

  toggle() {
    if (this.player.playing && !this.player.paused) this.player.pause();
    else this.player.play();
    this.changed();
  }

  seek() {
    this.player.seek(Number($("position").value));
    this.draw();
  }

  changed() {
    this.buttons();
    this.schedule();
    this.on.change();
  }

  // What is seen

  schedule() {
    this.frame ??= requestAnimationFrame((now) => {
      this.frame = null;
      const isDue = now - this.drawn >= FRAME_MS;
      if (isDue) {
        this.drawn = now;
        this.overview.work(WORK_MS);
        this.draw();
      }
      const goesOn = this.overview.queue.length || (this.player.playing && !this.player.paused);
      if (goesOn || !isDue) this.schedule();
    });
  }

  draw() {
    this.pictures.draw(this.overview, this.shown, this.player.position);
    this.place();
  }

  /** Everything, after a change of size or colours. */
  redraw() {
    this.draw();
    this.timeline.draw();
  }

  get shown() {
    return span(this.player.seconds, !this.receiving);
  }

  /** The slider lies on the waveform: its width is that of the audio. */
  place() {
    const { seconds, position } = this.player;
    const slider = $("position");
    slider.max = seconds.toFixed(2);
    slider.value = position.toFixed(2);
    slider.style.width = `${(100 * seconds) / this.shown}%`;
    const words = t("positionValue", { at: number(position, 1), all: number(seconds, 1) });
    if (slider.ariaValueText !== words) slider.ariaValueText = words;
    const time = `${clock(position)} / ${clock(seconds)}`;
    if ($("clock").textContent !== time) $("clock").textContent = time;
  }

  buttons() {
    const has = this.player.length > 0;
    const button = $("play");
    const playing = this.player.playing && !this.player.paused && has;
    button.disabled = $("position").disabled = !has;
    button.dataset.playing = String(playing);
    button.ariaLabel = t(playing ? "pause" : "play");
    $("download").disabled = !has || this.receiving;
    $("empty").hidden = has || this.receiving;
    const n = number(Math.round(this.player.seconds * 10) / 10, 1);
    $("wave").ariaLabel = t("waveLabel", { n });
    $("spectrogram").ariaLabel = t("spectrogramLabel", { n, khz: number(this.player.rate / 2000) });
  }

  showFigures() {
    const { ttfb, heard, rtf, tps, audio } = this.figures;
    const words = {
      ttfb: ttfb === undefined ? "–" : duration(ttfb),
      heard: heard === undefined ? "–" : duration(heard),
      rtf: rtf === undefined ? "–" : number(rtf, rtf < 0.1 ? 3 : 2),
      tps: tps === undefined ? "–" : number(tps),
      audio: audio === undefined ? "–" : t("unitS", { n: number(audio, 1) }),
    };
    for (const name of FIGURES) $(`figure-${name}`).textContent = words[name];
    $("gaps").textContent = this.gaps && !this.lenient ? t("gaps", { n: number(this.gaps) }) : "";
  }

  words() {
    this.timeline.show();
    this.showFigures();
    this.buttons();
    this.place();
  }

  colours() {
    this.pictures.colours();
    this.redraw();
  }
}

function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
