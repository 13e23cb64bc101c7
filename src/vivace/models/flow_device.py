"""The flow for many streams on one device: same chunks, same noise and same results as ``FlowModel.step``.

Streams hold pages of one pool; a voice's prompt is computed once and its pages are shared. On a GPU each chunk is one
copy of a small packet and one graph, and nothing waits for the device before a result is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.errors import SynthesisError
from vivace.kernels import dit_reference
from vivace.models.flow import FlowModel
from vivace.models.flow_pages import PageLayout, PagePool
from vivace.models.flow_solver import LOOKAHEAD_BEFORE, Chunk, Solver
from vivace.models.flow_weights import FlowWeights
from vivace.models.flow_whole import embed_tokens, solve_whole

FLAGS = 4096
"""Chunks that may be under way or unchecked before a flag is used again."""


@dataclass(slots=True, eq=False)
class PagedStream:
    """What one stream keeps. Made by ``DeviceFlow.open`` or ``fork``; ``DeviceFlow.close`` gives its pages back.

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


@dataclass(slots=True)
class MelHandle:
    """Frames on their way.

    Attributes:
        mel: float32 ``[mel, n]`` on the device; later work on the same CUDA stream may read it at once.
    """

    mel: Tensor
    _faults: list[Tensor]
    _done: torch.cuda.Event | None

    def check(self) -> Tensor:
        """Waits until the frames are there, and returns them.

        Raises:
            SynthesisError: they hold values that are not finite.
        """
        if self._done is not None:
            self._done.synchronize()
        if any(int(fault[0]) for fault in self._faults):
            raise _not_finite()
        return self.mel


def _not_finite() -> SynthesisError:
    return SynthesisError("the flow gave values that are not finite; use float32 or bfloat16 weights")


