"""The place where an inaudible watermark goes into the audio. Vivace has none of its own.

A package that brings one says so with an entry point of the group ``vivace.watermarks``; its value is a function
that takes the sample rate in Hz and returns a ``Watermark`` for one utterance.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vivace.errors import ServeError, SynthesisError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

GROUP = "vivace.watermarks"


class Watermark(Protocol):
    """The mark of one utterance, piece by piece. It may keep what the next piece needs."""

    def mark(self, samples: Float32) -> Float32:
        """The next piece ``[n]``, marked: as many samples, in -1 … 1. Must not need later ones."""
        ...


WatermarkMaker = Callable[[int], Watermark]
"""From the sample rate in Hz to the mark of a new utterance; called from several threads."""


def find_watermark(name: str) -> WatermarkMaker:
    """The installed watermark of that name.

    Raises:
        ServeError: there is none, or its package cannot be loaded.
    """
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise ServeError(f"No package with this watermark is installed (there are: {known})")
    try:
        maker: WatermarkMaker = installed[name].load()
    except Exception as error:  # whatever importing somebody's package raises, such as OSError
        raise ServeError(f"The watermark's package cannot be loaded ({type(error).__name__})") from error
    return maker


def marked(watermark: Watermark, samples: Float32) -> Float32:
    """``samples`` with the mark in them.

    Raises:
        SynthesisError: what came back is not as many finite samples. Speech without its mark is not let out.
    """
    try:
        result = np.asarray(watermark.mark(samples), np.float32)
    except Exception as error:
        raise SynthesisError("The watermark could not be applied.") from error
    if result.shape != samples.shape or not np.isfinite(result).all():
        raise SynthesisError("The watermark returned other samples than it was given.")
    return result
