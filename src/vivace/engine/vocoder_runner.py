"""Runs speed change and vocoder: mel frames in, float32 samples out, state per request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vivace.errors import SynthesisError
from vivace.layers.stretch import MelStretch

if TYPE_CHECKING:
    from vivace.datatypes import Samples
    from vivace.models.kinds import AnyVocoder
    from vivace.models.source import NoiseSource


class VocoderSession:
    """The audio side of one request: it runs on through all segments, so that joints have no click."""

    def __init__(self, vocoder: AnyVocoder, speed: float, noise: NoiseSource | None = None) -> None:
        # The stream is of the vocoder's own kind.
        self._step: Callable[[Any, Tensor, bool], Tensor] = vocoder.step
        self._stream = vocoder.new_stream(noise=noise)
        self._stretch = MelStretch(speed)
        self._samples: Tensor | None = None

    def launch(self, mel: Tensor, *, is_last: bool) -> None:
        """The first half of ``step``."""
        self._samples = self._step(self._stream, self._stretch.step(mel, is_last), is_last)

    def collect(self) -> Samples:
        """The second half of ``step``."""
        assert self._samples is not None, "nothing was launched"
        samples, self._samples = self._samples, None
        if not bool(torch.isfinite(samples).all()):
            raise SynthesisError("the vocoder gave values that are not finite; the weights may be damaged")
        result: Samples = samples.float().cpu().numpy()
        return result

    def close(self) -> None:
        """Nothing to give back: the stream goes with the session."""

    def step(self, mel: Tensor, *, is_last: bool) -> Samples:
        """Samples that the new frames complete.

        Args:
            mel: ``[80, n]``, n may be 0.

        Raises:
            SynthesisError: the samples of this request hold non-finite values.
        """
        self.launch(mel, is_last=is_last)
        return self.collect()
