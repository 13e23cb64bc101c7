"""The ladder in charts: one row a rung, its change alone below it, its floor marked."""

from __future__ import annotations

from typing import Any

from vivace.bench.ladder_compare import measured
from vivace.bench.report_charts import Stack, Step, stack_chart, step_chart
from vivace.bench.timeline import COLOURS

_FIGURES = (
    (
        "ttfb_ms_p50",
        "floor_ttfb_ms",
        "First audio, milliseconds (median of the phrases)",
        "{:,.0f} ms",
        "#3b6fb6",
    ),
    ("rtf", "floor_rtf", "Real-time factor (below 1: faster than real time)", "{:.3f}", "#c2573a"),
    ("tps", "floor_tps", "Speech tokens per second of LM time", "{:,.0f}", "#7a569a"),
    (
        "host_us_per_step",
        None,
        "Host time to give out one decoding step, microseconds",
        "{:,.0f} µs",
        "#7a869a",
    ),
)
STAGES = (("lm", "speech LM"), ("flow", "flow"), ("vocoder", "vocoder"))


def figure_charts(document: dict[str, Any], names: tuple[str, ...] = ()) -> list[str]:
    """A chart for each figure that has values; ``names``: some of them by member."""
    rungs = measured(document["rows"])
    alone = {row["rung"]: row for row in measured(document["rows"], "alone")}
    charts = []
    for name, floor, title, form, colour in _FIGURES:
        if (names and name not in names) or all(row[name] is None for row in rungs):
            continue
        steps = []
        for row in rungs:
            single = alone.get(row["rung"], {}).get(name)
            steps.append(
                Step(
                    str(row["title"]),
                    row[name],
                    "–" if row[name] is None else form.format(row[name]),
                    floor=None if floor is None else row[floor],
                    alone=single,
                    alone_text="" if single is None else form.format(single),
                )
            )
        charts.append(step_chart(title, steps, colour))
    return charts


def stage_chart(document: dict[str, Any]) -> str:
    """Where the time of each rung goes."""
    stacks = []
    for row in measured(document["rows"]):
        parts = tuple((row[f"{lane}_ms"], COLOURS[lane]) for lane, _ in STAGES)
        stacks.append(Stack(str(row["title"]), parts, f"{sum(value for value, _ in parts):,.0f}"))
    key = [(label, COLOURS[lane]) for lane, label in STAGES]
    return stack_chart("Where the time goes, milliseconds for all phrases", stacks, key)
