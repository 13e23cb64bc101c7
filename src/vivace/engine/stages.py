"""Runs what the scheduler planned for one request: a burst of decoding, or one chunk through flow and vocoder."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vivace.config import Limits
from vivace.datatypes import AudioChunk
from vivace.engine.chunking import ChunkPlan
from vivace.engine.device_stages import DeviceFlowRunner, DeviceStages, DeviceVocoderSession
from vivace.engine.flow_runner import FlowRunner
from vivace.engine.interleave import Interleaver
from vivace.engine.live import LiveRequest, Segment
from vivace.engine.lm_device import DeviceLMSession
from vivace.engine.lm_runner import EQUAL_SECONDS, LMSession, PlainSequence
from vivace.engine.silence import is_near_silent
from vivace.engine.trace import Lane, Trace
from vivace.engine.vocoder_runner import VocoderSession
from vivace.errors import SynthesisError

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.checkpoint import Model
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
    """

    def __init__(self, model: Model, limits: Limits, vocoder_noise: NoiseSource | None = None) -> None:
        self._model = model
        self._limits = limits
        self._vocoder_noise = vocoder_noise
        config = model.config
        flow = config.flow
        self.plan = ChunkPlan(config.chunk_tokens, flow.lookahead_tokens, flow.num_frames(1))
        self._device: DeviceStages | None = None
        self._flow: FlowRunner | DeviceFlowRunner = FlowRunner(model.flow)
        device = DeviceStages.open(model, limits) if vocoder_noise is None else None
        if device is not None:
            self.use(device)
        self.trace: Trace | None = None

    def start_trace(self) -> Trace:
        """From now on every stage's work is noted."""
        self.trace = Trace(self._model.device)
        return self.trace

    def _span(self, lane: Lane) -> AbstractContextManager[None]:
        return nullcontext() if self.trace is None else self.trace.span(lane)

    def use(self, device: DeviceStages) -> None:
        """From now on the stages run with ``device``."""
        self._device, self._flow = device, device.flow

    def warm_up(self) -> None:
        """Compiles kernels and captures graphs, where there are any."""
        if self._device is not None:
            self._device.warm_up()

    def open_vocoder(self, speed: float) -> VocoderSession | DeviceVocoderSession:
        """The audio side of a new request.

        Raises:
            OverloadedError: the device has no room for another one.
        """
        if self._device is not None:
            return self._device.open_vocoder(speed)
        return VocoderSession(self._model.vocoder, speed, self._vocoder_noise)

    def decode(self, live: LiveRequest, count: int) -> None:
        """Makes up to ``count`` speech tokens, none beyond what the next chunk needs.

        Raises:
            SynthesisError: values that are not finite, or a segment without any speech.
        """
        segment = live.segment or self._next_segment(live)
        assert segment.lm is not None
        if not segment.is_whole:
            count = min(count, self.plan.tokens_until_audio(segment.done_tokens, segment.known_tokens))
        started = time.perf_counter()
        with self._span("lm"):
            made = segment.lm.collect() if segment.lm.is_launched else segment.lm.decode(count)
        live.times.lm_ms += (time.perf_counter() - started) * 1e3
        segment.tokens.extend(made)
        live.num_speech_tokens += len(made)
        if segment.lm.finish_reason is not None:
            self._end_of_tokens(live, segment)

    def render(self, live: LiveRequest) -> AudioChunk | None:
        """One chunk through flow and vocoder; None if it completes no samples. The last one may hold none.

        Raises:
            SynthesisError: values that are not finite, an utterance longer than the model can speak, or a short
                segment that stays near silence whatever is drawn.
        """
        segment = live.segment
        if segment is None and live.given_tokens is not None:
            segment = self._given_segment(live, live.given_tokens)
        started = time.perf_counter()
        is_first = segment is not None and segment.fed_tokens == len(live.voice.speech_tokens)
        tokens = segment.take_chunk(self.plan) if segment is not None else []
        segment_ends = segment is None or (segment.is_complete and not segment.tokens)
        request_ends = segment_ends and (live.feed is None or live.feed.is_exhausted)
        flow: Any = self._flow  # streams are of its own kind
        with self._span("flow"):
            if segment is None:  # all was rendered before the end of the text was known
                mel = self._flow.no_frames()
            elif segment.flow is not None:
                mel = flow.step(segment.flow, tokens, is_last=segment_ends)
            else:
                mel = self._flow.generate(live.voice, tokens)
        if is_first and segment_ends and self._is_refused(live, mel):
            return None
        assert live.vocoder is not None
        launched = time.perf_counter()
        with self._span("vocoder"):
            live.vocoder.launch(mel, is_last=request_ends)
        self._run_ahead(segment)
        # On a device nothing has been waited for until here: the flow's time is up to its own end.
        waited = time.perf_counter()
        self._flow.check()
        rendered = time.perf_counter()
        live.times.flow_ms += (launched - started + rendered - waited) * 1e3
        samples = live.vocoder.collect()
        live.times.vocoder_ms += (waited - launched) * 1e3
        live.times.vocoder_ms += (time.perf_counter() - rendered) * 1e3
        if segment_ends:
            live.close_segment()
        if not len(samples) and not request_ends:
            return None
        live.account_waiting()
        return AudioChunk(
            samples=samples,
            sample_rate_hz=live.sample_rate_hz,
            index=live.num_chunks,
            segment=segment.index if segment is not None else max(0, live.num_segments - 1),
            start_s=live.num_samples / live.sample_rate_hz,
            elapsed_ms=live.elapsed_ms(),
            times=replace(live.times),
            is_last=request_ends,
        )

    def _run_ahead(self, segment: Segment | None) -> None:
        """Queues the speech tokens of the next chunk behind this one, where the LM has such a queue."""
        if segment is None or segment.lm is None or segment.is_complete or segment.is_whole:
            return
        count = self.plan.tokens_until_audio(segment.done_tokens, segment.known_tokens)
        if count and not segment.lm.is_launched:
            with self._span("lm"):
                segment.lm.launch(count)  # behind what was queued: audio is waited for, tokens are not yet

    def update_ticket(self, live: LiveRequest) -> None:
        """Tells the scheduler what the request can do next."""
        ticket, segment, feed = live.ticket, live.segment, live.feed
        if segment is None and live.given_tokens is not None:
            ticket.tokens_until_audio, ticket.waits_for_text = 0, False
        elif segment is None:
            # Between segments, or the text has just ended behind the last one: flush the vocoder.
            has_text = feed is not None and (live.segment_input is not None or feed.has_segment)
            ticket.waits_for_text = not has_text
            flush = feed is not None and feed.is_exhausted and not has_text
            ticket.tokens_until_audio = 0 if flush else FAR
        elif segment.is_complete:
            ticket.tokens_until_audio, ticket.waits_for_text = 0, False
        else:
            assert segment.lm is not None
            ticket.waits_for_text = segment.lm.waits_for_text
            ticket.tokens_until_audio = (
                self.plan.tokens_until_audio(segment.done_tokens, segment.known_tokens)
                if not segment.is_whole
                else FAR
            )

    def _next_segment(self, live: LiveRequest) -> Segment:
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
            with self._span("prompt"):
                flow = self._flow.open(live.voice) if live.stream else None
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

    def _is_refused(self, live: LiveRequest, mel: Tensor) -> bool:
        """Whether the whole segment, of which nothing was given out, is near silence: then it is decoded again."""
        segment, entry = live.segment, live.segment_input
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
        raise SynthesisError(f"the model {fault}; reword it or change the seed")
    live.segment_input = live.segment_input.as_known()
    live.drop_segment()
