"""Small functions on speech samples that the generator and the evaluation share."""

from __future__ import annotations

import numpy as np

SAMPLE_RATE = 24000
LEAD_SECONDS = 0.10
TAIL_SECONDS = 0.15
PEAK = 0.97


def speech_bounds(samples: np.ndarray, sample_rate: int, floor_db: float = 48.0) -> tuple[int, int]:
    """First and last sample of what is louder than ``floor_db`` below the loudest 10 ms.

    Returns ``(0, 0)`` when all is silent.
    """
    hop = sample_rate // 100
    count = len(samples) // hop
    if count == 0:
        return 0, 0
    frames = samples[: count * hop].astype(np.float64).reshape(count, hop)
    level = np.sqrt((frames**2).mean(axis=1))
    if level.max() < 1e-4:
        return 0, 0
    loud = np.flatnonzero(level > level.max() * 10 ** (-floor_db / 20))
    return int(loud[0]) * hop, (int(loud[-1]) + 1) * hop


def trim(samples: np.ndarray, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """Cut the silence before and after the speech down to 0.1 s and 0.15 s, with short fades."""
    start, stop = speech_bounds(samples, sample_rate)
    if stop == 0:
        return samples[:0]
    start = max(0, start - round(LEAD_SECONDS * sample_rate))
    stop = min(len(samples), stop + round(TAIL_SECONDS * sample_rate))
    kept = samples[start:stop].astype(np.float32)
    ramp = np.linspace(0.0, 1.0, sample_rate // 100, dtype=np.float32)
    if len(kept) > 2 * len(ramp):
        kept[: len(ramp)] *= ramp
        kept[-len(ramp) :] *= ramp[::-1]
    return kept


def limit_peak(samples: np.ndarray, peak: float = PEAK) -> np.ndarray:
    """Turn the whole utterance down if it would pass ``peak``; the loudness stays otherwise."""
    highest = float(np.abs(samples).max(initial=0.0))
    return samples * np.float32(peak / highest) if highest > peak else samples


def prepare(samples: np.ndarray, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """What is stored of a synthesised utterance: trimmed, peak-limited, int16."""
    kept = limit_peak(trim(samples, sample_rate))
    return np.round(kept * 32767.0).astype(np.int16)
