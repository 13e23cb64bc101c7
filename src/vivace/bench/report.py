"""The ladder as one HTML page: charts, tables, other people's figures. No script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from vivace.bench.ladder_table import columns_of
from vivace.bench.report_charts import Bar, bar_chart
from vivace.bench.report_published import REPORTS
from vivace.bench.tables import cell
from vivace.bench.timeline import COLOURS

_STYLE = """
:root { color-scheme: light dark; --line: #d5d8dd; --soft: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --line: #3a3f47; --soft: #9aa3af; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 0.9em; }
th, td { border-bottom: 1px solid var(--line); padding: 0.3rem 0.5rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.alone td { color: var(--soft); } .wide { overflow-x: auto; } p.note, .about { color: var(--soft); }
svg { width: 100%; height: auto; margin-top: 1rem; } .key span { margin-right: 1.2rem; }
""".strip()


def ladder_page(document: dict[str, Any]) -> str:
    """The whole page for a document of ``vivace bench ladder``."""
    seconds = sum(document["tokens"]) / 25
    lead = (
        f"{document['model']} on {document['hardware']}, PyTorch {document['torch']},"
        f" threads: {document['threads']}; {len(document['tokens'])} phrases, {seconds:.1f} s of audio."
    )
    return page(
        "The ladder",
        [
            f"<p>{escape(lead)} Every rung keeps what the rungs before it switched on;"
            " “alone” has nothing but its own change.</p>",
            *_charts(document),
            "<h2>All figures</h2>",
            _figures(document),
            "<h2>What each rung changes</h2>",
            _about(document),
            "<h2>What others reported</h2>",
            '<p class="note">Their hardware, their models, their phrases: not comparable with the figures above'
            " line by line.</p>",
            *_reports(),
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
        f'<tr class="{kind}">' + "".join(f"<td>{escape(text)}</td>" for text in cells) + "</tr>"
        for kind, cells in rows
    ]
    return f'<div class="wide"><table>\n<tr>{top}</tr>\n' + "\n".join(lines) + "\n</table></div>"


def _charts(document: dict[str, Any]) -> list[str]:
    rows = [row for row in document["rows"] if row["reason"] is None]
    floor = document["floors"][0] if document["floors"] else {}
    return [
        bar_chart(
            "First audio, milliseconds (median; logarithmic)",
            _bars(rows, lambda row: row["ttfb_ms_p50"], "{:,.0f} ms", "#3b6fb6"),
            is_log=True,
            floor=floor.get("ttfb_ms"),
        ),
        bar_chart(
            "Real-time factor (logarithmic; below 1 is faster than real time)",
            _bars(rows, lambda row: row["rtf"], "{:.3f}", "#c2573a"),
            is_log=True,
            floor=floor.get("rtf"),
        ),
        bar_chart(
            "Speech tokens per second of LM time",
            _bars(rows, lambda row: row["tps"], "{:,.0f}", "#7a569a"),
        ),
        bar_chart("Where the time goes, milliseconds for all phrases", _stage_bars(rows)),
        '<p class="key">'
        + "".join(
            f'<span><span style="color:{COLOURS[lane]}">■</span>{label}</span>'
            for lane, label in (("lm", "speech LM"), ("flow", "flow"), ("vocoder", "vocoder"))
        )
        + "stages may overlap in time; dashed: the float32 floor of this machine</p>",
    ]


def _bars(
    rows: Sequence[dict[str, Any]], figure: Callable[[dict[str, Any]], float], form: str, colour: str
) -> list[Bar]:
    return [
        Bar(_label(row), ((figure(row), colour),), form.format(figure(row)), row["kind"] == "alone")
        for row in rows
    ]


def _stage_bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    bars = []
    for row in rows:
        parts = tuple((row[f"{lane}_ms"], COLOURS[lane]) for lane in ("lm", "flow", "vocoder"))
        total = sum(value for value, _ in parts)
        bars.append(Bar(_label(row), parts, f"{total:,.0f}", row["kind"] == "alone"))
    return bars


def _label(row: dict[str, Any]) -> str:
    return f"{row['title']} (alone)" if row["kind"] == "alone" else str(row["title"])


def _figures(document: dict[str, Any]) -> str:
    columns = columns_of(document)
    rows: list[tuple[str, list[str]]] = []
    for row in document["rows"]:
        if row["reason"] is None:
            cells = [cell(row, name, factor, form) for name, _, factor, form in columns]
            rows.append((row["kind"], [_label(row), *cells]))
    for floor in document["floors"]:
        cells = [cell(floor, {"ttfb_ms_p50": "ttfb_ms"}.get(n, n), f, form) for n, _, f, form in columns]
        rows.append(("floor", [f"floor, {floor['format']}", *cells]))
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


def _reports() -> list[str]:
    parts = []
    for report in REPORTS:
        parts.append(f"<h3>{escape(report.title)}</h3>")
        parts.append(f'<p class="note">{escape(report.hardware)}; {escape(report.model)}</p>')
        parts.append(table(("figure", "before", "after"), [("", row) for row in report.rows]))
    return parts
