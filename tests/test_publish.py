"""All figures in one command: its tables, its options, what it prints, the pictures."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from rich.console import Console

from benchmarks import publish, rows
from benchmarks.steps import ROOT, Outcome, Runner, Step
from tests.test_steps import counted, is_running, script
from vivace.bench import ladder_judge
from vivace.cli import app


def test_groups_and_names_of_steps():
    steps = publish.cuda_steps()
    assert publish.chosen(steps, "") == [step.name for step in steps]
    assert publish.chosen(steps, "ladder, single-2") == ["single-2", "ladder"]
    serving = publish.chosen(steps, "serving")
    assert len(serving) == 5
    assert serving[0] == "serving-streams"
    assert all(name.startswith("serving-") for name in serving)
    with pytest.raises(ValueError, match="there is no step servin; there are checkpoint, "):
        publish.chosen(steps, "servin")


class ReachedError(Exception):
    """A command understood its options and began to work, with these."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_commands_of_the_tables_are_understood(device, tmp_path, monkeypatch):
    """Each command with its options, up to where its work begins."""
    reference = ["--repo", str(tmp_path), "--reference-fp16"]
    steps = publish.cuda_steps(reference) if device == "cuda" else publish.cpu_steps(judge=True)
    Runner(steps, tmp_path)
    monkeypatch.chdir(tmp_path)
    publish.write_jobs(tmp_path / "jobs.jsonl")
    modules = set()
    for step in steps:
        assert 0 < step.usual_s < step.most_s
        program, *arguments = shlex.split(step.command.replace("{seconds}", "60"))
        if program == "vivace":
            reach(arguments, monkeypatch)
            continue
        assert arguments[0] == "-m"
        modules.add(arguments[1])
        if arguments[1] == "pytest":
            files = [argument for argument in arguments if argument.endswith(".py")]
            assert files
            assert all(Path(file).is_file() for file in files)
        else:
            assert parsed(arguments[1], arguments[2:], monkeypatch) is not None
    kernels = {f"benchmarks.kernels.{path.stem}" for path in (ROOT / "benchmarks/kernels").glob("[a-z]*.py")}
    kernels.remove("benchmarks.kernels.compile")  # which needs no GPU
    others = {"pytest", "benchmarks.compare_reference", "benchmarks.server_speech"}
    assert modules == (others | kernels if device == "cuda" else set())
    text = "".join(step.command for step in steps)
    assert ("--judge" in text) is (device == "cpu")


def parsed(module, arguments, monkeypatch):
    """What a program that uses argparse makes of its command line; it goes no further."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self, *given):
        raise ReachedError(parse(self, *given))

    main = importlib.import_module(module).main
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr("sys.argv", [module, *arguments])
        with pytest.raises(ReachedError) as reached:
            main()
    return reached.value.args[0]


def reach(arguments, monkeypatch):
    """A ``vivace`` command up to the call of what measures, whose own checks of its settings are made here."""
    name = arguments[1] if arguments[0] == "bench" else arguments[0]
    if name in ("batch", "random-checkpoint"):
        understand(app, arguments)
        return
    module = importlib.import_module(f"vivace.bench.{name}")
    signature = inspect.signature(module.run)

    def run(*given, **named):
        raise ReachedError(signature.bind(*given, **named).arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "run", run)
        patch.setattr(ladder_judge, "WhisperJudge", object)  # needs packages that may not be there
        with pytest.raises(ReachedError) as reached:
            typer.main.get_command(app)(arguments, standalone_mode=False)
    found = reached.value.args[0]
    if name == "serving":
        found["settings"].check()
    elif name == "llm":
        module._check(found["batches"], found["context"], found["runs"], found["choices"])
    elif name == "ladder":
        module._check(found["runs"], found["rungs"])
    elif name == "throughput":
        module.check(found["batches"], found["requests"])


def understand(app, arguments):
    """Parses a command line without running it."""
    command, path = typer.main.get_command(app), []
    while hasattr(command, "commands"):
        path.append(arguments[0])
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(path[-1], list(arguments))


def test_the_command_on_this_machine_ends_with_status_and_document(tmp_path, monkeypatch, capsys):
    steps = [
        Step("fine", 0, 20, counted("fine")),
        Step("wrong-1", 0, 20, script("print('all went well until here'); raise SystemExit(2)")),
    ]
    monkeypatch.setattr(publish, "cpu_steps", lambda judge: steps)
    arguments = ["--device", "cpu", "--out", str(tmp_path / "out")]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert publish.main([*arguments, "--only", "fine"]) == 0
        assert publish.main(arguments) == 1
        assert publish.main([*arguments, "--only", "nothing"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    printed, complained = capsys.readouterr()
    document = json.loads(printed.splitlines()[-1])
    assert [(step["name"], step["state"], step["earlier"]) for step in document["steps"]] == [
        ("fine", "done", True),
        ("wrong-1", "failed", False),
    ]
    assert "done before" in printed
    assert "the end of wrong-1.txt:\n  all went well until here\n" in printed
    assert "done 1, failed 1; left: nothing" in printed
    assert "there is no step nothing" in complained
    jobs = [json.loads(line) for line in (tmp_path / "out" / "jobs.jsonl").read_text().splitlines()]
    assert len({job["id"] for job in jobs}) == len({job["text"] for job in jobs}) == publish.JOBS


def test_a_reason_in_brackets_is_shown_as_it_is(tmp_path):
    file = io.StringIO()
    failed = Outcome("bad", "failed", 1.5, "exit status 1: [Errno 28] no space [/]")
    publish.show([failed], tmp_path, Console(file=file, width=150))
    assert "exit status 1: [Errno 28] no space [/]" in file.getvalue()


def test_a_run_that_is_ended_takes_its_step_along_and_remembers_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from benchmarks import publish; from benchmarks.steps import Step\n"
        'slow = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"\n'
        "publish.cpu_steps = lambda judge: [Step('slow', 0, 60, f\"python -c '{slow}'\")]\n"
        f"sys.exit(publish.main(['--device', 'cpu', '--out', {str(tmp_path)!r}]))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        output = tmp_path / "slow.txt"
        ends = time.monotonic() + 60
        while not (output.exists() and output.read_text().endswith("\n")) and time.monotonic() < ends:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == publish.INTERRUPTED
        printed = process.stdout.read()
    assert not is_running(int(output.read_text()))
    kept = json.loads((tmp_path / "steps.json").read_text())["slow"]
    assert (kept["state"], kept["reason"]) == ("left", "was interrupted")
    assert "left 1; left: slow" in printed


def test_rows_do_not_make_a_checkout_dirty(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text("")
    (tmp_path / "code.py").write_text("")
    monkeypatch.setattr(rows, "__file__", str(tmp_path / "benchmarks" / "rows.py"))
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "First")
    clean = rows.commit_of_checkout()
    assert len(clean) == 7
    (folder / "a.jsonl").write_text("{}\n")
    assert rows.commit_of_checkout() == clean
    (tmp_path / "code.py").write_text("x = 1\n")
    assert rows.commit_of_checkout() == f"{clean}-dirty"
