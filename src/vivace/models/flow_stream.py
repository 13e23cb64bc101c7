"""What the flow keeps for a stream, and what it prepares once for all streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from vivace.errors import CancelledRequestError
from vivace.models.dit_stream import DiTState, PreparedDiT

ShouldStop = Callable[[], bool]
"""Asked between two Euler steps whether anybody still wants the chunk."""


def check_wanted(should_stop: ShouldStop | None) -> None:
    """Raises ``CancelledRequestError`` if nobody wants the chunk any more; its stream cannot go on then."""
    if should_stop is not None and should_stop():
        raise CancelledRequestError("the request was cancelled")


class PreparedFlow(NamedTuple):
    """Computed once from the weights.

    Attributes:
        dit: the velocity estimator for the solver's fixed times.
        grid: ``(t, dt)`` of every Euler step.
        noise: float32 ``[noise_frames, 80]`` on the weights' device.
    """

    dit: PreparedDiT
    grid: list[tuple[float, float]]
    noise: Tensor


@dataclass(slots=True)
class FlowStream:
    """Everything that one stream keeps between two calls of ``FlowModel.step``.

    Attributes:
        spks: projected speaker embedding ``[80]``.
        prompt_mel: ``[frames, 80]``.
        dit: keys, values and convolution contexts of the finished frames.
        waiting: tokens that came and whose frames are not finished.
        before: the last tokens before ``waiting``, as many as the look-ahead layer looks back on.
        finished: the last token came and its frames were returned.
        should_stop: ends ``step`` early, at any Euler step. A fork has none.
    """

    spks: Tensor
    prompt_mel: Tensor
    dit: DiTState
    waiting: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    finished: bool = False
    should_stop: ShouldStop | None = None

    @property
    def num_frames(self) -> int:
        """Frames finished so far, those of the prompt included."""
        return self.dit.length

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        return self.dit.num_bytes

    def fork(self, capacity_frames: int | None = None) -> FlowStream:
        """A stream that goes on from here independently. Costs one copy of what is kept.

        Args:
            capacity_frames: frames to make room for, those kept included; None: as many as here.
        """
        dit = self.dit.fork(capacity_frames)
        return FlowStream(
            self.spks, self.prompt_mel, dit, list(self.waiting), list(self.before), self.finished
        )
