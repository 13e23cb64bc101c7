"""Runs the flow: streams per segment, the voice's prompt computed once per voice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vivace.errors import SynthesisError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vivace.models.flow_stream import ShouldStop
    from vivace.models.kinds import AnyFlow, AnyFlowStream
    from vivace.voice import Voice

ROOM_FRAMES = 500
"""Frames beyond the prompt that a new stream has room for at once: ten seconds; it grows when needed."""

CPU_ROOM_FRAMES = 2000
CPU_ROOM_BYTES = 512 * 1024**2
"""The same on a CPU, where memory never written to costs nothing but growing holds up a chunk: more frames, as far as
that many bytes reach."""


class FlowRunner:
    """Opens flow streams and keeps the prompt part of recently used voices.

    Args:
        kept_bytes: memory for prompt states that stay; the least recently used one goes first, the newest stays.
    """

    runs_together = False
    """A launch serves one request."""

    generates_together = False
    """Whether whole segments of several requests may be given to ``generate_batch``."""

    def __init__(self, flow: AnyFlow, *, kept_bytes: int = 2 * 1024**3) -> None:
        self._flow = flow
        # Streams are the flow's own kind; each flow takes only those that it opened.
        self._step: Callable[[Any, Sequence[int], bool], Tensor] = flow.step
        self._kept_bytes = kept_bytes
        self._prompts: OrderedDict[Voice, AnyFlowStream] = OrderedDict()

    def open(self, voice: Voice, should_stop: ShouldStop | None = None) -> AnyFlowStream:
        """A stream behind the voice's prompt; the prompt's finished chunks are computed at first use only.

        Args:
            should_stop: ends a step of the stream early.
        """
        prompt = self._prompts.get(voice)
        if prompt is None:
            prompt = self._prompts[voice] = self._run_prompt(voice)
            while (
                len(self._prompts) > 1
                and sum(kept.num_bytes for kept in self._prompts.values()) > self._kept_bytes
            ):
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(voice)
        stream = prompt.fork(prompt.num_frames + self._room_frames)
        stream.should_stop = should_stop
        return stream

    @property
    def _room_frames(self) -> int:
        weight = self._flow.input_embedding.weight
        if weight.device.type != "cpu":
            return ROOM_FRAMES
        frame_bytes = max(1, self._flow.config.kept_values) * weight.element_size()
        return max(ROOM_FRAMES, min(CPU_ROOM_FRAMES, CPU_ROOM_BYTES // frame_bytes))

    def no_frames(self) -> Tensor:
        """An empty mel on the flow's device, ``[80, 0]``."""
        return self._flow.input_embedding.weight.new_zeros(
            self._flow.config.output_size, 0, dtype=torch.float32
        )

    def _run_prompt(self, voice: Voice) -> AnyFlowStream:
        device = self._flow.input_embedding.weight.device
        prompt = self._flow.new_stream(
            to_device(voice.embedding, device), to_device(voice.mel, device), capacity_frames=len(voice.mel)
        )
        self._step(prompt, voice.speech_tokens.tolist(), False)
        return prompt

    def step(self, stream: AnyFlowStream, tokens: list[int], *, is_last: bool) -> Tensor:
        """Frames that the new tokens complete, ``[80, n]``.

        Raises:
            SynthesisError: the mel of this request holds non-finite values.
        """
        return _finite(self._step(stream, tokens, is_last))

    def check(self) -> None:
        """Nothing is left to check: ``step`` has waited for its frames."""

    def close(self, stream: AnyFlowStream) -> None:
        """Nothing to give back: the stream's memory goes with it."""

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


def to_device(values: NDArray[np.float32], device: torch.device) -> Tensor:
    """On its way to the device; from locked memory, or the host would wait for all that is queued there."""
    sent = torch.tensor(values)  # which cannot lock what it takes from NumPy
    return (sent.pin_memory() if device.type == "cuda" else sent).to(device, non_blocking=True)


def _finite(mel: Tensor) -> Tensor:
    if not bool(torch.isfinite(mel).all()):
        raise SynthesisError("the flow gave values that are not finite; use float32 or bfloat16 weights")
    return mel
