"""The ``vivace`` command. Exit codes: 0 done, 1 the request failed, 2 a model folder or the usage is at fault."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from vivace import __version__
from vivace.cli.batch import batch
from vivace.cli.bench import bench_app, limits
from vivace.cli.end_signals import end_on_signals
from vivace.cli.options import print_line
from vivace.cli.server import serve
from vivace.cli.speech import say, transform
from vivace.cli.tools import compile_kernels, convert, doctor, random_checkpoint
from vivace.cli.voices import voice_app
from vivace.environment import spin_briefly
from vivace.errors import ModelFolderError, ServeError, VivaceError

app = typer.Typer(
    name="vivace",
    help="Fast, exact, streaming CosyVoice text-to-speech.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (say, transform, batch, convert, doctor, random_checkpoint, serve, limits):
    app.command()(command)
app.command("compile")(compile_kernels)
app.add_typer(voice_app, name="voice")
app.add_typer(bench_app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        print_line(f"vivace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself; its help is the application's."""


def _take_any_text() -> None:
    """Text comes in as UTF-8 whatever the locale says, and none that goes out is an error."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point: errors of ours become one line and an exit code."""
    spin_briefly()
    end_on_signals()
    _take_any_text()
    try:
        app()
    except (ModelFolderError, ServeError) as error:
        sys.stderr.write(f"vivace: {error.sentence}\n")
        sys.exit(2)
    except VivaceError as error:
        sys.stderr.write(f"vivace: {error.sentence} ({error.code})\n")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"vivace: {where}{error.strerror or type(error).__name__}\n")
        sys.exit(1)
