"""Moves the pages of whole requests to host memory and back, beside what the device does. ``swap_plan`` says whose.

Copies go on a CUDA stream of their own, behind what was launched before them, and nobody waits: the scheduler hears
when a move has ended (``arrived``), and until then the pages are held in both places. What comes back is bit-equal.
All host memory is taken and locked when the swapper is opened: no move waits for more of it, and there is no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.engine.device_stages import DeviceFlowRunner, DeviceStages, on_device
from vivace.engine.lm_device import LMDevice
from vivace.engine.lm_device_session import DeviceLMSession
from vivace.models.flow_paged import PagedStream
from vivace.models.host_pages import HostFrames, frames_within
from vivace.models.lm_launches import PAGE_TOKENS

if TYPE_CHECKING:
    from vivace.engine.live import LiveRequest

CACHE_TOKENS = 3
"""Positions of the speech LM's cache that there is room for in host memory, per token that the flow's pages there hold:
speech and its text, and the voice's prompt, of which the flow's pages stay on the device."""


@dataclass(slots=True)
class _Move:
    """A request whose pages are in host memory, or on the way.

    Attributes:
        frames: of its flow's pages. cache: of those of its row.
        is_under_way: a copy was begun and its end was not noticed; done: when it ends, on a GPU.
    """

    live: LiveRequest
    frames: list[int] = field(default_factory=list)
    cache: list[int] = field(default_factory=list)
    goes_out: bool = True
    is_under_way: bool = True
    done: torch.cuda.Event | None = None


class Swapper:
    """The host's side of one engine's pages. One thread at a time may use it.

    Args:
        device: the stages, whose flow has pages.
        frames: host memory for pages of the flow. cache: for those of the speech LM's cache.
    """

    def __init__(self, device: DeviceStages, frames: HostFrames, cache: HostFrames) -> None:
        assert isinstance(device.flow, DeviceFlowRunner), "only pages can be moved"
        self._flow, self._lm = device.flow.paged, device.lm
        self._frames, self._cache = frames, cache
        self._moves: dict[int, _Move] = {}
        where = self._flow.device
        self._stream: torch.cuda.Stream | None = None
        if where.type == "cuda":
            self._stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
            self._rendering = torch.cuda.default_stream(where)

    @classmethod
    def open(cls, device: DeviceStages, num_bytes: int) -> Swapper | None:
        """With so much host memory, which is taken at once; None where that holds no page, or the flow has none."""
        if not isinstance(device.flow, DeviceFlowRunner):
            return None
        flow = device.flow.paged
        is_pinned = flow.device.type == "cuda"
        page_bytes, cache_bytes = flow.pool.frame_bytes, cache_page_bytes(device.lm)
        per_page = -(-CACHE_TOKENS * device.capacity.chunk_tokens // PAGE_TOKENS)
        for_cache = num_bytes // (page_bytes + per_page * cache_bytes) * per_page * cache_bytes
        num_cache = frames_within(for_cache, cache_bytes, is_pinned=is_pinned)
        num_frames = frames_within(num_bytes - for_cache, page_bytes, is_pinned=is_pinned)
        if not num_frames or not num_cache:
            return None
        with on_device(flow.device):
            frames = HostFrames(num_frames, page_bytes, is_pinned=is_pinned)
            return cls(device, frames, HostFrames(num_cache, cache_bytes, is_pinned=is_pinned))

    @property
    def num_frames(self) -> int:
        """Pages of the flow that there is room for."""
        return self._frames.num_frames

    @property
    def num_cache_frames(self) -> int:
        """Pages of the speech LM's cache that there is room for."""
        return self._cache.num_frames

    def leave(self, live: LiveRequest) -> None:
        """Begins to copy a request's pages. Nothing of it may be under way.

        Raises:
            SynthesisError, RuntimeError: host memory is full, or cannot be used; nothing has changed.
        """
        move = _Move(live)
        pages, row = self._own_pages(live), _row_of(live)
        try:
            move.frames = self._frames.take_many(len(pages))
            move.cache = self._cache.take_many(0 if row is None else row.num_cached_pages)
            with self._copying(move):
                for frame, page in zip(move.frames, pages, strict=True):
                    self._frames.store(frame, self._flow.pool.parts(page))
                if row is not None:
                    self._save_cache(row, move.cache)
        except BaseException:
            self._give_back(move)
            raise
        self._moves[live.request_id] = move

    def come_back(self, live: LiveRequest) -> None:
        """Takes pages for a request and begins to copy what was in them. It fits: the scheduler has counted."""
        move = self._moves[live.request_id]
        move.goes_out, move.is_under_way = False, True
        segment = live.segment
        if segment is None:
            return
        if isinstance(segment.flow, PagedStream):
            self._flow.lengthen(segment.flow, len(move.frames))
        row = _row_of(live)
        if row is not None:
            self._lm.rows.return_to(row.lease)
            self._lm.paged.set_pages(row.lease.slot, row.lease.pages)
        with self._copying(move):
            for frame, page in zip(move.frames, self._own_pages(live), strict=True):
                self._frames.load(frame, self._flow.pool.parts(page))
            if row is not None:
                self._load_cache(row, move.cache)

    def arrived(self) -> list[LiveRequest]:
        """Requests whose pages have all been copied since the last call. Those that left are free from now on."""
        ended = [move for move in self._moves.values() if move.is_under_way and _has_ended(move)]
        for move in ended:
            move.is_under_way, move.done = False, None
            if not move.goes_out:
                del self._moves[move.live.request_id]
                self._give_back(move)
                continue
            segment, row = move.live.segment, _row_of(move.live)
            if segment is not None and isinstance(segment.flow, PagedStream):
                self._flow.shorten(segment.flow, move.live.ticket.prompt_pages)
            if row is not None:
                self._lm.rows.lend(row.lease)
        return [move.live for move in ended]

    def forget(self, live: LiveRequest) -> None:
        """The request ends: what it has in host memory is free. Its pages may be given away at once."""
        move = self._moves.pop(live.request_id, None)
        if move is None:
            return
        # The next copy into these frames comes behind the one from or to them: all are on one CUDA stream.
        self._give_back(move)
        if move.done is not None and not move.goes_out:  # what is launched into its pages must come behind it
            self._rendering.wait_event(move.done)
            if self._lm.paged.stream is not None:
                self._lm.paged.stream.wait_event(move.done)

    @staticmethod
    def _own_pages(live: LiveRequest) -> list[int]:
        """The request's pages of the flow but those of its voice's prompt, which stay."""
        stream = None if live.segment is None else live.segment.flow
        return stream.pages[live.ticket.prompt_pages :] if isinstance(stream, PagedStream) else []

    def _give_back(self, move: _Move) -> None:
        self._frames.give_back(move.frames)
        self._cache.give_back(move.cache)

    def _save_cache(self, row: DeviceLMSession, frames: list[int]) -> None:
        pages = self._lm.paged.pool.movedim(2, 0).index_select(0, self._page_numbers(row, len(frames)))
        for frame, page in zip(frames, pages, strict=True):
            self._cache.store(frame, [page])

    def _load_cache(self, row: DeviceLMSession, frames: list[int]) -> None:
        pool = self._lm.paged.pool.movedim(2, 0)
        pages = torch.empty((len(frames), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
        for frame, page in zip(frames, pages, strict=True):
            self._cache.load(frame, [page])
        pool.index_copy_(0, self._page_numbers(row, len(frames)), pages)

    def _page_numbers(self, row: DeviceLMSession, count: int) -> Tensor:
        """Of the row's first pages, on the device, where they are known: nothing is copied for it."""
        return self._lm.paged.table[row.lease.slot, :count].long()

    @contextmanager
    def _copying(self, move: _Move) -> Iterator[None]:
        """Copies behind all that was launched; notes when they end."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(self._rendering)
        if self._lm.paged.stream is not None:
            self._stream.wait_stream(self._lm.paged.stream)
        with torch.cuda.stream(self._stream):
            yield
            move.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            move.done.record()


def cache_page_bytes(lm: LMDevice) -> int:
    """Memory of a page of the speech LM's cache: keys and values of all layers."""
    page = lm.paged.pool[:, :, 0]
    return page.numel() * page.element_size()


def _row_of(live: LiveRequest) -> DeviceLMSession | None:
    """The request's row of the speech LM, if it has one."""
    row = None if live.segment is None else live.segment.lm
    return row if isinstance(row, DeviceLMSession) else None


def _has_ended(move: _Move) -> bool:
    return move.done is None or bool(move.done.query())  # type: ignore[no-untyped-call]
