"""All figures in one command: time limits, going on, failures, rows. Steps are tiny scripts."""

from __future__ import annotations

import importlib.util
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

from benchmarks import compare_reference, publish, rows
from benchmarks.steps import ROOT, Outcome, Runner, Step, environment, last_document
from vivace.bench.serving_chart import serving_svg
from vivace.cli import app


def script(code):
    return f"python -c {shlex.quote(code)}"


def counted(name, document='{"bench": "toy", "hardware": "none"}'):
    """Leaves a mark for each run, and prints a table and a document."""
    return script(f"open('{name}.runs', 'a').write('x'); print('a table'); print('{document}')")


def runs(folder, name):
    path = folder / f"{name}.runs"
    return len(path.read_text()) if path.exists() else 0


def run(steps, out, names=None, **settings):
    runner = Runner(steps, out, say=lambda line: None, **settings)
    return {found.name: found for found in runner.run(names or [step.name for step in steps])}


def test_outputs_documents_and_rows_are_kept_and_finished_steps_skipped(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    steps = [
        Step("one", 0, 20, counted("one")),
        Step("two", 0, 20, counted("two", '{"figure": 2}')),
        Step("three", 0, 20, script("open('made', 'w')"), has_document=False),
    ]
    settings = {"results": results, "commit": "abc1234", "identity": lambda: {"hardware": "some"}}
    found = run(steps, out, **settings)
    assert [outcome.state for outcome in found.values()] == ["done"] * 3
    assert (out / "one.txt").read_text().splitlines()[0] == "a table"
    assert json.loads((out / "two.json").read_text()) == {"figure": 2}
    [toy] = map(json.loads, (results / "toy.jsonl").read_text().splitlines())
    assert list(toy)[:3] == ["bench", "hardware", "commit"]
    assert (toy["commit"], toy["step"]) == ("abc1234", "one")
    [two] = map(json.loads, (results / "two.jsonl").read_text().splitlines())
    assert (two["bench"], two["hardware"], two["figure"]) == ("two", "some", 2)
    moved = tmp_path / "moved"
    out.rename(moved)
    again = run(steps, moved, **settings)
    assert all(outcome.state == "done" and outcome.earlier for outcome in again.values())
    assert runs(moved, "one") == 1
    assert len((results / "toy.jsonl").read_text().splitlines()) == 1


def test_a_failing_step_has_a_reason_and_no_row_and_stops_no_other(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    document = '{"bench": "toy", "hardware": "none"}'
    steps = [
        Step("bad", 0, 20, script(f"import sys; print('{document}'); sys.exit('disk full')")),
        Step("silent", 0, 20, script("print('a table only')")),
        Step("torn", 0, 20, script("print('{\"bench\": ')")),
        Step("good", 0, 20, counted("good")),
    ]
    found = run(steps, out, results=results)
    assert found["bad"].state == found["silent"].state == found["torn"].state == "failed"
    assert found["bad"].reason == "exit status 1: disk full"
    assert found["silent"].reason == found["torn"].reason == "printed no JSON document"
    assert not (out / "bad.json").exists()
    assert found["good"].state == "done"
    assert len((results / "toy.jsonl").read_text().splitlines()) == 1


def test_failed_steps_are_tried_again_behind_the_others(tmp_path):
    begun = []
    steps = [
        Step("first", 0, 20, script("import os, sys; sys.exit(not os.path.exists('repaired'))")),
        Step("second", 0, 20, counted("second")),
    ]
    assert run(steps, tmp_path, ["first"])["first"].state == "failed"
    (tmp_path / "repaired").touch()
    Runner(steps, tmp_path, say=begun.append).run(["first", "second"])
    assert [line.split(":")[0] for line in begun if "begins" in line] == ["second", "first"]


def test_a_step_over_its_own_limit_fails_with_all_that_it_started(tmp_path):
    child = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys, time; "
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}]); print(child.pid, flush=True); time.sleep(60)"
    )
    begun = time.monotonic()
    found = run([Step("slow", 0, 4, script(code))], tmp_path, limit_s=60)
    assert time.monotonic() - begun < 20
    assert found["slow"].state == "failed"
    assert found["slow"].reason == "took longer than 4 s"
    assert not is_running(int((tmp_path / "slow.txt").read_text()))


