"""Many listeners in virtual time: the real scheduler before a device whose launches take the times of a table.

``Clock`` does what the engine does in a step (tokens of the step before, plan, flow and vocoder, speech LM) and only
adds up what each launch takes. Listeners ask as those of ``vivace bench serving``, whose arithmetic says what they
met. ``python -m tests.virtual_time 64,200,300`` prints a line for each number of listeners.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vivace.bench.serving_figures import figures
from vivace.bench.serving_load import LONGEST_PAUSE_S, TAIL_S, poisson_gaps
from vivace.bench.serving_player import Record, Window
from vivace.engine.chunking import ChunkPlan
from vivace.engine.decoder import TURN_TOKENS
from vivace.engine.scheduler import Capacity, Policy, Scheduler, Ticket
from vivace.errors import OverloadedError
from vivace.models.launch_sizes import cheapest, powers_of_two

PLAN = ChunkPlan(chunk_tokens=25, lookahead_tokens=3, frames_per_token=2)
TOKENS_PER_S = 25
PROMPT_TOKENS = 75
FAR = 1 << 30

H200 = Capacity(batch=64, pack=32, running=256, queue=512, flow_pages=1050)
"""What a full-size model has room for there; a page is the 88 MB of one second."""

_OPEN, _OFFLINE = -1, -2  # in place of the number of a client


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds on one H200, full-size CosyVoice 3 in bfloat16.

    Attributes:
        flow: of a launch by its chunks, as ``kernels.dit_packed.LAUNCH_MS``, which cannot be imported without Triton.
        wave: chunks of one stream that may share a launch.
        vocoder: of a chunk by the streams of its launch.
        step: of one step of the speech LM, by its rows. prompt: of one request's prompt.
        host: of a step, of each chunk and of each row in it, while the device has nothing to do.
        emit: of handing a chunk over.
        text: from a request's submission until the scheduler hears of it.
        beside: how many times longer flow and speech LM take while both run; None: they run in turn.
    """

    flow: Mapping[int, float] = field(
        default_factory=lambda: {
            1: 6.2, 2: 8.6, 4: 11.2, 6: 12.6, 8: 14.2, 10: 16.6, 12: 17.8, 16: 23.3, 24: 30.0, 32: 40.0,
        }
    )  # fmt: skip
    wave: int = 1
    vocoder: Mapping[int, float] = field(
        default_factory=lambda: {1: 0.49, 2: 0.282, 4: 0.19, 8: 0.164, 16: 0.144, 32: 0.136}
    )
    step: Mapping[int, float] = field(
        default_factory=lambda: {
            1: 0.31, 2: 0.6, 4: 0.7, 8: 0.799, 16: 0.83, 32: 0.874, 64: 0.99, 128: 1.165, 192: 1.38, 256: 1.595,
        }
    )  # fmt: skip
    prompt: float = 1.3
    host: tuple[float, float, float] = (1.5, 0.1, 0.02)
    emit: float = 0.1
    text: float = 1.0
    beside: tuple[float, float] | None = None

    def chunks_ms(self, hops: list[int]) -> float:
        """Flow and vocoder for so many chunks of each stream, launched as ``PagedFlow.launch_batch`` does."""
        total, left = 0.0, list(hops)
        while left := sorted((hop for hop in left if hop), reverse=True):
            counts = [min(hop, self.wave) for hop in left]
            size = room = cheapest(sum(counts), self.flow)[0]
            total += self.flow[size]
            for index, count in enumerate(counts):
                left[index] -= min(count, room)
                room -= min(count, room)
        for number in range(max(hops, default=0)):
            streams = sum(hop > number for hop in hops)
            total += sum(size * self.vocoder[size] for size in powers_of_two(streams, max(self.vocoder)))
        return total

    def rows_ms(self, counts: list[int], prompts: int) -> float:
        """The speech LM's steps for so many tokens of each row, in launches of 8, 4, 2 and 1."""
        total, left, sizes = prompts * self.prompt, sorted(counts), list(self.step)
        while left and left[-1] > 0:
            left = left[bisect_left(left, 1) :]
            steps = next(size for size in (8, 4, 2, 1) if size <= left[-1])
            total += steps * self.step[sizes[bisect_left(sizes, len(left))]]
            left = [count - steps for count in left]
        return total

    def ends_ms(self, chunks: float, rows: float, num_rows: int) -> tuple[float, float]:
        """When both have ended, if they begin at 0 and take so long alone. One row's kernel is always in turn."""
        if self.beside is None or num_rows == 1:
            return chunks, chunks + rows
        slower = chunks * self.beside[0], rows * self.beside[1]
        if slower[0] <= slower[1]:
            return slower[0], slower[0] + rows - slower[0] / self.beside[1]
        return slower[1] + chunks - slower[1] / self.beside[0], slower[1]


