"""``FlowRunner`` for a flow that computes pieces with what lies around them, many requests in a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.engine.flow_runner import FlowRunner
from vivace.errors import VivaceError
from vivace.models.flow_paged import MelHandle

if TYPE_CHECKING:
    from vivace.models.kinds import AnyFlowStream
    from vivace.models.piece_device import DevicePieceFlow, PieceItem, WholeItem
    from vivace.voice import Voice


class PieceFlowRunner(FlowRunner):
    """Streams hold no pages; a voice's prompt is part of every window."""

    runs_together = generates_together = True
    """Several requests may be given to ``launch_batch`` and ``generate_batch``."""

    def __init__(self, flow: DevicePieceFlow) -> None:
        super().__init__(flow.model)
        self._pieces = flow

    def rehearse(self) -> None:
        """Runs once, without memory, what launches compile."""
        self._pieces.rehearse()

    @property
    def pieces(self) -> DevicePieceFlow:
        """The flow itself."""
        return self._pieces

    def step(self, stream: AnyFlowStream, tokens: list[int], *, is_last: bool) -> Tensor:
        return self.launch_batch([(stream, tokens, is_last)])[0].check()  # type: ignore[list-item]

    def launch_batch(self, items: Sequence[PieceItem]) -> list[MelHandle]:
        """Queues the next tokens of several streams together. Errors lie in the handles."""
        return self._pieces.launch_batch(items)

    def generate(self, voice: Voice, tokens: list[int]) -> Tensor:
        return self.generate_batch([(voice, tokens)])[0].check()

    def generate_batch(self, items: Sequence[tuple[Voice, list[int]]]) -> list[MelHandle]:
        """Queues whole segments of several requests together (offline mode). Errors lie in the handles."""
        streams: list[WholeItem] = []
        refused: dict[int, MelHandle] = {}
        for number, (voice, tokens) in enumerate(items):
            try:
                # What a voice's prompt consists of lies on the device already: a copy would make the host wait.
                streams.append((self.open(voice), tokens))  # type: ignore[arg-type]
            except (VivaceError, torch.OutOfMemoryError) as error:
                refused[number] = MelHandle(self.no_frames(), error)
        made = iter(self._pieces.generate_batch(streams))
        return [refused[number] if number in refused else next(made) for number in range(len(items))]

    def _run_prompt(self, voice: Voice) -> AnyFlowStream:
        if not self._prompts:  # the first voice: the one that the engine warms up with
            self._pieces.warm_up(len(voice.mel))
        return super()._run_prompt(voice)
