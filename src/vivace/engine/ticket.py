"""What the scheduler knows of requests and stages, and what may be tuned. Plain Python on integers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Place(IntEnum):
    """Where the pages of a running request are. Only on the device can it run."""

    DEVICE = 0
    LEAVING = 1
    HOST = 2
    RETURNING = 3


@dataclass(slots=True, eq=False)
class Ticket:
    """What the scheduler knows of a live request; the engine keeps it up to date. Times are in milliseconds.

    Attributes:
        tokens_until_audio: speech tokens missing until the next chunk can be rendered; 0: it can be now.
        spare_tokens: tokens known beyond those that the next chunk needs.
        is_complete: no more tokens of the segment will come.
        opens_segment: the next decoding runs a prompt.
        waits_for_text: the speech LM can do nothing until more text arrives.
        pending_chunks: chunks made but not yet taken by the consumer.
        kv_pages: of the speech LM's cache, the most that it can take at any time.
        flow_pages: of the flow's memory, likewise; likely_pages: by the length of its text.
        typical_pages: what it is counted for while it runs; set by the scheduler.
        held_pages, most_held: of the flow's memory, now and at most so far.
        cached_pages: of the speech LM's cache, those with contents, while nothing is under way.
        prompt_pages: those of the voice's prompt, which it may hold from its start to its end; they never leave.
        place: where the others are, and the pages of the speech LM's cache.
        swapped_pages: of the flow's memory, in host memory or on the way there or back; swapped_cache: of the cache.
        tokens_under_way: queued on the device and not taken; meanwhile its pages cannot leave.
        submitted_ms, first_ms: when it came; when its first chunk was handed over (-1: not yet).
        audio_ms: audio handed over.
        lagging_ms: since when the consumer takes nothing of a full queue (-1: it does).
        served: the step that served it last.
    """

    request_id: int
    tokens_until_audio: int = 1
    spare_tokens: int = 0
    is_complete: bool = False
    opens_segment: bool = True
    waits_for_text: bool = False
    pending_chunks: int = 0
    kv_pages: int = 0
    flow_pages: int = 0
    likely_pages: int = 0
    typical_pages: int = 0
    held_pages: int = 0
    most_held: int = 0
    cached_pages: int = 0
    prompt_pages: int = 0
    place: Place = Place.DEVICE
    swapped_pages: int = 0
    swapped_cache: int = 0
    tokens_under_way: int = 0
    submitted_ms: int = 0
    first_ms: int = -1
    audio_ms: int = 0
    lagging_ms: int = -1
    served: int = -1

    def credit_ms(self, now_ms: int) -> int:
        """Audio that a player which began with the first chunk has not played yet; below 0 it has run dry."""
        return 0 if self.first_ms < 0 else self.first_ms + self.audio_ms - now_ms

    def note_chunk(self, now_ms: int, audio_ms: int) -> None:
        """A chunk was made; ``audio_ms`` is all audio so far."""
        self.pending_chunks += 1
        self.audio_ms = audio_ms
        if self.first_ms < 0:
            self.first_ms = now_ms

    def hold(self, pages: int) -> None:
        """Notes how many pages of the flow's memory it holds now."""
        self.held_pages = pages
        self.most_held = max(self.most_held, pages)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the stages have room for. The default is that of plain stages: one unit of work at a time.

    Attributes:
        batch: most chunks of one step; 1: a step is one burst of decoding or one chunk, of one request.
        pack: streams whose chunks share a launch of the flow; 1: each has its own.
        wave: chunks of one stream that a launch of the flow computes for less than one by one; 1: none.
        wave_ms: audio that a stream must have handed over for each chunk of such a launch: the faster the stages make
            as much the less, so that no playback runs dry while the tokens for the launch are made.
        running: requests that may hold state at once; queue: those that may wait beyond them.
        kv_pages, flow_pages: pages there are for requests.
        host_pages: pages of the flow that host memory has room for; 0: nothing is swapped.
        host_cache: pages of the speech LM's cache that it has room for.
        chunk_tokens: speech tokens of a chunk.
        quiet_tokens: tokens that a row may decode in a step while hardly anybody else does, where they are made beside
            the other stages; with less than a chunk's the speech LM would wait for these.
        beside_tokens: likewise beside a launch of the flow that takes longer than that.
    """

    batch: int = 1
    pack: int = 1
    wave: int = 1
    wave_ms: int = 800
    running: int = 64
    queue: int = 0
    kv_pages: int = 1 << 60
    flow_pages: int = 1 << 60
    host_pages: int = 0
    host_cache: int = 1 << 60
    chunk_tokens: int = 25
    quiet_tokens: int = 0
    beside_tokens: int = 0

    @property
    def takes_turns(self) -> bool:
        """Whether a lone row's tokens are made faster than two rows', in turn with the other stages."""
        return self.wave > 1 and not self.beside_tokens


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be tuned.

    Attributes:
        max_requests: live requests beyond which a new one is refused; None: as the stages have room for.
        burst_tokens: most tokens one row decodes in a step, so that who comes meanwhile does not wait for long;
            first_tokens: before its first audio, as many as a first chunk needs.
        first_rows: with at most so many rows those that have more than ``urgent_ms`` to play wait while a first chunk's
            tokens are decoded; crowd_rows: with more than so many all rows get as many tokens then.
        quiet_rows: so few streams do not wait for larger hops, and may decode beside a launch of the flow.
        turn_rows: so few streams are served one after the other where that is faster (``Capacity.takes_turns``).
        max_prompts: prompts of one step, so that a crowd of new requests does not stop those that play. A prompt is a
            launch of its own.
        max_pending_chunks: undelivered chunks at which a request pauses, each as large as it was handed over.
        max_ahead_ms: credit at which a stream pauses; None: as far as its consumer takes chunks.
        max_hop_chunks: chunks of one stream in a step while its playback is safe and others are there; safe_ms: credit
            per chunk of it.
        wave_ms: audio handed over per chunk, and least credit, from which a stream that has a step to itself waits for
            more chunks, where they share launches; None: as the stages say.
        first_ms: when the first audio is due; urgent_ms: credit at which a stream goes before all others.
        max_queue_ms: longest wait of a request that has not started.
        max_stall_ms: longest time in which the consumer of a paused request takes nothing. None: for ever.
        swap_after_ms: a request that has waited so long for memory may send the pages of others to host memory.
        swap_out_ms: credit from which a stream's pages may go there though it could run; swap_in_ms: below it they come
            back, whoever waits. The first is larger, so that nothing goes to and fro.
        max_swaps: requests whose pages leave together.
    """

    max_requests: int | None = None
    burst_tokens: int = 16
    first_tokens: int = 32
    first_rows: int = 8
    crowd_rows: int = 16
    quiet_rows: int = 4
    turn_rows: int = 2
    max_prompts: int = 5
    max_pending_chunks: int = 8
    max_ahead_ms: int | None = None
    max_hop_chunks: int = 4
    safe_ms: int = 1500
    wave_ms: int | None = None
    first_ms: int = 200
    urgent_ms: int = 300
    max_queue_ms: int = 30_000
    max_stall_ms: int | None = None
    swap_after_ms: int = 100
    swap_out_ms: int = 5000
    swap_in_ms: int = 2500
    max_swaps: int = 8
