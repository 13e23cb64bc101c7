"""Decides what the next step runs. Plain Python on integers: no tensors, no clocks.

Today's policy is round-robin, one burst of decoding or one chunk of rendering per request and turn. A request
whose consumer lags (``max_pending_chunks`` undelivered) is skipped, so a slow reader pauses only itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from vivace.errors import OverloadedError

Work = Literal["decode", "render"]


@dataclass(slots=True)
class Ticket:
    """What the scheduler knows of a live request; the engine keeps it up to date.

    Attributes:
        tokens_until_audio: speech tokens missing until the next chunk can be rendered; 0: it can be now.
        waits_for_text: the speech LM can do nothing until more text arrives.
        pending_chunks: chunks made but not yet taken by the consumer.
    """

    request_id: int
    tokens_until_audio: int = 1
    waits_for_text: bool = False
    pending_chunks: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One unit of work for one request; ``num_tokens`` bounds a decode burst."""

    request_id: int
    work: Work
    num_tokens: int = 0


class Scheduler:
    """Table of live requests in turn order.

    Args:
        max_requests: live requests beyond which ``add`` raises ``OverloadedError``.
        burst_tokens: most tokens one decode turn makes, so that no request holds the machine for long.
        max_pending_chunks: undelivered chunks at which a request pauses.
    """

    def __init__(
        self, *, max_requests: int = 64, burst_tokens: int = 16, max_pending_chunks: int = 8
    ) -> None:
        self.max_requests = max_requests
        self.burst_tokens = burst_tokens
        self.max_pending_chunks = max_pending_chunks
        self._tickets: dict[int, Ticket] = {}
        self._turns: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        if len(self._tickets) >= self.max_requests:
            raise OverloadedError(
                f"{self.max_requests} requests are running; try again when one has finished",
                retry_after_s=1.0,
            )
        self._tickets[ticket.request_id] = ticket
        self._turns.append(ticket.request_id)

    def remove(self, request_id: int) -> None:
        if self._tickets.pop(request_id, None) is not None:
            self._turns.remove(request_id)

    def plan(self) -> StepPlan | None:
        """The next unit of work, or None when every request waits for text or for its consumer."""
        for _ in range(len(self._turns)):
            request_id = self._turns[0]
            self._turns.rotate(-1)
            ticket = self._tickets[request_id]
            if ticket.pending_chunks >= self.max_pending_chunks:
                continue
            if ticket.tokens_until_audio == 0:
                return StepPlan(request_id, "render")
            if not ticket.waits_for_text:
                return StepPlan(request_id, "decode", min(self.burst_tokens, ticket.tokens_until_audio))
        return None
