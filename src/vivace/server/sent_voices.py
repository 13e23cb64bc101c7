"""Which voices an engine process holds already: each crosses once, and the engine keeps what it computed for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.voice.file import to_bytes

if TYPE_CHECKING:
    from vivace.server.child import EngineProcess
    from vivace.voice import Voice

MAX_SENT = 64


class SentVoices:
    """The voices that one engine process holds, the most recently used last."""

    def __init__(self, child: EngineProcess) -> None:
        self._child = child
        self._keys: dict[Voice, int] = {}
        self._next_key = 1

    def key(self, voice: Voice) -> int:
        """The key of a voice there; sends it first if needed."""
        key = self._keys.pop(voice, 0)
        if not key:
            key, self._next_key = self._next_key, self._next_key + 1
            self._child.send({"kind": "voice", "key": key}, to_bytes(voice))
        self._keys[voice] = key
        if len(self._keys) > MAX_SENT:
            oldest = next(iter(self._keys))
            self._child.send({"kind": "forget", "key": self._keys.pop(oldest)})
        return key
