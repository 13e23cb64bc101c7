"""The ladder as one HTML page: charts, tables, other people's figures. No script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from vivace.bench.ladder_charts import figure_charts, stage_chart
from vivace.bench.ladder_compare import measured, per_phrase
from vivace.bench.ladder_table import columns_of
from vivace.bench.report_charts import FLOOR_COLOUR
from vivace.bench.report_published import REPORTS, Reported
from vivace.bench.tables import Column, cell, cells

_STYLE = """
:root { color-scheme: light dark; --line: #d5d8dd; --soft: #6b7280; --tile: #f4f5f7; }
@media (prefers-color-scheme: dark) { :root { --line: #3a3f47; --soft: #9aa3af; --tile: #22262c; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 0.88em; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.45rem; text-align: right; }
th { vertical-align: bottom; } td + td { white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
.alone td { color: var(--soft); } .alone td:first-child { padding-left: 1.2rem; } .floor td { color: #3f8f5f; }
.wide { overflow-x: auto; } p.note, .about, .key { color: var(--soft); }
svg { width: 100%; height: auto; margin-top: 1.2rem; } .key span { margin-right: 1.2rem; }
.tiles { display: flex; flex-wrap: wrap; gap: 0.8rem; margin: 1.2rem 0; }
.tiles div { background: var(--tile); border-radius: 0.5rem; padding: 0.7rem 1rem; flex: 1 1 11rem; }
.tiles b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 0.9em; }
dt { font-weight: 600; margin-top: 0.6rem; } dd { margin-left: 1.2rem; }
""".strip()

_TILES: tuple[tuple[str, str, float, str, bool], ...] = (
    ("ttfb_ms_p50", "first audio, ms", 1.0, "{:,.0f}", False),
    ("rtf", "real-time factor", 1.0, "{:.3f}", False),
    ("tps", "speech tokens per second", 1.0, "{:,.0f}", True),
    ("host_us_per_step", "host µs a step", 1.0, "{:,.0f}", False),
)
"""Member, what it is, factor, format, whether more is better."""

_FLOORS: tuple[Column, ...] = (
    ("ttfb_gain", "TTFB gain", 1.0, "{:.2f}"),
    ("floor_ttfb_ms", "floor TTFB ms", 1.0, "{:,.1f}"),
    ("floor_rtf", "floor RTF", 1.0, "{:.4f}"),
)

_OURS: dict[str, Column] = {
    "ttfb_ms_p50": ("ttfb_ms_p50", "", 1.0, "{:,.0f} ms"),
    "rtf": ("rtf", "", 1.0, "{:.3f}"),
    "tps": ("tps", "", 1.0, "{:,.0f}"),
    "peak_memory_bytes": ("peak_memory_bytes", "", 1e-9, "{:.2f} GB"),
    "host_us_per_step": ("host_us_per_step", "", 1e-3, "{:.3g} ms"),
    "phrase_ms": ("phrase_ms", "", 1.0, "{:,.0f} ms"),
    "phrases_per_second": ("phrases_per_second", "", 1.0, "{:.3g}"),
}


def ladder_page(document: dict[str, Any]) -> str:
    """The whole page for a document of ``vivace bench ladder``."""
    seconds = sum(document["tokens"]) / 25
    lead = (
        f"{document['model']} on {document['hardware']}, PyTorch {document['torch']},"
        f" threads: {document['threads']}; {len(document['tokens'])} phrases, {seconds:.1f} s of audio,"
        f" runs: {document['runs']}."
    )
    return page(
        "The ladder",
        [
            f"<p>{escape(lead)} Every rung keeps what the rungs before it switched on;"
            " “alone” has nothing but its own change.</p>",
            *(_measured(document) if measured(document["rows"]) else ["<p>No rung was measured.</p>"]),
            "<h2>What each rung changes</h2>",
            _about(document),
            "<h2>What others reported</h2>",
            f'<p class="note">Their hardware, their models, their phrases; “here” is {escape(document["model"])} on'
            f" {escape(document['hardware'])}, before and after all rungs. Not comparable line by line.</p>",
            *(_report(report, document) for report in REPORTS),
        ],
    )


def page(title: str, body: Sequence[str]) -> str:
    """A self-contained page."""
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
    )
    return head + "\n".join(body) + "\n</body>\n</html>\n"


def table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """An HTML table; each row is its class and its cells."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = [
        f'<tr class="{kind}">' + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>"
        for kind, texts in rows
    ]
    return f'<div class="wide"><table>\n<tr>{top}</tr>\n' + "\n".join(lines) + "\n</table></div>"


def _ends(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bottom rung that was measured and the top one, int8 left aside where it can; empty ones if none was."""
    rungs = measured(document["rows"])
    floats = [row for row in rungs if not row["switches"]["int8"]] or rungs  # int8 gives up accuracy
    return (floats[0], floats[-1]) if floats else ({}, {})


def _tiles(document: dict[str, Any]) -> str:
    """First and last rung, figure by figure."""
    first, last = _ends(document)
    tiles = []
    for name, label, factor, form, more_is_better in _TILES:
        old, new = first.get(name), last.get(name)
        if old is None or new is None:
            continue
        times = new / old if more_is_better else old / new
        tiles.append(
            f"<div><b>{cell(first, name, factor, form)} → {cell(last, name, factor, form)}</b>"
            f"<span>{label}: {times:,.1f} times better</span></div>"
        )
    return '<div class="tiles">' + "".join(tiles) + "</div>"


def _measured(document: dict[str, Any]) -> list[str]:
    """Tiles, charts and the table."""
    return [
        _tiles(document),
        *figure_charts(document),
        f'<p class="key"><span><span style="color:{FLOOR_COLOUR}">▎</span>floor of this machine for the rung’s'
        " precision</span><span>thin and pale: the change alone</span>axes are logarithmic</p>",
        stage_chart(document),
        '<p class="key">stages may overlap in time, so that a bar may be longer than the phrases took</p>',
        "<h2>All figures</h2>",
        _figures(document),
        '<p class="note">gain: how many times faster than the rung below it (alone: than the reference’s way);'
        " % floor: of the floor’s real-time factor.</p>",
    ]


def _figures(document: dict[str, Any]) -> str:
    columns = [*columns_of(document), *_FLOORS]
    rows: list[tuple[str, list[str]]] = [
        (row["kind"], ["· alone" if row["kind"] == "alone" else row["title"], *cells(row, columns)])
        for row in document["rows"]
        if row["reason"] is None
    ]
    for floor in document["floors"]:
        names = {"ttfb_ms_p50": "ttfb_ms"}
        figures = [cell(floor, names.get(name, name), factor, form) for name, _, factor, form in columns]
        rows.append(("floor", [f"floor, {floor['format']}", *figures]))
    return table(["rung", *(heading for _, heading, _, _ in columns)], rows)


def _about(document: dict[str, Any]) -> str:
    lines = []
    for row in document["rows"]:
        if row["kind"] == "cumulative":
            why = "" if row["reason"] is None else f" <em>Not available: {escape(row['reason'])}.</em>"
            lines.append(
                f"<dt>{escape(row['title'])}</dt><dd class='about'>{escape(row['about'])}.{why}</dd>"
            )
    return "<dl>\n" + "\n".join(lines) + "\n</dl>"


def _report(report: Reported, document: dict[str, Any]) -> str:
    """Someone's table with the same figures of this ladder's ends beside it."""
    first, last = (row and row | per_phrase(row, len(document["tokens"])) for row in _ends(document))
    rows: list[tuple[str, list[str]]] = []
    for figure in report.figures:
        columns = [] if figure.ours is None else [_OURS[figure.ours]]
        ours = [*cells(first, columns), *cells(last, columns)] or ["–", "–"]
        rows.append(("", [figure.label, figure.before, figure.after, *ours]))
    heads = ("figure", f"{report.hardware}, before", "after", "here, first rung", "here, last rung")
    return (
        f"<h3>{escape(report.title)}</h3>\n"
        f'<p class="note">{escape(report.hardware)}; {escape(report.model)}</p>\n{table(heads, rows)}'
        f"{_note(report.note, document)}"
    )


def _note(note: str, document: dict[str, Any]) -> str:
    """What stands below a report."""
    if not note:
        return ""
    seconds = ", ".join(f"{count / 25:.1f}" for count in document["tokens"])
    return f'\n<p class="note">{escape(note.format(phrases=f"{seconds} s"))}</p>'
