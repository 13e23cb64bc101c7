"""What the flows of a device share: streams on pages, launches of several streams, frames on their way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vivace.errors import SynthesisError
from vivace.models.launch_sizes import powers_of_two

FLAGS = 4096
"""Chunks that may be under way or unchecked before a flag is used again."""

MOST_CHUNKS = 256
"""Of one launch."""


@dataclass(slots=True, eq=False)
class PagedStream:
    """What one stream keeps. Made by the flow's ``open`` or ``fork``; ``close`` gives its pages back.

    Attributes:
        speaker: what the speaker adds to the input projection, float32 ``[dim]``.
        prompt_mel: ``[frames, mel]`` on the device.
        pages: page of each finished chunk.
        length: frames finished so far, those of the prompt included.
        waiting, before, finished: as in ``FlowStream``.
    """

    speaker: Tensor
    prompt_mel: Tensor
    pages: list[int] = field(default_factory=list)
    length: int = 0
    waiting: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    finished: bool = False
    closed: bool = False

    @property
    def num_frames(self) -> int:
        """Frames finished so far, those of the prompt included."""
        return self.length


@dataclass(slots=True)
class MelHandle:
    """Frames on their way.

    Attributes:
        mel: float32 ``[mel, n]`` on the device, for work on the flow's CUDA stream.
        error: why there are none; then the stream is as it was before.
    """

    mel: Tensor
    error: Exception | None = None
    faults: list[Tensor] = field(default_factory=list)
    done: torch.cuda.Event | None = None

    def check(self) -> Tensor:
        """Makes the host wait for the frames, and returns them.

        Raises:
            SynthesisError: they hold values that are not finite.
            Exception: ``error``.
        """
        if self.error is not None:
            raise self.error
        if self.done is not None:
            self.done.synchronize()
        if any(bool(fault) for fault in self.faults):
            raise not_finite()
        return self.mel


class _Before(NamedTuple):
    """What a launch changes of a stream."""

    num_pages: int
    length: int
    waiting: list[int]
    before: list[int]

    @classmethod
    def of(cls, stream: PagedStream) -> _Before:
        return cls(len(stream.pages), stream.length, list(stream.waiting), list(stream.before))

    def restore(self, stream: PagedStream) -> None:
        """All but the pages."""
        stream.length, stream.finished = self.length, False
        stream.waiting, stream.before = list(self.waiting), list(self.before)


@dataclass(slots=True)
class Work:
    """One stream's part in a launch.

    Attributes:
        sizes: tokens of each chunk that is to be computed.
        pages: a page for each of them.
        skip: frames at the beginning that belong to the prompt.
        before: the stream as it was, should anything fail.
        mels, faults: what was computed; ``[frames, mel]`` each, and where its flag will be.
        error: why it could not be computed.
    """

    stream: PagedStream
    sizes: list[int]
    pages: list[int]
    skip: int
    before: _Before
    error: Exception | None = None
    mels: list[Tensor] = field(default_factory=list)
    faults: list[Tensor] = field(default_factory=list)


def not_finite() -> SynthesisError:
    """What a request gets whose mel holds NaN or infinities."""
    return SynthesisError("the flow gave values that are not finite; use float32 or bfloat16 weights")


Item = tuple[PagedStream, Sequence[int], bool]
"""A stream, its next tokens, and whether they are the last."""


class Pages(Protocol):
    """A pool of pages with counted references."""

    @property
    def pages_in_use(self) -> int:
        """Pages that someone holds."""
        ...

    def share(self, page: int) -> int:
        """One more reference to ``page``, which is returned."""
        ...

    def drop(self, page: int) -> None:
        """One reference less; the last one frees the page."""
        ...


class PagedFlow(ABC):
    """Streams that hold pages of one pool. All launches must come from one CUDA stream.

    Args:
        device: where the flow runs. pool: of its pages.
        output_size: channels of the mel.
        max_streams: streams of one launch.
        before_tokens: tokens before a chunk that its encoder looks back on.
        check_length: raises ``SynthesisError`` for a sequence of too many frames.

    Attributes:
        max_streams: as above. launches_halved: for want of memory, so far.
    """

    most_in_wave = 1
    """Chunks of one stream that share a launch, at most."""

    wave_ms = 800
    """Audio that a stream must have handed over for each chunk of a launch that holds several of its own."""

    gains_by_waiting = False
    """Whether it pays to wait for more chunks of a stream even where its tokens are made beside the flow's work."""

    def __init__(
        self,
        device: torch.device,
        pool: Pages,
        output_size: int,
        max_streams: int,
        before_tokens: int,
        check_length: Callable[[int], None],
    ) -> None:
        self.device = device
        self._pages, self._output_size = pool, output_size
        assert max_streams <= MOST_CHUNKS
        self.max_streams, self._before_tokens = max_streams, before_tokens
        self._check_length = check_length
        self._flags = torch.zeros(FLAGS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._launches = 0
        self.launches_halved = 0

    @property
    def pages_in_use(self) -> int:
        """Pages that open streams hold: 0 when all are closed."""
        return self._pages.pages_in_use

    def fork(self, stream: PagedStream) -> PagedStream:
        """A stream that goes on from here independently. Finished chunks are shared, not copied."""
        assert not stream.closed, "the stream is closed"
        return PagedStream(
            stream.speaker,
            stream.prompt_mel,
            [self._pages.share(page) for page in stream.pages],
            stream.length,
            list(stream.waiting),
            list(stream.before),
            stream.finished,
        )

    def close(self, stream: PagedStream) -> None:
        """Gives the stream's pages back. Doing so twice is allowed."""
        stream.closed = True
        while stream.pages:
            self._pages.drop(stream.pages.pop())

    def shorten(self, stream: PagedStream, count: int) -> None:
        """Gives back all pages but the first ``count``, whose contents somebody keeps until ``lengthen``."""
        while len(stream.pages) > count:
            self._pages.drop(stream.pages.pop())

    def lengthen(self, stream: PagedStream, count: int) -> None:
        """Takes ``count`` more pages; what is in them has no meaning.

        Raises:
            SynthesisError: there are none.
        """
        assert not stream.closed, "the stream is closed"
        stream.pages += self._take(stream, count)

    def step(self, stream: PagedStream, tokens: Sequence[int], is_last: bool) -> Tensor:
        """As the plain flow's ``step``: mel of the frames that the tokens complete, float32 ``[mel, n]``.

        Raises:
            SynthesisError: the sequence is too long, memory is full (the stream stays as it was), or values are not
                finite.
        """
        return self.launch(stream, tokens, is_last).check()

    def launch(self, stream: PagedStream, tokens: Sequence[int], is_last: bool) -> MelHandle:
        """As ``step``, without waiting for the device.

        Raises:
            SynthesisError: the sequence is too long, or memory is full; the stream stays as it was.
        """
        handle = self.launch_batch([(stream, tokens, is_last)])[0]
        if handle.error is not None:
            raise handle.error
        return handle

    @torch.no_grad()
    def launch_batch(self, items: Sequence[Item]) -> list[MelHandle]:
        """``launch`` for several streams, whose chunks are computed together. Errors lie in the handles.

        Where memory is missing for so many streams at once, half of them are tried, down to one.
        """
        works: list[Work | SynthesisError] = []
        for stream, tokens, is_last in items:
            try:
                works.append(self._begin(stream, tokens, is_last))
            except SynthesisError as error:
                works.append(error)
        active = [work for work in works if isinstance(work, Work)]
        try:
            while active := [work for work in active if work.sizes and work.error is None]:
                # Whoever has most chunks left goes first, so that the last launches are not for few streams.
                active.sort(key=lambda work: -len(work.sizes))
                self._run_or_halve(self._choose(active))
        except BaseException:  # no page is lost; what the streams hold goes back when they are closed
            for work in works:
                if isinstance(work, Work):
                    self._undo(work)
            raise
        done = self._mark()
        return [self._handle(work, done) for work in works]

    def _mark(self) -> torch.cuda.Event | None:
        """The end of what is queued so far; None on a CPU, where it is done."""
        if self.device.type != "cuda":
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    def _run_or_halve(self, works: list[Work]) -> None:
        """``_run``, in smaller parts where memory is missing; a stream of which one chunk does not fit has an error."""
        known, held = self._shared_chunks(), [len(work.stream.pages) for work in works]
        try:
            self._run(works)
            return
        except BaseException as error:
            self._forget_shared(known)
            for work, count in zip(works, held, strict=True):
                while len(work.stream.pages) > count:
                    work.pages.insert(0, work.stream.pages.pop())
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            fault = error.with_traceback(None)  # which would keep what the launch has taken so far
        self.launches_halved += 1
        if len(works) == 1:
            works[0].error = fault
            self._undo(works[0])
            return
        half = len(works) // 2
        self._run_or_halve(works[:half])
        left = [
            work for work in works[half:] if work.error is None
        ]  # a stream in both may have failed already
        if left:
            self._run_or_halve(left)

    def _undo(self, work: Work) -> None:
        """The stream as it was before the launch, and its new pages back in the pool."""
        stream = work.stream
        while len(stream.pages) > work.before.num_pages:
            self._pages.drop(stream.pages.pop())
        while work.pages:
            self._pages.drop(work.pages.pop())
        work.before.restore(stream)

    @abstractmethod
    def _chunk_sizes(self) -> tuple[int, int, int]:
        """Tokens of a chunk, tokens of look-ahead, frames of a token."""

    @abstractmethod
    def _take(self, stream: PagedStream, count: int) -> list[int]:
        """Pages for the stream's next chunks. Raises SynthesisError where there are none."""

    @abstractmethod
    def _run(self, works: list[Work]) -> None:
        """Launches the next chunk of each, and notes it (``_note``); as many of one stream as it is there times."""

    def _choose(self, active: list[Work]) -> list[Work]:
        """Who shares the next launch: a stream is there once for each of its chunks in it, one behind the other.

        Args:
            active: those who have chunks left, most chunks first.
        """
        return active[: self._launch_sizes(len(active))[0]]

    def _launch_sizes(self, count: int) -> list[int]:
        """Launches that serve ``count`` chunks; the last may be larger than what is left for it."""
        return powers_of_two(count, self.max_streams)

    def _shared_chunks(self) -> int:
        """How much is known of what all streams share; ``_forget_shared`` goes back to it."""
        return 0

    def _forget_shared(self, known: int) -> None:
        """After a launch that failed."""
        del known

    def _begin(self, stream: PagedStream, tokens: Sequence[int], is_last: bool) -> Work:
        """Takes tokens and pages; everything that can be refused is refused here."""
        assert not stream.finished, "the last token of this stream already came"
        assert not stream.closed, "the stream is closed"
        chunk, ahead, ratio = self._chunk_sizes()
        waiting = len(stream.waiting) + len(tokens)
        self._check_length(stream.length + ratio * waiting)
        sizes = []
        while waiting >= chunk + ahead or (is_last and waiting):
            sizes.append(min(chunk, waiting))
            waiting -= sizes[-1]
        skip = max(0, len(stream.prompt_mel) - stream.length)
        work = Work(stream, sizes, self._take(stream, len(sizes)), skip, _Before.of(stream))
        stream.waiting.extend(tokens)
        stream.finished = is_last
        return work

    def _note(self, works: list[Work], frames: Sequence[int], mels: Tensor, faults: Tensor) -> None:
        """What a launch made: ``mels [chunks, frames, mel]``, of which the chunks' own ``frames`` count."""
        flags = self._send_flags(faults)
        # Views of all rows at once: one by one each takes as long as the rest of this.
        rows, length = zip(mels.unbind(), flags.unbind(), strict=True), mels.shape[1]
        for work, count, (mel, flag) in zip(works, frames, rows, strict=True):
            stream, size = work.stream, work.sizes.pop(0)
            stream.length += count
            stream.before = (stream.before + stream.waiting[:size])[-self._before_tokens :]
            del stream.waiting[:size]
            work.mels.append(mel if count == length else mel[:count])
            work.faults.append(flag)

    def _send_flags(self, faults: Tensor) -> Tensor:
        """Where the host finds the flags of a launch's rows once it is done, ``[rows]``."""
        first = self._launches % (FLAGS - MOST_CHUNKS)
        self._launches += len(faults)
        flags = self._flags[first : first + len(faults)]
        return flags.copy_(faults, non_blocking=True)

    def _no_frames(self, error: Exception | None) -> MelHandle:
        return MelHandle(torch.zeros(self._output_size, 0, device=self.device), error)

    def _handle(self, work: Work | SynthesisError, done: torch.cuda.Event | None) -> MelHandle:
        error = work.error if isinstance(work, Work) else work
        if isinstance(work, Work) and work.mels and error is None:
            mel = work.mels[0] if len(work.mels) == 1 else torch.cat(work.mels)
            return MelHandle(mel[work.skip :].T, None, work.faults, done)
        return self._no_frames(error)
