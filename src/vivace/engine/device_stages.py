"""The three stages on a CUDA device: paged caches, graphs and kernels, chosen once when the engine opens.

Each has the interface of its plain counterpart (``LMSession``, ``FlowRunner``, ``VocoderSession``); what differs is
that a step only queues work and a second call takes the result. Flow and vocoder lie on one CUDA stream in the order in
which they were queued, the speech LM on another, so no stage waits for the host between two kernels.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vivace.engine.flow_runner import FlowRunner, to_device
from vivace.engine.lm_device import LMDevice
from vivace.engine.piece_runner import PieceFlowRunner
from vivace.engine.ticket import Capacity
from vivace.engine.vocoder_runner import VocoderSession
from vivace.layers.stretch import MelStretch
from vivace.models.device_kinds import (
    MOST_KEPT_BYTES,
    AnyDeviceFlow,
    AnyDeviceVocoder,
    make_device_flow,
    make_device_vocoder,
    make_piece_flow,
    page_bytes_used,
)
from vivace.models.flow import FlowModel
from vivace.models.flow_device import DeviceFlow, WholeItem
from vivace.models.flow_paged import MelHandle, PagedFlow, PagedStream
from vivace.models.hift_device import DeviceVocoder, is_supported
from vivace.models.host_samples import PendingSamples

if TYPE_CHECKING:
    from vivace.checkpoint import Model
    from vivace.config import Limits
    from vivace.datatypes import Samples
    from vivace.models.flow_stream import ShouldStop
    from vivace.models.kinds import AnyLM, AnyVocoder
    from vivace.models.piece_device import DevicePieceFlow
    from vivace.voice import Voice

FlowItem = tuple[PagedStream, Sequence[int], bool]
"""A stream, its next tokens, and whether they are the last."""

MAX_ROWS = 64
"""Segments that may be decoded, and utterances that may be rendered, side by side."""

PACKED_ROWS = 32
"""Streams of one launch of the flow; of a generation's that is not measured for so many, 16."""

VOCODER_ROWS = 32
"""Streams of one launch of the vocoder, where there is memory."""

MOST_CHUNKS = 64
"""Chunks of one step, in several launches."""

QUEUE_PER_ROW = 2
"""Requests that may wait, for each that may run."""

_VOCODER_SHARE = 0.1  # of the device's free memory for what the streams of a launch work on
_FLOW_SHARE = 0.75  # of the memory that is free then, for pages of the flow
_TEXT_POSITIONS = 1024  # of a row, beyond the longest speech
_CACHE_SHARE = 0.1  # of the device's free memory for keys and values of the speech LM
_TYPICAL_POSITIONS = 2048
_QUIET_TOKENS = 32  # a chunk's, and those under way beyond
_BESIDE_CHUNKS = 2  # whose tokens are made in the time of a launch of the older generations' flows

_log = logging.getLogger(__name__)


class DeviceFlowRunner:
    """``FlowRunner`` on pages: a voice's prompt is computed once, and its pages are shared by all its streams.

    Args:
        kept_bytes: memory for prompts that stay; the least recently used one goes first, the newest stays.
    """

    runs_together = True
    """Several requests may be given to ``launch_batch``."""

    def __init__(
        self, flow: AnyDeviceFlow, num_channels: int, chunk_tokens: int, *, kept_bytes: int = 8 * 1024**3
    ) -> None:
        self._flow = flow
        self._chunk_tokens = chunk_tokens
        self._channels = num_channels
        self._kept_bytes = kept_bytes
        self._prompts: OrderedDict[Voice, PagedStream] = OrderedDict()
        self._last: MelHandle | None = None

    @property
    def paged(self) -> AnyDeviceFlow:
        """The flow itself."""
        return self._flow

    def warm_up(self) -> None:
        """Compiles the kernels and captures the graphs."""
        self._flow.warm_up()

    def open(self, voice: Voice, should_stop: ShouldStop | None = None) -> PagedStream:
        """A stream behind the voice's prompt. A launch takes so little time that it is never stopped early."""
        prompt = self._prompts.get(voice)
        if prompt is None:
            chunk_bytes = self._flow.pool.page_bytes
            needed = len(voice.speech_tokens) // self._chunk_tokens * chunk_bytes
            while self._prompts and self._kept() + needed > self._kept_bytes:
                self._flow.close(self._prompts.popitem(last=False)[1])
            prompt = self._prompts[voice] = self._run_prompt(voice)
        self._prompts.move_to_end(voice)
        return self._flow.fork(prompt)

    def step(self, stream: PagedStream, tokens: list[int], *, is_last: bool) -> Tensor:
        """Queues the frames that the new tokens complete; ``[80, n]`` for the vocoder. ``check`` tells of faults."""
        self._last = self._flow.launch(stream, tokens, is_last)
        return self._last.mel

    def launch_batch(self, items: Sequence[FlowItem]) -> list[MelHandle]:
        """Queues the next tokens of several streams together. Errors lie in the handles."""
        return self._flow.launch_batch(items)

    def check(self) -> None:
        """Waits for the last step.

        Raises:
            SynthesisError: its mel holds non-finite values.
        """
        last, self._last = self._last, None
        if last is not None:
            last.check()

    @property
    def generates_together(self) -> bool:
        """Whether whole segments of several requests may be given to ``generate_batch``."""
        return isinstance(self._flow, DeviceFlow)

    def generate(self, voice: Voice, tokens: list[int]) -> Tensor:
        """A whole segment with full attention (offline mode), ``[80, frames]``."""
        return self._flow.generate(*self._whole(voice, tokens))

    def generate_batch(self, items: Sequence[tuple[Voice, list[int]]]) -> list[MelHandle]:
        """Queues whole segments of several requests together. Errors lie in the handles."""
        assert isinstance(self._flow, DeviceFlow)
        return self._flow.generate_batch([self._whole(voice, tokens) for voice, tokens in items])

    def _whole(self, voice: Voice, tokens: list[int]) -> WholeItem:
        device = self._flow.device
        mel, embedding = to_device(voice.mel, device), to_device(voice.embedding, device)
        return [*voice.speech_tokens.tolist(), *tokens], mel, embedding

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
        try:
            self._flow.step(prompt, voice.speech_tokens.tolist(), False)
        except BaseException:
            self._flow.close(prompt)
            raise
        return prompt


