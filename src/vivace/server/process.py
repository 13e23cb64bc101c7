"""The engine in a process of its own: what takes it down does not take the server down.

    service = await ProcessService.open(EngineSettings("mini"))

The server's process keeps voices, queue and answers. When the engine process dies, hangs or can no longer speak,
running requests end with ``engine_restarting`` at once, it is replaced, and new requests wait a moment for the new
one or are told when to come back. Needs a POSIX system.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, Callable, Sequence
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
from vivace.server.supervisor import Supervisor
from vivace.server.wire import Header, chunk_of, error_of, request_header, result_of
from vivace.voice import Voice
from vivace.voice.file import from_bytes

if TYPE_CHECKING:
    from vivace.server.service import ServiceState
    from vivace.voice import VoiceRegistry


class ProcessService:
    """A ``SpeechService``; made by ``open``."""

    def __init__(
        self,
        settings: EngineSettings,
        voices: VoiceRegistry,
        *,
        watch: Watch,
        model: str = "vivace-mini",
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._model = model
        self._voices = voices
        self._is_draining = False
        self._channels: dict[int, Channel] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._running = RunningStreams()
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_probing = False
        self._is_full = False  # the engine has refused a request since the last one ended
        self._supervisor = Supervisor(
            settings, watch, command, on_frame=self._on_frame, on_lost=self._on_lost
        )

    @classmethod
    async def open(
        cls,
        settings: EngineSettings | None = None,
        *,
        model: str = "vivace-mini",
        watch: Watch | None = None,
        command: Sequence[str] = COMMAND,
        voices: VoiceRegistry | None = None,
    ) -> ProcessService:
        """Opens the voices and starts the engine process; returns once it is ready.

        Args:
            model: name for ``/v1/models``.
            command: what to run in place of our own process (tests plant faulty ones).
            voices: those of the model, where somebody has opened them; None opens them.

        Raises:
            ModelFolderError: the folder cannot be used; the message names the file.
        """
        settings = settings or EngineSettings()
        if watch is None:
            watch = Watch(step_s=SLOW_STEP_SECONDS) if settings.is_slow else Watch()
        if voices is None:
            voices = await asyncio.to_thread(
                open_voices, settings.model, settings.voices_folder, tokenizer=settings.tokenizer
            )
        service = cls(settings, voices, watch=watch, model=model, command=command)
        await service._supervisor.open()
        service._keep(service._watch_consumers())
        return service

    @property
    def state(self) -> ServiceState:
        if self._is_draining:
            return "draining"
        if self._supervisor.child is not None:
            return "ready"
        if self._supervisor.has_failed:
            return "failed"
        return "restarting" if self._supervisor.sample_rate_hz else "starting"

    @property
    def model(self) -> str:
        return self._model

    @property
    def sample_rate_hz(self) -> int:
        return self._supervisor.sample_rate_hz

    @property
    def voices(self) -> VoiceRegistry:
        return self._voices

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_full(self) -> bool:
        """The engine has refused a request since the last one ended."""
        return self._is_full

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        child = self._supervisor.child
        return None if child is None else child.pid

    @property
    def num_restarts(self) -> int:
        """Engine processes that had to be replaced."""
        return self._supervisor.num_restarts

    @property
    def last_recovery_s(self) -> float | None:
        """From the newest failure noticed to the next engine ready; None before the first."""
        return self._supervisor.last_recovery_s

    def stream(self, request: SynthesisRequest, text: AsyncIterable[str] | None = None) -> ProcessStream:
        """Speaks. Errors, also that the service takes no requests, come with the first chunk asked for.

        Args:
            text: pieces of text as they arrive; ``request.text`` itself must be a str.
        """
        return ProcessStream(lambda: self, request, text)

    def transform(
        self, source: bytes, voice: str | Voice | None = None, *, speed: float = 1.0
    ) -> ProcessStream:
        """Voice conversion; errors come with the first chunk asked for."""
        return ProcessStream(lambda: self, conversion(voice, speed), source=source)

    async def make_voice(
        self, prompt_audio: bytes, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        self._check_size(prompt_audio, "prompt_audio")
        child = await self._ready_child()
        header = {"kind": "make_voice", "text": prompt_text, "name": name, "consent": consent}
        voice: Voice = await self._ask(child, header, prompt_audio)
        return voice

    def refuse_new(self) -> None:
        """From now on no request is taken; those that run go on."""
        self._is_draining = True

    async def drain(self, timeout_s: float) -> None:
        self.refuse_new()
        await self._running.wait_until_none(timeout_s)

    async def close(self) -> None:
        self._is_draining = True
        tasks, self._tasks = list(self._tasks), set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._fail_all(lambda: CancelledRequestError("the server was closed"))
        await self._supervisor.close()

    def gauges(self) -> dict[str, float]:
        """Figures for ``/metrics``."""
        figures = self._supervisor.gauges()
        return figures | {"engine_ready": self.state == "ready", "engine_streams": self.num_running}

    # -- what streams ask for (channel.Desk) -----------------------------------------------------------------

    def open_channel(self) -> Channel:
        channel = Channel(next(self._ids))
        self._running.add(channel.request_id)
        return channel

    async def begin(
        self, channel: Channel, request: SynthesisRequest, *, is_streamed: bool, source: bytes | None = None
    ) -> None:
        if (
            self._is_full and not self._is_draining
        ):  # refused here, so that a crowd at the door costs the engine nothing
            raise OverloadedError("As many requests as fit are running; try again in a moment.")
        if is_streamed:
            request = replace(request, text=())
        check_request(request, self._supervisor.settings.limits)
        if not is_streamed and not isinstance(request.text, str):
            raise InvalidTextError(
                "text must be a str; stream pieces apart", code="invalid_type", param="text"
            )
        if source is not None:
            self._check_size(source, "source")
        voice = await self._find_voice(request.voice)
        child = await self._ready_child()
        sent = self._supervisor.sent
        if channel.is_done or sent is None:  # closed by another task meanwhile
            return
        self._channels[channel.request_id] = channel
        child.send(
            {
                "kind": "speak" if source is None else "transform",
                "id": channel.request_id,
                "request": request_header(request),
                "voice": sent.key(voice) if isinstance(voice, Voice) else voice,
                "credit": self._supervisor.watch.credit_chunks,
                "is_streamed": is_streamed,
            },
            source or b"",
        )

    def send(self, channel: Channel, header: Header) -> None:
        child = self._supervisor.child
        if child is not None and channel.request_id in self._channels:
            child.send({**header, "id": channel.request_id})

    def cancel(self, channel: Channel) -> None:
        if not channel.is_done:
            self.send(channel, {"kind": "cancel"})
        channel.fail(CancelledRequestError("the request was cancelled"), at_once=True)
        if channel.request_id in self._channels:
            self._forget(channel)
        self._running.discard(channel.request_id)

    # -- the engine process ------------------------------------------------------------------------------------

    async def _ready_child(self) -> EngineProcess:
        if not self._is_draining:
            child = await self._supervisor.ready_child()
        if self._is_draining:  # perhaps meanwhile
            raise OverloadedError("The server is shutting down.", code="draining")
        return child

    def _on_lost(self) -> None:
        self._fail_all(self._supervisor.restarting_error)

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
            self._forget(channel)
        elif kind == "error":
            error = error_of(header)
            channel.fail(error)
            self._forget(channel)
            self._is_full = isinstance(error, OverloadedError) and bool(self._channels)
            if isinstance(error, SynthesisError) and not self._is_probing:
                self._is_probing = True
                self._keep(self._probe())

    async def _probe(self) -> None:
        """After a failed request: can the engine still speak? A device that has failed never will again."""
        child = self._supervisor.child
        try:
            if child is not None:
                async with asyncio.timeout(self._supervisor.watch.probe_s):
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

    def _check_size(self, recording: bytes, param: str) -> None:
        limit = self._supervisor.settings.limits.prompt_file_bytes
        if len(recording) > limit:
            raise InvalidAudioError(
                f"The audio file is larger than {limit} bytes. Cut it, or send FLAC or MP3.",
                code="payload_too_large",
                param=param,
            )

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
                if channel.num_idle * TICK_SECONDS >= self._supervisor.watch.stall_s:
                    self.send(channel, {"kind": "cancel"})
                    error = CancelledRequestError("The audio was not taken in time.", code="write_stall")
                    channel.fail(error, at_once=True)
                    self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        """It has ended in the engine, or was told to: there may be room for another one."""
        del self._channels[channel.request_id]
        self._is_full = False

    def _fail_all(self, make_error: Callable[[], VivaceError]) -> None:
        channels, self._channels = self._channels, {}
        self._is_full = False
        for channel in channels.values():
            channel.fail(make_error())
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(make_error())

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def conversion(voice: str | Voice | None, speed: float) -> SynthesisRequest:
    """A request whose words come as a recording."""
    return SynthesisRequest("", voice=voice, speed=speed)


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
