"""Progress of benchmarks: a bar on standard error where that is a terminal, never in what a script reads."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vivace.bench import llm, profile, single, streaming, throughput
from vivace.bench.progress import Count, progress_bar
from vivace.cli import app

RUNS = {
    "throughput": lambda model, out, told: throughput.run(
        model, seconds=1.0, batches=(1, 2), requests=1, with_start=True, progress=told
    ),
    "profile": lambda model, out, told: profile.run(model, out=out, seconds=1.0, batch=2, progress=told),
    "single": lambda model, out, told: single.run(
        model, seconds=1.0, requests=2, runs=2, long_seconds=3.0, progress=told
    ),
    "llm": lambda model, out, told: llm.run(
        model, batches=(1, 2), context=20, runs=1, choices=("eager",), progress=told
    ),
    "streaming": lambda model, out, told: streaming.run(model, seconds=1, runs=2, progress=told),
}

LAST = {
    "throughput": ("2 side by side", 24, 24),
    "profile": ("2 side by side", 6, 6),
    "single": ("3 s at once", 7, 7),
    "llm": ("eager, batch 2", 2, 2),
    "streaming": ("an utterance of 1 s", 3, 3),
}
"""What each says at the end: the title, how much is done, how much there is."""


@pytest.mark.parametrize("bench", RUNS)
def test_all_that_is_counted_gets_done(bench, random_model_folder, tmp_path):
    told = []
    RUNS[bench](str(random_model_folder), tmp_path, lambda *step: told.append(step))
    assert told[-1] == LAST[bench]
    assert {total for _, _, total in told} == {LAST[bench][2]}
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert done[0] == 0


COMMANDS = {
    "throughput": ("2 side by side", "--seconds 1 --requests 1 --batch 2"),
    "profile": ("2 side by side", "--seconds 1 --requests 1 --batch 2"),
    "single": ("one stream", "--seconds 1 --requests 1 --runs 1"),
    "llm": ("eager, batch 1", "--batch 1 --context 20 --runs 1 --choices eager"),
    "streaming": ("an utterance of 1 s", "--seconds 1 --runs 1"),
    "ladder": ("our kernels (the engine)", "--tokens 30 --rungs kernels"),
    "limits": ("the machine", ""),
}


@pytest.mark.parametrize("bench", COMMANDS)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_bar_is_on_a_terminal_and_the_document_on_standard_output(
    bench, is_terminal, random_model_folder, tmp_path, monkeypatch
):
    title, options = COMMANDS[bench]
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    command = ["limits"] if bench == "limits" else ["bench", bench]
    if bench == "profile":
        command += ["--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "-m", str(random_model_folder), *options.split()])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["bench"] == bench
    assert (title in done.stderr) == is_terminal
    assert is_terminal or done.stderr == ""


def test_bar_shows_what_is_done_of_how_much():
    terminal, pipe = (Console(file=io.StringIO(), force_terminal=yes, width=100) for yes in (True, False))
    for console in (terminal, pipe):
        with progress_bar(console) as progress:
            progress("reading", 3, 7)
    assert "reading" in terminal.file.getvalue()
    assert "3/7" in terminal.file.getvalue()
    assert pipe.file.getvalue() == ""


def test_a_count_without_a_listener_counts():
    count = Count(None, 2)
    count.begin("one")
    count.advance()
    assert (count.done, count.total) == (1, 2)
