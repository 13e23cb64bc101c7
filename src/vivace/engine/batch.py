"""Runs what the scheduler planned for many requests together, on paged stages.

A step queues one launch of the flow for all chunks, one of the vocoder for what comes of them, and one of the speech
LM for all rows (``decoder``); only then does it wait, first for the audio. The tokens are taken at the beginning of the
next step. So the device has work from the first launch of a step to the last. What fails, fails alone: each row carries
its own flag of values that are not finite, and where memory is missing for many rows, fewer are tried.

The last chunk of a voice's prompt may look ahead on new tokens. The flow gets it as soon as these are known, while the
speech LM goes on to the first border: the first chunk then finds it done.

The samples of a request do not depend on how many chunks a step renders of it: its frames go to the vocoder chunk by
chunk, cut at the absolute borders. Only where a step renders one stream, and streams take turns, do they go there as
they come: long pieces cost less, and may round differently.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vivace.engine.decoder import BatchDecoder
from vivace.engine.device_stages import DeviceStages, DeviceVocoderSession
from vivace.engine.work import Outcome, Rendering, attempt
from vivace.models.piece_device import PieceHandle

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.datatypes import AudioChunk, Samples
    from vivace.engine.live import LiveRequest, Segment
    from vivace.engine.scheduler import StepPlan
    from vivace.engine.stages import Stages
    from vivace.models.flow_paged import MelHandle


_Early = tuple["Segment", int]
"""A segment, and how many of its tokens the flow gets before its first chunk."""


@dataclass(slots=True)
class _Part:
    """One request's part in the rendering of a step.

    Attributes:
        handle: its frames on their way, where the flow has pages.
        outcome: known before the end: it failed, or its segment is decoded again.
        samples: of a vocoder that has no queue.
    """

    work: Rendering
    mel: Tensor | None = None
    handle: MelHandle | None = None
    outcome: Outcome | None = None
    samples: list[Samples] = field(default_factory=list)

    @property
    def live(self) -> LiveRequest:
        return self.work.live

    def take(self, handle: MelHandle) -> None:
        """Its frames, or why there are none."""
        self.handle, self.mel = handle, handle.mel
        if handle.error is not None:
            self.fail(handle.error)

    def fail(self, error: Exception) -> None:
        self.outcome = Outcome(self.live, error=error)


class BatchRunner:
    """The device's side of ``Stages``.

    Args:
        stages: what is common to all ways of running.
        device: runs the stages.
    """

    def __init__(self, stages: Stages, device: DeviceStages) -> None:
        self._stages, self._device = stages, device
        self._flow: Any = device.flow
        self.decoder = BatchDecoder(stages, device.lm, device.capacity.beside_tokens)

    def collect(self) -> Iterator[Outcome]:
        """Takes tokens that earlier steps queued."""
        return self.decoder.collect()

    def run(self, plan: StepPlan, lives: Mapping[int, LiveRequest]) -> Iterator[Outcome]:
        """Queues everything, then waits for the audio; an outcome for each request that has news."""
        started = time.perf_counter()
        parts = [part for entry in plan.render if (part := self._begin(lives[entry[0]], entry[1]))]
        early = self._early([lives[request_id] for request_id, _ in plan.decode], parts)
        if parts or early:
            self.decoder.in_turn()
        with self._stages.span("flow"):
            self._launch_flow(parts, early)
        self._judge(parts)
        launched = time.perf_counter()
        with self._stages.span("vocoder"):
            self._launch_vocoder(parts)
        failed = {part.live.request_id for part in parts if part.outcome is not None}
        yield from self.decoder.launch(plan.decode, lives, failed)
        waited = time.perf_counter()
        flow_ms, vocoder_ms = (launched - started) * 1e3, (waited - launched) * 1e3
        for part in parts:
            if part.live.is_done:  # its tokens have failed meanwhile
                continue
            part.live.times.flow_ms += flow_ms
            part.live.times.vocoder_ms += vocoder_ms
            yield part.outcome or attempt(part.live, partial(self._finish, part, waited))

    # -- audio -------------------------------------------------------------------------------------------------

    def _begin(self, live: LiveRequest, hop: int) -> _Part:
        part = _Part(self._stages.begin(live, hop))
        if live.vocoder is None:
            self._guard([part], lambda: self._open_vocoder(live))
        return part

    def _open_vocoder(self, live: LiveRequest) -> None:
        live.vocoder = self._device.open_vocoder(live.speed)

    @staticmethod
    def _guard(parts: list[_Part], work: Callable[[], None]) -> None:
        """Work for several requests; if it fails, so do they."""
        try:
            work()
        except Exception as error:
            for part in parts:
                part.fail(error)

    def _early(self, lives: Sequence[LiveRequest], parts: Sequence[_Part]) -> list[_Early]:
        """Segments whose prompt's last chunk can be computed now, and with how many tokens."""
        rendered = {part.live.request_id for part in parts}
        found: list[_Early] = []
        for live in lives:
            segment = live.segment
            if segment is not None and live.request_id not in rendered:
                count = self.decoder.early_tokens(live, segment)
                if 0 < count <= len(segment.tokens):
                    found.append((segment, count))
        return found

    def _launch_flow(self, parts: list[_Part], early: list[_Early]) -> None:
        together, whole = [], []
        for part in parts:
            segment = part.work.segment
            if part.outcome is not None:
                continue
            if segment is not None and segment.flow is not None and self._flow.runs_together:
                together.append(part)
            elif segment is not None and self._flow.generates_together:
                whole.append(part)
            else:
                self._guard([part], partial(self._run_flow_alone, part))
        if together or early:  # first: they have listeners
            self._guard(together, partial(self._run_flow_together, together, early))
        if whole:
            self._guard(whole, partial(self._run_flow_whole, whole))

    def _run_flow_alone(self, part: _Part) -> None:
        part.mel = self._stages.mel_of(part.work)

    def _run_flow_whole(self, parts: list[_Part]) -> None:
        handles = self._flow.generate_batch([(part.live.voice, part.work.tokens) for part in parts])
        for part, handle in zip(parts, handles, strict=True):
            part.take(handle)

    def _run_flow_together(self, parts: list[_Part], early: list[_Early]) -> None:
        items: list[Any] = []
        for part in parts:
            segment = part.work.segment
            assert segment is not None
            tokens = part.work.tokens[segment.early_tokens if part.work.is_first else 0 :]
            items.append((segment.flow, tokens, part.work.segment_ends))
        items += [(segment.flow, segment.tokens[:count], False) for segment, count in early]
        handles = self._flow.launch_batch(items)
        for part, handle in zip(parts, handles, strict=False):
            part.take(handle)
        for (segment, count), handle in zip(early, handles[len(parts) :], strict=True):
            if handle.error is None:  # or it is tried again with the first chunk
                segment.early_tokens, segment.early_mel = count, handle

    def _judge(self, parts: list[_Part]) -> None:
        """A whole segment near silence is decoded again."""
        for part in parts:
            if part.outcome is None and part.mel is not None:
                self._guard([part], partial(self._judge_one, part, part.mel))

    def _judge_one(self, part: _Part, mel: Tensor) -> None:
        if self._stages.is_refused(part.work, mel):
            part.outcome = Outcome(part.live)

    def _launch_vocoder(self, parts: list[_Part]) -> None:
        rounds: list[list[tuple[_Part, Tensor, bool]]] = []
        vocoder = self._device.vocoder
        takes_long = vocoder is not None and vocoder.takes_long_pieces
        takes_long = takes_long and len(parts) == 1 and self._device.capacity.takes_turns
        for part in parts:
            if part.outcome is not None or part.mel is None:
                continue
            pieces = [part.mel] if takes_long else self._pieces(part, part.mel)
            while len(rounds) < len(pieces):
                rounds.append([])
            for number, piece in enumerate(pieces):
                is_last = part.work.request_ends and number == len(pieces) - 1
                rounds[number].append((part, piece, is_last))
        for row in rounds:
            self._run_vocoder(row)

    def _pieces(self, part: _Part, mel: Tensor) -> list[Tensor]:
        """Frames cut at the chunk borders, so that every split of the work gives the same pieces."""
        if part.handle is None:
            return [mel]
        if isinstance(part.handle, PieceHandle):
            return list(torch.split(mel, part.handle.sizes or [0], dim=1))
        plan = self._stages.plan
        first, chunk = part.work.border * plan.frames_per_token, plan.chunk_tokens * plan.frames_per_token
        cuts = [0, *range(first, mel.shape[1], chunk), mel.shape[1]]
        return [mel[:, start:end] for start, end in itertools.pairwise(cuts)]

    def _run_vocoder(self, row: list[tuple[_Part, Tensor, bool]]) -> None:
        together = []
        for part, piece, is_last in row:
            vocoder = part.live.vocoder
            if part.outcome is not None:
                continue
            if isinstance(vocoder, DeviceVocoderSession):
                together.append((part, (vocoder, piece, is_last)))
            else:
                self._guard([part], partial(self._run_vocoder_alone, part, piece, is_last))
        if together:
            self._guard([part for part, _ in together], partial(self._run_vocoder_together, together))

    @staticmethod
    def _run_vocoder_together(row: list[tuple[_Part, tuple[DeviceVocoderSession, Tensor, bool]]]) -> None:
        errors = DeviceVocoderSession.launch_batch([item for _, item in row])
        for (part, _), error in zip(row, errors, strict=True):
            if error is not None:
                part.fail(error)

    @staticmethod
    def _run_vocoder_alone(part: _Part, piece: Tensor, is_last: bool) -> None:
        assert part.live.vocoder is not None
        part.live.vocoder.launch(piece, is_last=is_last)
        part.samples.append(part.live.vocoder.collect())

    def _finish(self, part: _Part, waited: float) -> AudioChunk | None:
        """Waits for the request's audio."""
        live = part.live
        if part.handle is not None:
            part.handle.check()
        segment = part.work.segment
        if segment is not None and segment.early_mel is not None:
            segment.early_mel.check()
            segment.early_mel = None
        rendered = time.perf_counter()
        vocoder = live.vocoder
        if isinstance(vocoder, DeviceVocoderSession):
            samples = vocoder.collect()
        else:
            samples = np.concatenate(part.samples)
        live.times.flow_ms += (rendered - waited) * 1e3
        live.times.vocoder_ms += (time.perf_counter() - rendered) * 1e3
        return self._stages.finish(part.work, samples)
