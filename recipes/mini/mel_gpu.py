"""Log-mel of flow and vocoder for batches on any device, and a whole corpus as one mel.

The numbers equal those of ``vivace.audio.features.mel_24k`` (which works on one utterance with numpy).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.mini.corpus import Corpus
from recipes.mini.features_gpu import _slaney_hz, _slaney_mel

RATE = 24_000
HOP = 480
FFT = 1920
MEL_FLOOR = 1e-5
_PAD = (FFT - HOP) // 2
_GAP_FRAMES = 12
"""Silence between two utterances of a flat corpus: more than any frame or look-ahead reaches."""


@cache
def slaney_filters(bins: int, fft: int, rate: int = RATE) -> Tensor:
    """Triangles of equal area from 0 to half the sample rate, ``[bins, fft / 2 + 1]``."""
    edges = _slaney_hz(np.linspace(0.0, float(_slaney_mel(np.array(rate / 2))), bins + 2))
    lines = np.arange(fft // 2 + 1) * rate / fft
    rising = (lines[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - lines[None]) / (edges[2:] - edges[1:-1])[:, None]
    weights = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(weights.astype(np.float32))


def log_mel(samples: Tensor) -> Tensor:
    """Float32 samples ``[B, L]`` in -1 … 1 to ``[B, 80, L // 480]``; both ends are mirrored."""
    return _log_mel_of_padded(F.pad(samples[:, None], (_PAD, _PAD), mode="reflect")[:, 0])


def _log_mel_of_padded(padded: Tensor) -> Tensor:
    window = torch.hann_window(FFT, device=padded.device)
    spectrum = torch.fft.rfft(padded.unfold(-1, FFT, HOP) * window)
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    mel = magnitude @ slaney_filters(80, FFT).to(padded.device).T
    return mel.clamp_min(MEL_FLOOR).log().transpose(1, 2)


class FlatSpeech:
    """A corpus on one device as one signal, with silence between the utterances, and its mel.

    Attributes:
        samples: int16 ``[num_frames * 480]``.
        mel: float32 ``[num_frames, 80]``; frame ``j`` is centred on sample ``480 j + 240``. Around an utterance
            lies silence, where ``log_mel`` of the utterance alone would see its mirror image.
        starts, lengths: first frame and whole frames of every utterance, int64 on the CPU.
    """

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        sizes = np.array([item["num_samples"] for item in corpus.items], dtype=np.int64)
        rooms = -(-sizes // HOP) + _GAP_FRAMES
        starts = np.cumsum(rooms) - rooms
        self.starts, self.lengths = torch.from_numpy(starts), torch.from_numpy(sizes // HOP)
        self.num_frames = int(rooms.sum())
        flat = np.zeros(self.num_frames * HOP, dtype=np.int16)
        for index, start in enumerate(starts):
            flat[start * HOP : start * HOP + sizes[index]] = corpus.audio(index)
        self.samples = torch.from_numpy(flat).to(device)
        self.mel = torch.cat([_log_mel_of_padded(block)[0].T for block in self.blocks(_PAD, _PAD)])

    def blocks(self, before: int, after: int, frames: int = 4096) -> Iterator[Tensor]:
        """The signal in float32 blocks of ``frames`` frames or less, ``[1, before + n * 480 + after]``."""
        padded = F.pad(self.samples, (before, after))
        for first in range(0, self.num_frames, frames):
            end = min(first + frames, self.num_frames) * HOP + before + after
            yield padded[None, first * HOP : end].float() / 32768.0

    def crops(self, first: Tensor, frames: int) -> Tensor:
        """Float32 samples ``[B, frames * 480]`` from the frames ``first`` (int64, on the device) on."""
        along = torch.arange(frames * HOP, device=self.samples.device)
        return self.samples[first[:, None] * HOP + along].float() / 32768.0

    def mel_crops(self, first: Tensor, frames: int) -> Tensor:
        """Mel ``[B, 80, frames]`` from the frames ``first`` on."""
        along = torch.arange(frames, device=self.mel.device)
        return self.mel[first[:, None] + along].transpose(1, 2)
