"""The text of one utterance on its way from a client to the engine."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator

from vivace.server.errors import ServerError

_SURROGATE = re.compile("[\ud800-\udfff]")


class TextQueue(AsyncIterator[str]):
    """Pieces in, pieces out. They may be cut anywhere, also within a character that JSON writes as two.

    Attributes:
        num_bytes: UTF-8 bytes of all the text so far.
        is_finished: no more will come.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_finished = False
        self._pieces: deque[str] = deque()
        self._half = ""
        self._news = asyncio.Event()

    def push(self, piece: str) -> int:
        """Adds a piece; returns its UTF-8 bytes.

        Raises:
            ServerError: ``invalid_utf8``: half of a surrogate pair without the other half.
        """
        piece, self._half = self._half + piece, ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            piece, self._half = piece[:-1], piece[-1]
        if _SURROGATE.search(piece):
            piece = _join_pairs(piece)
        num_bytes = len(piece.encode())
        self.num_bytes += num_bytes
        if piece:
            self._pieces.append(piece)
            self._news.set()
        return num_bytes

    def finish(self) -> None:
        """No more will come. Raises as ``push`` does."""
        self.is_finished = True
        self._news.set()
        if self._half:
            raise _half_pair()

    async def __anext__(self) -> str:
        while not self._pieces:
            if self.is_finished:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._pieces.popleft()


def _join_pairs(text: str) -> str:
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise _half_pair() from None


def _half_pair() -> ServerError:
    return ServerError("The text holds half of a surrogate pair.", code="invalid_utf8", param="text")