def is_running(pid):
    """False for a process that has ended, also while nobody has asked for its status."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


def test_steps_without_time_are_left_and_one_that_the_end_cuts_too(tmp_path):
    steps = [
        Step("long", 500, 600, counted("long")),
        Step("cut", 0, 60, script("import time; time.sleep(60)")),
        Step("late", 1, 60, counted("late")),
    ]
    found = run(steps, tmp_path, limit_s=2)
    assert [outcome.state for outcome in found.values()] == ["left"] * 3
    assert found["long"].reason.startswith("takes about 500 s, ")
    assert found["cut"].reason.startswith("was ended with the run")
    assert runs(tmp_path, "late") == 0
    again = run(steps, tmp_path, ["long", "late"])
    assert [outcome.state for outcome in again.values()] == ["done", "done"]


def test_what_a_step_needs_runs_first_and_again_only_where_it_is_gone(tmp_path):
    make = "import os; os.mkdir('folder'); open('make.runs', 'a').write('x')"
    steps = [
        Step("make", 0, 20, script(make), makes="folder", clears=("folder",), has_document=False),
        Step("use", 0, 20, counted("use"), needs=("make",)),
        Step("more", 0, 20, counted("more"), needs=("make",)),
    ]
    (tmp_path / "folder").mkdir()  # half made by somebody else
    assert list(run(steps, tmp_path, ["use"])) == ["make", "use"]
    assert runs(tmp_path, "make") == 1
    (tmp_path / "folder").rmdir()
    run(steps, tmp_path, ["make", "use"])
    assert runs(tmp_path, "make") == 1  # nothing is left that reads it
    run(steps, tmp_path)
    assert runs(tmp_path, "make") == 2
    assert runs(tmp_path, "more") == 1


def test_a_step_whose_need_fails_is_left(tmp_path):
    steps = [
        Step("make", 0, 20, script("raise SystemExit(3)"), makes="folder", has_document=False),
        Step("use", 0, 20, counted("use"), needs=("make",)),
        Step("more", 0, 20, counted("more"), needs=("make",)),
    ]
    found = run(steps, tmp_path)
    assert [outcome.state for outcome in found.values()] == ["failed", "left", "left"]
    assert found["more"].reason == "needs make"
    with pytest.raises(ValueError, match="make"):
        Runner(steps[1:], tmp_path)


PORTION = """
import json, sys
done = len(open("p.runs").read()) if __import__("os").path.exists("p.runs") else 0
open("p.runs", "a").write("x")
print(sys.argv[1])
rows = [{"reason": None if index <= done else "no time was left"} for index in range(3)]
print(json.dumps({"bench": "toy", "hardware": "none", "rows": rows}))
"""


def test_portions_go_on_until_no_row_is_left(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    steps = [Step("portions", 0, 100, script(PORTION) + " {seconds}", goes_on=True)]
    states, reasons = [], []
    for _ in range(4):
        found = run(steps, out, results=results)["portions"]
        states.append((found.state, found.earlier))
        reasons.append(found.reason)
    assert states == [("left", False), ("left", False), ("done", False), ("done", True)]
    assert reasons == ["2 of 3 rows are left", "1 of 3 rows are left", "", ""]
    assert (out / "portions.txt").read_text().splitlines()[0] == "60"
    assert len((results / "toy.jsonl").read_text().splitlines()) == 1


def test_environment_of_a_step_holds_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = environment(tmp_path / "out", {"PYTHONPATH": "src:/site", "HOME": "/h", "VIVACE_CACHE": "/used"})
    assert found["PYTHONPATH"] == f"{ROOT}:{tmp_path}/src:/site"
    assert found["VIVACE_CACHE"] == str(tmp_path / "out" / "cache" / "vivace_cache")
    assert found["HOME"] == "/h"


def test_last_document_stands_before_warnings(tmp_path):
    path = tmp_path / "output"
    path.write_text('{"old": 1}\n{"new": 2}\n{no json\nWarning: x\n', encoding="utf-8")
    assert last_document(path) == {"new": 2}


def test_groups_and_names_of_steps():
    steps = publish.cuda_steps()
    assert publish.chosen(steps, "") == [step.name for step in steps]
    assert publish.chosen(steps, "ladder, single-2") == ["single-2", "ladder"]
    serving = publish.chosen(steps, "serving")
    assert len(serving) == 5
    assert all(name.startswith("serving-") for name in serving)
    with pytest.raises(ValueError, match="there is no step servin; there are checkpoint, "):
        publish.chosen(steps, "servin")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_commands_of_the_tables_are_understood(device, tmp_path, monkeypatch):
    """Each ``vivace`` command with its options, as far as the parser goes."""
    reference = ["--repo", str(tmp_path), "--reference-fp16"]
    steps = publish.cuda_steps(reference) if device == "cuda" else publish.cpu_steps(judge=True)
    Runner(steps, tmp_path)
    for step in steps:
        assert 0 < step.usual_s < step.most_s
        program, *arguments = shlex.split(step.command.replace("{seconds}", "60"))
        if program == "vivace":
            understand(app, arguments)
        elif "benchmarks.compare_reference" in arguments:
            monkeypatch.setattr("sys.argv", arguments[1:])
            assert compare_reference._options().reference_fp16
        else:
            assert arguments[0] == "-m"
            assert importlib.util.find_spec(arguments[1])
    text = "".join(step.command for step in steps)
    assert ("--judge" in text) is (device == "cpu")


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
        Step("wrong-1", 0, 20, script("raise SystemExit(2)")),
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
    assert "there is no step nothing" in complained
    jobs = [json.loads(line) for line in (tmp_path / "out" / "jobs.jsonl").read_text().splitlines()]
    assert len({job["id"] for job in jobs}) == len({job["text"] for job in jobs}) == publish.JOBS


def test_a_reason_in_brackets_is_shown_as_it_is():
    file = io.StringIO()
    failed = Outcome("bad", "failed", 1.5, "exit status 1: [Errno 28] no space [/]")
    publish.show([failed], Console(file=file, width=150))
    assert "exit status 1: [Errno 28] no space [/]" in file.getvalue()


def test_a_run_that_is_ended_takes_its_step_along_and_remembers_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from benchmarks import publish; from benchmarks.steps import Step\n"
        'slow = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"\n'
        "publish.cpu_steps = lambda judge: [Step('slow', 0, 60, f\"python -c '{slow}'\")]\n"
        f"publish.main(['--device', 'cpu', '--out', {str(tmp_path)!r}])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        output = tmp_path / "slow.txt"
        ends = time.monotonic() + 60
        while not (output.exists() and output.read_text().endswith("\n")) and time.monotonic() < ends:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) != 0
    assert not is_running(int(output.read_text()))
    assert json.loads((tmp_path / "steps.json").read_text())["slow"]["state"] == "begun"


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


def test_picture_of_a_sweep_in_several_rows():
    path = ROOT / "docs" / "pictures" / "make_serving.py"
    spec = importlib.util.spec_from_file_location("make_serving", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recorded = (ROOT / "benchmarks" / "results" / "serving.jsonl").read_text(encoding="utf-8").splitlines()[0]
    base = json.loads(recorded)
    point = next(point for point in base["points"] if "streams" in point)
    others = {name: value for name, value in point.items() if name != "streams"}

    def row(*points, **other):
        return base | {"commit": "abc1234", "points": list(points)} | other

    rows_of_file = [
        row(point | {"streams": 7}, commit="older00"),
        row(point | {"streams": 1, "ttfb_ms_p50": 99.0}, point | {"streams": 32}),
        row(point | {"streams": 400}, point | {"streams": 1, "ttfb_ms_p50": 21.5}, others | {"offline": 400}),
        row(others | {"rate": 10.0}),
        row(point | {"streams": 16}, deterministic=True),
        row(point | {"streams": 2}, loop="reply"),
        row(point | {"streams": 3}, hardware="another"),
    ]
    merged = module.sweep(rows_of_file[:-1])
    loads = [point.get("streams", point.get("rate", point.get("offline"))) for point in merged["points"]]
    assert loads == [1, 32, 400, 10.0, 400]
    assert merged["points"][0]["ttfb_ms_p50"] == 21.5
    assert merged["most_streams_in_real_time"] == 400
    drawn = serving_svg(merged)
    assert "p50, 1: 21.5" in drawn
    assert "p50, 32:" in drawn
    assert [point["streams"] for point in module.sweep(rows_of_file)["points"]] == [3]
    with pytest.raises(ValueError, match="no row"):
        module.sweep(rows_of_file[4:6])
