"""Features of whole batches on any device, for the trainings of the prompt encoders.

The numbers equal those of ``vivace.audio.features`` (which works on one utterance with numpy): Whisper's
log-mel with 128 bins, Kaldi's filter bank with 80 bins. Rows of a batch may differ in length; what lies
behind the end of a row never changes its features.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.mini.corpus import Corpus

RATE = 16_000
HOP = 160
FFT = 400
KALDI_FFT = 512
_SIDE = 96  # input samples on either side of an output sample in the resampling filter
_GAP = 2 * _SIDE + 6  # zeros between two utterances, so that the filter never reaches the neighbour


def _slaney_mel(hz: np.ndarray) -> np.ndarray:
    """Slaney's mel scale: linear below 1 kHz, logarithmic above."""
    above = 15.0 + np.log(np.maximum(hz, 1000.0) / 1000.0) * 27.0 / np.log(6.4)
    return np.where(hz < 1000.0, hz * 3.0 / 200.0, above)


def _slaney_hz(mel: np.ndarray) -> np.ndarray:
    """Inverse of ``_slaney_mel``."""
    return np.where(mel < 15.0, mel * 200.0 / 3.0, 1000.0 * np.exp((mel - 15.0) * np.log(6.4) / 27.0))


@cache
def _whisper_filters(device: torch.device, bins: int = 128) -> Tensor:
    """Triangles of equal area, ``[bins, 201]``."""
    edges = _slaney_hz(np.linspace(0.0, float(_slaney_mel(np.array(RATE / 2))), bins + 2))
    lines = np.arange(FFT // 2 + 1) * RATE / FFT
    rising = (lines[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - lines[None]) / (edges[2:] - edges[1:-1])[:, None]
    weights = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(weights.astype(np.float32)).to(device)


@cache
def _kaldi_filters(device: torch.device, bins: int = 80, low_hz: float = 20.0) -> Tensor:
    """Triangles on Kaldi's mel scale, straight in mel, ``[bins, 257]``."""

    def mel(hz: np.ndarray) -> np.ndarray:
        return 1127.0 * np.log1p(hz / 700.0)

    edges = np.linspace(mel(np.array(low_hz)), mel(np.array(RATE / 2)), bins + 2)
    lines = mel(np.arange(KALDI_FFT // 2 + 1) * RATE / KALDI_FFT)
    step = edges[1] - edges[0]
    weights = np.maximum(
        0.0, np.minimum(lines[None] - edges[:-2, None], edges[2:, None] - lines[None]) / step
    )
    weights[:, -1] = 0.0  # Kaldi leaves out the line at half the sample rate
    return torch.from_numpy(weights.astype(np.float32)).to(device)


@cache
def _resampling_filter(device: torch.device) -> Tensor:
    """Windowed sinc for 24 → 16 kHz, ``[taps, 2]``: one column for each of the two output phases."""
    cutoff = 7_700.0 / 24_000.0  # cycles per input sample; the window's slope ends near 8 kHz
    at = np.arange(-_SIDE, _SIDE + 4)[:, None] - np.array([0.0, 1.5])[None]
    inside = np.clip(1.0 - (at / (_SIDE + 1)) ** 2, 0.0, None)
    taps = 2 * cutoff * np.sinc(2 * cutoff * at) * np.i0(9.0 * np.sqrt(inside)) / np.i0(9.0) * (inside > 0)
    return torch.from_numpy((taps / taps.sum(axis=0)).astype(np.float32)).to(device)


def resample_24k_to_16k(samples: Tensor, block: int = 1 << 20) -> Tensor:
    """``[num_samples]`` at 24 kHz to ``[ceil(num_samples * 2 / 3)]`` at 16 kHz.

    Works through blocks of ``block`` output pairs, so that hours of speech fit.
    """
    taps = _resampling_filter(samples.device)
    pairs = -(-len(samples) // 3)
    padded = F.pad(samples, (_SIDE, _SIDE + 4 + 3 * pairs - len(samples)))
    pieces = [
        padded[3 * start :].unfold(0, len(taps), 3)[: min(block, pairs - start)] @ taps
        for start in range(0, pairs, block)
    ]
    return torch.cat(pieces).reshape(-1)[: -(-len(samples) * 2 // 3)]


def log_mel128(samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Whisper's log-mel.

    Args:
        samples: float32 ``[batch, num_samples]`` at 16 kHz.
        lengths: valid samples of each row, ``[batch]``, at least 201 each.

    Returns:
        ``[batch, 128, frames]`` (0 behind a row's end) and the frames of each row, ``lengths // 160``.
    """
    size, half = samples.shape[1], FFT // 2
    place = torch.arange(-half, size + half, device=samples.device)[None]
    last = lengths[:, None] - 1
    place = place.abs()
    place = (
        torch.where(place > last, 2 * last - place, place).clamp_min(0).minimum(last)
    )  # reflected at both ends
    window = torch.hann_window(FFT, device=samples.device)
    frames = samples.gather(1, place).unfold(1, FFT, HOP)[:, : size // HOP]
    power = torch.fft.rfft(frames * window).abs().square()
    counts = lengths // HOP
    inside = torch.arange(power.shape[1], device=samples.device)[None, :, None] < counts[:, None, None]
    mel = (power @ _whisper_filters(samples.device).T).clamp_min(1e-10).log10()
    top = mel.masked_fill(~inside, -math.inf).amax((1, 2), keepdim=True)
    return (((mel.maximum(top - 8.0) + 4.0) / 4.0) * inside).transpose(1, 2), counts


def fbank80(samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Kaldi's filter bank (25 ms, every 10 ms, no dither, whole frames only), mean over time removed.

    Args:
        samples: float32 ``[batch, num_samples]`` at 16 kHz.
        lengths: valid samples of each row, ``[batch]``, at least 400 each.

    Returns:
        ``[batch, frames, 80]`` (0 behind a row's end) and the frames of each row.
    """
    frames = samples.unfold(1, FFT, HOP)
    frames = frames - frames.mean(-1, keepdim=True)
    frames = frames - 0.97 * torch.cat([frames[..., :1], frames[..., :-1]], -1)
    window = torch.hann_window(FFT, periodic=False, device=samples.device).pow(0.85)
    power = torch.fft.rfft(frames * window, n=KALDI_FFT).abs().square()
    banks = (power @ _kaldi_filters(samples.device).T).clamp_min(torch.finfo(torch.float32).eps).log()
    counts = 1 + (lengths - FFT) // HOP
    inside = torch.arange(frames.shape[1], device=samples.device)[None, :, None] < counts[:, None, None]
    mean = (banks * inside).sum(1, keepdim=True) / counts[:, None, None]
    return (banks - mean) * inside, counts


class Speech16k:
    """All speech of a corpus at 16 kHz on one device (int16: 115 MB an hour)."""

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        lengths24 = np.array([item["num_samples"] for item in corpus.items], dtype=np.int64)
        room = (lengths24 + _GAP + 5) // 6 * 6  # multiples of 6 start on whole samples at 16 kHz
        starts24 = np.cumsum(room) - room
        self.num_samples_24k = lengths24
        self.starts = torch.from_numpy(starts24 // 3 * 2).to(device)
        self.lengths = torch.from_numpy(-(-lengths24 * 2 // 3))
        self.device = device
        pieces: list[Tensor] = []
        group = 2048  # utterances on their way at once: bounds the memory
        for first in range(0, len(corpus), group):
            chosen = range(first, min(first + group, len(corpus)))
            flat = np.zeros(int(room[first : first + group].sum()), dtype=np.int16)
            for index in chosen:
                begin = int(starts24[index] - starts24[first])
                flat[begin : begin + int(lengths24[index])] = corpus.audio(index)
            whole = torch.from_numpy(flat).to(device).float()
            pieces.append(resample_24k_to_16k(whole).round().clamp(-32768, 32767).short())
        self.samples = torch.cat(pieces)

    def batch(
        self, items: Tensor, begin: Tensor | None = None, size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Float32 samples ``[batch, size]`` of the utterances ``items`` (int64, CPU), zeros behind the end.

        Args:
            begin: first sample wanted of each utterance, on the CPU; default 0.
            size: samples of each row; default the longest, rounded up so that few different shapes occur.

        Returns:
            The samples and the valid samples of each row, both on the device.
        """
        lengths = self.lengths[items]
        starts = self.starts[items.to(self.device)]
        if begin is not None:
            lengths = lengths - begin
            starts = starts + begin.to(self.device)
        if size is None:
            size = -(-int(lengths.max()) // 6400) * 6400
        lengths = lengths.clamp_max(size).to(self.device)
        along = torch.arange(size, device=self.device)
        place = (starts[:, None] + along[None]).clamp_max(len(self.samples) - 1)
        samples = self.samples[place].float() / 32768.0
        return samples * (along[None] < lengths[:, None]), lengths


def played_faster(samples: Tensor, rate: float) -> tuple[Tensor, float]:
    """Speech as if a tape ran ``rate`` times as fast: shorter and higher.

    Returns:
        ``[batch, about num_samples / rate]`` (a multiple of 1600, so that few shapes occur) and new ÷ old size.
    """
    size = samples.shape[1]
    wanted = max(1, round(size / rate / 1600)) * 1600
    changed = F.interpolate(samples[:, None], size=wanted, mode="linear", align_corners=False)
    return changed[:, 0], wanted / size


def disturb(samples: Tensor, lengths: Tensor, generator: torch.Generator, amount: float = 1.0) -> Tensor:
    """Change the loudness (−12 … +6 dB); for half of the rows add coloured noise, 12 … 45 dB below."""
    rows, device = len(samples), samples.device

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, 1, device=device, generator=generator)

    level = (samples.square().sum(1, keepdim=True) / lengths[:, None]).sqrt()
    noise = torch.randn(samples.shape, device=device, generator=generator)
    colour = draw(0.0, 0.95)
    smooth = noise[:, 1:] + colour * noise[:, :-1]  # one zero: white to dull
    noise = F.pad(smooth, (1, 0)) / (1.0 + colour.square()).sqrt()
    present = (draw(0.0, 1.0) < 0.5 * amount).float()
    noisy = samples + noise * level * present * 10 ** (-draw(12.0, 45.0) / 20)
    return noisy * 10 ** (draw(-12.0, 6.0) / 20)
