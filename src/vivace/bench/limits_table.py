"""The tables of ``vivace limits``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from vivace.bench.tables import Column, cell

_FIGURES = (
    ("flow, ms a chunk", "flow_ms_per_chunk", 1.0, "{:,.3f}"),
    ("vocoder, ms a second", "vocoder_ms_per_second", 1.0, "{:,.3f}"),
    ("RTF", "rtf", 1.0, "{:.5f}"),
    ("TTFB, ms", "ttfb_ms", 1.0, "{:,.2f}"),
    ("TTFB, late border, ms", "ttfb_late_border_ms", 1.0, "{:,.2f}"),
    ("TTFB, cold voice, ms", "ttfb_cold_voice_ms", 1.0, "{:,.2f}"),
    ("weights, MB", "weight_bytes", 1e-6, "{:,.1f}"),
    ("a stream of 10 s, MB", "stream_bytes", 1e-6, "{:,.1f}"),
)


_MEASURED: tuple[Column, ...] = (
    ("tps", "speech LM, tokens/s", 1.0, "{:,.0f}"),
    ("flow_ms_per_second", "flow, ms a second", 1.0, "{:,.3f}"),
    ("vocoder_ms_per_second", "vocoder, ms a second", 1.0, "{:,.3f}"),
    ("ttfb_ms", "TTFB, ms", 1.0, "{:,.2f}"),
    ("rtf", "RTF", 1.0, "{:.5f}"),
    ("audio_seconds_per_second", "audio s/s, {streams} side by side", 1.0, "{:,.2f}"),
    ("memory_per_stream_bytes", "memory of each, MB", 1e-6, "{:,.1f}"),
)


def print_limits(document: dict[str, Any], console: Console | None = None) -> None:
    """Floors by format, the speech LM by batch, and the engine beside them where it was measured."""
    console = console or Console()
    bandwidth, rates = document["bandwidth_bytes_per_second"], document["matrix_flops_per_second"]
    console.print(
        f"{document['model']} on {document['hardware']}: copies {bandwidth / 1e9:,.1f} GB/s, multiplies "
        f"{rates['float32'] / 1e12:,.3f} TFLOP/s in float32 and {rates['float16'] / 1e12:,.3f} in halves",
        highlight=False,
    )
    stages = Table(title="floors, one stream")
    stages.add_column("figure", no_wrap=True)
    for row in document["formats"]:
        stages.add_column(row["format"], justify="right", no_wrap=True)
    for label, name, factor, form in _FIGURES:
        stages.add_row(label, *(form.format(row[name] * factor) for row in document["formats"]))
    console.print(stages)
    batches = Table(title=f"by batch, {document['context_tokens']} tokens of context")
    for name in ("weights", "batch", "LM MB", "LM GFLOP", "LM µs", "tokens/s", "audio s/s"):
        batches.add_column(name, justify="left" if name == "weights" else "right")
    for row in document["formats"]:
        for entry in row["lm"]:
            batches.add_row(
                row["format"],
                str(entry["batch"]),
                f"{entry['bytes_per_step'] / 1e6:,.1f}",
                f"{entry['flops_per_step'] / 1e9:,.3f}",
                f"{entry['us_per_step']:,.1f}",
                f"{entry['tps']:,.0f}",
                f"{entry['audio_seconds_per_second']:,.1f}",
            )
    console.print(batches)
    if document["measured"] is not None:
        console.print(_measured(document["measured"]))


def _measured(document: dict[str, Any]) -> Table:
    """The engine beside its floors."""
    table = Table(title=f"the engine beside the {document['format']} floors")
    for name in ("figure", "measured", "floor", "% of floor"):
        table.add_column(name, justify="left" if name == "figure" else "right", no_wrap=True)
    for name, label, factor, form in _MEASURED:
        entry = document["figures"][name]
        table.add_row(
            label.format(streams=document["streams"]),
            cell(entry, "measured", factor, form),
            cell(entry, "floor", factor, form),
            cell(entry, "percent_of_floor", 1.0, "{:.1f}"),
        )
    return table
