"""The way in: checks what is asked for, reads its text, and puts it in the queue. All in the caller's thread."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from vivace.datatypes import SamplingParams
from vivace.engine.live import LiveRequest
from vivace.engine.loop import EngineLoop, now_ms
from vivace.engine.request import SynthesisRequest, check_request, check_speed
from vivace.engine.scheduler import Ticket
from vivace.engine.text_feed import TextFeed, TextReader
from vivace.errors import InvalidRequestError, SynthesisError, VivaceError

if TYPE_CHECKING:
    from vivace.audio.decode import AudioSource
    from vivace.engine.frontend import SpokenPart
    from vivace.engine.loading import Assets
    from vivace.engine.stages import Stages
    from vivace.voice import Voice

_log = logging.getLogger(__name__)


class Intake:
    """Makes requests of what callers give.

    Args:
        assets: voices, text front end, limits.
        stages: know what a request costs.
        loop: where requests go.
    """

    def __init__(self, assets: Assets, stages: Stages, loop: EngineLoop) -> None:
        self._assets, self._stages, self._loop = assets, stages, loop
        self._limits, self._config = assets.limits, assets.model.config
        self._ids = itertools.count(1)

    def submit(self, request: SynthesisRequest, *, is_pushed: bool = False) -> LiveRequest:
        """Checks a request and puts it in the queue; ``step`` works on it.

        Args:
            is_pushed: the text comes through ``push_text`` and ``finish_text``, not from ``request.text``.
        """
        started = time.perf_counter()
        self._loop.check_open()
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
        live.skipped_text = reader.skipped
        live.times.text_ms = live.elapsed_ms()
        return self._admit(live)

    def submit_transform(
        self, source: AudioSource, voice: str | Voice | None, *, speed: float = 1.0, stream: bool = True
    ) -> LiveRequest:
        """As ``submit``, for voice conversion."""
        started = time.perf_counter()
        self._loop.check_open()
        speed = check_speed(speed, self._limits)
        target = self._assets.find_voice(voice)
        tokens = self._assets.speech_tokens(source)
        live = self._new_request(started, target, SamplingParams(), speed, stream=stream)
        live.times.prompt_ms = live.elapsed_ms()
        return self._admit_tokens(live, tokens)

    def submit_tokens(
        self, tokens: list[int], voice: Voice, *, speed: float = 1.0, stream: bool = True
    ) -> LiveRequest:
        """Renders given speech tokens in a voice: flow and vocoder alone."""
        self._loop.check_open()
        speed = check_speed(speed, self._limits)
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
                self.pull_text(live)

    def pull_text(self, live: LiveRequest) -> None:
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
                self._loop.abort(live, error)
            else:
                self._loop.cancel(live)
            raise
        else:
            self.push_text(live, piece)

    def _new_request(
        self, started: float, voice: Voice, sampling: SamplingParams, speed: float, *, stream: bool
    ) -> LiveRequest:
        """The record of a request, which nobody else knows yet."""
        request_id = next(self._ids)
        return LiveRequest(
            request_id=request_id,
            ticket=Ticket(request_id, submitted_ms=now_ms()),
            voice=voice,
            sampling=sampling,
            stream=stream,
            sample_rate_hz=self._config.sample_rate_hz,
            started=started,
            speed=speed,
            vocoder=self._stages.open_vocoder(speed),
        )

    def _admit_tokens(self, live: LiveRequest, tokens: list[int]) -> LiveRequest:
        live.given_tokens = tokens
        live.num_speech_tokens = len(tokens)
        return self._admit(live)

    def _admit(self, live: LiveRequest) -> LiveRequest:
        self._stages.count_costs(live)
        self._stages.update_ticket(live)
        self._loop.admit(live)
        return live

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
            self._loop.abort(live, error)
            return
        except Exception as error:  # a fault of ours must end the request, not leave its consumer waiting
            _log.exception("internal error in the text front end")
            self._loop.abort(live, SynthesisError(f"internal error ({type(error).__name__})"))
            return
        elapsed_ms = (time.perf_counter() - started) * 1e3
        self._loop.turn.tell(lambda: self._add_text(live, parts, elapsed_ms, is_end=is_end))

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
