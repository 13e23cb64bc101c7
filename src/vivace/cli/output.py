"""Where ``say`` and ``transform`` put their audio: a file that grows, or standard output."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vivace.cli.end_signals import end_signals_held
from vivace.cli.estimate import Estimate
from vivace.cli.options import print_json, print_line
from vivace.errors import InvalidRequestError

if TYPE_CHECKING:
    from types import FrameType

    from vivace.audio.formats import AudioWriter
    from vivace.datatypes import AudioChunk, SynthesisResult
    from vivace.engine import SpeechStream

STANDARD_OUTPUT = Path("-")
INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit codes as a shell knows them: 128 and the number of the signal, SIGINT and SIGPIPE."""


@dataclass(frozen=True, slots=True)
class Target:
    """What ``--out`` and ``--format`` name. Made by ``check_target``."""

    path: Path
    format: str = "wav"

    @property
    def is_standard_output(self) -> bool:
        return self.path == STANDARD_OUTPUT

    @property
    def kept_path(self) -> Path:
        """Where the audio goes that an interrupted command has made."""
        return self.path.with_suffix(f".part{self.path.suffix}")

    def open(self, rate_hz: int) -> AudioWriter:
        """Raises OSError: it cannot be written."""
        from vivace.audio.formats import StreamWriter, open_writer

        if self.is_standard_output:
            return StreamWriter(sys.stdout.buffer, self.format, rate_hz)
        return open_writer(self.path, rate_hz)

    def print_line(self, line: str) -> None:
        """For the user: on standard error where standard output holds the audio."""
        if self.is_standard_output:
            print_error(line)
        else:
            print_line(line)


def check_target(out: Path, audio_format: str | None) -> Target:
    """Finds out before any work whether audio can go there.

    Raises:
        InvalidRequestError: ``unsupported_value``. OSError: as ``audio.formats.check_target``.
    """
    from vivace.audio.encoders import check_stream_format
    from vivace.audio.formats import check_target as check_path

    if out != STANDARD_OUTPUT:
        if audio_format is not None:
            raise InvalidRequestError(
                "the file's suffix says its format; --format is for --out -",
                code="unsupported_value",
                param="format",
            )
        check_path(out)
        return Target(out)
    if sys.stdout.isatty():
        raise InvalidRequestError(
            "standard output is a terminal: send the audio on (| aplay), or name a file",
            code="unsupported_value",
            param="out",
        )
    return Target(out, check_stream_format(audio_format or "wav", "--format"))


def write_stream(stream: SpeechStream, target: Target, rate_hz: int, estimate: Estimate) -> SynthesisResult:
    """Writes a stream as it comes, with a progress bar on standard error.

    Ctrl-C ends it: what a file has by then is kept as ``Target.kept_path``, whole as far as it goes.

    Raises:
        typer.Exit: interrupted, or nobody reads standard output any more.
    """
    # Opened with the first audio in hand: a request that fails before leaves an older file alone.
    with _progress() as show, _Interrupts() as interrupts:
        first = list(islice(stream, 1))
        interrupts.hold()
        try:
            with ExitStack() as stack:
                with end_signals_held():  # or a file just made would be nobody's
                    writer = stack.enter_context(target.open(rate_hz))
                for chunk in interrupts.between(first, stream):
                    writer.write(chunk.samples)
                    show(chunk, estimate, stream.summary())
        except BrokenPipeError:
            stream.close()
            _leave_standard_output()
            raise typer.Exit(BROKEN_PIPE) from None
        if interrupts.happened:
            stream.close()
            _keep(stream.summary(), target)
            raise typer.Exit(INTERRUPTED)
    return stream.summary()


def report(result: SynthesisResult, target: Target, as_json: bool) -> None:
    """The figures of a request that has ended well."""
    if result.skipped_text:
        named = " | ".join(result.skipped_text)
        print_error(f"vivace: Not spoken, since the model cannot read it: {named}")
    times = result.times
    target.print_line(
        f"{target.path}: {result.audio_seconds:.2f} s of audio, TTFB {result.ttfb_ms:.0f} ms, RTF {result.rtf:.3f}, "
        f"TPS {result.tps:.0f} | text {times.text_ms:.0f} ms, LM {times.lm_ms:.0f} ms, flow {times.flow_ms:.0f} ms, "
        f"vocoder {times.vocoder_ms:.0f} ms, waiting {times.waiting_ms:.0f} ms"
    )
    if as_json:
        document = asdict(result)
        del document["samples"]
        print_json({"out": str(target.path), **document}, target.print_line)


def print_error(line: str) -> None:
    """Standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _keep(result: SynthesisResult, target: Target) -> None:
    """Nothing half made has the name of a whole result."""
    if target.is_standard_output:
        print_error(f"vivace: stopped after {result.audio_seconds:.1f} s of audio")
        return
    os.replace(target.path, target.kept_path)
    print_error(f"vivace: stopped; the {result.audio_seconds:.1f} s made so far are in {target.kept_path}")


def _leave_standard_output() -> None:
    """Its end at exit would complain of the pipe once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def _progress() -> Iterator[Callable[[AudioChunk, Estimate, SynthesisResult], None]]:
    """A bar on standard error, silent where that is no terminal; and one line where the work will take long."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("speaking"),
        BarColumn(),
        TextColumn("{task.fields[audio]:.1f} s of audio"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None, audio=0.0)

        def show(chunk: AudioChunk, estimate: Estimate, so_far: SynthesisResult) -> None:
            line = estimate.note(chunk, so_far)
            if line is not None:
                print_error(line)
            audio_s = chunk.start_s + len(chunk.samples) / chunk.sample_rate_hz
            progress.update(task, audio=audio_s, completed=audio_s, total=estimate.audio_seconds)

        yield show


class _Interrupts:
    """Ctrl-C ends the wait for the next chunk, and never a write half way.

    Attributes:
        happened: there was one.
    """

    def __init__(self) -> None:
        self.happened = False
        self._is_waiting = False
        self._previous: object = None

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def hold(self) -> None:
        """From now on Ctrl-C is only noted, but while ``between`` waits. Python's own handling stays elsewhere."""
        if self._previous is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    def between(self, first: list[AudioChunk], stream: SpeechStream) -> Iterator[AudioChunk]:
        """All chunks, or those until Ctrl-C."""
        yield from first
        while not self.happened:
            try:
                self._is_waiting = True
                chunk = None if self.happened else next(stream, None)
                self._is_waiting = False
            except KeyboardInterrupt:
                self.happened = True
                return
            if chunk is None:
                return
            yield chunk

    def _note(self, number: int, frame: FrameType | None) -> None:
        was_first, self.happened = not self.happened, True
        if self._is_waiting or not was_first:  # twice: whoever presses it does not want to wait
            self._is_waiting = False
            raise KeyboardInterrupt
