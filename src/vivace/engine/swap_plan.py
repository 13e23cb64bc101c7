"""Whose pages go to host memory, and whose come back. Plain Python on integers.

Pages leave the device only for a request that has waited for memory for a while, or needs some soon, and only if that
makes enough room. Those of streams whose consumers take nothing go first, then those of streams that wait for text,
then those that are furthest ahead of their playback. They come back when the stream can do something again and nobody
waits for memory, or its playback needs it soon; then it comes before whoever has not begun. Whole requests are moved,
and none of which anything is under way on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.engine.ticket import Place

if TYPE_CHECKING:
    from vivace.engine.admission import Admission
    from vivace.engine.ticket import Policy, Ticket


def is_moving(ticket: Ticket) -> bool:
    """Whether its pages are on the way."""
    return ticket.place is Place.LEAVING or ticket.place is Place.RETURNING


def is_paused(ticket: Ticket, policy: Policy) -> bool:
    """Whether its consumer has too much that it has not taken; what is in host memory waits until half is taken."""
    most = policy.max_pending_chunks
    return ticket.pending_chunks >= (most if ticket.place is Place.DEVICE else max(1, most // 2))


def waits_for_text(ticket: Ticket) -> bool:
    """Whether nothing can be done for it before more text comes."""
    return ticket.waits_for_text and bool(ticket.tokens_until_audio)


def plan_returns(requests: Admission, policy: Policy, now_ms: int) -> tuple[list[int], int | None]:
    """Requests whose pages come back now, and when the next one may want to though nothing happens (None: never).

    Notes in ``requests.num_due`` how many have no room yet.
    """
    wake_ms: int | None = None
    due: list[Ticket] = []
    for ticket in requests.running.values():
        if ticket.place is not Place.HOST or is_paused(ticket, policy) or waits_for_text(ticket):
            continue
        needed_ms = _deadline(ticket, policy) - policy.swap_in_ms
        if not requests.queue or needed_ms <= now_ms:
            due.append(ticket)
        else:
            wake_ms = needed_ms if wake_ms is None else min(wake_ms, needed_ms)
    due.sort(key=lambda ticket: _deadline(ticket, policy))
    returning: list[int] = []
    # Overtaking is allowed: what one leaves on the device may be what another one waits for.
    while (fitting := next(filter(requests.fits, due), None)) is not None:
        due.remove(fitting)
        requests.come_back(fitting)
        returning.append(fitting.request_id)
    requests.num_due = len(due)
    return returning, wake_ms


def plan_leaves(
    blocked: Ticket | None, requests: Admission, policy: Policy, now_ms: int
) -> tuple[list[int], int | None]:
    """Requests whose pages leave the device now, and when to look again though nothing happens.

    Args:
        blocked: the most urgent request on the device that got no page when it needed one.
    """
    if any(is_moving(ticket) for ticket in requests.running.values()):
        return [], None  # what comes of it is not known yet
    if blocked is not None and blocked.request_id in requests.running:
        claimant, since_ms = blocked, _deadline(blocked, policy) - policy.swap_in_ms
    elif requests.num_due:
        claimant, since_ms = _first_due(requests, policy), now_ms
    elif requests.queue:
        claimant = next(iter(requests.queue.values()))
        since_ms = claimant.submitted_ms + policy.swap_after_ms
    else:
        return [], None
    if since_ms > now_ms:
        return [], since_ms
    leaving = _make_room(claimant, requests, policy, now_ms)
    for ticket in leaving:
        requests.leave(ticket)
    return [ticket.request_id for ticket in leaving], None


def _make_room(claimant: Ticket, requests: Admission, policy: Policy, now_ms: int) -> list[Ticket]:
    """Idle requests without which there is room for ``claimant``, or none."""
    others = [ticket for ticket in requests.running.values() if ticket is not claimant]
    idle = [ticket for ticket in others if _is_idle(ticket, policy, now_ms)]
    idle.sort(key=lambda ticket: _urgency(ticket, policy))
    chosen: list[Ticket] = []
    for ticket in idle[: policy.max_swaps]:
        if not requests.may_leave([*chosen, ticket]):
            continue
        chosen.append(ticket)
        if requests.fits(claimant, chosen):
            break
    else:
        return []
    for ticket in chosen[:-1]:  # the first ones may be small
        rest = [other for other in chosen if other is not ticket]
        if requests.fits(claimant, rest):
            chosen = rest
    return chosen


def _first_due(requests: Admission, policy: Policy) -> Ticket:
    """The first of those that cannot come back."""
    away = [ticket for ticket in requests.running.values() if ticket.place is Place.HOST]
    due = [ticket for ticket in away if not is_paused(ticket, policy) and not waits_for_text(ticket)]
    return min(due, key=lambda ticket: _deadline(ticket, policy))


def _is_idle(ticket: Ticket, policy: Policy, now_ms: int) -> bool:
    if ticket.place is not Place.DEVICE or ticket.tokens_under_way:
        return False
    if not ticket.kv_pages and ticket.held_pages <= ticket.prompt_pages:
        return False  # it has nothing that others could take
    if is_paused(ticket, policy):
        return True
    # What has all its tokens is gone soon by itself.
    return ticket.first_ms >= 0 and not ticket.is_complete and ticket.credit_ms(now_ms) >= policy.swap_out_ms


def _urgency(ticket: Ticket, policy: Policy) -> tuple[int, int]:
    if is_paused(ticket, policy):
        rank = 0
    else:
        rank = 1 if waits_for_text(ticket) else 2
    return rank, -_deadline(ticket, policy)


def _deadline(ticket: Ticket, policy: Policy) -> int:
    """When playback runs dry, or the first audio is due."""
    if ticket.first_ms < 0:
        return ticket.submitted_ms + policy.first_ms
    return ticket.first_ms + ticket.audio_ms
