"""``vivace batch``: a list of texts, each into a file."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli.end_signals import end_signals_cancel_task
from vivace.cli.options import (
    AsJson,
    Consent,
    Deterministic,
    Device,
    Dtype,
    Lm,
    MaxStreams,
    Model,
    Precision,
    Tokenizer,
    Variant,
    open_engine,
    print_json,
    print_line,
)

if TYPE_CHECKING:
    from vivace.batch import Batch, BatchSummary, JobResult
    from vivace.engine import Engine

STANDARD_INPUT = Path("-")
LINE_ADVICE = 'give one JSON object a line, such as {"id": "a", "text": "Hi."}'
MOST_LISTED = 50
"""Failures that are shown; all of them stand in the results."""


def batch(
    jobs: Annotated[
        Path,
        typer.Argument(
            help='One JSON object a line: {"id": "a", "text": "Hi."}; \'-\' reads standard input, to its end first.'
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the audio and results.jsonl.")],
    model: Model = "mini",
    voice: Annotated[str | None, typer.Option(help="Voice of jobs that name none.")] = None,
    speed: Annotated[float, typer.Option(help="Of jobs that name none: 0.25 to 4.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of jobs that name none.")] = 0,
    audio_format: Annotated[
        str, typer.Option("--format", help="Of jobs that name none: wav, flac, mp3, opus, aac or pcm.")
    ] = "wav",
    consent: Consent = False,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
    lm: Variant = Lm.base,
    tokenizer: Tokenizer = None,
    max_streams: MaxStreams = None,
    deterministic: Deterministic = False,
    as_json: AsJson = False,
) -> None:
    """Speak many texts as fast as the device allows; the same command again goes on where it stopped."""
    from vivace.batch import Batch, ResultsFolder, read_jobs
    from vivace.checkpoint import model_folder
    from vivace.engine.routing import MANY_STREAMS

    defaults = {"voice": voice, "speed": speed, "seed": seed, "format": audio_format, "consent": consent}
    given = {name: value for name, value in defaults.items() if value is not None}
    total, source = _open_jobs(jobs)
    listed = read_jobs(source, given)

    def open_this() -> Engine:
        streams = max_streams or (1 if device == "cpu" else MANY_STREAMS)
        return open_engine(
            model, device, dtype, lm, tokenizer=tokenizer, max_streams=streams, deterministic=deterministic
        )

    with ResultsFolder(out) as results, _progress(total) as show:
        work = Batch(
            listed,
            results,
            model=f"{model_folder(model).resolve().name} {lm.value}",
            on_result=lambda result: show(work.summary),
        )
        try:
            if work.has_work():
                show(work.summary)
                asyncio.run(_run(work, open_this))
        except (KeyboardInterrupt, SystemExit):
            sys.stderr.write("vivace: stopped; the same command goes on from here\n")
            raise
    if not work.summary.num_jobs:
        place = "standard input" if jobs == STANDARD_INPUT else str(jobs)
        sys.stderr.write(f"vivace: {place}: no jobs, so there was nothing to do; {LINE_ADVICE}\n")
    _list_failures(work.summary.failures)
    if work.summary.incomplete:
        sys.stderr.write(
            f"vivace: Of {work.summary.incomplete} texts words were not spoken, since the model cannot read them; "
            "skipped_text in the results names them.\n"
        )
    _report(work.summary, out, as_json)
    if work.summary.failures:
        raise typer.Exit(1)


async def _run(work: Batch, open_this: Callable[[], Engine]) -> None:
    from vivace.engine import AsyncEngine

    async with AsyncEngine(open_this()) as engine:
        with end_signals_cancel_task():
            await work.run(engine)


def _open_jobs(path: Path) -> tuple[int, Path | list[bytes]]:
    """How many jobs a progress bar counts to, and where they are: in the file, or in the lines that a pipe had.

    Raises:
        OSError: it cannot be read; of a file that is not there it says what to name.
    """
    if path == STANDARD_INPUT:
        lines = _standard_input()
        return _count(lines), lines
    try:
        with path.open("rb") as file:
            if path.is_file():
                return _count(file), path
            lines = list(file)  # a pipe gives them once
            return _count(lines), lines
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, f"this jobs file does not exist; {LINE_ADVICE}", str(path)
        ) from None
    except IsADirectoryError:
        raise IsADirectoryError(
            errno.EISDIR, f"is a folder, not a jobs file; {LINE_ADVICE}", str(path)
        ) from None


def _standard_input() -> list[bytes]:
    stdin = sys.stdin  # None where it was closed
    if isinstance(stdin, TextIOWrapper):
        return list(stdin.buffer)
    return [line.encode() for line in stdin or ()]


def _count(lines: Iterable[bytes]) -> int:
    """Those that are not empty."""
    return sum(1 for line in lines if line.strip())


@contextmanager
def _progress(total: int) -> Iterator[Callable[[BatchSummary], None]]:
    """A bar on standard error; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed, {task.fields[audio]:.0f} s of audio"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, failed=0, audio=0.0)

        def show(summary: BatchSummary) -> None:
            bar.update(
                task, completed=summary.num_jobs, failed=len(summary.failures), audio=summary.audio_seconds
            )

        yield show


def _list_failures(failures: list[JobResult]) -> None:
    for each in sorted(failures, key=lambda result: result.line or 0)[:MOST_LISTED]:
        name = "" if each.id is None else "".join(c if c.isprintable() else "?" for c in each.id)
        line = "" if each.line is None else f"line {each.line}"
        sys.stderr.write(f"vivace: {', '.join(filter(None, (line, name)))}: {each.message} ({each.code})\n")
    if len(failures) > MOST_LISTED:
        sys.stderr.write(f"vivace: and {len(failures) - MOST_LISTED} more, which the results name\n")


def _report(summary: BatchSummary, out: Path, as_json: bool) -> None:
    figures = summary.to_dict()
    print_line(
        f"{out}: {summary.done} done, {summary.skipped} done before, {len(summary.failures)} failed; "
        f"{summary.audio_seconds:.1f} s of audio in {summary.wall_seconds:.1f} s, "
        f"{figures['audio_seconds_per_second']:.2f} audio seconds per second"
    )
    if as_json:
        print_json({"out": str(out), **figures})
