"""Streams of ``DeviceFlow``, and frames on their way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vivace.errors import SynthesisError


@dataclass(slots=True, eq=False)
class PagedStream:
    """What one stream keeps. Made by ``DeviceFlow.open`` or ``fork``; ``DeviceFlow.close`` gives its pages back.

    Attributes:
        speaker: what the speaker adds to the input projection, float32 ``[dim]``.
        prompt_mel: ``[frames, mel]`` on the device.
        pages: page of each finished chunk.
        length: frames finished so far, those of the prompt included.
        waiting, before, finished: as in ``FlowStream``.
    """

    speaker: Tensor
    prompt_mel: Tensor
    pages: list[int] = field(default_factory=list)
    length: int = 0
    waiting: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    finished: bool = False
    closed: bool = False

    @property
    def num_frames(self) -> int:
        """Frames finished so far, those of the prompt included."""
        return self.length


@dataclass(slots=True)
class MelHandle:
    """Frames on their way.

    Attributes:
        mel: float32 ``[mel, n]`` on the device. Work on the flow's CUDA stream may read it at once, other streams after
            ``wait``.
        error: why there are none, known before anything was started.
    """

    mel: Tensor
    error: SynthesisError | None = None
    faults: list[Tensor] = field(default_factory=list)
    done: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """Makes the current CUDA stream wait for the frames (not the host), and returns them."""
        if self.done is not None:
            self.done.wait()
            self.mel.record_stream(torch.cuda.current_stream(self.mel.device))
        return self.mel

    def check(self) -> Tensor:
        """Makes the host wait for the frames, and returns them.

        Raises:
            SynthesisError: they hold values that are not finite, or there are none.
        """
        if self.error is not None:
            raise self.error
        if self.done is not None:
            self.done.synchronize()
        if any(bool(fault) for fault in self.faults):
            raise not_finite()
        return self.mel


@dataclass(slots=True)
class Work:
    """One stream's part in a launch.

    Attributes:
        sizes: tokens of each chunk that is to be computed.
        pages: a page for each of them.
        skip: frames at the beginning that belong to the prompt.
        mels, faults: what was computed; ``[frames, mel]`` each, and where its flag will be.
    """

    stream: PagedStream
    sizes: list[int]
    pages: list[int]
    skip: int
    mels: list[Tensor] = field(default_factory=list)
    faults: list[Tensor] = field(default_factory=list)


def not_finite() -> SynthesisError:
    """What a request gets whose mel holds NaN or infinities."""
    return SynthesisError("the flow gave values that are not finite; use float32 or bfloat16 weights")
