"""What the engine's loop did while a load ran: steps, rows, chunks, from the scheduler's own plans."""

from __future__ import annotations

from dataclasses import dataclass, field

from vivace.engine.batch_limit import BatchLimit
from vivace.engine.scheduler import Scheduler, StepPlan
from vivace.engine.ticket import Capacity


@dataclass(slots=True)
class Steps:
    """Sums over the steps of a stretch of time.

    Attributes:
        steps: all of them. lm_steps, lm_rows, lm_tokens: those that decode, their rows and the tokens these may make.
        flow_steps, flow_chunks, flow_rows: those that render, their chunks and streams.
        step_ms: time of each. resident: most requests that held state at once.
    """

    steps: int = 0
    lm_steps: int = 0
    lm_rows: int = 0
    lm_tokens: int = 0
    flow_steps: int = 0
    flow_rows: int = 0
    flow_chunks: int = 0
    resident: int = 0
    step_ms: list[int] = field(default_factory=list)

    def note(self, plan: StepPlan, running: int) -> None:
        """One step begins."""
        self.steps += 1
        self.resident = max(self.resident, running)
        if plan.decode:
            self.lm_steps += 1
            self.lm_rows += len(plan.decode)
            self.lm_tokens += sum([count for _, count in plan.decode])
        if plan.render:
            self.flow_steps += 1
            self.flow_rows += len(plan.render)
            self.flow_chunks += sum([hop for _, hop in plan.render])


class _CountedLimit(BatchLimit):
    """Also keeps how long each step took."""

    def __init__(self, like: BatchLimit, owner: CountingScheduler) -> None:
        super().__init__(like.most, least=like.least)
        self._owner = owner

    def note(self, step_ms: int, wall_ms: int) -> None:
        self._owner.counted.step_ms.append(step_ms)
        super().note(step_ms, wall_ms)


class CountingScheduler(Scheduler):
    """The engine's scheduler; ``take`` gives what it has planned since the last call."""

    counted: Steps

    def use(self, capacity: Capacity) -> None:
        super().use(capacity)
        self.counted = Steps()
        self.limit = _CountedLimit(self.limit, self)

    def plan(self, now_ms: int = 0) -> StepPlan | None:
        plan = super().plan(now_ms)
        if plan is not None:
            self.counted.note(plan, len(self.requests.running))
        return plan

    def take(self) -> Steps:
        """The sums so far; they begin anew. May be called from any thread."""
        taken, self.counted = self.counted, Steps()
        return taken
