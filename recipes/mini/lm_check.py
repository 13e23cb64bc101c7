"""Decodes held-out texts with the speech LM and measures what it wrote.

The sequences are driven by the engine's own state machines and sampler, many rows at a time. Rows differ in length
and advance on their own, so each step runs over the whole padded grid without a cache: on a GPU that is quick at
this size, and it is one more check of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import recipes.mini.without_audio  # noqa: F401  (must come before vivace.engine)
from recipes.mini.lm_data import LMData
from vivace.config import SamplingConfig
from vivace.datatypes import SamplingParams
from vivace.engine.interleave import Done, Feed, Interleaver, WaitForText
from vivace.engine.lm_runner import PlainSequence
from vivace.engine.sampler import SamplingRows, TokenKind, allowed_tokens, sample
from vivace.models.speech_lm import SpeechLM

Sequence_ = PlainSequence | Interleaver
MOST_PER_TEXT_TOKEN = 4.0
LEAST_PER_TEXT_TOKEN = 0.6

SETTINGS = (
    SamplingConfig(0.8, 25, 10, 0.1),
    SamplingConfig(0.8, 25, 10, 0.8),
    SamplingConfig(0.6, 10, 10, 0.5),
    SamplingConfig(0.6, 10, 10, 0.8),
    SamplingConfig(0.4, 10, 10, 0.7),
    SamplingConfig(0.4, 10, 10, 0.9),
)


def sequence(lm: SpeechLM, data: LMData, item: int, prompt: int | None, streamed: bool) -> Sequence_:
    """The engine's sequence for one item, with another item as the prompt or without."""
    text, prefix = data.text[item], data.prefixes[0]
    prompt_text = [] if prompt is None else data.text[prompt]
    prompt_speech = [] if prompt is None else data.speech[prompt].tolist()
    if not streamed:
        return PlainSequence(lm, [*prefix, *prompt_text], text, prompt_speech)
    machine = Interleaver(lm.config, instruction=prefix, prompt_text=prompt_text, prompt_speech=prompt_speech)
    machine.push_text(text)
    machine.finish()
    return machine


class Row:
    """One sequence being decoded: what was fed so far, in the joint numbering, and what came out."""

    def __init__(self, machine: Sequence_, text_tokens: int, seed: int, text_vocab_size: int) -> None:
        self.machine, self.seed = machine, seed
        self.fed: list[int] = []
        self.made: list[int] = []
        self.kind = TokenKind.SPEECH
        self.ended = False
        self._offset = text_vocab_size
        self._least = int(LEAST_PER_TEXT_TOKEN * text_tokens)
        self._most = int(MOST_PER_TEXT_TOKEN * text_tokens) + 25

    def ready(self) -> bool:
        """Feed what is due; False at the end or when the row runs away."""
        if len(self.made) >= self._most:
            return False
        action = self.machine.next_action()
        if isinstance(action, Done | WaitForText):
            self.ended = isinstance(action, Done)
            return False
        assert isinstance(action, Feed)
        for piece in action.pieces:
            self.fed += piece.ids if piece.kind == "text" else [i + self._offset for i in piece.ids]
        if isinstance(self.machine, PlainSequence):
            self.kind = TokenKind.SPEECH if len(self.made) < self._least else TokenKind.ANY
        else:
            self.kind = TokenKind.SPEECH_OR_EOS if action.final else TokenKind.SPEECH_OR_FILL
        return True

    def accept(self, token: int) -> None:
        speech = self.machine.accept(token)
        if speech is not None:
            self.made.append(speech)


