"""Features of the prompt audio, in NumPy (no torch: the import is light and no call holds the GIL long).

===================  =======================================================================================
``resample``         band-limited, soxr; time and memory do not depend on the ratio of the rates
``mel_spectrogram``  log-mel of flow and vocoder (HiFi-GAN's definition); ``mel_24k`` is CosyVoice 2/3's
``fbank80``          Kaldi filter bank of the speaker encoder (CAM++), no dither, mean removed
``log_mel128``       Whisper's log-mel, input of the speech tokenizer
===================  =======================================================================================

All take mono float32 ``[num_samples]`` in -1 … 1. Checked against ``tests/golden/frontend/features.npz``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np
import soxr

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

KALDI_EPSILON = float(np.finfo(np.float32).eps)
"""Floor under the logarithm of Kaldi's filter bank."""


def resample(samples: Float32, rate_in_hz: int, rate_out_hz: int) -> Float32:
    """``[n]`` at one rate to ``[round(n · out / in)]`` at another.

    soxr interpolates between the phases of one fixed filter, so 16 001 Hz costs what 16 000 Hz costs. (A
    filter with one phase per output position, as torchaudio builds it, takes gigabytes for such rates.)
    """
    if rate_in_hz == rate_out_hz:
        return samples
    return cast("Float32", soxr.resample(samples, rate_in_hz, rate_out_hz, quality="HQ"))


def mel_24k(samples: Float32) -> Float32:
    """24 kHz samples to log-mel ``[num_samples // 480, 80]``, 50 frames per second, up to 12 kHz."""
    return mel_spectrogram(samples, rate_hz=24_000, n_fft=1920, hop=480, num_mels=80, fmax_hz=None)


def mel_spectrogram(
    samples: Float32, *, rate_hz: int, n_fft: int, hop: int, num_mels: int, fmax_hz: float | None
) -> Float32:
    """Natural log of mel magnitudes ``[num_samples // hop, num_mels]``, HiFi-GAN's definition.

    Frames are not centred: the signal is mirrored by ``(n_fft - hop) / 2`` at each end instead.

    Args:
        samples: at least ``n_fft`` samples (the mirror needs them).
        fmax_hz: upper edge of the highest mel band; None is half the rate.
    """
    padding = (n_fft - hop) // 2
    spectrum = _spectrogram(np.pad(samples, padding, mode="reflect"), n_fft, hop)
    magnitude = np.sqrt(spectrum.real**2 + spectrum.imag**2 + np.float32(1e-9))
    mel = magnitude @ slaney_mel_filters(rate_hz, n_fft, num_mels, fmax_hz)
    return cast("Float32", np.log(np.maximum(mel, np.float32(1e-5))))


def log_mel128(samples: Float32) -> Float32:
    """16 kHz samples to Whisper's log-mel ``[128, num_samples // 160]``: 8 decades deep, about -1 … 1."""
    n_fft, hop = 400, 160
    # Whisper centres its frames and drops the last one.
    spectrum = _spectrogram(np.pad(samples, n_fft // 2, mode="reflect"), n_fft, hop)[: len(samples) // hop]
    power = spectrum.real**2 + spectrum.imag**2
    log_mel = np.log10(np.maximum(power @ slaney_mel_filters(16_000, n_fft, 128, None), np.float32(1e-10)))
    log_mel = np.maximum(log_mel, log_mel.max() - np.float32(8.0))
    return np.ascontiguousarray((log_mel.T + np.float32(4.0)) / np.float32(4.0))


def fbank80(samples: Float32) -> Float32:
    """16 kHz samples to Kaldi's log filter bank ``[1 + (num_samples - 400) // 160, 80]``, mean removed.

    25 ms Povey window, 10 ms shift, whole frames only, pre-emphasis 0.97, 512-point power spectrum. Samples
    stay in -1 … 1 as in the reference (its speaker encoder saw no int16 scale).
    """
    length, hop, n_fft, emphasis = 400, 160, 512, np.float32(0.97)
    frames = np.lib.stride_tricks.sliding_window_view(samples, length)[::hop]
    frames = frames - frames.mean(axis=1, keepdims=True)
    previous = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    frames = (frames - emphasis * previous) * _povey_window(length)
    spectrum = np.fft.rfft(frames, n_fft).astype(np.complex64)[:, : n_fft // 2]
    power = spectrum.real**2 + spectrum.imag**2
    energy = np.log(np.maximum(power @ _kaldi_mel_filters(16_000, n_fft, 80), np.float32(KALDI_EPSILON)))
    return cast("Float32", energy - energy.mean(axis=0, keepdims=True))


def _spectrogram(padded: Float32, n_fft: int, hop: int) -> NDArray[np.complex64]:
    """Windowed FFT ``[frames, n_fft // 2 + 1]`` of every whole frame."""
    frames = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop]
    return np.fft.rfft(frames * _hann_window(n_fft), axis=1).astype(np.complex64)


@lru_cache(maxsize=8)
def _hann_window(length: int) -> Float32:
    """Periodic Hann window."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)).astype(np.float32)


@lru_cache(maxsize=8)
def _povey_window(length: int) -> Float32:
    """Kaldi's window: a symmetric Hann window to the power 0.85."""
    return ((0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))) ** 0.85).astype(np.float32)


def _hz_to_slaney(hz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Slaney's mel scale: linear to 1 kHz (15 mel), 27 mel per factor 6.4 above."""
    linear = hz * 3.0 / 200.0
    return np.where(hz < 1000.0, linear, 15.0 + 27.0 * np.log(np.maximum(hz, 1.0) / 1000.0) / np.log(6.4))


def _slaney_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < 15.0, mel * 200.0 / 3.0, 1000.0 * np.exp((mel - 15.0) * np.log(6.4) / 27.0))


@lru_cache(maxsize=8)
def slaney_mel_filters(rate_hz: int, n_fft: int, num_mels: int, fmax_hz: float | None) -> Float32:
    """Triangles in hertz, each of area one, as librosa's default: ``[n_fft // 2 + 1, num_mels]``."""
    top = np.array(rate_hz / 2 if fmax_hz is None else fmax_hz)
    edges = _slaney_to_hz(np.linspace(0.0, _hz_to_slaney(top), num_mels + 2))
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    hz = np.linspace(0.0, rate_hz / 2, n_fft // 2 + 1)[:, None]
    rising, falling = (hz - left) / (centre - left), (right - hz) / (right - centre)
    triangles = np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (right - left)
    return triangles.astype(np.float32)


@lru_cache(maxsize=2)
def _kaldi_mel_filters(rate_hz: int, n_fft: int, num_mels: int) -> Float32:
    """Triangles in mel (1127 · ln(1 + f / 700)), height one, from 20 Hz: ``[n_fft // 2, num_mels]``."""

    def to_mel(hz: NDArray[np.float64]) -> NDArray[np.float64]:
        return 1127.0 * np.log1p(hz / 700.0)

    low, high = to_mel(np.array(20.0)), to_mel(np.array(rate_hz / 2))
    edges = np.linspace(low, high, num_mels + 2)
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    mel = to_mel(np.arange(n_fft // 2) * rate_hz / n_fft)[:, None]
    triangles = np.maximum(0.0, np.minimum((mel - left) / (centre - left), (right - mel) / (right - centre)))
    return triangles.astype(np.float32)
