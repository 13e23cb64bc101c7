"""What ``vivace say`` tells of a long text before it has been spoken."""

import numpy as np
import pytest

from vivace.cli.estimate import LETTERS_PER_SECOND, Estimate
from vivace.datatypes import AudioChunk, StageTimes, SynthesisResult

RATE = 24_000


def chunk(start_s, seconds, elapsed_s, segment=0):
    samples = np.zeros(int(seconds * RATE), np.float32)
    return AudioChunk(samples, RATE, 0, segment, start_s, elapsed_s * 1e3, StageTimes(), False)


def result(*spoken):
    nothing = np.zeros(0, np.float32)
    return SynthesisResult(nothing, RATE, 0, 0, 0, 0, 0, 0, 0, 0, "stop", StageTimes(), list(spoken))


def test_a_long_text_is_announced_once_by_the_running_speed():
    text = "a" * int(600 * LETTERS_PER_SECOND)  # ten minutes
    estimate = Estimate(text)
    assert estimate.note(chunk(0, 1, 9), result(text[:400])) is None  # the start says nothing of the rest
    line = estimate.note(chunk(1, 9, 5), result(text[:400]))
    assert (
        line
        == "vivace: about 10 minutes of audio, which takes about 5 minutes more; Ctrl-C keeps what is there"
    )
    assert estimate.note(chunk(10, 1, 6), result(text[:400])) is None
    assert estimate.audio_seconds == pytest.approx(600, abs=1)


def test_a_segment_that_was_spoken_tells_more_than_the_usual():
    estimate = Estimate("a" * 1_000)
    estimate.note(chunk(0, 10, 1), result("a" * 100))
    assert estimate.audio_seconds == pytest.approx(1_000 / LETTERS_PER_SECOND)
    estimate.note(chunk(10, 1, 1, segment=1), result("a" * 100, "a" * 100))
    assert estimate.audio_seconds == pytest.approx(100)


def test_speed_and_ideographs_count():
    slow, ideographs = Estimate("a" * 1_000, speed=0.5), Estimate("\u4f60" * 250)
    for estimate in (slow, ideographs):
        estimate.note(chunk(0, 10, 1), result())
    assert slow.audio_seconds == pytest.approx(2_000 / LETTERS_PER_SECOND)
    assert ideographs.audio_seconds == pytest.approx(1_000 / LETTERS_PER_SECOND)


@pytest.mark.parametrize("text", ["a" * 500, None])
def test_what_is_short_or_unknown_is_not_announced(text):
    estimate = Estimate(text)
    assert estimate.note(chunk(0, 10, 30 if text is None else 5), result("a" * 500)) is None
