"""Moves the pages of whole requests to host memory and back, beside what the device does. ``swap_plan`` says whose.

Copies go on a CUDA stream of their own, behind what was launched before them, and nobody waits: the scheduler hears
when a move has ended (``arrived``), and until then the pages are held in both places. What comes back is bit-equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.engine.device_stages import DeviceFlowRunner, DeviceStages, on_device
from vivace.engine.lm_device import DeviceLMSession
from vivace.models.flow_paged import PagedStream
from vivace.models.host_pages import HostFrames
from vivace.models.lm_launches import PAGE_TOKENS

if TYPE_CHECKING:
    from vivace.engine.live import LiveRequest


@dataclass(slots=True)
class _Move:
    """A request whose pages are in host memory, or on the way.

    Attributes:
        frames: of its flow's pages. cache: keys and values of its row, ``[layers, 2, pages, ...]``.
        is_under_way: a copy was begun and its end was not noticed; done: when it ends, on a GPU.
    """

    live: LiveRequest
    frames: list[int] = field(default_factory=list)
    cache: Tensor | None = None
    goes_out: bool = True
    is_under_way: bool = True
    done: torch.cuda.Event | None = None


class Swapper:
    """The host's side of one engine's pages. One thread at a time may use it.

    Args:
        device: the stages, whose flow has pages.
        frames: host memory for pages of the flow. The rows of the speech LM's cache lie beside it: they are small.
    """

    def __init__(self, device: DeviceStages, frames: HostFrames) -> None:
        assert isinstance(device.flow, DeviceFlowRunner), "only pages can be moved"
        self._flow, self._lm, self._frames = device.flow.paged, device.lm, frames
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
        num_frames = num_bytes // flow.pool.frame_bytes
        if not num_frames:
            return None
        with on_device(flow.device):
            frames = HostFrames(num_frames, flow.pool.frame_bytes, is_pinned=flow.device.type == "cuda")
            return cls(device, frames)

    @property
    def num_frames(self) -> int:
        """Pages of the flow that there is room for."""
        return self._frames.num_frames

    def leave(self, live: LiveRequest) -> None:
        """Begins to copy a request's pages. Nothing of it may be under way.

        Raises:
            SynthesisError, RuntimeError: host memory is full, or cannot be used; nothing has changed.
        """
        move = _Move(live)
        pages = self._own_pages(live)
        move.frames = self._frames.take_many(len(pages))
        try:
            with self._copying(move):
                for frame, page in zip(move.frames, pages, strict=True):
                    self._frames.store(frame, self._flow.pool.parts(page))
                move.cache = self._save_cache(live)
        except BaseException:
            self._frames.give_back(move.frames)
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
        if isinstance(segment.lm, DeviceLMSession):
            self._lm.rows.return_to(segment.lm.lease)
        with self._copying(move):
            for frame, page in zip(move.frames, self._own_pages(live), strict=True):
                self._frames.load(frame, self._flow.pool.parts(page))
            self._load_cache(live, move.cache)

    def arrived(self) -> list[LiveRequest]:
        """Requests whose pages have all been copied since the last call. Those that left are free from now on."""
        ended = [move for move in self._moves.values() if move.is_under_way and _has_ended(move)]
        for move in ended:
            move.is_under_way, move.done = False, None
            segment = move.live.segment
            row = segment.lm if segment is not None and isinstance(segment.lm, DeviceLMSession) else None
            if not move.goes_out:
                del self._moves[move.live.request_id]
                self._frames.give_back(move.frames)
                if row is not None:
                    self._lm.paged.set_pages(row.lease.slot, row.lease.pages)
                continue
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
        self._frames.give_back(move.frames)
        if move.done is not None and not move.goes_out:  # what is launched into its pages must come behind it
            self._rendering.wait_event(move.done)
            if self._lm.paged.stream is not None:
                self._lm.paged.stream.wait_event(move.done)

    @staticmethod
    def _own_pages(live: LiveRequest) -> list[int]:
        """The request's pages of the flow but those of its voice's prompt, which stay."""
        stream = None if live.segment is None else live.segment.flow
        return stream.pages[live.ticket.prompt_pages :] if isinstance(stream, PagedStream) else []

    def _save_cache(self, live: LiveRequest) -> Tensor | None:
        session = None if live.segment is None else live.segment.lm
        if not isinstance(session, DeviceLMSession):
            return None
        pool, pages = self._lm.paged.pool, session.lease.pages
        rows = pool.index_select(2, self._on_device(pages[: session.num_positions // PAGE_TOKENS + 1]))
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=self._stream is not None)
        return host.copy_(rows, non_blocking=True)

    def _load_cache(self, live: LiveRequest, cache: Tensor | None) -> None:
        session = None if live.segment is None else live.segment.lm
        if cache is None or not isinstance(session, DeviceLMSession):
            return
        pool, pages = self._lm.paged.pool, session.lease.pages
        used = self._on_device(pages[: cache.shape[2]])
        pool.index_copy_(2, used, cache.to(pool.device, non_blocking=True))

    def _on_device(self, pages: list[int]) -> Tensor:
        """Numbers of pages, on the device. In locked memory before: else the host would wait for all earlier copies."""
        numbers = torch.tensor(pages, pin_memory=self._stream is not None)
        return numbers.to(self._lm.paged.pool.device, non_blocking=True)

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


def _has_ended(move: _Move) -> bool:
    return move.done is None or bool(move.done.query())  # type: ignore[no-untyped-call]