class DeviceVocoderSession:
    """``VocoderSession`` in a slot of the device's vocoder, which it takes with the first frames."""

    def __init__(self, vocoder: AnyDeviceVocoder, speed: float) -> None:
        self._vocoder = vocoder
        self._stretch = MelStretch(speed)
        self._stream = vocoder.open()
        self._pending: list[PendingSamples] = []

    def launch(self, mel: Tensor, *, is_last: bool) -> None:
        """Queues the samples that the new frames ``[80, n]`` complete."""
        self.launch_batch([(self, mel, is_last)])

    @staticmethod
    def launch_batch(items: Sequence[tuple[DeviceVocoderSession, Tensor, bool]]) -> list[Exception | None]:
        """``launch`` of several sessions of one vocoder together; for each, why it cannot go on, if so."""
        if not items:
            return []
        frames = [(s._stream, s._stretch.step(mel, is_last), is_last) for s, mel, is_last in items]
        pending = items[0][0]._vocoder.launch_batch(frames)
        for (session, _, _), own in zip(items, pending, strict=True):
            session._pending.append(own)
        return [own.error for own in pending]

    def collect(self) -> Samples:
        """Waits for what was queued.

        Raises:
            SynthesisError: the samples of this request hold non-finite values.
        """
        assert self._pending, "nothing was launched"
        pending, self._pending = self._pending, []
        parts = [self._vocoder.collect(own) for own in pending]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Gives the slot back."""
        self._vocoder.close(self._stream)


@dataclass(slots=True)
class DeviceStages:
    """What one engine runs its stages with on a CUDA device.

    Attributes:
        vocoder: None where the model's kind has the plain way only.
        flow: with a runner of its own kind.
        capacity: what there is room for.
    """

    lm: LMDevice
    flow: DeviceFlowRunner | FlowRunner
    vocoder: AnyDeviceVocoder | None
    plain_vocoder: AnyVocoder
    capacity: Capacity

    @classmethod
    def open(
        cls,
        model: Model,
        limits: Limits,
        max_streams: int = MAX_ROWS,
        *,
        deterministic: bool = False,
    ) -> DeviceStages | None:
        """The fast way for ``model``, or None where the device or the model's kind has none; says so once."""
        if model.device.type != "cuda":
            return None
        if not is_supported(model.device):
            _log.warning(
                "this GPU has no fast kernels here: every stage takes the plain way, which is slower"
            )
            return None
        from vivace.kernels.triton_cache import use_cache_folder
        from vivace.kernels.triton_launcher import why_no_launches

        use_cache_folder()
        problem = why_no_launches()
        if problem is not None:
            _log.warning(
                "Triton cannot launch kernels here: every stage takes the plain way, which is slower (%s)",
                problem,
            )
            return None
        with on_device(model.device):
            stages = cls.build(model, limits, max_streams, deterministic=deterministic)
            torch.cuda.synchronize()  # what was made on the default stream may be used on others
        if isinstance(model.flow, FlowModel):
            model.flow.to("cpu")  # the device holds packed copies
        return stages

    @classmethod
    def build(
        cls,
        model: Model,
        limits: Limits,
        max_rows: int = MAX_ROWS,
        *,
        deterministic: bool = False,
    ) -> DeviceStages:
        """The same stages for any device, with plain kernels where it has no others.

        Args:
            max_rows: segments that may be decoded, and utterances that may be rendered, side by side.
            deterministic: every launch computes a row as it would alone. The speech LM has kernels for that; the flow
                and the vocoder run one stream a launch, and the flow one chunk.
        """
        config = model.config
        most = 1 if deterministic else 1 << (max_rows.bit_length() - 1)
        packed = min(PACKED_ROWS, most)
        longest = config.flow.num_tokens(limits.stream_frames)
        lm = _open_lm(model.lm, longest, max_rows, deterministic)
        max_bytes = vocoder_bytes = None
        if model.device.type == "cuda":
            vocoder_bytes = int(torch.cuda.mem_get_info(model.device)[0] * _VOCODER_SHARE)
        vocoder = make_device_vocoder(model.vocoder, max_rows, min(VOCODER_ROWS, most), vocoder_bytes)
        if model.device.type == "cuda":
            free = torch.cuda.mem_get_info(model.device)[0]
            max_bytes = min(int(free * _FLOW_SHARE), page_bytes_used(model.flow, config, max_rows, longest))
        paged = make_device_flow(model.flow, max_bytes, packed, alone=deterministic)
        pieces = make_piece_flow(model.flow, packed, alone=deterministic)
        flow: DeviceFlowRunner | FlowRunner
        flow = FlowRunner(model.flow) if pieces is None else PieceFlowRunner(pieces)
        pages = 1 << 60
        if paged is not None:
            kept = MOST_KEPT_BYTES if max_bytes is None else min(MOST_KEPT_BYTES, max_bytes // 8)
            flow = DeviceFlowRunner(paged, config.flow.output_size, config.chunk_tokens, kept_bytes=kept)
            if paged.pool.most_pages is not None and max_bytes is not None:
                pages = paged.pool.most_pages - -(-kept // paged.pool.page_bytes)
        shared = paged if pieces is None else pieces  # launches of several streams
        wave, wave_ms, beside = 1, PagedFlow.wave_ms, 0
        if shared is not None and (shared.gains_by_waiting or not lm.runs_beside):
            wave, wave_ms = shared.most_in_wave, shared.wave_ms
            beside = _BESIDE_CHUNKS * config.chunk_tokens if lm.runs_beside else 0
        capacity = Capacity(
            batch=max(2, wave, min(MOST_CHUNKS, max_rows)),
            pack=min(shared.max_streams, most) if shared is not None else 1,
            wave=wave,
            wave_ms=wave_ms,
            running=max_rows,
            queue=QUEUE_PER_ROW * max_rows,
            kv_pages=lm.rows.num_free_pages,
            flow_pages=pages,
            chunk_tokens=config.chunk_tokens,
            quiet_tokens=_QUIET_TOKENS if lm.runs_beside else 0,
            beside_tokens=beside,
        )
        return cls(lm, flow, vocoder, model.vocoder, capacity)

    @property
    def launches_halved(self) -> int:
        """How often memory was missing for a launch of several rows, or of one."""
        flow: AnyDeviceFlow | DevicePieceFlow | None = None
        if isinstance(self.flow, DeviceFlowRunner):
            flow = self.flow.paged
        elif isinstance(self.flow, PieceFlowRunner):
            flow = self.flow.pieces
        return sum(stage.launches_halved for stage in (self.lm, flow, self.vocoder) if stage is not None)

    def warm_up(self) -> None:
        """Compiles kernels and captures the graphs of all batches."""
        if isinstance(self.flow, DeviceFlowRunner):
            self.flow.warm_up()
        if self.vocoder is not None:
            self.vocoder.warm_up(_powers_of_two(self.vocoder.max_rows))
        self.lm.warm_up()

    def rehearse(self) -> None:
        """Runs once what ``warm_up`` compiles, with a model without memory; see ``vivace.kernels.launches``."""
        if isinstance(self.flow, DeviceFlowRunner):
            self.flow.paged.rehearse()
        elif isinstance(self.flow, PieceFlowRunner):
            self.flow.rehearse()
        if isinstance(self.vocoder, DeviceVocoder):
            self.vocoder.rehearse(_powers_of_two(self.vocoder.max_rows))
        self.lm.rehearse()

    def open_vocoder(self, speed: float) -> DeviceVocoderSession | VocoderSession:
        """The audio side of a request that runs; no more than ``capacity.running`` do."""
        if self.vocoder is None:
            return VocoderSession(self.plain_vocoder, speed)
        return DeviceVocoderSession(self.vocoder, speed)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one; nothing on others."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _open_lm(lm: AnyLM, most_speech: int, max_rows: int, deterministic: bool) -> LMDevice:
    config, weight = lm.config, lm.llm_decoder.weight
    position_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * weight.element_size()
    positions = most_speech + _TEXT_POSITIONS
    cache = max_rows * _TYPICAL_POSITIONS
    if weight.is_cuda:
        free = int(torch.cuda.mem_get_info(weight.device)[0] * _CACHE_SHARE)
        cache = min(cache, free // position_bytes)
    cache = max(cache, positions)  # the longest row fits when it is alone
    return LMDevice(
        lm,
        max_rows=max_rows,
        cache_tokens=cache,
        max_positions=positions,
        deterministic=deterministic,
    )
