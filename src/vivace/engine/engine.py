"""The engine: one loop (plan, run, emit) over all requests, and the calls that users make.

    with Engine.open("mini") as engine:
        for chunk in engine.stream(SynthesisRequest("Hello!")):
            play(chunk.samples)

Requests may run side by side. On a CPU each call to ``step`` does one unit of work for the request whose turn it is; on
a device a step serves all of them. All calls are safe from several threads, and none waits for another request but
``submit``, which waits for the step that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from vivace.checkpoint import model_folder
from vivace.checkpoint.loading import default_dtype, resolve_device
from vivace.config import Limits
from vivace.datatypes import AudioChunk, SynthesisResult
from vivace.engine.compile_ahead import compile_ahead
from vivace.engine.device_stages import QUEUE_PER_ROW, DeviceStages
from vivace.engine.gauges import engine_gauges
from vivace.engine.intake import Intake
from vivace.engine.loading import Assets, load_assets
from vivace.engine.loop import EngineLoop
from vivace.engine.request import SynthesisRequest
from vivace.engine.results import SpeechStream
from vivace.engine.scheduler import Scheduler
from vivace.engine.silence import is_audio_near_silent
from vivace.engine.stages import Stages
from vivace.errors import InvalidRequestError, SynthesisError
from vivace.models.lm_launches import BUCKETS
from vivace.text import library

if TYPE_CHECKING:
    from vivace.audio.decode import AudioSource
    from vivace.checkpoint import LMVariant
    from vivace.datatypes import Samples
    from vivace.engine.live import LiveRequest
    from vivace.engine.trace import Trace
    from vivace.models.source import NoiseSource
    from vivace.voice import Voice, VoiceRegistry

MOST_STREAMS = BUCKETS[-1]
"""Rows of the largest launch of the speech LM."""

MOST_HOST_GB = 4096

FEW_STREAMS = 8
"""Streams of a device where nobody says how many: quick to warm up."""


class Engine:
    """Speaks. Made by ``Engine.open``; ``close`` (or ``with``) ends everything that runs.

    Args:
        assets: model, tokenizer, voices.
        scheduler: turn order and queue length.
        vocoder_noise: replaces the vocoder's own noise, for comparison with recorded audio.
        max_streams: requests that run at once; twice as many may wait. None: ``FEW_STREAMS`` on a CUDA device;
            elsewhere as many as the scheduler takes.
        deterministic: on a CUDA device, the same samples in any company, at a price (``docs/architecture.md``).
        host_memory_gb: see ``open``.
    """

    def __init__(
        self,
        assets: Assets,
        *,
        scheduler: Scheduler | None = None,
        vocoder_noise: NoiseSource | None = None,
        max_streams: int | None = None,
        deterministic: bool = False,
        host_memory_gb: float = 0.0,
    ) -> None:
        self._assets = assets
        self._config = assets.model.config
        self._scheduler = Scheduler() if scheduler is None else scheduler  # an empty one is false
        if max_streams is not None and not 1 <= max_streams <= MOST_STREAMS:
            raise InvalidRequestError(
                f"max_streams must lie between 1 and {MOST_STREAMS}", param="max_streams"
            )
        device = None
        if vocoder_noise is None:
            streams = max_streams or FEW_STREAMS
            device = DeviceStages.open(assets.model, assets.limits, streams, deterministic=deterministic)
        self._stages = Stages(assets.model, assets.limits, vocoder_noise, device, _gb_bytes(host_memory_gb))
        capacity = self._stages.capacity
        if device is None and max_streams is not None:
            capacity = replace(capacity, running=max_streams, queue=QUEUE_PER_ROW * max_streams)
        self._scheduler.use(capacity)
        self._loop = EngineLoop(self._stages, self._scheduler)
        self._intake = Intake(assets, self._stages, self._loop)

    @classmethod
    def open(
        cls,
        model: str | Path = "mini",
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        lm_variant: LMVariant = "base",
        voices_folder: Path | None = None,
        limits: Limits | None = None,
        tokenizer: Path | None = None,
        warm_up: bool = True,
        max_streams: int | None = None,
        deterministic: bool = False,
        host_memory_gb: float = 0.0,
    ) -> Engine:
        """Loads a model folder (official layout or our own format) and its voices.

        Args:
            model: folder, or "mini" for the embedded model.
            dtype: of speech LM and flow; None takes ``default_dtype``: float32 on a CPU, bfloat16 on a GPU, or float16
                before compute capability 8.0. The vocoder keeps its own: float32, with products of halves on a GPU
                (``DeviceVocoder``). int8: CosyVoice 3 on a CPU.
            lm_variant: "rl" takes ``llm.rl.pt`` of an official folder in place of ``llm.pt``.
            voices_folder: where stored voices live; None takes the user's folder.
            tokenizer: where to take the text tokenizer from instead of the model folder: a folder with Qwen2's
                files, or the rank file that CosyVoice-300M needs and does not bring.
            warm_up: run a few tokens through every stage and load the library that reads numbers, so that the first
                request is as fast as the second.
            max_streams: requests that run at once, 1 to 256; twice as many may wait. On a CUDA device more take longer
                to warm up; None takes ``FEW_STREAMS`` there, and 64 without a queue on a CPU.
            deterministic: on a CUDA device, the same request gives the same samples in any company. Slow in company
                (``docs/architecture.md`` has the price); on a CPU it is always so.
            host_memory_gb: of the machine's own memory, locked for pages of streams that a full CUDA device need not
                hold at the moment, so that others may start.

        Raises:
            ModelFolderError: the folder cannot be used; the message names the file.
            InvalidRequestError: ``max_streams`` or ``host_memory_gb`` is out of range.
        """
        streams = max_streams or FEW_STREAMS
        if dtype is None:
            dtype = default_dtype(resolve_device(device))
        with compile_ahead(model_folder(model), device, dtype, streams, deterministic=deterministic):
            assets = load_assets(
                model,
                device=device,
                dtype=dtype,
                lm_variant=lm_variant,
                voices_folder=voices_folder,
                limits=limits,
                tokenizer=tokenizer,
            )
        engine = cls(
            assets, max_streams=max_streams, deterministic=deterministic, host_memory_gb=host_memory_gb
        )
        if warm_up:
            library.warm_up()
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
        return len(self._loop.live)

    @property
    def streams_at_once(self) -> int:
        """Requests that a step serves together: 1 on a CPU, where more of them end no sooner than one by one."""
        return self._scheduler.capacity.running if self._stages.is_paged else 1

    def gauges(self) -> dict[str, float]:
        """Figures for a server's metrics, by their names there."""
        device = self._assets.model.device
        return engine_gauges(self._scheduler, self._stages, self._loop.last_plan, device)

    def use_device(self, stages: DeviceStages, host_bytes: int = 0) -> None:
        """From now on the engine runs with ``stages``, and host memory for pages. No request may be live."""
        self._stages.use(stages, host_bytes)
        self._scheduler.use(self._stages.capacity)

    def end_stalled_after(self, seconds: float) -> None:
        """Requests whose consumer takes nothing of a full queue for so long are ended."""
        self._loop.turn.ask(lambda: self._scheduler.end_stalled_after(int(seconds * 1000)))

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
        self._loop.check_open()
        return self._assets.make_voice(prompt_audio, prompt_text, name=name, consent=consent)

    def is_near_silent(self, samples: Samples, voice: str | Voice | None = None) -> bool:
        """Whether audio of ``voice`` never rises above the level at which a segment counts as not spoken."""
        return is_audio_near_silent(samples, self._assets.find_voice(voice), self._config)

    def close(self) -> None:
        """Cancels everything and refuses new requests."""
        self._loop.close()
        self._assets.close()

    def warm_up(self, voice: str | Voice | None = None) -> None:
        """Runs a voice's prompt and a few tokens through every stage; ``open`` does it for the default voice.

        The prompts of recently used voices are kept, so the first request with a voice that is warm begins as fast
        as the second.
        """
        self._loop.turn.ask(self._stages.warm_up)
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

    # -- submit, step, take: what streams and servers call ----------------------------------------------------

    def submit(self, request: SynthesisRequest, *, is_pushed: bool = False) -> LiveRequest:
        """Checks a request and puts it in the queue; ``step`` works on it.

        Args:
            is_pushed: the text comes through ``push_text`` and ``finish_text``, not from ``request.text``.
        """
        return self._intake.submit(request, is_pushed=is_pushed)

    def submit_transform(
        self, source: AudioSource, voice: str | Voice | None, *, speed: float = 1.0, stream: bool = True
    ) -> LiveRequest:
        """As ``submit``, for voice conversion."""
        return self._intake.submit_transform(source, voice, speed=speed, stream=stream)

    def submit_tokens(
        self, tokens: list[int], voice: Voice, *, speed: float = 1.0, stream: bool = True
    ) -> LiveRequest:
        """As ``submit``, for speech tokens in a voice: flow and vocoder alone."""
        return self._intake.submit_tokens(tokens, voice, speed=speed, stream=stream)

    def push_text(self, live: LiveRequest, piece: str) -> None:
        """More text for a request whose text is streamed in; one thread at a time."""
        self._intake.push_text(live, piece)

    def finish_text(self, live: LiveRequest) -> None:
        """No more text will come."""
        self._intake.finish_text(live)

    def pull_all_text(self, live: LiveRequest) -> None:
        """Takes the caller's iterator to its end, as fast as it gives; for a thread of its own."""
        self._intake.pull_all_text(live)

    def step(self) -> bool:
        """Plan, run, emit. False when nothing could be done, or another thread is at it."""
        return self._loop.step()

    def run_forever(self) -> None:
        """Steps until ``close``; sleeps while there is nothing to do. A fault of the loop itself closes the engine."""
        try:
            self._loop.run_forever()
        finally:
            self.close()

    def take(self, live: LiveRequest) -> AudioChunk | None:
        """The request's next finished chunk, if there is one. Raises its error once all chunks are taken."""
        return self._loop.take(live)

    def next_chunk(self, live: LiveRequest) -> AudioChunk | None:
        """Steps until the request has a chunk; None at its end. Pulls streamed text when the request waits for it."""
        return self._loop.next_chunk(live, self._intake.pull_text)

    def cancel(self, live: LiveRequest) -> None:
        """Ends a request and frees its state: now, or at the end of the step that runs in another thread.

        Never waits. A request that has ended already is left as it is.
        """
        self._loop.cancel(live)

    def abort(self, live: LiveRequest, error: Exception) -> None:
        """Ends a request with ``error``, which its consumer gets as it is."""
        self._loop.abort(live, error)

    def listen(self, live: LiveRequest, listener: Callable[[], object]) -> None:
        """Calls ``listener`` (from the thread that steps) whenever the request has news. It must not raise."""
        self._loop.listen(live, listener)

    def ask_for_sign(self, answer: Callable[[], object]) -> None:
        """Calls ``answer`` (in any thread) once the step that runs has ended; at once if none does. A watchdog asks."""
        self._loop.turn.tell(answer)


def _gb_bytes(host_memory_gb: float) -> int:
    if not 0 <= host_memory_gb <= MOST_HOST_GB:
        raise InvalidRequestError(
            f"host_memory_gb must lie between 0 and {MOST_HOST_GB}", param="host_memory_gb"
        )
    return int(host_memory_gb * 1e9)
