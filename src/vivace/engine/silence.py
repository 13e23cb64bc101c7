"""Tells a segment that the model left near silence from one that it spoke, by its mel, before the vocoder runs.

Mel values are natural logarithms of mel magnitudes (``audio.features.mel_24k``). By their definition a
pure tone of -60 dBFS peaks at -3.7 (up to 2 kHz), and white noise, spread over all bands, at -5.5. Speech of -40 dBFS
overall peaks between -1.1 and -0.2 (400 utterances), so -4.0 is speech of some -68 dBFS, whose loudest frames have -60.
The embedded model's failed segments peak at -4.9 and below, its speech above -0.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vivace.voice.prompt import model_mel

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.config import ModelConfig
    from vivace.datatypes import Samples
    from vivace.voice import Voice

SILENT_LOG_MEL = -4.0
"""No band of any frame is louder: about a tone of -62 dBFS."""

BELOW_PROMPT = 3.0
"""A quiet prompt makes quiet speech: only what stays 26 dB below the prompt's loudest frame is near silence."""

EDGE_FRAMES = 4
"""What the vocoder makes of silence begins and ends with a click that peaks at up to -2.2."""


def is_near_silent(mel: Tensor, voice: Voice) -> bool:
    """Whether a whole segment's ``mel`` ``[80, n]`` never rises above the level of near silence.

    Waits for the device that holds ``mel``.
    """
    return mel.numel() == 0 or float(mel.max()) < _limit(voice)


def is_audio_near_silent(samples: Samples, voice: Voice, config: ModelConfig) -> bool:
    """The same of finished audio ``[n]`` at the model's rate, by the mel that it has but for its first and last frames.

    It peaks between 1.5 below and 1.0 above what the flow made (embedded model, four voices, near the limit).
    """
    hop, limit = config.vocoder.hop_samples, _limit(voice)
    # One loud frame says that it is not silent, and of speech the loudest place has it: seldom the rest is looked at.
    return _inner_peak(_loudest(samples, hop), config) < limit and _inner_peak(samples, config) < limit


def _loudest(samples: Samples, hop: int) -> Samples:
    """Some frames of the samples ``[n]`` around the loudest place that counts; all of them if they are few.

    They begin at a frame of the whole, so that all but the first and last ``EDGE_FRAMES`` of their mel are its frames.
    """
    num_frames = len(samples) // hop
    if num_frames <= 2 * EDGE_FRAMES:
        return samples
    inner = samples[EDGE_FRAMES * hop : (num_frames - EDGE_FRAMES) * hop]
    middle = EDGE_FRAMES + int(np.abs(inner).argmax()) // hop
    around = EDGE_FRAMES + 2  # a frame of the mel sees a frame and a half on either side of its own
    return samples[max(0, middle - around) * hop : (middle + around + 1) * hop]


def _inner_peak(samples: Samples, config: ModelConfig) -> float:
    missing = 4 * config.vocoder.hop_samples - len(samples)
    if missing > 0:
        samples = np.pad(samples, (0, missing))
    mel = model_mel(samples, config)
    return float((mel[EDGE_FRAMES:-EDGE_FRAMES] if len(mel) > 2 * EDGE_FRAMES else mel).max())


def _limit(voice: Voice) -> float:
    return min(SILENT_LOG_MEL, float(voice.mel.max()) - BELOW_PROMPT) if voice.mel.size else SILENT_LOG_MEL
