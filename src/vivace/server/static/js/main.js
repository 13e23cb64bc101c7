// Puts the page together.

import { ApiError, key, listModels, speechFile } from "./api.js";
import { Connection } from "./connection.js";
import { clearError, clearServerError, showError, startErrors } from "./errors.js";
import { duration, onLanguage, startLanguage, t } from "./i18n.js";
import { settings, startSettings } from "./settings.js";
import { Speaking } from "./speaking.js";
import { Stage } from "./stage.js";
import { tab } from "./store.js";
import { TextField } from "./text_field.js";
import { startTheme } from "./theme.js";
import { VoiceDialog } from "./voice_dialog.js";
import { Voices } from "./voices.js";
import { save, wavFile } from "./wav.js";

const SERVER_WORDS = {
  starting: "stateStarting",
  away: "stateAway",
  restarts: "stateRestarts",
  draining: "stateDraining",
  key: "stateKey",
};
const $ = (id) => document.getElementById(id);

let model = "";
let note = null; // words of what happened last; null shows how the server is

startErrors();
const stage = new Stage({ change: () => showState() });
const speaking = new Speaking(stage, session, {
  change: () => showState(),
  error: failed,
  ready: (event) => setModel(event.model),
  done: ({ audio_seconds: audio, rtf, skipped_text: skipped = [] }) => {
    say("stateDone", () => ({ audio: duration(1000 * audio), wall: duration(1000 * audio * rtf) }));
    if (skipped.length) showError(new ApiError("words_skipped", { message: skipped.join(" | ") }));
  },
});
const voices = new Voices({ error: failed, deleted: () => say("voiceDeleted") });
new VoiceDialog({
  saved: async (name) => {
    await voices.load(name).catch(failed);
    say("saved", { name });
  },
});
const connection = new Connection({ changed: serverChanged });
const field = new TextField({
  typed: clearError,
  piece: (text, last) => speaking.type(text, last),
  mode: () => {
    speaking.stop();
    note = null;
    showState();
  },
});

function session() {
  const config = { model: model || "tts-1", ...settings() };
  if (voices.current) config.voice = voices.current;
  return config;
}

// State in words

function say(words, values) {
  note = [words, values];
  showState();
}

function stateWords() {
  const { player, receiving } = stage;
  if (speaking.working && !player.length) return t(field.speaksAlong ? "stateListening" : "stateWaiting");
  if (stage.sounding) return t(player.paused ? "statePaused" : "stateSpeaking");
  if (connection.state in SERVER_WORDS) return t(SERVER_WORDS[connection.state]);
  if (receiving) return t("stateSpeaking");
  if (note) return t(note[0], typeof note[1] === "function" ? note[1]() : note[1]);
  return model ? t("stateReadyModel", { model }) : t("stateReady");
}

function showState() {
  const busy = speaking.working || stage.sounding;
  $("speak").dataset.busy = String(busy);
  $("speak-text").textContent = t(busy ? "stop" : "speak");
  const words = stateWords();
  if ($("state-text").textContent !== words) $("state-text").textContent = words;
  $("dot").dataset.state = busy ? "busy" : connection.state;
}

function setModel(name) {
  model = name ?? model;
  $("mini-hint").hidden = !isMini();
  showState();
}

// Server

async function serverChanged(state, before) {
  $("key-form").hidden = state !== "key";
  if (state === "key") $("key").focus();
  if (state === "ready") {
    if (["away", "restarts", "draining"].includes(before)) {
      clearServerError();
      say("stateBack");
    }
    await load();
  }
  showState();
}

async function load() {
  try {
    await voices.load();
    const [name] = await listModels();
    setModel(name);
    if (!field.value && !tab.get("started")) field.set(sample());
    tab.set("started", "yes");
  } catch (error) {
    if (!connection.failed(error) || isWrongKey(error)) showError(error);
  }
}

function sample() {
  return isMini() ? t("sample", {}, "en") : t("sample");
}

function isMini() {
  return /(^|-)mini$/.test(model);
}

function isWrongKey(error) {
  return error.code === "invalid_api_key" && Boolean(key.get());
}

function failed(error) {
  if (error.code === "socket_failed") return socketFailed(error);
  if (error.code === "cut") connection.check();
  if (error.code === "voice_not_found") voices.load().catch(() => {});
  if (!connection.failed(error) || error.code !== "invalid_api_key" || key.get()) showError(error);
  return showState();
}

/** A browser does not say why a WebSocket failed: is the server away, the key wrong, or a proxy in between? */
async function socketFailed(error) {
  await connection.check();
  if (connection.state !== "ready") return showError(new ApiError("connection_lost"));
  try {
    await voices.load();
  } catch (reason) {
    return failed(reason);
  }
  return showError(error);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  clearError();
  connection.newKey();
});

// Speaking

function start() {
  clearError();
  note = null;
  if (field.speaksAlong) field.send(true);
  else speaking.speak(field.value);
}

function stop() {
  if (!speaking.working && !stage.sounding) return;
  speaking.stop();
  say("stateStopped");
}

$("speak").addEventListener("click", () => (speaking.working || stage.sounding ? stop() : start()));

document.addEventListener("keydown", (event) => {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    start();
  } else if (event.key === "Escape") {
    stop();
  }
});

// Download

$("download").addEventListener("click", async () => {
  const format = $("format").value;
  clearError();
  if (format === "wav") return save(wavFile(stage.player.samples(), stage.player.rate), "vivace.wav");
  say("downloading");
  try {
    save(await speechFile(speaking.last.config, speaking.last.text, format), `vivace.${format}`);
    say("downloaded");
  } catch (error) {
    note = null;
    failed(error);
  }
});

// Start

startSettings();
onLanguage(showState);
startLanguage($("page-language"));
startTheme($("theme"), () => stage.colours());
document.documentElement.classList.remove("starting");
connection.check();
