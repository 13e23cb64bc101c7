"""Near silence told from finished audio: a look at the loudest place must not say other than the whole would."""

from types import SimpleNamespace

import numpy as np
import pytest

from vivace.engine import silence
from vivace.engine.silence import EDGE_FRAMES, SILENT_LOG_MEL, is_audio_near_silent
from vivace.random_checkpoint import full_config
from vivace.voice.prompt import model_mel

CONFIG = full_config()
HOP = CONFIG.vocoder.hop_samples
VOICE = SimpleNamespace(mel=np.zeros((80, 80), np.float32))


@pytest.fixture
def looked_at(monkeypatch):
    """Lengths of what the mel was made of."""
    lengths = []

    def counted(samples, config):
        lengths.append(len(samples))
        return model_mel(samples, config)

    monkeypatch.setattr(silence, "model_mel", counted)
    return lengths


def with_burst(length, at, level):
    """Near silence, with a tone of 40 ms in it."""
    samples = 1e-5 * np.random.default_rng(at).standard_normal(length).astype(np.float32)
    burst = level * np.sin(2 * np.pi * 440 * np.arange(960) / 24_000).astype(np.float32)
    samples[at : at + 960] += burst[: max(0, length - at)]
    return samples


@pytest.mark.parametrize("length", [4 * HOP, 8 * HOP, 9 * HOP, 9 * HOP + 1, 13 * HOP - 1, 40 * HOP + 100])
@pytest.mark.parametrize("level", [2e-3, 0.1])
def test_the_answer_is_that_of_the_whole(length, level):
    answers = set()
    for at in range(0, length, HOP // 2 + 7):
        samples = with_burst(length, at, level)
        mel = model_mel(samples, CONFIG)
        whole = mel[EDGE_FRAMES:-EDGE_FRAMES] if len(mel) > 2 * EDGE_FRAMES else mel
        answers.add(bool(whole.max() < SILENT_LOG_MEL))
        assert is_audio_near_silent(samples, VOICE, CONFIG) == bool(whole.max() < SILENT_LOG_MEL), at
        if len(mel) > 2 * EDGE_FRAMES:
            seen = model_mel(silence._loudest(samples, HOP), CONFIG)[EDGE_FRAMES:-EDGE_FRAMES]
            assert len(seen)
            same = np.abs(whole[:, None] - seen[None]).max(-1).min(0)
            assert same.max() < 1e-3, at  # each of its frames is one of the whole's
    assert False in answers


def test_of_speech_only_the_loudest_place_is_looked_at(looked_at):
    assert not is_audio_near_silent(with_burst(200 * HOP, 77 * HOP, 0.1), VOICE, CONFIG)
    assert looked_at == [13 * HOP]


def test_of_near_silence_all_is_looked_at(looked_at):
    assert is_audio_near_silent(with_burst(200 * HOP, 77 * HOP, 1e-5), VOICE, CONFIG)
    assert looked_at[1:] == [200 * HOP]