@torch.inference_mode()
def decode(lm: SpeechLM, rows: Sequence[Row], settings: SamplingConfig) -> None:
    """Run all rows to their ends."""
    device, window = lm.llm_decoder.weight.device, max(1, settings.win_size)
    weight = torch.cat([lm.embed_tokens.weight, lm.speech_embedding.weight])
    masks = allowed_tokens(lm.config, device)
    live = [row for row in rows if row.ready()]
    while live:
        lengths = torch.tensor([len(row.fed) for row in live], device=device)
        width = -(-int(max(len(row.fed) for row in live)) // 32) * 32
        grid = np.zeros((len(live), width), dtype=np.int64)
        recent = np.full((len(live), window), -1, dtype=np.int64)
        for place, row in enumerate(live):
            grid[place, : len(row.fed)] = row.fed
            last = row.machine.history[-window:]
            if last:
                recent[place, -len(last) :] = last
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            hidden = lm(weight[torch.from_numpy(grid).to(device)])
            last_hidden = hidden[torch.arange(len(live), device=device), lengths - 1]
            logits = lm.logits(last_hidden).float()
        ids, ok = sample(
            logits,
            SamplingRows.from_params([SamplingParams(seed=row.seed) for row in live], settings, device),
            torch.tensor([len(row.machine.history) for row in live], device=device),
            torch.from_numpy(recent).to(device),
            masks[torch.tensor([int(row.kind) for row in live], device=device)],
        )
        if not bool(ok.all()):
            raise FloatingPointError("logits are not finite")
        for row, token in zip(live, ids.tolist(), strict=True):
            row.accept(token)
        live = [row for row in live if row.ready()]


Recognise = Callable[[Sequence[Sequence[int]]], float]


def recogniser(checkpoint: Path, folder: Path, items: np.ndarray, device: torch.device) -> Recognise:
    """A function from token sequences of ``items`` to their phoneme error rate."""
    from recipes.mini.corpus import Corpus
    from recipes.mini.symbols import choose, error_rate, numbers
    from recipes.mini.tokenizer_model import TokenRecogniser

    found = TokenRecogniser(str(checkpoint), device)
    corpus = Corpus(folder)
    _, spell = choose(corpus, found.kind)
    meant = [numbers(spell(corpus.items[i]), found.names) for i in items]

    def rate(rows: Sequence[Sequence[int]]) -> float:
        said = found.recognise([torch.tensor(row if len(row) else [0]) for row in rows])
        return error_rate(said, meant)

    return rate


def check(
    lm: SpeechLM,
    data: LMData,
    items: np.ndarray,
    folder: Path,
    recogniser_path: Path | None,
    *,
    sweep: bool,
    most_seconds: float,
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Decode ``items`` plainly, after a prompt, and with streamed text; print and return a table.

    Returns:
        The plain mode's tokens with the model's own settings, and the table's rows.
    """
    begun = time.monotonic()
    rate = recogniser(recogniser_path, folder, items, data.device) if recogniser_path else None
    real = [data.speech[i].tolist() for i in items]
    table: list[dict[str, Any]] = []
    if rate is not None:
        print(f"phoneme errors of the real tokens: {rate(real):.4f}", flush=True)
    own = lm.config.sampling
    runs: list[tuple[str, SamplingConfig]] = [("plain", own), ("prompt", own), ("streamed", own)]
    runs += [("prompt+streamed", own)]
    if sweep:
        runs += [("prompt", settings) for settings in SETTINGS if settings != own]
    prompts = same_voice(data, items)
    kept: list[list[int]] = []
    for mode, settings in runs:
        if table and time.monotonic() - begun > most_seconds:
            print("no time for further settings", flush=True)
            break
        rows = []
        for place, item in enumerate(items):
            prompt = prompts[place] if "prompt" in mode else None
            machine = sequence(lm, data, int(item), prompt, "streamed" in mode)
            rows.append(Row(machine, len(data.text[item]), place, lm.config.text_vocab_size))
        started = time.monotonic()
        decode(lm, rows, replace(settings))
        made = [row.made for row in rows]
        kept = kept or made
        lengths = np.array([len(row) for row in made]) / np.array([len(row) for row in real])
        line: dict[str, Any] = {
            "mode": mode,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "tau_r": settings.tau_r,
            "ended": round(float(np.mean([row.ended for row in rows])), 4),
            "length": [round(float(v), 3) for v in np.percentile(lengths, [2, 50, 98])],
            "repeats": round(_repeats(made), 4),
            "real_repeats": round(_repeats(real), 4),
            "seconds": round(time.monotonic() - started, 1),
        }
        if rate is not None:
            line["phoneme_errors"] = round(rate(made), 4)
        table.append(line)
        print(line, flush=True)
    return kept, table


def same_voice(data: LMData, items: np.ndarray) -> list[int]:
    """For each item another one of its voice, 2 to 6 s long where there is one: what built-in voices are."""
    random = np.random.default_rng(0)
    good = (data.speech_length >= 50) & (data.speech_length <= 150) & (data.text_length > 1)
    out = []
    for place, item in enumerate(items):
        others = (good & (data.voice == data.voice[item])).nonzero()[0]
        others = others[others != item]
        out.append(int(random.choice(others)) if len(others) else int(items[place - 1]))
    return out


def _repeats(rows: Sequence[Sequence[int]]) -> float:
    """Share of tokens that equal one of the ten before them: what repetition-aware resampling acts on."""
    hits = sum(token in row[max(0, i - 10) : i] for row in rows for i, token in enumerate(row))
    return hits / max(1, sum(map(len, rows)))
