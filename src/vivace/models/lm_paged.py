"""The speech LM for many rows at once: paged key-value cache, row state and sampling on the device, CUDA graphs.

``PagedLM`` holds a pool of pages and a number of row slots. The host says which slots advance and by how many tokens
(``launch``), and later takes what came of it (``collect``); in between the device needs nothing from the host.

Does a row's result depend on the company it keeps? Not on what the other rows hold. With ``deterministic=False`` it
depends on the batch bucket (how many rows advance together, rounded up): matrix products and the attention's division
of the past differ between buckets, so logits differ in their rounding. With ``deterministic=True`` every bucket runs
the kernels that one row runs, row by row the same sums in the same order: bitwise equal, and slow in large batches.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vivace.config import SpeechLMConfig
from vivace.errors import OverloadedError
from vivace.kernels.reference import DrawRows
from vivace.kernels.row_state import RING, RowState
from vivace.layers.attention import rotary_tables
from vivace.models import lm_packed
from vivace.models.capture import capturing
from vivace.models.lm_launches import (
    BUCKETS,
    OUT_TOKENS,
    PAGE_TOKENS,
    Launch,
    RowCommand,
    RowPrompt,
    RowResult,
)
from vivace.models.lm_ops import HEADER, PlainOps
from vivace.models.lm_packed import FUSED_ROWS, PackedWeights
from vivace.models.speech_lm import SpeechLM

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vivace.config import LMConfig
    from vivace.kernels.lm_launch import KernelOps
    from vivace.kernels.lm_persistent import PersistentKernel
    from vivace.models.kinds import AnyLM

STEPS = (8, 4, 2, 1)
"""Steps of one launch; a longer burst is several launches."""
_SINGLE = ("single", 1, OUT_TOKENS)
"""The launch of the resident kernel; how many tokens it makes is told by the command."""
PROMPT_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512)
"""Positions of one prompt launch; a longer prompt is several launches."""
_log = logging.getLogger(__name__)
_DEPTH = 32  # launches that may be under way: each has its own command and result


class PagedLM:
    """See the module's docstring. One thread at a time may use it.

    Args:
        lm: the model, on its device; its weights become views of packed ones.
        draw: ``sampler.sample`` on row state, for the plain way.
        num_pages: pages of ``PAGE_TOKENS`` positions; page 0 is scratch.
        num_slots: rows that may be open at once.
        max_positions: longest row.
        use_kernels: Triton kernels in CUDA graphs; False: plain PyTorch, any device.
        pdl: kernels overlap (compute capability 9.0 and later).
        deterministic: see the module's docstring.

    Attributes:
        stream: where launches go; None on a CPU.
        in_turn: a launch of the resident kernel begins when the work on the caller's CUDA stream is done. It needs the
            whole device: beside others it would wait for room, and hold up everything that comes behind it. Launches
            of several rows and of prompts run beside others.
    """

    prompt_buckets: tuple[int, ...] = PROMPT_BUCKETS
    plain_ops: type[PlainOps] = PlainOps
    fused_rows = FUSED_ROWS
    """Up to so many rows, kernels with their norms and sums inside are faster than the library's products."""

    def __init__(
        self,
        lm: AnyLM,
        draw: DrawRows,
        *,
        num_pages: int,
        num_slots: int,
        max_positions: int,
        use_kernels: bool,
        pdl: bool = False,
        deterministic: bool = False,
    ) -> None:
        config = lm.config
        self.config: LMConfig = config
        self.device = lm.llm_decoder.weight.device
        self.num_slots, self.num_pages = num_slots, num_pages
        self._pack(lm, max_positions)
        self.max_pages = -(-max_positions // PAGE_TOKENS)
        dtype = lm.llm_decoder.weight.dtype
        shape = (config.num_layers, 2, num_pages, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=self.device)
        self.table = torch.zeros(num_slots, self.max_pages, dtype=torch.int32, device=self.device)
        self.state = RowState.empty(num_slots, OUT_TOKENS, self.device)
        self.cos, self.sin = self._rotary(self.max_pages * PAGE_TOKENS)
        self.use_kernels = use_kernels
        self.deterministic = deterministic
        self.ops = self._make_ops(draw, pdl)
        self._single: PersistentKernel | None = None
        self._graphs: dict[tuple[str, int, int], Any] = {}
        self._inputs: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        self._memory: Any = None
        self._count = 0
        self._launches = torch.zeros(1, dtype=torch.int64, device=self.device)
        width, most = 2 + OUT_TOKENS, next(size for size in BUCKETS if size >= num_slots)
        self._results = torch.zeros(_DEPTH, most, width, dtype=torch.int32, device=self.device)
        self._under_way: deque[Launch] = deque()
        on_cuda = self.device.type == "cuda"
        self.in_turn = False
        self.stream = torch.cuda.Stream(self.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._copy_stream = torch.cuda.Stream(self.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._host_table = torch.zeros(num_slots, self.max_pages, dtype=torch.int32, pin_memory=on_cuda)
        longest = max(most * 4, HEADER + RING + self.prompt_buckets[-1])
        self._host_commands = [
            torch.zeros(longest, dtype=torch.int64, pin_memory=on_cuda) for _ in range(_DEPTH)
        ]
        self._host_results = [
            torch.zeros(most, width, dtype=torch.int32, pin_memory=on_cuda) for _ in range(_DEPTH)
        ]

    def _pack(self, lm: AnyLM, max_positions: int) -> None:
        """Makes the weights ready."""
        del max_positions
        assert isinstance(lm, SpeechLM), "other kinds pack their own"
        self.weights = PackedWeights.of(lm)

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 ``[length, head_dim / 2]``."""
        config, half = self.config, self.config.head_dim // 2
        assert isinstance(config, SpeechLMConfig), "other kinds have no angles"
        cos, sin = rotary_tables(0, length, config.head_dim, config.rope_theta, self.device)
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()

    def _make_ops(self, draw: DrawRows, pdl: bool) -> PlainOps | KernelOps:
        config = self.config
        eps = config.rms_norm_eps if isinstance(config, SpeechLMConfig) else 0.0
        if not self.use_kernels:
            return self.plain_ops(
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                eps=eps,
                state=self.state,
                table=self.table,
                cos=self.cos,
                sin=self.sin,
                speech_token_size=config.speech_token_size,
                draw=draw,
            )
        fill_id = -1 if config.fill_id is None else config.fill_id
        return self._kernel_ops()(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=eps,
            state=self.state,
            table=self.table,
            cos=self.cos,
            sin=self.sin,
            ids=(config.speech_token_size, config.num_speech_rows, fill_id, config.eos_id),
            pdl=pdl,
            splits=8 if self.deterministic else None,
        )

    @staticmethod
    def _kernel_ops() -> type[KernelOps]:
        """Launches the kernels; Triton is imported where there is use for it only."""
        from vivace.kernels.lm_launch import KernelOps

        return KernelOps

    def use_single(self, kernel: PersistentKernel | None) -> None:
        """Decodes a row that steps alone with ``kernel``, whose weights are this model's; from now on in turn."""
        self._single, self.in_turn = kernel, kernel is not None
        self._graphs.pop(_SINGLE, None)

    # -- rows ------------------------------------------------------------------------------------------------

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Gives a slot its pages, in the order of its positions; behind all that was launched."""
        assert len(pages) <= self.max_pages, "more pages than a row may have"
        # An earlier copy from here that is still to come brings the newest pages too, so it does no harm.
        row = self._host_table[slot]
        row.zero_()
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        with self._on_stream():
            self.table[slot].copy_(row, non_blocking=True)

    def set_speaker(self, slot: int, embedding: NDArray[np.float32] | None) -> None:
        """Who speaks in a row whose prompt comes next; for models that read it."""

    def next_steps(self, rows: int, left: int) -> int:
        """Steps of the next launch of a burst of which ``left`` tokens are missing."""
        if rows == 1 and self._single is not None:
            return min(left, OUT_TOKENS)
        return next(size for size in STEPS if size <= left)

    def launch(self, commands: Sequence[RowCommand], steps: int) -> Launch:
        """Starts ``steps`` (see ``next_steps``) steps of the rows named; returns at once on CUDA."""
        rows = len(commands)
        if rows == 1 and self._single is not None:
            command = commands[0]
            assert command.count <= OUT_TOKENS, "more tokens than one launch can report"
            numbers = [command.slot, command.count, command.kind, command.min_place]
            return self._run(_SINGLE, numbers, [command.slot])
        bucket = next(size for size in BUCKETS if size >= rows)
        numbers = [number for c in commands for number in (c.slot, c.count, c.kind, c.min_place)]
        numbers += [-1, 0, 0, 0] * (bucket - rows)
        return self._run(("step", bucket, steps), numbers, [c.slot for c in commands])

    def prompt(self, row: RowPrompt) -> Launch:
        """Starts a prompt: its positions, then one token. The result is that of its last launch."""
        ids, past = list(row.ids), row.past
        most = self.prompt_buckets[-1]
        while len(ids) > most:
            self._prompt_part(row, ids[:most], past, draws=False)
            ids, past = ids[most:], past + most
        return self._prompt_part(row, ids, past, draws=True)

    def _prompt_part(self, row: RowPrompt, ids: list[int], past: int, *, draws: bool) -> Launch:
        bucket = next(size for size in self.prompt_buckets if size >= len(ids))
        numbers = row.packet(ids, past, bucket, draws=draws)
        return self._run(("prompt", bucket, 1), numbers, [row.command.slot])

    def collect(self, launch: Launch) -> dict[int, RowResult]:
        """Waits for a launch (all earlier ones have ended then too); results by slot."""
        while not launch.is_collected:
            self._collect_oldest()
        return launch.results

    @torch.inference_mode()
    def forced_scores(self, slot: int, tokens: Sequence[int], bucket: int) -> Tensor:
        """Scores ``[tokens, vocab]`` behind each of ``tokens``, fed to an open row without drawing; for measurements.

        Runs what a launch of ``bucket`` rows runs, the others empty.
        """
        rows = []
        with self._on_stream():
            slots = torch.full((bucket,), -1, dtype=torch.int32, device=self.device)
            slots[0] = slot
            self.state.stop[slot], self.state.remaining[slot] = 0, 1
            for token in tokens:
                self.state.token[slot] = token
                rows.append(self._scores(slots)[0, : self.config.num_speech_rows].clone())
                self.state.length[slot] += 1
            stacked = torch.stack(rows)
        if self.stream is not None:
            self.stream.synchronize()
        return stacked

    # -- graphs ----------------------------------------------------------------------------------------------

    def warm_up(
        self, max_rows: int, steps: Sequence[int] = STEPS, prompts: Sequence[int] | None = None
    ) -> None:
        """Captures the graphs of all buckets up to ``max_rows`` rows and of the prompts."""
        for key in self._launch_kinds(max_rows, steps, prompts):
            self._prepare(key)

    def rehearse(self, max_rows: int) -> None:
        """Runs once, without memory, what ``warm_up`` compiles; see ``vivace.kernels.launches``."""
        for key in self._launch_kinds(max_rows, (1,), None):
            self._prepare(key)
            self._body(key)

    def _launch_kinds(
        self, max_rows: int, steps: Sequence[int], prompts: Sequence[int] | None
    ) -> Iterator[tuple[str, int, int]]:
        if self._single is not None:
            yield _SINGLE
        for bucket in self.prompt_buckets:
            if prompts is None or bucket in prompts:
                yield "prompt", bucket, 1
        for bucket in BUCKETS:
            for count in steps:
                yield "step", bucket, count
            if bucket >= max_rows:
                break

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self.stream)

    def _run(self, key: tuple[str, int, int], numbers: list[int], slots: list[int]) -> Launch:
        self._prepare(key)  # before anything changes: where memory is missing, the caller may try fewer rows
        if len(self._under_way) == _DEPTH:
            self._collect_oldest()
        turn = self._count % _DEPTH
        self._count += 1
        host = self._host_commands[turn]
        host[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        launch = Launch(slots, self._host_results[turn][: len(slots)], self._count)
        if self.in_turn and self.stream is not None and key == _SINGLE:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            launch.begun = self._mark()
            commands, _ = self._inputs[key]
            commands.view(-1).copy_(host[: len(numbers)], non_blocking=True)
            graph = self._graphs[key]
            if graph is None:
                self._run_body(key, launch)
            else:
                graph.replay()
            result = self._results[turn, : len(slots)]
            if self._copy_stream is None:
                launch.host.copy_(result)
            else:
                assert self.stream is not None
                self._copy_stream.wait_stream(self.stream)
                with torch.cuda.stream(self._copy_stream):
                    launch.host.copy_(result, non_blocking=True)
                    launch.done = self._mark()
        self._under_way.append(launch)
        return launch

    def _run_body(self, key: tuple[str, int, int], launch: Launch) -> None:
        """A launch without a graph. When it fails the rows may have moved, so nobody may try it again."""
        started = time.perf_counter()
        try:
            self._body(key)
        except torch.OutOfMemoryError as error:
            self._launches.fill_(self._count)
            raise OverloadedError(
                "the device's memory is full; try again later", retry_after_s=1.0
            ) from error
        launch.spent_ms = (time.perf_counter() - started) * 1e3

    def _mark(self) -> torch.cuda.Event | None:
        """Now, on the current CUDA stream."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _collect_oldest(self) -> None:
        launch = self._under_way.popleft()
        if launch.begun is not None and launch.done is not None:
            launch.done.synchronize()
            launch.spent_ms = launch.begun.elapsed_time(launch.done)
        for slot, row in zip(launch.slots, launch.host.tolist(), strict=True):
            launch.results[slot] = RowResult(row[2 : 2 + row[1]], row[0])
        launch.is_collected = True

    def _prepare(self, key: tuple[str, int, int]) -> None:
        """Inputs and graph of one kind of launch, made at warm-up or at its first use."""
        if key in self._graphs:
            return
        kind, size, _ = key
        width = (HEADER + RING + size,) if kind == "prompt" else (size, 4)
        with self._on_stream():  # before the launch that writes there
            commands = torch.full(width, -1, dtype=torch.int64, device=self.device)
            slots = torch.full((1 if kind == "prompt" else size,), -1, dtype=torch.int32, device=self.device)
        self._inputs[key] = commands, slots
        if self.stream is None or not self._has_graph(kind, size):
            self._graphs[key] = None
            return
        _log.info("speech LM: capturing %s of %d, %d steps", *key)
        # A run over empty rows compiles what is not compiled yet and touches no row.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            self._empty_command(kind, commands)
            turn = self._launches.clone()
            self._body(key)
            self._launches.copy_(turn)
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.device, self._memory, self.stream):
            self._body(key)
        self._memory = self._memory or graph.pool()
        self._graphs[key] = graph

    def _has_graph(self, kind: str, size: int) -> bool:
        """Whether launches of a kind are captured."""
        del kind, size
        return self.use_kernels

    @staticmethod
    def _empty_command(kind: str, commands: Tensor) -> None:
        if kind == "prompt":
            commands.zero_()
            commands[0] = -1
            commands[1] = 1

    @torch.inference_mode()
    def _body(self, key: tuple[str, int, int]) -> None:
        """What a launch runs, from the commands on the device to the results on the device."""
        kind, _, steps = key
        commands, slots = self._inputs[key]
        if kind == "prompt":
            self.ops.prompt_begin(commands, slots)
            self._run_prompt(commands[HEADER + RING :], slots)
        elif kind == "single":
            assert self._single is not None
            self.ops.begin(commands, slots)
            self._single.launch(self.state, slots, self.pool, self.table, steps)
        else:
            self.ops.begin(commands, slots)
            for _ in range(steps):
                self.ops.sample(self._scores(slots), slots)
        self.ops.report(slots, self._launches, self._results)
        self._launches += 1

    def _run_prompt(self, ids: Tensor, slots: Tensor) -> None:
        """New positions of the row in ``slots [1]``, and one token behind the last of them."""
        lm_packed.prompt(self.ops, self.weights, self.pool, ids, slots)

    def _scores(self, slots: Tensor) -> Tensor:
        rows, arguments = slots.shape[0], (self.weights, self.pool, slots)
        if isinstance(self.ops, PlainOps):
            if self.deterministic:  # each row's products alone, as if it had no company
                each = (slots[row : row + 1] for row in range(rows))
                return torch.cat([lm_packed.scores(self.ops, self.weights, self.pool, one) for one in each])
            return lm_packed.scores(self.ops, *arguments)
        if self.deterministic or rows <= self.fused_rows:
            return lm_packed.fused_scores(self.ops, *arguments)
        return lm_packed.scores(self.ops, *arguments)
