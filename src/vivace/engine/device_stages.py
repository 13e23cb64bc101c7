"""The three stages on a CUDA device: paged caches, graphs and kernels, chosen once when the engine opens.

Each has the interface of its plain counterpart (``LMSession``, ``FlowRunner``, ``VocoderSession``); what differs is
that a step only queues work and a second call takes the result. All work lies on one CUDA stream in the order in
which it was queued, so no stage waits for the host between two kernels.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.engine.flow_runner import FlowRunner
from vivace.engine.lm_device import LMDevice
from vivace.engine.vocoder_runner import VocoderSession
from vivace.errors import OverloadedError
from vivace.layers.stretch import MelStretch
from vivace.models.device_kinds import AnyDeviceFlow, make_device_flow
from vivace.models.flow import FlowModel
from vivace.models.flow_paged import MelHandle, PagedStream
from vivace.models.hift import CausalHiFT
from vivace.models.hift_device import DeviceVocoder, PendingSamples, is_supported
from vivace.models.speech_lm import SpeechLM

if TYPE_CHECKING:
    from vivace.checkpoint import Model
    from vivace.config import Limits
    from vivace.datatypes import Samples
    from vivace.models.kinds import AnyVocoder
    from vivace.voice import Voice

MAX_ROWS = 64
"""Segments that may be decoded, and utterances that may be rendered, side by side."""

_TEXT_POSITIONS = 1024  # of a row, beyond the longest speech
_CACHE_SHARE = 0.1  # of the device's free memory for keys and values of the speech LM
_TYPICAL_POSITIONS = 2048

_log = logging.getLogger(__name__)


class DeviceFlowRunner:
    """``FlowRunner`` on pages: a voice's prompt is computed once, and its pages are shared by all its streams.

    Args:
        kept_bytes: memory for prompts that stay; the least recently used one goes first, the newest stays.
    """

    def __init__(self, flow: AnyDeviceFlow, num_channels: int, *, kept_bytes: int = 8 * 1024**3) -> None:
        self._flow = flow
        self._channels = num_channels
        self._kept_bytes = kept_bytes
        self._prompts: OrderedDict[Voice, PagedStream] = OrderedDict()
        self._last: MelHandle | None = None

    def warm_up(self) -> None:
        """Compiles the kernels and captures the graphs."""
        self._flow.warm_up()

    def open(self, voice: Voice) -> PagedStream:
        """A stream behind the voice's prompt."""
        prompt = self._prompts.get(voice)
        if prompt is None:
            prompt = self._prompts[voice] = self._run_prompt(voice)
            while len(self._prompts) > 1 and self._kept() > self._kept_bytes:
                self._flow.close(self._prompts.popitem(last=False)[1])
        self._prompts.move_to_end(voice)
        return self._flow.fork(prompt)

    def step(self, stream: PagedStream, tokens: list[int], *, is_last: bool) -> Tensor:
        """Queues the frames that the new tokens complete; ``[80, n]`` for the vocoder. ``check`` tells of faults."""
        self._last = self._flow.launch(stream, tokens, is_last)
        return self._last.mel

    def check(self) -> None:
        """Waits for the last step.

        Raises:
            SynthesisError: its mel holds non-finite values.
        """
        last, self._last = self._last, None
        if last is not None:
            last.check()

    def generate(self, voice: Voice, tokens: list[int]) -> Tensor:
        """A whole segment with full attention (offline mode), ``[80, frames]``."""
        mel = torch.tensor(voice.mel, device=self._flow.device)
        embedding = torch.tensor(voice.embedding, device=self._flow.device)
        return self._flow.generate([*voice.speech_tokens.tolist(), *tokens], mel, embedding)

    def no_frames(self) -> Tensor:
        """An empty mel on the flow's device, ``[80, 0]``."""
        return torch.zeros(self._channels, 0, device=self._flow.device)

    def close(self, stream: PagedStream) -> None:
        """Gives the stream's pages back."""
        self._flow.close(stream)

    def _kept(self) -> int:
        return sum(len(prompt.pages) for prompt in self._prompts.values()) * self._flow.pool.page_bytes

    def _run_prompt(self, voice: Voice) -> PagedStream:
        device = self._flow.device
        prompt = self._flow.open(
            torch.tensor(voice.embedding, device=device), torch.tensor(voice.mel, device=device)
        )
        self._flow.step(prompt, voice.speech_tokens.tolist(), False)
        return prompt


