"""Features of prompt audio against the reference's numbers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import soxr

from vivace.audio import features
from vivace.audio.pool import FeaturePool
from vivace.errors import OverloadedError

# float32 FFTs of two libraries differ by about 1e-6 of a frame's largest bin; the logarithm of a quiet band
# (e-8 in 22 kHz mels, 1e-7 in the Kaldi banks) turns that into a few 1e-4.
MEL_TOLERANCE = 1e-4
QUIET_TOLERANCE = 6e-4


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "golden" / "frontend" / "features.npz") as file:
        return {name: file[name] for name in file.files}


def test_mel_24k_equals_the_reference(golden):
    mel = features.mel_24k(golden["signal24"])
    assert mel.dtype == np.float32
    np.testing.assert_allclose(mel, golden["mel80_24k"][0].T, rtol=0, atol=MEL_TOLERANCE)


@pytest.mark.parametrize(
    ("signal", "expected", "rate_hz", "n_fft", "hop", "tolerance"),
    [
        ("signal24", "mel80_24k_fmax8000", 24_000, 1920, 480, MEL_TOLERANCE),
        ("signal22", "mel80_22k_fmax8000", 22_050, 1024, 256, QUIET_TOLERANCE),
    ],
)
def test_mel_of_the_other_generations(golden, signal, expected, rate_hz, n_fft, hop, tolerance):
    mel = features.mel_spectrogram(
        golden[signal], rate_hz=rate_hz, n_fft=n_fft, hop=hop, num_mels=80, fmax_hz=8000
    )
    np.testing.assert_allclose(mel, golden[expected][0].T, rtol=0, atol=tolerance)


def test_fbank80_equals_the_reference(golden):
    fbank = features.fbank80(golden["signal16"])
    assert fbank.dtype == np.float32
    np.testing.assert_allclose(fbank, golden["campplus_fbank80_16k"], rtol=0, atol=QUIET_TOLERANCE)


def test_fbank80_equals_kaldi_on_noise():
    knf = pytest.importorskip("kaldi_native_fbank")
    samples = np.random.default_rng(0).normal(0, 0.1, 16_123).astype(np.float32)
    options = knf.FbankOptions()
    options.mel_opts.num_bins = 80
    options.frame_opts.dither = 0.0
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(16_000, samples.tolist())
    expected = np.stack([bank.get_frame(frame) for frame in range(bank.num_frames_ready)])
    expected -= expected.mean(axis=0)
    np.testing.assert_allclose(features.fbank80(samples), expected, rtol=0, atol=QUIET_TOLERANCE)


def test_log_mel128_equals_whisper(golden):
    log_mel = features.log_mel128(golden["signal16"])
    assert log_mel.dtype == np.float32
    np.testing.assert_allclose(log_mel, golden["whisper_logmel128_16k"][0], rtol=0, atol=MEL_TOLERANCE)


@pytest.mark.parametrize("num_samples", [24_000, 24_479, 24_480])
def test_mel_24k_has_one_frame_per_whole_hop(num_samples):
    assert features.mel_24k(np.zeros(num_samples, np.float32)).shape == (num_samples // 480, 80)


@pytest.mark.parametrize("num_samples", [16_000, 16_159, 16_160])
def test_frame_counts_at_16k(num_samples):
    samples = np.zeros(num_samples, np.float32)
    assert features.log_mel128(samples).shape == (128, num_samples // 160)
    assert features.fbank80(samples).shape == (1 + (num_samples - 400) // 160, 80)


@pytest.mark.parametrize("rate_in_hz", [8_000, 11_025, 16_001, 22_049, 44_100, 47_999, 191_999])
def test_resample_keeps_a_tone(rate_in_hz):
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate_in_hz) / rate_in_hz).astype(np.float32)
    resampled = features.resample(tone, rate_in_hz, 24_000)
    assert resampled.dtype == np.float32
    assert abs(len(resampled) - 24_000) <= 1
    inner = slice(2_000, 22_000)  # the filter rings where the tone is cut off
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(resampled)) / 24_000)
    # -80 dB: the pass band of the HQ filter is flat to 0.001 dB, its phase linear.
    np.testing.assert_allclose(resampled[inner], expected[inner], rtol=0, atol=1e-4)


def test_resample_removes_what_would_alias():
    tone = np.sin(2 * np.pi * 15_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(features.resample(tone, 48_000, 24_000)[2_000:-2_000]).max() < 1e-4


def test_resample_is_soxr_and_asks_for_hq(monkeypatch):
    """A6: the cost must not depend on the ratio, which soxr promises and a table of phases cannot."""
    asked = []
    real = soxr.resample
    monkeypatch.setattr(soxr, "resample", lambda *a, **k: asked.append((a[1:], k)) or real(*a, **k))
    features.resample(np.zeros(1_600, np.float32), 16_001, 24_000)
    assert asked == [((16_001, 24_000), {"quality": "HQ"})]


def test_resample_at_the_same_rate_changes_nothing():
    samples = np.ones(10, np.float32)
    assert features.resample(samples, 24_000, 24_000) is samples


def test_pool_is_bounded_and_recovers():
    """A26: no more tasks than slots; a slot is free again after success, error and cancellation."""
    go = threading.Event()
    with FeaturePool(num_workers=1, max_pending=2) as pool:
        running = pool.submit(lambda: go.wait(10))
        waiting = pool.submit(lambda: 1 / 0)
        with pytest.raises(OverloadedError):
            pool.submit(lambda: None)
        go.set()
        assert running.result(10) is True
        assert isinstance(waiting.exception(10), ZeroDivisionError)
        go.clear()
        blocking = pool.submit(lambda: go.wait(10))
        cancelled = pool.submit(lambda: None)
        assert cancelled.cancel()
        replacement = pool.submit(lambda: 7)
        go.set()
        assert (blocking.result(10), replacement.result(10)) == (True, 7)
