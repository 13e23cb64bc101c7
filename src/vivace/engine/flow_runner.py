"""Runs the flow: streams per segment, the voice's prompt computed once per voice."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.errors import SynthesisError

if TYPE_CHECKING:
    from vivace.models.flow import FlowModel
    from vivace.models.flow_stream import FlowStream
    from vivace.voice import Voice

ROOM_FRAMES = 500
"""Frames beyond the prompt that a new stream has room for at once: ten seconds; it grows when needed."""

CPU_ROOM_FRAMES = 1000
"""The same on a CPU: memory never written to costs nothing there, but growing halts a stream by 50 to 100 ms."""


class FlowRunner:
    """Opens flow streams and keeps the prompt part of recently used voices.

    Args:
        kept_bytes: memory for prompt states that stay; the least recently used one goes first, the newest stays.
    """

    def __init__(self, flow: FlowModel, *, kept_bytes: int = 2 * 1024**3) -> None:
        self._flow = flow
        self._kept_bytes = kept_bytes
        self._prompts: OrderedDict[Voice, FlowStream] = OrderedDict()

    def open(self, voice: Voice) -> FlowStream:
        """A stream behind the voice's prompt; the prompt's finished chunks are computed at first use only."""
        prompt = self._prompts.get(voice)
        if prompt is None:
            prompt = self._prompts[voice] = self._run_prompt(voice)
            while (
                len(self._prompts) > 1
                and sum(kept.num_bytes for kept in self._prompts.values()) > self._kept_bytes
            ):
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(voice)
        room = CPU_ROOM_FRAMES if prompt.spks.device.type == "cpu" else ROOM_FRAMES
        return prompt.fork(prompt.num_frames + room)

    def no_frames(self) -> Tensor:
        """An empty mel on the flow's device, ``[80, 0]``."""
        return self._flow.input_embedding.weight.new_zeros(
            self._flow.config.output_size, 0, dtype=torch.float32
        )

    def _run_prompt(self, voice: Voice) -> FlowStream:
        device = self._flow.input_embedding.weight.device
        prompt = self._flow.new_stream(
            torch.tensor(voice.embedding, device=device),
            torch.tensor(voice.mel, device=device),
            capacity_frames=len(voice.mel),
        )
        self._flow.step(prompt, voice.speech_tokens.tolist(), is_last=False)
        return prompt

    def step(self, stream: FlowStream, tokens: list[int], *, is_last: bool) -> Tensor:
        """Frames that the new tokens complete, ``[80, n]``.

        Raises:
            SynthesisError: the mel of this request holds non-finite values.
        """
        return _finite(self._flow.step(stream, tokens, is_last))

    def generate(self, voice: Voice, tokens: list[int]) -> Tensor:
        """A whole segment with full attention (offline mode), ``[80, frames]``."""
        device = self._flow.input_embedding.weight.device
        whole = torch.tensor([*voice.speech_tokens.tolist(), *tokens], device=device)
        mel = self._flow.generate(
            whole,
            torch.tensor(voice.mel, device=device),
            torch.tensor(voice.embedding, device=device),
            streaming=False,
        )
        return _finite(mel)


def _finite(mel: Tensor) -> Tensor:
    if not bool(torch.isfinite(mel).all()):
        raise SynthesisError("the flow gave values that are not finite; use float32 or bfloat16 weights")
    return mel