class DeviceVocoderSession:
    """``VocoderSession`` in a slot of the device's vocoder, which it takes with the first frames."""

    def __init__(self, vocoder: DeviceVocoder, speed: float) -> None:
        self._vocoder = vocoder
        self._stretch = MelStretch(speed)
        self._stream = vocoder.open()
        self._pending: PendingSamples | None = None

    def launch(self, mel: Tensor, *, is_last: bool) -> None:
        """Queues the samples that the new frames ``[80, n]`` complete."""
        self._pending = self._vocoder.launch(self._stream, self._stretch.step(mel, is_last), is_last)

    def collect(self) -> Samples:
        """Waits for what was queued.

        Raises:
            SynthesisError: the samples of this request hold non-finite values.
        """
        assert self._pending is not None, "nothing was launched"
        pending, self._pending = self._pending, None
        return self._vocoder.collect(pending)

    def close(self) -> None:
        """Gives the slot back."""
        self._vocoder.close(self._stream)


@dataclass(slots=True)
class DeviceStages:
    """What one engine runs its stages with on a CUDA device.

    Attributes:
        lm, vocoder: None where the model's kind has the plain way only.
        flow: with a runner of its own kind.
    """

    lm: LMDevice | None
    flow: DeviceFlowRunner | FlowRunner
    vocoder: DeviceVocoder | None
    plain_vocoder: AnyVocoder

    @classmethod
    def open(cls, model: Model, limits: Limits) -> DeviceStages | None:
        """The fast way for ``model``, or None where the device or the model's kind has none; says so once."""
        if model.device.type != "cuda":
            return None
        if not is_supported(model.device):
            _log.warning(
                "this GPU has no fast kernels here: every stage takes the plain way, which is slower"
            )
            return None
        stages = cls.build(model, limits)
        if isinstance(model.flow, FlowModel):
            model.flow.to("cpu")  # the device holds packed copies
        return stages

    @classmethod
    def build(cls, model: Model, limits: Limits, max_rows: int = MAX_ROWS) -> DeviceStages:
        """The same stages for any device, with plain kernels where it has no others."""
        config, lm, vocoder = model.config, None, None
        if isinstance(model.lm, SpeechLM):
            lm = _open_lm(model.lm, config.flow.num_tokens(limits.stream_frames), max_rows)
        if isinstance(model.vocoder, CausalHiFT):
            vocoder = DeviceVocoder(model.vocoder, slots=max_rows)
        paged = make_device_flow(model.flow)
        flow = FlowRunner(model.flow) if paged is None else DeviceFlowRunner(paged, config.flow.output_size)
        return cls(lm, flow, vocoder, model.vocoder)

    def warm_up(self) -> None:
        """Compiles kernels and captures the graphs of a single stream."""
        for stage in (self.flow, self.vocoder):
            if stage is not None and not isinstance(stage, FlowRunner):
                stage.warm_up()
        if self.lm is not None:
            self.lm.warm_up(1)

    def open_vocoder(self, speed: float) -> DeviceVocoderSession | VocoderSession:
        """The audio side of a new request.

        Raises:
            OverloadedError: as many utterances as the device has slots for are being spoken.
        """
        if self.vocoder is None:
            return VocoderSession(self.plain_vocoder, speed)
        try:
            return DeviceVocoderSession(self.vocoder, speed)
        except RuntimeError:
            message = f"{MAX_ROWS} utterances are being spoken; try again when one has finished"
            raise OverloadedError(message, retry_after_s=1.0) from None


def _open_lm(lm: SpeechLM, most_speech: int, max_rows: int) -> LMDevice:
    config, weight = lm.config, lm.llm_decoder.weight
    position_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * weight.element_size()
    positions = most_speech + _TEXT_POSITIONS
    cache = max_rows * _TYPICAL_POSITIONS
    if weight.is_cuda:
        free = int(torch.cuda.mem_get_info(weight.device)[0] * _CACHE_SHARE)
        cache = min(cache, free // position_bytes)
    cache = max(cache, positions)  # the longest row fits when it is alone
    return LMDevice(lm, max_rows=max_rows, cache_tokens=cache, max_positions=positions)