class DeviceFlow:
    """The flow of one engine.

    Args:
        model: its weights are copied (those that depend on ``t`` alone are not needed any more).
        device: where to run; None: where the model is.
        ops: the kernels, ``vivace.kernels.dit``; its plain versions by default.
        options: keyword arguments for the kernels by name.
        max_bytes: memory for pages; None: all that there is.
        use_graphs: whole chunks as CUDA graphs.
    """

    def __init__(
        self,
        model: FlowModel,
        device: torch.device | None = None,
        *,
        ops: ModuleType = dit_reference,
        options: dict[str, dict[str, object]] | None = None,
        max_bytes: int | None = None,
        use_graphs: bool = False,
    ) -> None:
        device = model.speaker_projection.weight.device if device is None else device
        self._config = config = model.config
        self._check_length: Callable[[int], None] = model.check_length
        self._speaker = copy.deepcopy(model.speaker_projection).to(device)
        self.weights = FlowWeights.of(model, device)
        self.layout = PageLayout.of(config)
        dtype = self.weights.x.dtype
        self.pool = PagePool(self.layout.page, dtype, device, max_bytes)
        # Blocks of the unconditional branch at step 0; offsets count from the same arena.
        self._start_pool = PagePool(self.layout.block, dtype, device, arena=self.pool.arena)
        self._start_blocks: list[int] = []
        self._scratch = self._start_pool.take()
        velocities = torch.zeros(config.noise_frames, config.dit.mel_dim, device=device)
        self.solver = Solver(
            config,
            self.weights,
            self.pool.arena,
            self._resolve,
            self.layout,
            velocities,
            1,
            ops,
            options,
            use_graphs,
        )
        self._flags = torch.zeros(FLAGS, 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._launches = 0
        self._conditions_set = False

    @property
    def pages_in_use(self) -> int:
        """Pages that open streams hold: 0 when all are closed."""
        return self.pool.pages_in_use

    @torch.no_grad()
    def open(self, embedding: Tensor, prompt_mel: Tensor) -> PagedStream:
        """Begins a stream, as ``FlowModel.new_stream``; its first tokens must be those of the prompt."""
        speaker = self._speaker(F.normalize(embedding.to(self._speaker.weight), dim=-1))
        speaker = F.linear(speaker.to(self.weights.speaker), self.weights.speaker, self.weights.bias)
        return PagedStream(speaker, prompt_mel.to(self.weights.x))

    @torch.no_grad()
    def generate(self, tokens: Sequence[int], prompt_mel: Tensor, embedding: Tensor) -> Tensor:
        """A whole sequence with full attention, as ``FlowModel.generate`` without streaming.

        Raises:
            SynthesisError: the sequence is too long, or values are not finite.
        """
        frames = self._config.token_mel_ratio * len(tokens)
        self._check_length(frames)
        stream = self.open(embedding, prompt_mel)
        mu = embed_tokens(self.weights, self._config, torch.tensor(tokens, device=self.weights.x.device))
        cond = torch.zeros_like(mu)
        cond[: len(prompt_mel)] = stream.prompt_mel
        mel = solve_whole(self.weights, self._config, mu, cond, stream.speaker)
        if not bool(mel.isfinite().all()):
            raise _not_finite()
        return mel[len(prompt_mel) :].T

    def fork(self, stream: PagedStream) -> PagedStream:
        """A stream that goes on from here independently. Finished chunks are shared, not copied."""
        assert not stream.closed, "the stream is closed"
        return PagedStream(
            stream.speaker,
            stream.prompt_mel,
            [self.pool.share(page) for page in stream.pages],
            stream.length,
            list(stream.waiting),
            list(stream.before),
            stream.finished,
        )

    def close(self, stream: PagedStream) -> None:
        """Gives the stream's pages back. Doing so twice is allowed."""
        if stream.closed:
            return
        stream.closed = True
        while stream.pages:
            self.pool.drop(stream.pages.pop())

    def step(self, stream: PagedStream, tokens: Sequence[int], is_last: bool) -> Tensor:
        """As ``FlowModel.step``: mel of the frames that the tokens complete, float32 ``[mel, n]``.

        Raises:
            SynthesisError: the sequence is too long, memory is full (the stream stays as it was), or values are not
                finite.
        """
        return self.launch(stream, tokens, is_last).check()

    @torch.no_grad()
    def launch(self, stream: PagedStream, tokens: Sequence[int], is_last: bool) -> MelHandle:
        """As ``step``, without waiting for the device.

        Raises:
            SynthesisError: the sequence is too long, or memory is full; the stream stays as it was.
        """
        assert not stream.finished, "the last token of this stream already came"
        assert not stream.closed, "the stream is closed"
        ratio, ahead = self._config.token_mel_ratio, self._config.lookahead_tokens
        chunk_tokens = self._config.dit.static_chunk_frames // ratio
        waiting = len(stream.waiting) + len(tokens)
        self._check_length(stream.length + ratio * waiting)
        sizes = []
        while waiting >= chunk_tokens + ahead or (is_last and waiting):
            sizes.append(min(chunk_tokens, waiting))
            waiting -= sizes[-1]
        pages = self._take(len(sizes))
        stream.waiting.extend(tokens)
        prompt_left = max(0, stream.prompt_mel.shape[0] - stream.length)
        mels, faults = [], []
        for size, page in zip(sizes, pages, strict=True):
            stream.pages.append(page)
            mel, fault = self._run_chunk(stream, size)
            mels.append(mel)
            faults.append(fault)
        stream.finished = is_last
        done = None
        if self.weights.x.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        if not mels:
            return MelHandle(self.weights.bias.new_zeros(self._config.output_size, 0), [], None)
        mel = mels[0] if len(mels) == 1 else torch.cat(mels)
        return MelHandle(mel[prompt_left:].T, faults, done)

    def _take(self, count: int) -> list[int]:
        pages: list[int] = []
        try:
            for _ in range(count):
                pages.append(self.pool.take())  # noqa: PERF401 (those taken must be given back)
        except SynthesisError:
            for page in pages:
                self.pool.drop(page)
            raise
        return pages

    def _run_chunk(self, stream: PagedStream, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The next ``num_tokens`` waiting tokens: mel ``[frames, mel]``, and where its flag will be."""
        config = self._config
        chunk, count = config.dit.static_chunk_frames, config.token_mel_ratio * num_tokens
        index = len(stream.pages) - 1
        is_known, block = self._start_block(index, count == chunk)
        solver = self.solver
        solver.send(
            [
                Chunk(
                    ids=self._ids(stream, num_tokens),
                    start=stream.length,
                    num_frames=count,
                    pages=stream.pages,
                    shared=[*self._start_blocks[:index], block],
                )
            ]
        )
        solver.speakers[0].copy_(stream.speaker, non_blocking=True)
        self._set_conditions(stream.prompt_mel[stream.length : stream.length + chunk])
        solver.run(is_known)
        flag = self._flags[self._launches % len(self._flags)]
        self._launches += 1
        flag.copy_(solver.fault, non_blocking=True)
        stream.length += count
        stream.before = (stream.before + stream.waiting[:num_tokens])[-LOOKAHEAD_BEFORE:]
        del stream.waiting[:num_tokens]
        return solver.x[0, :count].clone(), flag

    def _start_block(self, index: int, is_whole: bool) -> tuple[bool, int]:
        """Block of chunk ``index`` for the unconditional branch at step 0, and whether its values are known."""
        if not is_whole:  # its frames see fewer others than those of a whole chunk
            return False, self._scratch
        if index < len(self._start_blocks):
            return True, self._start_blocks[index]
        assert index == len(self._start_blocks)
        self._start_blocks.append(self._start_pool.take())
        return False, self._start_blocks[index]

    def _ids(self, stream: PagedStream, num_tokens: int) -> list[int]:
        config = self._config
        total = config.dit.static_chunk_frames // config.token_mel_ratio + config.lookahead_tokens
        after = [max(0, token) for token in stream.waiting[: num_tokens + config.lookahead_tokens]]
        before = [max(0, token) for token in stream.before]
        return [-1] * (LOOKAHEAD_BEFORE - len(before)) + before + after + [-1] * (total - len(after))

    def _set_conditions(self, mel: Tensor) -> None:
        """The prompt's mel in this chunk; nothing is copied where there is none, as mostly."""
        if self._conditions_set:
            self.solver.conditions.zero_()
        self._conditions_set = bool(len(mel))
        if len(mel):
            self.solver.conditions[0, : len(mel)] = mel

    def _resolve(self, offset: int) -> Tensor:
        """For the plain kernels: what is in a page from ``offset`` on."""
        for pool in (self.pool, self._start_pool):
            found = pool.resolve(offset)
            if found is not None:
                return found
        raise AssertionError(f"no page at {offset}")
