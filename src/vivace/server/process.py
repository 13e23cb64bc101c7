"""The engine in a process of its own: what takes it down does not take the server down.

    service = await ProcessService.open(EngineSettings("mini"))

The server's process keeps voices, queue and answers. When the engine process dies, hangs or can no longer speak,
running requests end with ``engine_restarting`` at once, it is replaced, and new requests wait a moment for the new
one or are told when to come back. Needs a POSIX system.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vivace.engine import SynthesisRequest, open_voices
from vivace.engine.request import check_request
from vivace.errors import (
    CancelledRequestError,
    InvalidAudioError,
    InvalidRequestError,
    InvalidTextError,
    OverloadedError,
    SynthesisError,
    VivaceError,
)
from vivace.server.channel import Channel, ProcessStream
from vivace.server.child import (
    COMMAND,
    SLOW_STEP_SECONDS,
    TICK_SECONDS,
    EngineProcess,
    EngineSettings,
    Watch,
)
from vivace.server.running import RunningStreams
from vivace.server.sent_voices import SentVoices
from vivace.server.wire import Header, chunk_of, error_of, request_header, result_of
from vivace.voice import Voice
from vivace.voice.file import from_bytes

if TYPE_CHECKING:
    from vivace.server.service import ServiceState
    from vivace.voice import VoiceRegistry

STEADY_SECONDS = 60.0
"""An engine process that lived this long did not fail because of how it was started."""
MANY_FAILED_STARTS = 3

_log = logging.getLogger(__name__)


class ProcessService:
    """A ``SpeechService``; made by ``open``.

    Attributes:
        num_restarts: engine processes that had to be replaced.
        last_recovery_s: from the newest failure noticed to the next engine ready; None before the first.
    """

    def __init__(
        self,
        settings: EngineSettings,
        voices: VoiceRegistry,
        *,
        watch: Watch,
        model: str = "vivace-mini",
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.num_restarts = 0
        self.last_recovery_s: float | None = None
        self._settings = settings
        self._watch = watch
        self._model = model
        self._voices = voices
        self._command = command
        self._is_draining = False
        self._num_failed_starts = 0
        self._sample_rate_hz = 0
        self._child: EngineProcess | None = None
        self._sent: SentVoices | None = None
        self._has_child = asyncio.Event()
        self._num_waiting = 0
        self._channels: dict[int, Channel] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._running = RunningStreams()
        self._ids = itertools.count(1)
        self._start_s = 5.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_probing = False

    @classmethod
    async def open(
        cls,
        settings: EngineSettings | None = None,
        *,
        model: str = "vivace-mini",
        watch: Watch | None = None,
        command: Sequence[str] = COMMAND,
    ) -> ProcessService:
        """Opens the voices and starts the engine process; returns once it is ready.

        Args:
            model: name for ``/v1/models``.
            command: what to run in place of our own process (tests plant faulty ones).

        Raises:
            ModelFolderError: the folder cannot be used; the message names the file.
        """
        settings = settings or EngineSettings()
        if watch is None:
            watch = Watch(step_s=SLOW_STEP_SECONDS) if settings.is_slow else Watch()
        voices = await asyncio.to_thread(open_voices, settings.model, settings.voices_folder)
        service = cls(settings, voices, watch=watch, model=model, command=command)
        child = await service._start_child()
        service._keep(service._supervise(child))
        service._keep(service._watch_consumers())
        return service

    @property
    def state(self) -> ServiceState:
        if self._is_draining:
            return "draining"
        if self._child is not None:
            return "ready"
        if self._num_failed_starts >= MANY_FAILED_STARTS:
            return "failed"
        return "restarting" if self._sample_rate_hz else "starting"

    @property
    def model(self) -> str:
        return self._model

    @property
    def sample_rate_hz(self) -> int:
        return self._sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        return self._voices

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        return None if self._child is None else self._child.pid

    def stream(self, request: SynthesisRequest, text: AsyncIterable[str] | None = None) -> ProcessStream:
        """Speaks. Errors, also that the service takes no requests, come with the first chunk asked for.

        Args:
            text: pieces of text as they arrive; ``request.text`` itself must be a str.
        """
        return ProcessStream(self, request, text)

    async def make_voice(
        self, prompt_audio: bytes, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        limit = self._settings.limits.prompt_file_bytes
        if len(prompt_audio) > limit:
            raise InvalidAudioError(
                f"The audio file is larger than {limit} bytes. Cut it, or send FLAC or MP3.",
                code="payload_too_large",
                param="prompt_audio",
            )
        child = await self._ready_child()
        header = {"kind": "make_voice", "text": prompt_text, "name": name, "consent": consent}
        voice: Voice = await self._ask(child, header, prompt_audio)
        return voice

    async def drain(self, timeout_s: float) -> None:
        self._is_draining = True
        await self._running.wait_until_none(timeout_s)

    async def close(self) -> None:
        self._is_draining = True
        tasks, self._tasks = list(self._tasks), set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        child, self._child = self._child, None
        self._fail_all(lambda: CancelledRequestError("the server was closed"))
        if child is not None:
            await child.kill()

    def gauges(self) -> dict[str, float]:
        """Figures for ``/metrics``."""
        child = self._child
        figures = {"engine_restarts": float(self.num_restarts)}
        return (
            figures if child is None else child.gauges | figures | {"heartbeat_age_seconds": child.silent_s}
        )

    # -- what streams ask for (channel.Desk) -----------------------------------------------------------------

    def open_channel(self) -> Channel:
        channel = Channel(next(self._ids))
        self._running.add(channel.request_id)
        return channel

    async def begin(self, channel: Channel, request: SynthesisRequest, *, is_streamed: bool) -> None:
        if is_streamed:
            request = replace(request, text=())
        check_request(request, self._settings.limits)
        if not is_streamed and not isinstance(request.text, str):
            raise InvalidTextError(
                "text must be a str; stream pieces apart", code="invalid_type", param="text"
            )
        voice = await self._find_voice(request.voice)
        child = await self._ready_child()
        if channel.is_done or self._sent is None:  # closed by another task meanwhile
            return
        self._channels[channel.request_id] = channel
        child.send(
            {
                "kind": "speak",
                "id": channel.request_id,
                "request": request_header(request),
                "voice": self._sent.key(voice) if isinstance(voice, Voice) else voice,
                "credit": self._watch.credit_chunks,
                "is_streamed": is_streamed,
            }
        )

    def send(self, channel: Channel, header: Header) -> None:
        if self._child is not None and channel.request_id in self._channels:
            self._child.send({**header, "id": channel.request_id})

    def cancel(self, channel: Channel) -> None:
        if not channel.is_done:
            self.send(channel, {"kind": "cancel"})
        channel.fail(CancelledRequestError("the request was cancelled"), at_once=True)
        self._channels.pop(channel.request_id, None)
        self._running.discard(channel.request_id)

    # -- the engine process ------------------------------------------------------------------------------------

    async def _start_child(self) -> EngineProcess:
        started = asyncio.get_running_loop().time()
        child = await EngineProcess.start(self._settings.header(), self._on_frame, self._watch, self._command)
        self._start_s = asyncio.get_running_loop().time() - started
        self._num_failed_starts = 0
        self._sample_rate_hz = child.sample_rate_hz
        self._child, self._sent = child, SentVoices(child)
        self._has_child.set()
        return child

    async def _supervise(self, child: EngineProcess) -> None:
        """Replaces the engine process whenever it is lost."""
        clock = asyncio.get_running_loop().time
        num_quick = 0
        while True:
            started = clock()
            reason = await child.lost
            lost = clock()
            num_quick = 0 if lost - started >= STEADY_SECONDS else num_quick + 1
            self._child = self._sent = None
            self._has_child.clear()
            self.num_restarts += 1
            _log.error("the engine process is replaced: %s", reason)
            self._fail_all(self._restarting_error)
            await child.kill()
            child = await self._restart(num_quick - 1)
            self.last_recovery_s = clock() - lost
            _log.warning("the engine is ready again after %.1f s", self.last_recovery_s)

    async def _restart(self, num_failures: int) -> EngineProcess:
        """A new process, however often it takes; waits longer after each failure in a row."""
        while True:
            if num_failures > 0:
                delay_s = self._watch.backoff_s * 2.0 ** min(num_failures - 1, 16)
                await asyncio.sleep(min(delay_s, self._watch.max_backoff_s))
            try:
                return await self._start_child()
            except VivaceError as error:
                num_failures += 1
                self._num_failed_starts += 1
                _log.error("the engine process does not start: %s", error.message)

    async def _ready_child(self) -> EngineProcess:
        """The engine process; waits a moment for one that is being replaced."""
        if self._child is None and not self._is_draining and self._num_waiting < self._watch.max_waiting:
            self._num_waiting += 1
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._has_child.wait(), self._watch.wait_s)
            finally:
                self._num_waiting -= 1
        if self._is_draining:
            raise OverloadedError("The server is shutting down.", code="draining")
        if self._child is None:
            raise self._restarting_error()
        return self._child

    def _restarting_error(self) -> OverloadedError:
        return OverloadedError(
            "The engine is being restarted. Try again in a moment.",
            code="engine_restarting",
            retry_after_s=math.ceil(self._start_s),
        )

    def _on_frame(self, header: Header, payload: bytes) -> None:
        kind, answer = header["kind"], self._answers.get(header["id"])
        if answer is not None:
            _settle(answer, header, payload)
            return
        channel = self._channels.get(header["id"])
        if channel is None:  # cancelled meanwhile
            return
        if kind == "chunk":
            channel.push(chunk_of(header, payload), result_of(header["result"]))
        elif kind == "end":
            channel.finish(result_of(header["result"]))
            del self._channels[channel.request_id]
        elif kind == "error":
            error = error_of(header)
            channel.fail(error)
            del self._channels[channel.request_id]
            if isinstance(error, SynthesisError) and not self._is_probing:
                self._is_probing = True
                self._keep(self._probe())

    async def _probe(self) -> None:
        """After a failed request: can the engine still speak? A device that has failed never will again."""
        child = self._child
        try:
            if child is not None:
                async with asyncio.timeout(self._watch.probe_s):
                    if not await self._ask(child, {"kind": "probe"}):
                        child.lose("it can no longer speak")
        except TimeoutError:
            if child is not None:
                child.lose("it no longer answers")
        except VivaceError:  # lost meanwhile
            pass
        finally:
            self._is_probing = False

    async def _ask(self, child: EngineProcess, header: Header, payload: bytes = b"") -> Any:
        """Sends a question and waits for its answer."""
        request_id = next(self._ids)
        answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
        child.send({**header, "id": request_id}, payload)
        try:
            return await answer
        except asyncio.CancelledError:
            child.send({"kind": "cancel", "id": request_id})
            raise
        finally:
            del self._answers[request_id]

    # -- bookkeeping -------------------------------------------------------------------------------------------

    async def _find_voice(self, voice: str | Voice | None) -> str | Voice | None:
        """A voice that the engine process has by name, or one to send."""
        if isinstance(voice, str):
            is_builtin = voice in self._voices.builtin_names
            voice = (
                self._voices.get(voice) if is_builtin else await asyncio.to_thread(self._voices.get, voice)
            )
        if voice is None:
            return None
        if not isinstance(voice, Voice):
            raise InvalidRequestError("voice must be a name or a Voice", code="invalid_type", param="voice")
        is_builtin = voice.name in self._voices.builtin_names and self._voices.get(voice.name) is voice
        return voice.name if is_builtin else voice

    async def _watch_consumers(self) -> None:
        """Ends requests whose consumer takes nothing. Counts ticks: while this loop is held up nobody can take."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for channel in [channel for channel in self._channels.values() if channel.chunks]:
                channel.num_idle += 1
                if channel.num_idle * TICK_SECONDS >= self._watch.stall_s:
                    self.send(channel, {"kind": "cancel"})
                    error = CancelledRequestError("The audio was not taken in time.", code="write_stall")
                    channel.fail(error, at_once=True)
                    del self._channels[channel.request_id]

    def _fail_all(self, make_error: Callable[[], VivaceError]) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.fail(make_error())
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(make_error())

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _settle(answer: asyncio.Future[Any], header: Header, payload: bytes) -> None:
    """Gives the engine process's answer to whoever asked."""
    if answer.done():
        return
    if header["kind"] == "error":
        answer.set_exception(error_of(header))
    elif header["kind"] == "made_voice":
        answer.set_result(from_bytes(payload))
    else:
        answer.set_result(header["is_well"])
