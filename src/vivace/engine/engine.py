"""The engine: one loop (plan, run, emit) over all requests, and the calls that users make.

    with Engine.open("mini") as engine:
        for chunk in engine.stream(SynthesisRequest("Hello!")):
            play(chunk.samples)

Requests may run side by side. On a CPU each call to ``step`` does one unit of work for the request whose turn it is; on
a device a step serves all of them. All calls are safe from several threads, and none waits for another request but
``submit``, which waits for the step that runs.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from vivace.config import Limits
from vivace.datatypes import AudioChunk, FinishReason, SamplingParams, SynthesisResult
from vivace.engine.device_stages import DeviceStages
from vivace.engine.live import LiveRequest
from vivace.engine.loading import Assets, load_assets
from vivace.engine.request import SynthesisRequest, check_request, check_speed
from vivace.engine.results import SpeechStream
from vivace.engine.scheduler import Overdue, Scheduler, StepPlan, Ticket
from vivace.engine.stages import Stages
from vivace.engine.text_feed import TextFeed, TextReader
from vivace.engine.turn import Turn
from vivace.errors import (
    CancelledRequestError,
    InvalidRequestError,
    OverloadedError,
    SynthesisError,
    VivaceError,
)
from vivace.models.lm_paged import BUCKETS

if TYPE_CHECKING:
    from vivace.audio.decode import AudioSource
    from vivace.checkpoint import LMVariant
    from vivace.engine.frontend import SpokenPart
    from vivace.engine.trace import Trace
    from vivace.engine.work import Outcome
    from vivace.models.source import NoiseSource
    from vivace.voice import Voice, VoiceRegistry

MOST_STREAMS = BUCKETS[-1]
"""Rows of the largest launch of the speech LM."""

CANCELLED = "the request was cancelled"

_log = logging.getLogger(__name__)


class Engine:
    """Speaks. Made by ``Engine.open``; ``close`` (or ``with``) ends everything that runs.

    Args:
        assets: model, tokenizer, voices.
        scheduler: turn order and queue length.
        vocoder_noise: replaces the vocoder's own noise, for comparison with recorded audio.
        max_streams: requests that a CUDA device serves at once.
        deterministic: on a CUDA device, the same samples in any company, at a price (``docs/architecture.md``).
    """

    def __init__(
        self,
        assets: Assets,
        *,
        scheduler: Scheduler | None = None,
        vocoder_noise: NoiseSource | None = None,
        max_streams: int = 8,
        deterministic: bool = False,
    ) -> None:
        self._assets = assets
        self._limits = assets.limits
        self._config = assets.model.config
        self._scheduler = Scheduler() if scheduler is None else scheduler  # an empty one is false
        if not 1 <= max_streams <= MOST_STREAMS:
            raise InvalidRequestError(
                f"max_streams must lie between 1 and {MOST_STREAMS}", param="max_streams"
            )
        device = None
        if vocoder_noise is None:
            device = DeviceStages.open(assets.model, assets.limits, max_streams, deterministic=deterministic)
        self._stages = Stages(assets.model, assets.limits, vocoder_noise, device)
        self._scheduler.use(self._stages.capacity)
        self._live: dict[int, LiveRequest] = {}
        self._ids = itertools.count(1)
        self._turn = Turn()
        self._closed = False
        self._last_step_ms = self._now_ms()
        self._last_plan = 0, 0

    @classmethod
    def open(
        cls,
        model: str | Path = "mini",
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        lm_variant: LMVariant = "base",
        voices_folder: Path | None = None,
        limits: Limits | None = None,
        tokenizer: Path | None = None,
        warm_up: bool = True,
        max_streams: int = 8,
        deterministic: bool = False,
    ) -> Engine:
        """Loads a model folder (official layout or our own format) and its voices.

        Args:
            model: folder, or "mini" for the embedded model.
            dtype: of speech LM and flow; the vocoder always runs in float32.
            lm_variant: "rl" takes ``llm.rl.pt`` of an official folder in place of ``llm.pt``.
            voices_folder: where stored voices live; None takes the user's folder.
            tokenizer: where to take the text tokenizer from instead of the model folder: a folder with Qwen2's
                files, or the rank file that CosyVoice-300M needs and does not bring.
            warm_up: run a few tokens through every stage, so that the first request is as fast as the second.
            max_streams: requests that a CUDA device serves at once; more take longer to warm up.
            deterministic: on a CUDA device, the same request gives the same samples in any company. Slow in company.

        Raises:
            ModelFolderError: the folder cannot be used; the message names the file.
        """
        assets = load_assets(
            model,
            device=device,
            dtype=dtype,
            lm_variant=lm_variant,
            voices_folder=voices_folder,
            limits=limits,
            tokenizer=tokenizer,
        )
        engine = cls(assets, max_streams=max_streams, deterministic=deterministic)
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
        return self._config.sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        """Built-in and stored voices."""
        return self._assets.voices

    @property
    def num_running(self) -> int:
        """Requests that hold state at this moment."""
        return len(self._live)

    def gauges(self) -> dict[str, float]:
        """Figures for a server's metrics, by their names there."""
        requests, limit = self._scheduler.requests, self._scheduler.limit
        chunks, rows = self._last_plan
        figures = {
            "queue_length": len(requests.queue),
            "batch_size": rows,
            "flow_batch_size": chunks,
            "flow_batch_limit": limit.chunks,
            "pages_used": requests.kv_used,
            "flow_pages_used": requests.held,
            "engine_busy_ratio": limit.busy_percent / 100,
            "step_seconds_p99": limit.step_ms_p99 / 1000,
        }
        if self._stages.is_paged:
            capacity = self._scheduler.capacity
            figures |= {"pages_total": capacity.kv_pages, "flow_pages_total": capacity.flow_pages}
        if self._assets.model.device.type == "cuda":
            figures["gpu_memory_bytes"] = torch.cuda.memory_allocated(self._assets.model.device)
        return {name: float(value) for name, value in figures.items()}

    def use_device(self, stages: DeviceStages) -> None:
        """From now on the engine runs with ``stages``. No request may be live."""
        self._stages.use(stages)
        self._scheduler.use(stages.capacity)

    def end_stalled_after(self, seconds: float) -> None:
        """Requests whose consumer takes nothing of a full queue for so long are ended."""
        self._turn.ask(lambda: self._scheduler.end_stalled_after(int(seconds * 1000)))

    # -- what users call -------------------------------------------------------------------------------------

    def stream(self, request: SynthesisRequest) -> SpeechStream:
        """Speaks: an iterator of audio as it is made. Dropping or closing it cancels the request.

        Raises:
            InvalidRequestError and its kind before any model work; SynthesisError when a stage fails.
        """
        return SpeechStream(self, self.submit(request))

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
        return SpeechStream(self, self.submit_transform(source, voice, speed=speed, stream=stream))

    def render_tokens(
        self, tokens: list[int], voice: Voice, *, speed: float = 1.0, stream: bool = True
    ) -> SpeechStream:
        """Given speech tokens in a voice: flow and vocoder alone."""
        return SpeechStream(self, self.submit_tokens(tokens, voice, speed=speed, stream=stream))

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
        self._check_open()
        return self._assets.make_voice(prompt_audio, prompt_text, name=name, consent=consent)

    def cancel(self, live: LiveRequest) -> None:
        """Ends a request and frees its state: now, or at the end of the step that runs in another thread.

        Never waits. A request that has ended already is left as it is.
        """
        if not live.is_done:
            live.is_cancelled = True
            self._turn.tell(lambda: self._finish(live, "cancelled", CancelledRequestError(CANCELLED)))

    def close(self) -> None:
        """Cancels everything and refuses new requests."""
        self._closed = True
        self._turn.ask(self._finish_all)
        self._assets.close()

    def warm_up(self, voice: str | Voice | None = None) -> None:
        """Runs a voice's prompt and a few tokens through every stage; ``open`` does it for the default voice.

        The prompts of recently used voices are kept, so the first request with a voice that is warm begins as fast
        as the second.
        """
        self._turn.ask(self._stages.warm_up)
        if voice is None:
            voice = self._assets.default_voice
        if voice is None or self._assets.frontend is None:
            return
        voice = self._assets.find_voice(voice)
        first = self._stages.plan.first_audio_tokens(len(voice.speech_tokens))
        with suppress(SynthesisError):  # the first request will tell
            self.render_tokens([0] * first, voice).collect()
            with self.stream(SynthesisRequest("Ready.", voice=voice)) as stream:
                next(stream, None)

    def start_trace(self) -> Trace:
        """Notes when each stage runs until ``stop_trace``; for timelines of single requests."""
        return self._stages.start_trace()

    def stop_trace(self) -> None:
        """Ends the notes; what was noted stays with the trace."""
        self._stages.trace = None

    # -- submit, step, take ------------------------------------------------------------------------------------

    def submit(self, request: SynthesisRequest, *, is_pushed: bool = False) -> LiveRequest:
        """Checks a request and puts it in the queue; ``step`` works on it.

        Args:
            is_pushed: the text comes through ``push_text`` and ``finish_text``, not from ``request.text``.
        """
        started = time.perf_counter()
        self._check_open()
        check_request(request, self._limits)
        if self._assets.frontend is None:
            raise self._assets.missing_error("tokenizer")
        voice = self._assets.find_voice(request.voice)
        feed = TextFeed(self._assets.frontend, request, voice)
        reader = TextReader(self._assets.frontend, request)
        pieces: Iterator[str] | None = None
        if isinstance(request.text, str):
            feed.add(reader.read(request.text))
            feed.finish()
        elif not is_pushed:
            pieces = iter(request.text)
        live = self._new_request(started, voice, request.sampling, request.speed, stream=request.stream)
        live.feed, live.reader, live.pieces = feed, reader, pieces
        live.times.text_ms = live.elapsed_ms()
        return self._admit(live)

    def submit_transform(
        self, source: AudioSource, voice: str | Voice | None, *, speed: float = 1.0, stream: bool = True
    ) -> LiveRequest:
        """As ``submit``, for voice conversion."""
        started = time.perf_counter()
        self._check_open()
        check_speed(speed, self._limits)
        target = self._assets.find_voice(voice)
        tokens = self._assets.speech_tokens(source)
        live = self._new_request(started, target, SamplingParams(), speed, stream=stream)
        live.times.prompt_ms = live.elapsed_ms()
        return self._admit_tokens(live, tokens)

    def submit_tokens(
        self, tokens: list[int], voice: Voice, *, speed: float = 1.0, stream: bool = True
    ) -> LiveRequest:
        """Renders given speech tokens in a voice: flow and vocoder alone."""
        self._check_open()
        check_speed(speed, self._limits)
        vocab = self._config.flow.vocab_size
        if not tokens or not all(0 <= token < vocab for token in tokens):
            raise InvalidRequestError(
                f"speech tokens must be 1 or more integers from 0 to {vocab - 1}", param="tokens"
            )
        target = self._assets.find_voice(voice)
        live = self._new_request(time.perf_counter(), target, SamplingParams(), speed, stream=stream)
        return self._admit_tokens(live, list(tokens))

    def push_text(self, live: LiveRequest, piece: str) -> None:
        """More text for a request whose text is streamed in; one thread at a time."""
        self._read_text(live, lambda reader: reader.read(piece), is_end=False)

    def finish_text(self, live: LiveRequest) -> None:
        """No more text will come."""
        self._read_text(live, lambda reader: reader.finish(), is_end=True)

    def pull_all_text(self, live: LiveRequest) -> None:
        """Takes the caller's iterator to its end, as fast as it gives; for a thread of its own."""
        with suppress(Exception):  # reaches the consumer as the request's error
            while live.pieces is not None and not live.is_done:
                self._pull_text(live)

    def step(self) -> bool:
        """Plan, run, emit. False when nothing could be done, or another thread is at it."""
        return self._turn.run(self._step)

    def run_forever(self) -> None:
        """Steps until ``close``; sleeps while there is nothing to do. A fault of the loop itself closes the engine."""
        try:
            while not self._closed:
                seen = self._turn.version
                if not self.step():
                    self._sleep(seen)
        except Exception:
            _log.exception("the engine's loop failed")
        finally:
            self.close()  # whoever waits for a chunk must not wait for ever

    def take(self, live: LiveRequest) -> AudioChunk | None:
        """The request's next finished chunk, if there is one. Raises its error once all chunks are taken."""
        if live.is_cancelled and not live.is_done:
            raise CancelledRequestError(CANCELLED)
        error = live.error if live.is_done else None  # before the chunks: what is done makes no more of them
        chunk = None
        with suppress(IndexError):
            chunk = live.chunks.popleft()
        if chunk is not None:
            self._turn.tell(lambda: self._note_taken(live))
        elif error is not None:
            raise error
        return chunk

    def next_chunk(self, live: LiveRequest) -> AudioChunk | None:
        """Steps until the request has a chunk; None at its end. Pulls streamed text when the request waits for it."""
        while True:
            seen, is_done = self._turn.version, live.is_done
            chunk = self.take(live)
            if chunk is not None or is_done:
                return chunk
            if live.pieces is not None and live.ticket.waits_for_text:
                self._pull_text(live)
            elif not self.step():
                self._sleep(seen)

    def listen(self, live: LiveRequest, listener: Callable[[], object]) -> None:
        """Calls ``listener`` (from the thread that steps) whenever the request has news. It must not raise."""
        live.listener = listener
        listener()

    def abort(self, live: LiveRequest, error: Exception) -> None:
        """Ends a request with ``error``, which its consumer gets as it is."""
        self._turn.tell(lambda: self._finish(live, "error", error))

    def ask_for_sign(self, answer: Callable[[], object]) -> None:
        """Calls ``answer`` (in any thread) once the step that runs has ended; at once if none does. A watchdog asks."""
        self._turn.tell(answer)

    # -- inside; what follows runs under the turn, but for the text -----------------------------------------------

    def _step(self) -> bool:
        started_ms = self._now_ms()
        with torch.inference_mode(), self._stages.on_device():
            changed = self._emit_all(self._stages.collect(), ())
            plan = self._scheduler.plan(started_ms)
            if plan is None:
                return changed
            for request_id, reason in plan.overdue:
                self._end_overdue(self._live[request_id], reason)
            self._emit_all(self._stages.run(plan, self._live), plan.requests)
        self._note_step(plan, started_ms)
        return True

    def _emit_all(self, outcomes: Iterator[Outcome], planned: Iterable[int]) -> bool:
        """Hands over what a step made; whether that was anything. A fault of the step itself ends its requests."""
        made = False
        try:
            for outcome in outcomes:
                made = True
                self._emit(outcome)
        except Exception as error:
            self._finish_planned(planned, partial(self._fail, error=error))
        except BaseException:  # Ctrl-C in the middle of the requests' state
            interrupted = CancelledRequestError("the engine was interrupted")
            self._finish_planned(planned, lambda live: self._finish(live, "cancelled", interrupted))
            raise
        return made

    def _emit(self, outcome: Outcome) -> None:
        """Hands over what the step made, and tells the scheduler what the request can do next."""
        live, chunk = outcome.live, outcome.chunk
        if outcome.error is not None:
            self._fail(live, outcome.error)
            return
        if chunk is not None:
            live.first_ms = live.first_ms or chunk.elapsed_ms
            live.num_samples += len(chunk.samples)
            live.num_chunks += 1
            live.ticket.note_chunk(self._now_ms(), live.num_samples * 1000 // live.sample_rate_hz)
            live.chunks.append(chunk)
        if chunk is not None and chunk.is_last:
            self._finish(live, "length" if live.was_cut else "stop")
            return
        self._stages.update_ticket(live)
        if chunk is not None and live.listener is not None:
            live.listener()

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        """Ends a request with an error; a fault of ours must not reach the thread that happens to step."""
        if isinstance(error, CancelledRequestError):
            self._finish(live, "cancelled", error)
            return
        if isinstance(error, torch.OutOfMemoryError):
            _log.error("the device's memory is full", exc_info=error)
            error = OverloadedError("the device's memory is full; try again later", retry_after_s=1.0)
        elif not isinstance(error, VivaceError):
            _log.error("internal error in a request", exc_info=error)
            error = SynthesisError(f"internal error ({type(error).__name__})")
        self._finish(live, "error", error)

    def _finish_planned(self, planned: Iterable[int], finish: Callable[[LiveRequest], None]) -> None:
        for request_id in planned:
            if request_id in self._live:
                finish(self._live[request_id])

    def _end_overdue(self, live: LiveRequest, reason: Overdue) -> None:
        if reason == "queue":
            wait_s = self._scheduler.requests.retry_after_s()
            message = "the request waited too long for its turn; try again later"
            self._finish(live, "error", OverloadedError(message, retry_after_s=wait_s))
        else:
            message = "the audio was not taken for too long; read it faster or ask for less at a time"
            self._finish(live, "cancelled", CancelledRequestError(message, code="consumer_stalled"))

    def _note_step(self, plan: StepPlan, started_ms: int) -> None:
        """What the batch limit learns from."""
        ended_ms = self._now_ms()
        self._scheduler.limit.note(ended_ms - started_ms, ended_ms - self._last_step_ms)
        self._last_step_ms = ended_ms
        self._last_plan = sum(hop for _, hop in plan.render), len(plan.decode)

    @staticmethod
    def _now_ms() -> int:
        return time.monotonic_ns() // 1_000_000

    def _sleep(self, version: int) -> None:
        """Until something changed since ``version`` was read, or time changes what can be done."""
        wake_ms = self._scheduler.wake_ms
        self._turn.wait(version, None if wake_ms is None else max(0, wake_ms - self._now_ms()) / 1000)

    def _finish(self, live: LiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """The one place where a request ends, whatever the reason: its state is freed here."""
        if live.is_done:
            return
        live.wall_ms = live.elapsed_ms()
        live.account_waiting()
        live.release()
        if reason == "cancelled":
            live.chunks.clear()
        self._scheduler.remove(live.request_id, None if error is not None else self._now_ms())
        self._live.pop(live.request_id, None)
        if isinstance(error, VivaceError):
            # A traceback would keep the stages' tensors alive for as long as the caller keeps the error.
            error = error.with_traceback(None)
        live.error = error
        live.finish_reason = reason  # last: whoever sees it may rely on the rest
        listener, live.listener = live.listener, None
        if listener is not None:
            listener()

    def _finish_all(self) -> None:
        for live in list(self._live.values()):
            self._finish(live, "cancelled", CancelledRequestError("the engine was closed"))

    def _note_taken(self, live: LiveRequest) -> None:
        live.ticket.pending_chunks -= 1
        live.ticket.lagging_ms = -1

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the engine is closed; open a new one", code="engine_closed")

    def _new_request(
        self, started: float, voice: Voice, sampling: SamplingParams, speed: float, *, stream: bool
    ) -> LiveRequest:
        """The record of a request, which nobody else knows yet."""
        request_id = next(self._ids)
        return LiveRequest(
            request_id=request_id,
            ticket=Ticket(request_id, submitted_ms=self._now_ms()),
            voice=voice,
            sampling=sampling,
            stream=stream,
            sample_rate_hz=self.sample_rate_hz,
            started=started,
            speed=speed,
            vocoder=self._stages.open_vocoder(speed),
        )

    def _admit_tokens(self, live: LiveRequest, tokens: list[int]) -> LiveRequest:
        live.given_tokens = tokens
        live.num_speech_tokens = len(tokens)
        return self._admit(live)

    def _admit(self, live: LiveRequest) -> LiveRequest:
        """Into the queue, unless it is full or the engine has been closed meanwhile."""
        self._stages.count_costs(live)
        self._stages.update_ticket(live)

        def admit() -> None:
            self._check_open()
            self._scheduler.add(live.ticket)
            self._live[live.request_id] = live

        self._turn.ask(admit)
        return live

    def _pull_text(self, live: LiveRequest) -> None:
        """Takes the next piece from the caller's iterator, which may block; its errors end the request."""
        pieces = live.pieces
        if pieces is None:
            return
        try:
            piece = next(pieces)
        except StopIteration:
            live.pieces = None
            self.finish_text(live)
        except BaseException as error:
            if isinstance(error, Exception):
                self.abort(live, error)
            else:
                self.cancel(live)
            raise
        else:
            self.push_text(live, piece)

    def _read_text(
        self, live: LiveRequest, read: Callable[[TextReader], list[SpokenPart]], *, is_end: bool
    ) -> None:
        """Reads text in the caller's thread, then hands it to the request."""
        started, reader = time.perf_counter(), live.reader
        if live.is_done or reader is None:
            return
        try:
            parts = read(reader)
        except VivaceError as error:
            self.abort(live, error)
            return
        except Exception as error:  # a fault of ours must end the request, not leave its consumer waiting
            _log.exception("internal error in the text front end")
            self.abort(live, SynthesisError(f"internal error ({type(error).__name__})"))
            return
        elapsed_ms = (time.perf_counter() - started) * 1e3
        self._turn.tell(lambda: self._add_text(live, parts, elapsed_ms, is_end=is_end))

    def _add_text(
        self, live: LiveRequest, parts: list[SpokenPart], elapsed_ms: float, *, is_end: bool
    ) -> None:
        if live.is_done or live.feed is None:
            return
        live.feed.add(parts)
        if is_end:
            live.feed.finish()
        if live.segment is not None and live.segment.lm is not None:
            live.segment.lm.waits_for_text = False
        live.times.text_ms += elapsed_ms
        self._stages.update_ticket(live)
