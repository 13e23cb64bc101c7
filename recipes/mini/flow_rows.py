"""Rows for the flow's training: stretches of one voice, made on the device without any loop.

A row is several utterances of one voice in a row, without padding, as inference has a prompt and then new
speech. Its first part may serve as the prompt. Tokens come at 25 Hz, mel frames at 50 Hz.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipes.mini.corpus import Corpus
from recipes.mini.mel_gpu import FlatSpeech

LOOKAHEAD = 3
LEAST_TOKENS = 20
"""Shorter utterances are left out."""

VOICE_POWER = 0.6
"""A voice with n utterances is drawn with a probability like n ** VOICE_POWER, so that rare voices count."""


class Rows(NamedTuple):
    """One batch; ``T = 2 N``.

    Attributes:
        tokens: int64 ``[B, N + LOOKAHEAD]``; the last ones are what follows the row.
        mel: float32 ``[B, 80, T]``.
        valid: tokens of each row that count ``[B]``; what lies behind is no part of it.
        visible: tokens that the look-ahead may see ``[B]``: ``valid``, or ``LOOKAHEAD`` more.
        prompt: tokens of the prompt ``[B]``, 0 without.
        speaker: embedding of the row's first utterance ``[B, 192]``.
    """

    tokens: Tensor
    mel: Tensor
    valid: Tensor
    visible: Tensor
    prompt: Tensor
    speaker: Tensor


def is_held_out(item: dict[str, Any], share: int = 40) -> bool:
    """One utterance in ``share`` is kept for checking, chosen by its id as in the other trainings."""
    return zlib.crc32(str(item["id"]).encode()) % share == 0


class FlowSpeech:
    """A corpus on the device: mel, tokens and speaker embeddings.

    Args:
        tokens: ``tokens.npz``: ``tokens`` (flat), ``offsets`` ``[items + 1]``, ``codes``.
        speakers: ``speakers.npz``: ``embeddings`` float32 ``[items, 192]``.
    """

    def __init__(self, corpus: Corpus, tokens: Path, speakers: Path, device: torch.device) -> None:
        with np.load(tokens) as stored:
            flat, offsets, self.codes = stored["tokens"], stored["offsets"], int(stored["codes"])
        with np.load(speakers) as stored:
            embeddings = stored["embeddings"]
        if not len(corpus) + 1 == len(offsets) == len(embeddings) + 1:
            raise ValueError(f"{tokens} or {speakers} belongs to another corpus than {corpus.folder}")
        speech = FlatSpeech(corpus, device)
        self.device, self.mel = device, speech.mel
        self.mel_starts = speech.starts.to(device)
        counts = np.minimum(np.diff(offsets), speech.lengths.numpy() // 2)
        self.counts = torch.from_numpy(counts).to(device)
        self.tokens = torch.from_numpy(flat.astype(np.int64)).to(device)
        self.token_starts = torch.from_numpy(offsets[:-1].copy()).to(device)
        self.speakers = torch.from_numpy(embeddings).to(device)
        names = corpus.voices()
        fits = [place for place in range(len(corpus)) if counts[place] >= LEAST_TOKENS]
        held = {place for place in fits if is_held_out(corpus.items[place])}
        by_voice: dict[str, list[int]] = {}
        for place in fits:
            if place not in held:
                by_voice.setdefault(names[place], []).append(place)
        self._groups = list(by_voice.values())
        sizes = np.array([len(group) for group in self._groups])
        firsts = np.cumsum(sizes) - sizes
        self._group_sizes = torch.from_numpy(np.repeat(sizes, sizes)).to(device)
        self._group_firsts = torch.from_numpy(np.repeat(firsts, sizes)).to(device)
        weights = np.repeat(sizes ** (VOICE_POWER - 1.0), sizes)
        self._cumulative = torch.from_numpy(np.cumsum(weights / weights.sum())).float().to(device)
        self.order = torch.tensor([place for group in self._groups for place in group], device=device)
        self.pairs = [
            (by_voice[names[place]][0], place) for place in sorted(held) if names[place] in by_voice
        ]
        """For checking: a training utterance as the prompt, and a held-out one of the same voice."""

    def shuffle(self, generator: np.random.Generator) -> None:
        """Another order inside every voice: rows take neighbours, so that none holds an utterance twice."""
        mixed = np.concatenate([generator.permutation(group) for group in self._groups])
        self.order.copy_(torch.from_numpy(mixed))

    def draw(self, rows: int, size: int) -> Rows:
        """Random rows of ``size`` tokens. Every random number comes from the device's default generator."""

        def uniform() -> Tensor:
            return torch.rand(rows, device=self.device)

        at = torch.searchsorted(self._cumulative, uniform()).clamp(max=len(self.order) - 1)
        first, most = self._group_firsts[at], -(-(size + LOOKAHEAD) // LEAST_TOKENS) + 1
        around = (at - first)[:, None] + torch.arange(most, device=self.device)
        items = self.order[first[:, None] + around % self._group_sizes[at][:, None]]
        ends = self.counts[items].cumsum(1)
        # Half of the rows begin where an utterance begins, the others end where one ends.
        last = (ends >= size).int().argmax(1, keepdim=True)
        skip = (uniform() < 0.5) * (ends.gather(1, last)[:, 0] - size)
        ends_well = skip > 0
        valid = torch.full((rows,), size, device=self.device)
        visible = torch.where(ends_well | (uniform() < 0.1), valid, valid + LOOKAHEAD)
        # The prompt: whole utterances, or cut anywhere between 1 and 6 s; none in three rows of ten.
        border = (ends - skip[:, None]).masked_fill(ends - skip[:, None] < 25, 2 * size).amin(1)
        anywhere = (25 + uniform() * (min(150, size // 2) - 25)).long()
        prompt = torch.where((border <= size * 0.6) & (uniform() < 0.6), border, anywhere)
        prompt = (uniform() < 0.7) * prompt
        return self.gather(items, ends, skip, size, valid, visible, prompt)

    def check_rows(self, pairs: list[tuple[int, int]], size: int) -> Rows:
        """Held-out utterances, each after a prompt of its voice, as inference has them."""
        items = torch.tensor(pairs, device=self.device)
        ends = self.counts[items].cumsum(1)
        valid = ends[:, 1].clamp(max=size)
        prompt = ends[:, 0].clamp(max=size // 2)
        return self.gather(items, ends, torch.zeros_like(valid), size, valid, valid, prompt)

    def gather(
        self,
        items: Tensor,
        ends: Tensor,
        skip: Tensor,
        size: int,
        valid: Tensor,
        visible: Tensor,
        prompt: Tensor,
    ) -> Rows:
        """Tokens and mel of the utterances ``items`` ``[B, K]``, joined, from token ``skip`` on."""
        places = skip[:, None] + torch.arange(size + LOOKAHEAD, device=self.device)
        which = torch.searchsorted(ends, places, right=True).clamp(max=ends.shape[1] - 1)
        item = items.gather(1, which)
        inside = places - (ends - self.counts[items]).gather(1, which)
        inside = torch.minimum(inside, self.counts[item] - 1)
        frames = (self.mel_starts[item] + 2 * inside)[:, :size, None] + torch.arange(2, device=self.device)
        return Rows(
            tokens=self.tokens[self.token_starts[item] + inside],
            mel=self.mel[frames.flatten(1)].transpose(1, 2),
            valid=valid,
            visible=visible,
            prompt=prompt,
            speaker=self.speakers[items[:, 0]],
        )
