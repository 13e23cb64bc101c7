"""What every front end of the server speaks to: one engine, wherever it runs.

Front ends (HTTP, WebSocket, Wyoming) know this protocol alone. Whether the engine runs in a thread or in a
process of its own makes no difference to them.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    from vivace.datatypes import AudioChunk, SynthesisResult
    from vivace.engine.request import SynthesisRequest
    from vivace.voice import Voice, VoiceRegistry

ServiceState = Literal["starting", "ready", "restarting", "draining", "failed"]


class ServiceStream(Protocol):
    """The audio of one request: an asynchronous iterator of chunks. Closing or dropping it cancels the request."""

    def __aiter__(self) -> ServiceStream: ...

    async def __anext__(self) -> AudioChunk: ...

    async def __aenter__(self) -> ServiceStream: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def aclose(self) -> None: ...

    def summary(self) -> SynthesisResult: ...


class SpeechService(Protocol):
    """An engine as the front ends see it. All methods are called from one event loop.

    Attributes:
        state: only ``ready`` takes new requests; otherwise ``stream`` raises ``OverloadedError``
            with the code ``draining`` or ``engine_restarting``.
        model: name for ``/v1/models``.
        voices: built-in and stored voices; adding and removing takes effect for the next request.
        num_running: requests in work.
    """

    @property
    def state(self) -> ServiceState: ...

    @property
    def model(self) -> str: ...

    @property
    def sample_rate_hz(self) -> int: ...

    @property
    def voices(self) -> VoiceRegistry: ...

    @property
    def num_running(self) -> int: ...

    def stream(self, request: SynthesisRequest, text: AsyncIterable[str] | None = None) -> ServiceStream:
        """Speaks. Errors come with the first chunk asked for.

        Args:
            text: pieces of text as they arrive; they replace ``request.text``.
        """
        ...

    def transform(
        self, source: bytes, voice: str | Voice | None = None, *, speed: float = 1.0
    ) -> ServiceStream:
        """Voice conversion: the words of an uploaded recording in ``voice``. Errors come with the first chunk."""
        ...

    async def make_voice(
        self, prompt_audio: bytes, prompt_text: str = "", *, name: str = "clone", consent: bool = False
    ) -> Voice:
        """A voice from an uploaded recording; ``voices.add`` stores it."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits until the running ones have ended, ``timeout_s`` at most."""
        ...

    async def close(self) -> None:
        """Ends everything at once."""
        ...