@dataclass(slots=True)
class Request:
    """What the engine and its listener know of one request.

    Attributes:
        client: who asks again when it has been heard.
        total, made, fed, done: tokens in all, decoded, given to the flow, of finished chunks; the prompt's included.
    """

    ticket: Ticket
    record: Record
    client: int
    total: int
    made: int = PROMPT_TOKENS
    fed: int = PROMPT_TOKENS
    done: int = PROMPT_TOKENS

    def update(self) -> None:
        """Tells the scheduler what can be done next, as ``Stages.update_ticket``."""
        ticket = self.ticket
        ticket.opens_segment = False
        ticket.hold(self.done // PLAN.chunk_tokens)
        if self.made == self.total:
            ticket.tokens_until_audio, ticket.spare_tokens, ticket.is_complete = 0, self.made - self.fed, True
        else:
            ticket.tokens_until_audio = PLAN.tokens_until_audio(self.done, self.made)
            needed = PLAN.next_border(self.done) + PLAN.lookahead_tokens
            ticket.spare_tokens = max(0, self.made - needed)


class Clock:
    """One engine and its listeners, who hear ``seconds`` each.

    Attributes:
        now_ms: on the host. records: all requests so far.
        steps: milliseconds, chunks and rows of each.
        running_most: requests that ran at once.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        policy: Policy | None = None,
        capacity: Capacity = H200,
        seconds: float = 10.0,
    ) -> None:
        self.costs = costs or Costs()
        self.scheduler = Scheduler(policy)
        self.scheduler.use(capacity)
        self.now_ms = 0.0
        self.records: list[Record] = []
        self.steps: list[tuple[float, int, int]] = []
        self.running_most = 0
        self._tokens = PROMPT_TOKENS + round(TOKENS_PER_S * seconds)
        self._live: dict[int, Request] = {}
        self._ids = itertools.count()
        self._asking: list[tuple[float, int]] = []
        self._decoding: list[tuple[float, Request, int]] = []
        self._free_ms = 0.0
        self._left = 0

    # -- listeners ---------------------------------------------------------------------------------------------

    def closed(self, streams: int, ramp_s: float = 10.0, seconds: float = 20.0) -> dict[str, Any]:
        """Listeners who ask again when they have heard the answer; figures of a window behind the ramp."""
        for index in range(streams):
            heapq.heappush(self._asking, (1e3 * ramp_s * index / streams, index))
        return self._watch(Window(ramp_s, ramp_s + seconds))

    def poisson(self, rate: float, ramp_s: float = 10.0, seconds: float = 20.0) -> dict[str, Any]:
        """So many requests per second, whatever became of those before."""
        times = itertools.accumulate(poisson_gaps(rate, 0))
        end_s = ramp_s + seconds + TAIL_S
        for due_s in itertools.takewhile(lambda due_s: due_s < end_s, times):
            heapq.heappush(self._asking, (1e3 * due_s, _OPEN))
        return self._watch(Window(ramp_s, ramp_s + seconds))

    def offline(self, requests: int, side_by_side: int) -> dict[str, Any]:
        """As fast as possible, nobody listens."""
        self._left = requests - side_by_side
        for _ in range(side_by_side):
            heapq.heappush(self._asking, (0.0, _OFFLINE))
        while self._asking or self._live:
            self.step()
        window = Window(0.0, self.now_ms / 1e3)
        return figures(self.records, window, window.end_s, plays=False)

    def _watch(self, window: Window) -> dict[str, Any]:
        while self.now_ms < 1e3 * (window.end_s + TAIL_S):
            self.step()
        return figures(self.records, window, window.end_s + TAIL_S)

    def _ask(self, at_ms: float, client: int) -> None:
        ticket = Ticket(next(self._ids), tokens_until_audio=FAR, submitted_ms=int(at_ms))
        ticket.flow_pages = ticket.likely_pages = -(-self._tokens // PLAN.chunk_tokens)
        ticket.hold(PROMPT_TOKENS // PLAN.chunk_tokens)
        record = Record(at_ms / 1e3)
        self.records.append(record)
        request = Request(ticket, record, client, self._tokens)
        try:
            self.scheduler.add(ticket)
        except OverloadedError as error:
            self._refuse(request, error.retry_after_s)
        else:
            self._live[ticket.request_id] = request

    def _refuse(self, request: Request, retry_after_s: float) -> None:
        request.record.ended_s, request.record.error = self.now_ms / 1e3, OverloadedError.default_code
        if request.client != _OPEN:
            again_ms = self.now_ms + 1e3 * min(LONGEST_PAUSE_S, retry_after_s)
            heapq.heappush(self._asking, (again_ms, request.client))

    # -- the engine --------------------------------------------------------------------------------------------

    def step(self) -> None:
        """What ``EngineLoop`` does, or a sleep until there is something to do."""
        started_ms = self.now_ms
        decoding = self._take_decoding()
        while self._asking and self._asking[0][0] + self.costs.text <= self.now_ms:
            self._ask(*heapq.heappop(self._asking))
        for request, count in decoding:
            request.made = min(request.total, request.made + count)
            request.update()
        plan = self.scheduler.plan(int(self.now_ms))
        if plan is None:
            if not self._decoding:
                self._sleep()
            return
        for request_id, _ in plan.overdue:
            self.scheduler.remove(request_id)
            self._refuse(self._live.pop(request_id), 0.0)
        self.running_most = max(self.running_most, len(self.scheduler.requests.running))
        rendered = [(self._live[request_id], hop) for request_id, hop in plan.render]
        chunks, rows = sum(hop for _, hop in rendered), len(plan.decode)
        per_step, per_chunk, per_row = self.costs.host
        self.now_ms += per_step + per_chunk * chunks + per_row * rows
        flow_ms = self.costs.chunks_ms([self._feed(request, hop) for request, hop in rendered])
        heard_ms = self._launch(flow_ms, plan.decode)
        if rendered:
            self.now_ms = heard_ms
        for request, _ in rendered:
            self._hear(request)
        spent_ms = self.now_ms - started_ms
        self.steps.append((spent_ms, chunks, rows))
        self.scheduler.limit.note(int(spent_ms), int(spent_ms))

    def _feed(self, request: Request, hop: int) -> int:
        """Tokens go to the flow. Returns the chunks that it makes of them, at first the prompt's last one too."""
        is_first = request.fed == PROMPT_TOKENS
        needed = PLAN.tokens_until_audio(request.done, request.fed) + (hop - 1) * PLAN.chunk_tokens
        request.fed = min(request.made, request.fed + needed)
        request.done = max(request.done, PLAN.ready_border(request.fed))
        return hop + is_first

    def _take_decoding(self) -> list[tuple[Request, int]]:
        """Waits for tokens as ``BatchDecoder.collect`` does."""
        taken, self._decoding = self._decoding, []
        requests = {request.ticket.request_id: request for _, request, _ in taken}
        if len(requests) == 1 and next(iter(requests.values())).ticket.first_ms >= 0:
            taken, self._decoding = taken[:1], taken[1:]
        self.now_ms = max([self.now_ms, *(end_ms for end_ms, _, _ in taken)])
        return [(request, count) for _, request, count in taken]

    def _launch(self, flow_ms: float, planned: tuple[tuple[int, int], ...]) -> float:
        """Queues flow and vocoder, and the tokens of all rows. Returns when the flow's part has ended."""
        prompts, rows = 0, []
        for request_id, most in planned:
            request = self._live[request_id]
            under_way = sum(count for _, own, count in self._decoding if own is request)
            is_new = request.made == PROMPT_TOKENS and not under_way
            left = request.total - request.made
            count = min(most, PLAN.first_audio_tokens(PROMPT_TOKENS) if is_new else left) - under_way
            if count > 0:
                rows.append((request, count))
                prompts += is_new
        starts_ms = max(self._free_ms, self.now_ms)
        if len(planned) == 1 and rows and not prompts:
            heard_ms = self._free_ms = starts_ms + flow_ms
            ((request, count),) = rows
            while count > 0:
                part = min(count, TURN_TOKENS)
                self._free_ms += self.costs.rows_ms([part], 0)
                self._decoding.append((self._free_ms, request, part))
                count -= part
            return heard_ms
        # The prompt's launch draws one token.
        counts = [count - (request.made == PROMPT_TOKENS) for request, count in rows]
        flow_ms, rows_ms = self.costs.ends_ms(flow_ms, self.costs.rows_ms(counts, prompts), len(rows))
        self._free_ms = starts_ms + max(flow_ms, rows_ms)
        self._decoding += [(starts_ms + rows_ms, request, count) for request, count in rows]
        return starts_ms + flow_ms

    def _hear(self, request: Request) -> None:
        self.now_ms += self.costs.emit
        ticket, record = request.ticket, request.record
        ends = request.fed == request.total
        tokens = (request.total if ends else request.done) - PROMPT_TOKENS
        audio_ms = 1000 * tokens // TOKENS_PER_S
        record.note(self.now_ms / 1e3, (audio_ms - ticket.audio_ms) / 1e3)
        record.delivery_ms.append(0.0)
        ticket.note_chunk(int(self.now_ms), audio_ms)
        ticket.pending_chunks = 0
        if not ends:
            request.update()
            return
        record.ended_s = self.now_ms / 1e3
        self.scheduler.remove(ticket.request_id, int(self.now_ms))
        del self._live[ticket.request_id]
        if request.client >= 0:
            heapq.heappush(self._asking, (1e3 * record.dry_s, request.client))
        elif request.client == _OFFLINE and self._left > 0:
            self._left -= 1
            heapq.heappush(self._asking, (self.now_ms, _OFFLINE))

    def _sleep(self) -> None:
        times = [self.now_ms + 1000.0]
        if self._asking:
            times.append(self._asking[0][0] + self.costs.text)
        if self.scheduler.wake_ms is not None:
            times.append(float(self.scheduler.wake_ms))
        self.now_ms = max(self.now_ms + 0.05, min(times))


def main(listeners: list[int]) -> None:
    """A line for each number of listeners, in turn and beside."""
    for beside in (None, (1.5, 1.8)):
        for streams in listeners:
            clock = Clock(Costs(beside=beside))
            found = clock.closed(streams)
            names = ("ttfb_ms_p50", "ttfb_ms_p99", "underruns", "audio_seconds_per_second")
            values = ", ".join(f"{name} {found[name]:g}" for name in names)
            print(f"{streams} listeners, {'in turn' if beside is None else beside}: {values}")


if __name__ == "__main__":
    main([int(part) for part in sys.argv[1].split(",")])
