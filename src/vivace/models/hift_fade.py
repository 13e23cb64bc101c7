"""The reference's own streaming of a vocoder that looks to both sides: overlap and cross-fade.

Each piece is vocoded with the last ``fade_frames`` frames of the mel before it and their excitation; the samples of
these frames, which came out without knowing the future, are cross-faded. Less waiting than ``CentredHiFT.step``
(``fade_frames``), at the price of seams that differ from the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.config import VocoderConfig
from vivace.models.hift_centred import CentredHiFT, CentredStream
from vivace.models.source import CounterNoise, NoiseSource


@dataclass(slots=True)
class FadingStream:
    """What one utterance's vocoder remembers between pieces.

    Attributes:
        noise: the stream's noise.
        mel: frames that were vocoded and come again, and those that wait for more, ``[1, 80, n]``.
        source: excitation of the former.
        samples: their samples, which were held back.
        frames: absolute number of the first frame of ``mel``.
    """

    noise: NoiseSource
    mel: Tensor
    source: Tensor
    samples: Tensor
    frames: int = 0


class FadingHiFT(CentredHiFT):
    """``CentredHiFT`` whose streams overlap and fade."""

    def __init__(self, config: VocoderConfig) -> None:
        super().__init__(config)
        self.overlap = config.fade_frames * config.hop_samples
        # Not a buffer of the checkpoint, and the same on every device.
        self._window = torch.hamming_window(2 * self.overlap, periodic=False, dtype=torch.float64)

    def new_stream(  # type: ignore[override]
        self, seed: int = 0, noise: NoiseSource | None = None, batch: int = 1
    ) -> FadingStream:
        """State of an utterance that has not begun."""
        weight = self.conv_post.weight
        empty = weight.new_zeros(batch, 0)
        mel = weight.new_zeros(batch, self.config.in_channels, 0)
        return FadingStream(noise or CounterNoise(seed), mel, empty, empty)

    @torch.inference_mode()
    def step_batch(self, stream: FadingStream | CentredStream, mel: Tensor, is_last: bool) -> Tensor:
        """Next frames ``[B, 80, n]``: samples up to the overlap with what follows; at the end all."""
        assert isinstance(stream, FadingStream)
        fade, known = self.config.fade_frames, stream.source.shape[1] // self.hop_samples
        joined = torch.cat((stream.mel, mel), dim=2)
        if joined.shape[2] == 0 or (not is_last and joined.shape[2] < known + fade + 1):
            stream.mel = joined
            return mel.new_zeros(mel.shape[0], 0)
        source = self.source(joined, noise=stream.noise, start_frame=stream.frames)
        source[:, : stream.source.shape[1]] = stream.source
        samples = self.decode(joined, source)
        if known:
            count, window = stream.samples.shape[1], self._window.to(samples.device)
            faded = samples[:, :count] * window[:count] + stream.samples * window[count:]
            samples[:, :count] = faded.to(samples.dtype)
        if is_last:
            return samples
        stream.frames += joined.shape[2] - fade
        stream.mel = joined[..., -fade:].clone()
        stream.source = source[:, -self.overlap :].clone()
        stream.samples = samples[:, -self.overlap :].clone()
        return samples[:, : -self.overlap]
