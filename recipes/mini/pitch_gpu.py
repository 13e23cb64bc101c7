"""Pitch of a whole corpus at 50 Hz: YIN (de Cheveigné and Kawahara, 2002), batched over frames.

Frame ``j`` looks at the 59 ms around sample ``480 j + 240``, the centre of the mel's frame ``j``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.mini.mel_gpu import HOP, RATE, FlatSpeech

LOW_HZ, HIGH_HZ = 55.0, 550.0
_LONGEST = int(RATE / LOW_HZ)  # lags in samples
_SHORTEST = int(RATE / HIGH_HZ)
_WINDOW = 1024
_FFT = 2048
_SPAN = _WINDOW + _LONGEST + 2
_DIP = 0.15  # the first dip under this is the period
_VOICED = 0.30  # no dip under this: unvoiced
_QUIET = 10.0 ** (-52 / 20)  # root mean square


def difference(frames: Tensor) -> Tensor:
    """YIN's cumulative mean normalised difference, ``[n, span] -> [n, lags]`` for lags 0 …."""
    head = frames[:, :_WINDOW]
    lags = _LONGEST + 2
    product = torch.fft.rfft(head, _FFT).conj() * torch.fft.rfft(frames, _FFT)
    correlation = torch.fft.irfft(product, _FFT)[:, :lags]
    energy = F.pad(frames.square().double().cumsum(1), (1, 0))
    energies = (energy[:, _WINDOW : _WINDOW + lags] - energy[:, :lags]).float()
    d = (energies[:, :1] + energies - 2.0 * correlation).clamp_min(0.0)
    d[:, 0] = 0.0
    mean = d.cumsum(1) / torch.arange(lags, device=d.device).clamp_min(1)
    result = d / mean.clamp_min(1e-9)
    result[:, 0] = 1.0
    return result


def pick(normalised: Tensor, loud: Tensor) -> Tensor:
    """Pitch in Hz of each frame, 0 where it has none."""
    inner = normalised[:, 1:-1]
    dip = (inner <= normalised[:, :-2]) & (inner < normalised[:, 2:])
    lag = torch.arange(1, normalised.shape[1] - 1, device=normalised.device)
    dip &= (lag >= _SHORTEST) & (lag <= _LONGEST)
    score = torch.where(dip, inner, torch.full_like(inner, 9.0))
    best, best_at = score.min(dim=1)
    # The first dip that is deep, or nearly as deep as the deepest: later ones are whole multiples of the period.
    good = score < torch.maximum(torch.full_like(best, _DIP), best + 0.05)[:, None]
    first = good.to(torch.uint8).argmax(dim=1)
    at = torch.where(good.any(dim=1), first, best_at) + 1
    row = torch.arange(len(at), device=at.device)
    left, middle, right = normalised[row, at - 1], normalised[row, at], normalised[row, at + 1]
    bend = (left - 2 * middle + right).clamp_min(1e-6)
    period = at + (0.5 * (left - right) / bend).clamp(-0.5, 0.5)
    return torch.where((middle < _VOICED) & loud, RATE / period, torch.zeros_like(period))


def smooth(f0: Tensor, width: int = 5) -> Tensor:
    """Median filters: voicing over three frames, then pitch over its voiced neighbours. ``[n] -> [n]``."""
    voiced = F.pad((f0 > 0).float(), (1, 1)).unfold(0, 3, 1).median(dim=1).values > 0
    near = F.pad(f0, (width // 2, width // 2)).unfold(0, width, 1)
    pitch = torch.where(near > 0, near, torch.full_like(near, torch.nan)).nanmedian(dim=1).values
    return torch.where(voiced & pitch.isfinite(), pitch, torch.zeros_like(pitch))


def track(speech: FlatSpeech) -> Tensor:
    """Pitch in Hz of every frame of ``speech``, 0 where unvoiced: ``[num_frames]``."""
    before = _SPAN // 2 - HOP // 2
    found = []
    for block in speech.blocks(before, _SPAN):
        count = (block.shape[1] - before - _SPAN) // HOP
        frames = block[0].unfold(0, _SPAN, HOP)[:count]
        loud = frames.square().mean(dim=1).sqrt() > _QUIET
        found.append(pick(difference(frames - frames.mean(dim=1, keepdim=True)), loud))
    return smooth(torch.cat(found))
