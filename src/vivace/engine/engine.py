"""The engine: one loop (plan, run, emit) over all requests, and the calls that users make.

    with Engine.open("mini") as engine:
        for chunk in engine.stream(SynthesisRequest("Hello!")):
            play(chunk.samples)

Requests may run side by side: each call to ``step`` does one unit of work for the request whose turn it is. All
calls are safe from several threads.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from vivace.config import Limits
from vivace.datatypes import AudioChunk, FinishReason, SamplingParams, SynthesisResult
from vivace.engine.chunking import ChunkPlan
from vivace.engine.flow_runner import FlowRunner
from vivace.engine.interleave import Interleaver
from vivace.engine.live import LiveRequest, Segment
from vivace.engine.lm_runner import LMSession, PlainSequence
from vivace.engine.loading import Assets, load_assets
from vivace.engine.request import SynthesisRequest, check_request, check_sampling
from vivace.engine.results import SpeechStream
from vivace.engine.scheduler import Scheduler, StepPlan, Ticket
from vivace.engine.text_feed import SegmentInput, TextFeed
from vivace.engine.vocoder_runner import VocoderSession
from vivace.errors import CancelledRequestError, InvalidRequestError, SynthesisError, VivaceError

if TYPE_CHECKING:
    from vivace.audio.decode import AudioSource
    from vivace.models.source import NoiseSource
    from vivace.voice import Voice, VoiceRegistry

FAR = 1 << 30
"""Tokens until audio of a request that renders a whole segment at once."""

MAX_ATTEMPTS = 2
"""Decodings of a segment before "the model made no speech" is an error."""


class Engine:
    """Speaks. Made by ``Engine.open``; ``close`` (or ``with``) ends everything that runs.

    Args:
        assets: model, tokenizer, voices.
        scheduler: turn order and queue length.
        vocoder_noise: replaces the vocoder's own noise, for comparison with recorded audio.
    """

    def __init__(
        self,
        assets: Assets,
        *,
        scheduler: Scheduler | None = None,
        vocoder_noise: NoiseSource | None = None,
    ) -> None:
        self._assets = assets
        self._limits = assets.limits
        self._vocoder_noise = vocoder_noise
        self._scheduler = scheduler or Scheduler()
        model = assets.model
        self._model = model
        config = model.config
        self._plan = ChunkPlan(config.chunk_tokens, config.flow.lookahead_tokens, config.flow.token_mel_ratio)
        self._flow = FlowRunner(model.flow)
        self._live: dict[int, LiveRequest] = {}
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    @classmethod
    def open(
        cls,
        model: str | Path = "mini",
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        voices_folder: Path | None = None,
        limits: Limits | None = None,
        warm_up: bool = True,
    ) -> Engine:
        """Loads a model folder (official layout or our own format) and its voices.

        Args:
            model: folder, or "mini" for the embedded model.
            voices_folder: where stored voices live; None takes the user's folder.
            warm_up: run a few tokens through every stage, so that the first request is as fast as the second.

        Raises:
            ModelFolderError: the folder cannot be used; the message names the file.
        """
        engine = cls(
            load_assets(model, device=device, dtype=dtype, voices_folder=voices_folder, limits=limits)
        )
        if warm_up:
            engine.warm_up()
        return engine

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def sample_rate_hz(self) -> int:
        return self._model.config.sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        """Built-in and stored voices."""
        return self._assets.voices

    @property
    def num_running(self) -> int:
        """Requests that hold state at this moment."""
        with self._lock:
            return len(self._live)

    # -- what users call -------------------------------------------------------------------------------------

    def stream(self, request: SynthesisRequest) -> SpeechStream:
        """Speaks: an iterator of audio as it is made. Dropping or closing it cancels the request.

        Raises:
            InvalidRequestError and its kind before any model work; SynthesisError when a stage fails.
        """
        return self._follow(self.submit(request))

    def synthesize(self, request: SynthesisRequest) -> SynthesisResult:
        """Speaks and returns everything at once, with the figures of the request."""
        return self.stream(request).collect()

    def transform(
        self,
        source: AudioSource,
        voice: str | Voice | None = None,
        *,
        speed: float = 1.0,
        stream: bool = True,
    ) -> SpeechStream:
        """Voice conversion: the words of ``source`` (1 to 30 s of speech) in ``voice``."""
        return self._follow(self.submit_transform(source, voice, speed=speed, stream=stream))

    def render_tokens(
        self, tokens: list[int], voice: Voice, *, speed: float = 1.0, stream: bool = True
    ) -> SpeechStream:
        """Given speech tokens in a voice: flow and vocoder alone."""
        return self._follow(self.submit_tokens(tokens, voice, speed=speed, stream=stream))

    def make_voice(
        self, prompt_audio: AudioSource, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        """A voice from 1 to 30 s of speech; ``voices.add`` stores it.

        Args:
            prompt_text: what the recording says. Without it the voice works as in cross-lingual use.

        Raises:
            InvalidAudioError: names what is wrong with the recording.
            ModelFolderError: the model folder lacks the files that cloning needs.
        """
        return self._assets.make_voice(prompt_audio, prompt_text, name=name, consent=consent)

    def cancel(self, live: LiveRequest) -> None:
        """Ends a request now and frees its state; a request that has ended already is left as it is."""
        with self._lock:
            if not live.is_done:
                live.error = CancelledRequestError("the request was cancelled")
                self._finish(live, "cancelled")

    def close(self) -> None:
        """Cancels everything and refuses new requests."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            for live in list(self._live.values()):
                self.cancel(live)
            self._assets.close()

    def warm_up(self) -> None:
        """Runs the default voice's prompt and a few tokens through every stage."""
        voice = self._assets.default_voice
        if voice is None or self._assets.frontend is None:
            return
        self.render_tokens([0] * self._plan.first_audio_tokens(len(voice.speech_tokens)), voice).collect()
        with self.stream(SynthesisRequest("Ready.", voice=voice)) as stream:
            next(stream, None)

    # -- submit, step, finish ----------------------------------------------------------------------------------

    def submit(self, request: SynthesisRequest, *, is_pushed: bool = False) -> LiveRequest:
        """Checks a request and puts it in the queue; ``step`` works on it.

        Args:
            is_pushed: the text comes through ``push_text`` and ``finish_text``, not from ``request.text``.
        """
        started = time.perf_counter()
        check_request(request, self._limits)
        if self._assets.frontend is None:
            raise self._assets.missing_error("tokenizer")
        voice = self._assets.find_voice(request.voice)
        feed = TextFeed(self._assets.frontend, request, voice)
        pieces: Iterator[str] | None = None
        if isinstance(request.text, str):
            feed.push(request.text)
            feed.finish()
        elif not is_pushed:
            pieces = iter(request.text)
        live = self._start(voice, feed, request.sampling, speed=request.speed, stream=request.stream)
        live.started = started
        live.pieces = pieces
        live.times.text_ms = (time.perf_counter() - started) * 1e3
        with self._lock:
            self._update(live)
            self._changed.notify_all()
        return live

    def submit_transform(
        self, source: AudioSource, voice: str | Voice | None, *, speed: float = 1.0, stream: bool = True
    ) -> LiveRequest:
        """As ``submit``, for voice conversion."""
        started = time.perf_counter()
        check_request(SynthesisRequest("", speed=speed), self._limits)
        target = self._assets.find_voice(voice)
        tokens = self._assets.speech_tokens(source)
        live = self._start(target, None, SamplingParams(), speed=speed, stream=stream)
        live.started = started
        live.times.prompt_ms = (time.perf_counter() - started) * 1e3
        self._feed_tokens(live, tokens)
        return live

    def submit_tokens(
        self, tokens: list[int], voice: Voice, *, speed: float = 1.0, stream: bool = True
    ) -> LiveRequest:
        """Renders given speech tokens in a voice: flow and vocoder alone."""
        vocab = self._model.config.flow.vocab_size
        if not tokens or not all(0 <= token < vocab for token in tokens):
            raise InvalidRequestError(
                f"speech tokens must be 1 or more integers from 0 to {vocab - 1}", param="tokens"
            )
        live = self._start(voice, None, SamplingParams(), speed=speed, stream=stream)
        self._feed_tokens(live, tokens)
        return live

    def push_text(self, live: LiveRequest, piece: str) -> None:
        """More text for a request whose text is streamed in."""
        self._feed_text(live, lambda feed: feed.push(piece))

    def finish_text(self, live: LiveRequest) -> None:
        """No more text will come."""
        self._feed_text(live, lambda feed: feed.finish())

    def pull_all_text(self, live: LiveRequest) -> None:
        """Takes the caller's iterator to its end, as fast as it gives; for a thread of its own."""
        while live.pieces is not None and not live.is_done:
            self._pull_text(live)

    def step(self) -> bool:
        """Plan, run, emit. Returns False when nothing could be done."""
        with self._lock:
            plan = self._scheduler.plan()
            if plan is None:
                return False
            live = self._live[plan.request_id]
            try:
                with torch.inference_mode():
                    self._run(live, plan)
            except VivaceError as error:
                self.abort(live, error)
            except Exception as error:
                self.abort(live, error)
                raise
            return True

    def run_forever(self) -> None:
        """Steps until ``close``; waits without polling while there is nothing to do."""
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self.step():
                    self._changed.wait()

    def take(self, live: LiveRequest) -> AudioChunk | None:
        """The request's next finished chunk, if there is one. Raises its error once all chunks are taken."""
        with self._lock:
            if live.chunks:
                live.ticket.pending_chunks -= 1
                self._changed.notify_all()
                return live.chunks.popleft()
            if live.error is not None:
                raise live.error
            return None

    def listen(self, live: LiveRequest, listener: Callable[[], object]) -> None:
        """Calls ``listener`` (from the thread that steps) whenever the request has news."""
        with self._lock:
            live.listener = listener
        listener()

    def abort(self, live: LiveRequest, error: Exception) -> None:
        """Ends a request with an error; one that is not ours is wrapped without its text."""
        with self._lock:
            if not live.is_done:
                if not isinstance(error, VivaceError):
                    error = SynthesisError(f"internal error ({type(error).__name__})")
                live.error = error
                self._finish(live, "error")

    # -- inside ------------------------------------------------------------------------------------------------

    def _start(
        self, voice: Voice, feed: TextFeed | None, sampling: SamplingParams, *, speed: float, stream: bool
    ) -> LiveRequest:
        check_sampling(sampling)
        with self._lock:
            if self._closed:
                raise InvalidRequestError("the engine is closed; open a new one", code="engine_closed")
            request_id = next(self._ids)
            ticket = Ticket(request_id, waits_for_text=True)
            self._scheduler.add(ticket)
            vocoder = VocoderSession(self._model.vocoder, speed, self._vocoder_noise)
            live = LiveRequest(
                request_id, ticket, voice, sampling, stream, vocoder, feed, self.sample_rate_hz
            )
            self._live[request_id] = live
            return live

    def _feed_tokens(self, live: LiveRequest, tokens: list[int]) -> None:
        with self._lock:
            live.segment = self._open_segment(live, None)
            live.segment.tokens = tokens
            live.segment.is_complete = True
            live.num_segments = 1
            live.num_speech_tokens = len(tokens)
            live.ticket.waits_for_text = False
            live.ticket.tokens_until_audio = 0

    def _feed_text(self, live: LiveRequest, action: Callable[[TextFeed], None]) -> None:
        started = time.perf_counter()
        with self._lock:
            if live.is_done or live.feed is None:
                return
            try:
                action(live.feed)
            except VivaceError as error:
                self.abort(live, error)
                return
            if live.segment is not None and live.segment.lm is not None:
                live.segment.lm.waits_for_text = False
            live.times.text_ms += (time.perf_counter() - started) * 1e3
            self._update(live)
            self._changed.notify_all()

    def _follow(self, live: LiveRequest) -> SpeechStream:
        return SpeechStream(live, self._drive(live), self.cancel)

    def _drive(self, live: LiveRequest) -> Generator[AudioChunk, None, None]:
        """Steps the engine until the request ends; pulls streamed text when the request waits for it."""
        while True:
            chunk = self.take(live)
            if chunk is not None:
                yield chunk
            elif live.is_done:
                return
            elif live.pieces is not None and live.ticket.waits_for_text:
                self._pull_text(live)
            else:
                with self._changed:
                    if not live.chunks and not live.is_done and not self.step():
                        self._changed.wait()  # another thread holds the text or the turn

    def _pull_text(self, live: LiveRequest) -> None:
        """Takes the next piece from the caller's iterator, outside the lock: it may block."""
        pieces = live.pieces
        if pieces is None:
            return
        try:
            piece = next(pieces)
        except StopIteration:
            live.pieces = None
            self.finish_text(live)
            return
        self.push_text(live, piece)

    def _run(self, live: LiveRequest, plan: StepPlan) -> None:
        if plan.work == "decode":
            self._decode(live, plan.num_tokens)
        else:
            self._render(live)
        if not live.is_done:
            self._update(live)

    def _decode(self, live: LiveRequest, count: int) -> None:
        started = time.perf_counter()
        segment = live.segment
        if segment is None:
            assert live.feed is not None
            entry = live.segment_input or live.feed.next_segment()
            assert entry is not None, "planned to decode without text"
            live.segment_input = entry
            segment = live.segment = self._open_segment(live, entry)
        assert segment.lm is not None
        made = segment.lm.decode(count)
        segment.tokens.extend(made)
        live.num_speech_tokens += len(made)
        if segment.lm.finish_reason is not None:
            self._end_of_tokens(live, segment)
        live.times.lm_ms += (time.perf_counter() - started) * 1e3

    def _end_of_tokens(self, live: LiveRequest, segment: Segment) -> None:
        """The segment's LM has finished: no speech at all is tried again with other draws, once."""
        assert segment.lm is not None
        assert live.segment_input is not None
        live.was_cut |= segment.lm.finish_reason == "length"
        if segment.lm.num_speech_tokens == 0:
            live.attempt += 1
            if live.attempt >= MAX_ATTEMPTS or live.segment_input.is_streamed:
                raise SynthesisError("the model made no speech for this text; reword it or change the seed")
            live.segment = None
            return
        segment.is_complete = True
        live.num_text_tokens += live.segment_input.num_text_tokens
        live.spoken_text.append(live.segment_input.text)
        live.num_segments += 1

    def _open_segment(self, live: LiveRequest, entry: SegmentInput | None) -> Segment:
        started = time.perf_counter()
        prompt_tokens = len(live.voice.speech_tokens)
        with torch.inference_mode():
            flow = self._flow.open(live.voice) if live.stream else None
        live.times.prompt_ms += (time.perf_counter() - started) * 1e3
        lm = None if entry is None else self._open_lm(live, entry)
        return Segment(lm, flow, fed_tokens=prompt_tokens, done_tokens=prompt_tokens)

    def _open_lm(self, live: LiveRequest, entry: SegmentInput) -> LMSession:
        model = self._model
        sequence: PlainSequence | Interleaver
        if entry.interleaver is not None:
            sequence = entry.interleaver
        else:
            sequence = PlainSequence(model.lm, entry.prefix, entry.text_tokens, entry.prompt_speech)
        frames = self._limits.stream_frames // model.config.flow.token_mel_ratio
        return LMSession(
            model.lm,
            sequence,
            live.sampling,
            segment=live.num_segments,
            token_text_ratio=model.config.token_text_ratio,
            max_tokens=frames - len(live.voice.speech_tokens),
            attempt=live.attempt,
        )

    def _render(self, live: LiveRequest) -> None:
        segment = live.segment
        started = time.perf_counter()
        tokens = segment.take_chunk(self._plan) if segment is not None else []
        segment_ends = segment is None or (segment.is_complete and not segment.tokens)
        request_ends = segment_ends and (live.feed is None or live.feed.is_exhausted)
        if segment is None:
            mel = torch.zeros(self._model.config.vocoder.in_channels, 0)
        elif segment.flow is not None:
            mel = self._flow.step(segment.flow, tokens, is_last=segment_ends)
        else:
            mel = self._flow.generate(live.voice, tokens)
        rendered = time.perf_counter()
        live.times.flow_ms += (rendered - started) * 1e3
        samples = live.vocoder.step(mel, is_last=request_ends)
        live.times.vocoder_ms += (time.perf_counter() - rendered) * 1e3
        if segment_ends:
            live.segment = live.segment_input = None
            live.attempt = 0
        if len(samples) or request_ends:
            self._emit(
                live,
                AudioChunk(
                    samples=samples,
                    sample_rate_hz=self.sample_rate_hz,
                    index=live.num_chunks,
                    segment=max(0, live.num_segments - (1 if segment_ends else 0)),
                    start_s=live.num_samples / self.sample_rate_hz,
                    elapsed_ms=live.elapsed_ms(),
                    times=replace(live.times),
                    is_last=request_ends,
                ),
            )
        if request_ends:
            self._finish(live, "length" if live.was_cut else "stop")

    def _emit(self, live: LiveRequest, chunk: AudioChunk) -> None:
        live.account_waiting()
        chunk.times.waiting_ms = live.times.waiting_ms
        live.num_samples += len(chunk.samples)
        live.num_chunks += 1
        live.chunks.append(chunk)
        live.ticket.pending_chunks += 1
        self._notify(live)

    def _update(self, live: LiveRequest) -> None:
        """Tells the scheduler what the request can do next."""
        ticket, segment, feed = live.ticket, live.segment, live.feed
        if segment is None:
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
                self._plan.tokens_until_audio(segment.done_tokens, segment.known_tokens)
                if segment.flow is not None
                else FAR
            )

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        """The one place where a request ends, whatever the reason: its state is freed here."""
        live.finish_reason = reason
        live.wall_ms = live.elapsed_ms()
        live.account_waiting()
        live.segment = live.segment_input = None
        live.pieces = None
        if reason == "cancelled":
            live.chunks.clear()
        self._scheduler.remove(live.request_id)
        self._live.pop(live.request_id, None)
        self._notify(live)

    def _notify(self, live: LiveRequest) -> None:
        self._changed.notify_all()
        if live.listener is not None:
            live.listener()
