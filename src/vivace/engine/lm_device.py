"""The speech LM on a device that runs many rows at once: cache and graphs of one engine.

``LMDevice.open`` gives what ``LMSession`` is on a CPU, with the same rules and draws (``lm_device_session``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vivace.datatypes import SamplingParams
from vivace.engine.interleave import Interleaver
from vivace.engine.kv_cache import RowPool
from vivace.engine.lm_device_session import DeviceLMSession
from vivace.engine.lm_kernels import draw_rows, kernels_run_on, single_kernel
from vivace.engine.lm_runner import PlainSequence
from vivace.engine.sampler import OneRow, SamplingRows
from vivace.errors import OverloadedError, VivaceError
from vivace.kernels.gpu import gpu_of
from vivace.kernels.row_state import RING
from vivace.models.device_kinds import make_paged_lm
from vivace.models.kinds import AnyLM
from vivace.models.lm_launches import PAGE_TOKENS

MOST_TOP_K = 32
"""Largest ``top_k`` that the sampling kernels serve."""

_Stepping = tuple[DeviceLMSession, int]
"""A session, and how many tokens it is still to make."""


class LMDevice:
    """The speech LM of one engine with its cache. One thread at a time may use it.

    Args:
        lm: the model, on its device; its weights become views of packed ones.
        max_rows: sessions that may be open at once.
        cache_tokens: positions that all open sessions together may have.
        max_positions: longest session.
        use_kernels: None decides by the device (see ``kernels_run_on``).
        deterministic: see ``vivace.models.lm_paged``.
        resident: a row that steps alone takes the resident kernel where that fits; it has weights of its own.

    Attributes:
        launches_halved: for want of memory, so far.
    """

    def __init__(
        self,
        lm: AnyLM,
        *,
        max_rows: int,
        cache_tokens: int,
        max_positions: int,
        use_kernels: bool | None = None,
        deterministic: bool = False,
        resident: bool = True,
    ) -> None:
        device = lm.llm_decoder.weight.device
        gpu = gpu_of(device)
        use_kernels = kernels_run_on(device) if use_kernels is None else use_kernels
        num_pages = 1 + -(-cache_tokens // PAGE_TOKENS)
        self.lm = lm
        self.max_positions = max_positions
        self.max_rows = max_rows
        self.rows = RowPool(max_rows, num_pages, PAGE_TOKENS)
        self.paged = make_paged_lm(
            lm,
            draw_rows(lm.config),
            num_pages=num_pages,
            num_slots=max_rows,
            max_positions=max_positions,
            use_kernels=use_kernels,
            pdl=use_kernels and gpu is not None and gpu.has_overlap,
            deterministic=deterministic,
        )
        self.launches_halved = 0
        if resident and use_kernels and not deterministic and gpu is not None:
            kernel = single_kernel(self.paged)
            if kernel is not None:
                self.paged.use_single(kernel)

    @property
    def runs_beside(self) -> bool:
        """Whether launches leave room on the device for the work of other stages, and so may be queued ahead."""
        return not self.paged.in_turn

    def hold_back(self) -> None:
        """Work that comes on the current CUDA stream begins when all launches so far have ended."""
        if self.paged.stream is not None:
            torch.cuda.current_stream(self.paged.device).wait_stream(self.paged.stream)

    def warm_up(self, max_rows: int | None = None) -> None:
        """Compiles kernels and captures graphs for up to ``max_rows`` sessions side by side (all by default)."""
        self.paged.warm_up(max_rows or self.max_rows)

    def rehearse(self) -> None:
        """Runs once, without memory, what ``warm_up`` compiles."""
        self.paged.rehearse(self.max_rows)

    def serves(self, sampling: SamplingParams) -> bool:
        """Whether the row state holds what these settings need; where not, ``LMSession`` does."""
        row = OneRow.of(SamplingRows.from_params([sampling], self.lm.config.sampling))
        few = row.top_k <= MOST_TOP_K or row.temperature <= 0
        return row.win_size <= RING and (few or not self.paged.use_kernels)

    def open(
        self,
        sequence: PlainSequence | Interleaver,
        sampling: SamplingParams,
        *,
        segment: int,
        token_text_ratio: tuple[float, float],
        max_tokens: int,
        max_equal_tokens: int = 50,
        attempt: int = 0,
    ) -> DeviceLMSession:
        """A session; arguments as ``LMSession``. ``close`` it.

        Raises:
            OverloadedError: slots or pages are used up at present.
        """
        return DeviceLMSession(
            self,
            sequence,
            sampling,
            segment=segment,
            token_text_ratio=token_text_ratio,
            max_tokens=max_tokens,
            max_equal_tokens=max_equal_tokens,
            attempt=attempt,
        )

    def launch(self, work: Iterable[tuple[DeviceLMSession, int]]) -> list[tuple[DeviceLMSession, Exception]]:
        """Queues up to so many tokens for each session, all sessions together where they step.

        Sessions that wait for text, or have ended, are left out, and those whose next input is told by tokens that
        are under way. Where memory is missing for so many rows at once, half of them are tried, down to one. Returns
        those that cannot go on, and why; the others are not concerned.
        """
        stepping: list[_Stepping] = []
        refused: list[tuple[DeviceLMSession, Exception]] = []
        for session, count in work:
            try:
                left = session.start(count)
            except (VivaceError, torch.OutOfMemoryError) as error:
                refused.append((session, error))
            else:
                if left > 0:
                    stepping.append((session, left))
        groups = [stepping] if stepping else []
        while groups:
            group = groups.pop()
            try:
                rest = self._step(group)
            except torch.OutOfMemoryError as error:  # nothing was started
                self.launches_halved += 1
                half = len(group) // 2
                if half:
                    groups += [group[half:], group[:half]]
                else:
                    refused.append((group[0][0], error))
            except OverloadedError as error:
                refused += [(session, error) for session, _ in group]
            else:
                groups += [rest] if rest else []
        return refused

    def _step(self, group: list[_Stepping]) -> list[_Stepping]:
        """One launch of all; those who have tokens left to make."""
        steps = self.paged.next_steps(len(group), max(left for _, left in group))
        launch = self.paged.launch([session.command(left, steps) for session, left in group], steps)
        for session, left in group:
            session.follow(launch, min(left, steps))
        return [(session, left - steps) for session, left in group if left > steps]
