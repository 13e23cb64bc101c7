"""Runs what the scheduler planned, one request at a time: a burst of decoding, or a chunk through flow and vocoder.

What the two ways of running have in common lies here too; ``batch`` runs many requests together on a device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vivace.config import Limits
from vivace.datatypes import AudioChunk
from vivace.engine.batch import BatchRunner
from vivace.engine.chunking import ChunkPlan
from vivace.engine.costs import Costs
from vivace.engine.device_stages import DeviceFlowRunner, DeviceStages, on_device
from vivace.engine.flow_runner import FlowRunner
from vivace.engine.interleave import Interleaver
from vivace.engine.live import LiveRequest, Segment
from vivace.engine.lm_device_session import DeviceLMSession
from vivace.engine.lm_runner import EQUAL_SECONDS, LMSession, PlainSequence
from vivace.engine.scheduler import Capacity, StepPlan
from vivace.engine.silence import is_near_silent
from vivace.engine.swapper import Swapper
from vivace.engine.trace import Lane, Trace
from vivace.engine.vocoder_runner import VocoderSession
from vivace.engine.work import Outcome, Rendering, attempt
from vivace.errors import SynthesisError
from vivace.models.flow_paged import PagedStream
from vivace.models.flow_stream import check_wanted
from vivace.models.lm_launches import PAGE_TOKENS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vivace.checkpoint import Model
    from vivace.datatypes import Samples
    from vivace.engine.text_feed import SegmentInput
    from vivace.models.source import NoiseSource

FAR = 1 << 30
"""Tokens until audio of a request that renders a whole segment at once."""

MAX_ATTEMPTS = 4
"""Decodings of a segment, each with its own draws, before "no speech" or "near silence" is an error."""


class Stages:
    """The three models of one engine. Everything that a request changes lies in its ``LiveRequest``.

    Args:
        vocoder_noise: replaces the vocoder's own noise.
        device: how they run, if not in the plain way. host_bytes: see ``use``.

    Attributes:
        swapper: moves pages to host memory and back, if there is any for them.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        vocoder_noise: NoiseSource | None = None,
        device: DeviceStages | None = None,
        host_bytes: int = 0,
    ) -> None:
        self._model = model
        self._limits = limits
        self._vocoder_noise = vocoder_noise
        config = model.config
        flow = config.flow
        self.plan = ChunkPlan(config.chunk_tokens, flow.lookahead_tokens, flow.num_frames(1))
        self._device: DeviceStages | None = None
        self._flow: FlowRunner | DeviceFlowRunner = FlowRunner(model.flow)
        self._batch: BatchRunner | None = None
        self._costs: Costs | None = None
        self.trace: Trace | None = None
        self.swapper: Swapper | None = None
        if device is not None:
            self.use(device, host_bytes)

    def start_trace(self) -> Trace:
        """From now on every stage's work is noted."""
        self.trace = Trace(self._model.device)
        return self.trace

    def span(self, lane: Lane, stream: torch.cuda.Stream | None = None) -> AbstractContextManager[None]:
        """Notes what the body does, or queues on ``stream``, if a trace runs."""
        return nullcontext() if self.trace is None else self.trace.span(lane, stream)

    def use(self, device: DeviceStages, host_bytes: int = 0) -> None:
        """From now on the stages run with ``device``, and pages may move to so much host memory."""
        self._device, self._flow = device, device.flow
        self.swapper = Swapper.open(device, host_bytes)
        self._batch = BatchRunner(self, device)
        config, most = self._model.config, self._model.config.flow.num_tokens(self._limits.stream_frames)
        self._costs = Costs(
            longest_tokens=most,
            chunk_tokens=config.chunk_tokens,
            page_tokens=PAGE_TOKENS,
            max_positions=device.lm.max_positions,
        )

    def on_device(self) -> AbstractContextManager[object]:
        """Kernels and graphs go to the current device, which must be the model's."""
        return on_device(self._model.device)

    @property
    def launches_halved(self) -> int:
        """How often memory was missing for a launch."""
        return 0 if self._device is None else self._device.launches_halved

    @property
    def is_paged(self) -> bool:
        """Whether requests run together, on pages."""
        return self._device is not None

    @property
    def capacity(self) -> Capacity:
        """What there is room for."""
        if self._device is None:
            return Capacity()
        if self.swapper is None:
            return self._device.capacity
        return replace(
            self._device.capacity,
            host_pages=self.swapper.num_frames,
            host_cache=self.swapper.num_cache_frames,
        )

    def warm_up(self) -> None:
        """Compiles kernels and captures graphs, where there are any."""
        if self._device is not None:
            with self.on_device():
                self._device.warm_up()

    def open_vocoder(self, speed: float) -> VocoderSession | None:
        """The audio side of a new request; None on a device, where it is opened with the first chunk."""
        return (
            VocoderSession(self._model.vocoder, speed, self._vocoder_noise) if self._device is None else None
        )

    def count_costs(self, live: LiveRequest) -> None:
        """Writes into the ticket what the request takes at most."""
        if self._device is None or self._costs is None:
            return
        self._costs.apply(
            live,
            self._model.config.token_text_ratio[1],
            lm_is_paged=self._device.lm.serves(live.sampling),
            flow_is_paged=isinstance(self._flow, DeviceFlowRunner),
        )

    # -- a step ----------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Outcome]:
        """What earlier steps queued and did not wait for."""
        return iter(()) if self._batch is None else self._batch.collect()

    def run(self, plan: StepPlan, lives: Mapping[int, LiveRequest]) -> Iterator[Outcome]:
        """Does what was planned; an outcome for each request that has news."""
        if self._batch is not None:
            yield from self._batch.run(plan, lives)
            return
        for request_id, _ in plan.render:
            live = lives[request_id]
            yield attempt(live, partial(self.render, live))
        for request_id, count in plan.decode:
            live = lives[request_id]
            yield attempt(live, partial(self.decode, live, count))

    def decode(self, live: LiveRequest, count: int) -> None:
        """Makes up to ``count`` speech tokens, none beyond what the next chunk needs if that is not there.

        Raises:
            SynthesisError: values that are not finite, or a segment without any speech.
        """
        segment = live.segment or self.next_segment(live)
        assert segment.lm is not None
        needed = self.plan.tokens_until_audio(segment.done_tokens, segment.known_tokens)
        if needed and not segment.is_whole:  # 0: a chunk is there, and waits for others
            count = min(count, needed)
        started = time.perf_counter()
        with self.span("lm"):
            made = segment.lm.decode(count)
        live.times.lm_ms += (time.perf_counter() - started) * 1e3
        self.add_tokens(live, made)

    def add_tokens(self, live: LiveRequest, made: list[int]) -> None:
        """Speech tokens of the request's segment, and whether they were the last."""
        segment = live.segment
        assert segment is not None
        assert segment.lm is not None
        segment.tokens.extend(made)
        live.num_speech_tokens += len(made)
        if segment.lm.finish_reason is not None:
            self._end_of_tokens(live, segment)

    def render(self, live: LiveRequest) -> AudioChunk | None:
        """One chunk through flow and vocoder; None if it completes no samples. The last one may hold none.

        Raises:
            SynthesisError: values that are not finite, an utterance longer than the model can speak, or a short
                segment that stays near silence whatever is drawn.
            CancelledRequestError: its consumer left meanwhile.
        """
        started = time.perf_counter()
        work = self.begin(live)
        with self.span("flow"):
            mel = self.mel_of(work)
        if self.is_refused(work, mel):
            return None
        check_wanted(lambda: live.is_cancelled)
        launched = time.perf_counter()
        assert live.vocoder is not None
        with self.span("vocoder"):
            live.vocoder.launch(mel, is_last=work.request_ends)
            samples = live.vocoder.collect()
        live.times.flow_ms += (launched - started) * 1e3
        live.times.vocoder_ms += (time.perf_counter() - launched) * 1e3
        return self.finish(work, samples)

    def begin(self, live: LiveRequest, hop: int = 1) -> Rendering:
        """Takes the tokens of the request's next ``hop`` chunks."""
        segment = live.segment
        if segment is None and live.given_tokens is not None:
            segment = self._given_segment(live, live.given_tokens)
        tokens: list[int] = []
        is_first, border = False, 0
        if segment is not None:
            is_first = segment.fed_tokens == len(live.voice.speech_tokens)
            border = self.plan.next_border(segment.done_tokens) - segment.done_tokens
            tokens = segment.take_chunk(self.plan, hop)
        segment_ends = segment is None or (segment.is_complete and not segment.tokens)
        request_ends = segment_ends and (live.feed is None or live.feed.is_exhausted)
        return Rendering(live, segment, tokens, border, is_first, segment_ends, request_ends)

    def mel_of(self, work: Rendering) -> Tensor:
        """The flow's part, for one request."""
        flow: Any = self._flow  # streams are of its own kind
        mel: Tensor
        if work.segment is None:  # all was rendered before the end of the text was known
            mel = flow.no_frames()
        elif work.segment.flow is not None:
            mel = flow.step(work.segment.flow, work.tokens, is_last=work.segment_ends)
        else:
            mel = flow.generate(work.live.voice, work.tokens)
        return mel

    def finish(self, work: Rendering, samples: Samples) -> AudioChunk | None:
        """The chunk, if there is any; a segment that has been spoken is closed."""
        live = work.live
        if work.segment_ends:
            live.close_segment()
        if not len(samples) and not work.request_ends:
            return None
        live.account_waiting()
        return AudioChunk(
            samples=samples,
            sample_rate_hz=live.sample_rate_hz,
            index=live.num_chunks,
            segment=work.segment.index if work.segment is not None else max(0, live.num_segments - 1),
            start_s=live.num_samples / live.sample_rate_hz,
            elapsed_ms=live.elapsed_ms(),
            times=live.times.copy(),
            is_last=work.request_ends,
        )

    def update_ticket(self, live: LiveRequest) -> None:
        """Tells the scheduler what the request can do next."""
        ticket, segment, feed = live.ticket, live.segment, live.feed
        ticket.opens_segment, ticket.spare_tokens = segment is None, 0
        held: Any = None if segment is None else segment.flow
        ticket.hold(max(ticket.prompt_pages, len(held.pages) if isinstance(held, PagedStream) else 0))
        row = None if segment is None else segment.lm
        ticket.tokens_under_way = ticket.cached_pages = 0
        if isinstance(row, DeviceLMSession):
            ticket.tokens_under_way, ticket.cached_pages = row.tokens_under_way, row.num_cached_pages
        if segment is None and live.given_tokens is not None:
            ticket.tokens_until_audio, ticket.waits_for_text, ticket.is_complete = 0, False, True
        elif segment is None:
            # Between segments, or the text has just ended behind the last one: flush the vocoder.
            has_text = feed is not None and (live.segment_input is not None or feed.has_segment)
            ticket.waits_for_text = not has_text
            ticket.is_complete = feed is not None and feed.is_exhausted and not has_text
            ticket.tokens_until_audio = 0 if ticket.is_complete else FAR
        elif segment.is_complete:
            ticket.tokens_until_audio, ticket.waits_for_text, ticket.is_complete = 0, False, True
            ticket.spare_tokens = len(segment.tokens)
        else:
            assert segment.lm is not None
            ticket.waits_for_text, ticket.is_complete = segment.lm.waits_for_text, False
            needed = self.plan.tokens_until_audio(segment.done_tokens, segment.fed_tokens)
            known = len(segment.tokens)
            ticket.tokens_until_audio = FAR if segment.is_whole else max(0, needed - known)
            ticket.spare_tokens = 0 if segment.is_whole else max(0, known - needed)

    def next_segment(self, live: LiveRequest) -> Segment:
        """Opens the next segment of text, or again the one whose decoding was thrown away."""
        assert live.feed is not None
        entry = live.segment_input or live.feed.next_segment()
        assert entry is not None, "planned to decode without text"
        live.segment_input = entry
        live.segment = self._open_segment(live, self._open_lm(live, entry))
        return live.segment

    def _given_segment(self, live: LiveRequest, tokens: list[int]) -> Segment:
        """The one segment of a request whose speech tokens are given."""
        segment = live.segment = self._open_segment(live, None)
        segment.tokens, segment.is_complete = tokens, True
        live.given_tokens = None
        live.num_segments = 1
        return segment

    def _open_segment(self, live: LiveRequest, lm: LMSession | DeviceLMSession | None) -> Segment:
        started = time.perf_counter()
        prompt_tokens = len(live.voice.speech_tokens)
        flow: Any = None
        close_flow: Any = self._flow.close

        def release() -> None:
            if lm is not None:
                lm.close()
            if flow is not None:
                close_flow(flow)

        try:
            with self.span("prompt"):
                flow = self._flow.open(live.voice, lambda: live.is_cancelled) if live.stream else None
        except BaseException:
            release()
            raise
        live.times.prompt_ms += (time.perf_counter() - started) * 1e3
        return Segment(
            index=live.num_segments,
            lm=lm,
            flow=flow,
            release=release,
            is_whole=flow is None or live.attempt > 0,
            fed_tokens=prompt_tokens,
            done_tokens=prompt_tokens,
        )

    def _open_lm(self, live: LiveRequest, entry: SegmentInput) -> LMSession | DeviceLMSession:
        model = self._model
        lm = model.lm.for_speaker(live.voice.embedding if entry.reads_speaker else None)
        sequence: PlainSequence | Interleaver
        if entry.interleaver is not None:
            sequence = entry.interleaver
        else:
            sequence = PlainSequence(lm, entry.prefix, entry.text_tokens, entry.prompt_speech)
        most_tokens = model.config.flow.num_tokens(self._limits.stream_frames)
        open_session: Any = partial(LMSession, lm)
        device_lm = None if self._device is None else self._device.lm
        if device_lm is not None and device_lm.serves(live.sampling):
            open_session = device_lm.open
        session: LMSession | DeviceLMSession = open_session(
            sequence,
            live.sampling,
            segment=live.num_segments,
            token_text_ratio=model.config.token_text_ratio,
            max_tokens=most_tokens - len(live.voice.speech_tokens),
            max_equal_tokens=EQUAL_SECONDS * model.config.token_rate_hz,
            attempt=live.attempt,
        )
        return session

    def _end_of_tokens(self, live: LiveRequest, segment: Segment) -> None:
        """The segment's LM has finished: no speech at all is tried again with other draws."""
        assert segment.lm is not None
        if segment.lm.num_speech_tokens == 0:
            _try_again(live, "made no speech for this text")
        else:
            segment.is_complete = True

    def is_refused(self, work: Rendering, mel: Tensor) -> bool:
        """Whether the whole segment, of which nothing was given out, is near silence: then it is decoded again."""
        live, segment, entry = work.live, work.segment, work.live.segment_input
        if not work.is_first or not work.segment_ends:
            return False
        if segment is None or segment.lm is None or entry is None or not entry.is_all_known:
            return False
        if not is_near_silent(mel, live.voice):
            return False
        live.num_speech_tokens -= segment.lm.num_speech_tokens
        _try_again(live, "left this text near silence")
        return True


def _try_again(live: LiveRequest, fault: str) -> None:
    """Throws the segment away; the next one that is opened has the same text and other draws.

    Raises:
        SynthesisError: it was the last attempt, or the text is not all known.
    """
    assert live.segment_input is not None
    live.attempt += 1
    if live.attempt >= MAX_ATTEMPTS or not live.segment_input.is_all_known:
        raise SynthesisError(f"the model {fault}; reword it or change the seed", code="no_speech")
    live.segment_input = live.segment_input.as_known()
    live.drop_segment()
