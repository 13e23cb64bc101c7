"""Steps in processes of their own: time limits, going on, failures, rows. Steps are tiny scripts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.processes import end_processes_of, processes_of
from benchmarks.steps import (
    ROOT,
    BusyError,
    Outcome,
    Runner,
    Step,
    environment,
    last_document,
    only_one_in,
    plan,
    usual_s,
)


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
    [toy] = map(json.loads, (results / "toy.jsonl").read_text().splitlines())
    assert list(toy)[:3] == ["bench", "hardware", "commit"]
    assert (toy["commit"], toy["step"]) == ("abc1234", "one")
    [two] = map(json.loads, (results / "two.jsonl").read_text().splitlines())
    assert (two["bench"], two["hardware"], two["figure"]) == ("two", "some", 2)
    assert json.loads((out / "two.json").read_text()) == two
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


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@needs_proc
def test_nothing_that_a_step_has_started_outlives_it(tmp_path):
    """Also in a session of its own, and with another process's children."""
    code = (
        "import subprocess, sys; sleeper = [sys.executable, '-c', 'import time; time.sleep(60)']; "
        "print(subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    found = run([Step("leaves", 0, 20, script(code), has_document=False)], tmp_path)
    assert found["leaves"].state == "done"
    assert not is_running(int((tmp_path / "leaves.txt").read_text()))
    assert processes_of(tmp_path) == []


ONE_STEP = """
import os, pathlib, sys, time
name = sys.argv[1]
if not pathlib.Path(name + ".calm").exists():
    if os.fork():
        pathlib.Path(name + ".begun").touch()
    time.sleep(60)
print('{"bench": "toy", "hardware": "none"}')
"""


@needs_proc
def test_a_run_that_is_killed_in_every_step_goes_on_and_measures_each_once(tmp_path):
    out, results, names = tmp_path / "out", tmp_path / "results", ["one", "two", "three"]
    code = (
        "from pathlib import Path; from benchmarks.steps import Runner, Step; import shlex\n"
        f"command = 'python -c ' + shlex.quote({ONE_STEP!r})\n"
        f"steps = [Step(name, 0, 60, command + ' ' + name) for name in {names}]\n"
        f"Runner(steps, Path({str(out)!r}), results=Path({str(results)!r}), commit='abc1234').run({names})\n"
    )
    for name in names:
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            ends = time.monotonic() + 60
            while not (out / f"{name}.begun").exists() and time.monotonic() < ends:
                time.sleep(0.02)
            process.kill()
        assert json.loads((out / "steps.json").read_text())[name]["state"] == "begun"
        (out / f"{name}.calm").touch()
    assert processes_of(out)
    assert end_processes_of(out) >= 1
    assert processes_of(out) == []
    steps = [Step(name, 0, 60, f"python -c {shlex.quote(ONE_STEP)} {name}") for name in names]
    for _ in range(2):
        found = run(steps, out, results=results, commit="def5678")
        assert [outcome.state for outcome in found.values()] == ["done"] * 3
    rows_of_file = list(map(json.loads, (results / "toy.jsonl").read_text().splitlines()))
    assert sorted(row["step"] for row in rows_of_file) == sorted(names)


def test_rows_of_an_earlier_run_are_added_later_and_once(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    steps = [Step("one", 0, 20, counted("one")), Step("two", 0, 20, counted("two"))]
    run(steps, out, ["one"], commit="abc1234")
    results.mkdir()
    (results / "toy.jsonl").write_text('{"bench": "toy", "older": 1}\n')
    for _ in range(2):
        found = run(steps, out, results=results, commit="def5678")
        assert (found["one"].state, found["two"].state) == ("done", "done")
    older, *rows_of_file = map(json.loads, (results / "toy.jsonl").read_text().splitlines())
    assert older["older"] == 1
    assert [(row["step"], row["commit"]) for row in rows_of_file] == [("one", "abc1234"), ("two", "def5678")]
    assert sorted(path.name for path in results.iterdir()) == ["toy.jsonl"]


def test_one_run_at_a_time_in_a_folder(tmp_path):
    steps = [Step("one", 0, 20, counted("one"))]
    with only_one_in(tmp_path), pytest.raises(BusyError, match="another run"):
        run(steps, tmp_path)
    assert run(steps, tmp_path)["one"].state == "done"


def test_an_archive_has_all_but_what_can_be_made_again(tmp_path):
    out, archive = tmp_path / "out", tmp_path / "kept.tar.gz"
    make = "import os; os.mkdir('folder'); open('folder/large', 'w'); os.mkdir('ladder'); open('ladder/row', 'w')"
    steps = [
        Step("make", 0, 20, script(make), makes="folder", has_document=False),
        Step("use", 0, 20, counted("use"), needs=("make",)),
    ]
    run(steps, out, archive=archive)
    with tarfile.open(archive) as file:
        names = set(file.getnames())
        file.extractall(tmp_path / "elsewhere", filter="data")
    assert {"out/use.json", "out/use.txt", "out/steps.json", "out/ladder/row"} <= names
    assert not any("folder" in name or name.endswith("lock") for name in names)
    again = run(steps, tmp_path / "elsewhere" / "out")
    assert again["use"].earlier


def test_a_step_that_was_cut_is_expected_to_take_longer():
    step = Step("one", 10, 100, "python")
    assert usual_s(step, None) == 10
    assert usual_s(step, Outcome("one", "left", 40.0)) == 60
    assert usual_s(step, Outcome("one", "left", 90.0)) == 100
    assert usual_s(step, Outcome("one", "failed", 90.0)) == 10


def test_plan_fills_runs_in_order_with_what_steps_need():
    steps = [
        Step("make", 30, 60, "python", makes="folder"),
        Step("first", 60, 90, "python", needs=("make",)),
        Step("second", 50, 90, "python", needs=("make",)),
        Step("small", 10, 90, "python"),
        Step("long", 200, 300, "python"),
    ]
    names = [step.name for step in steps]

    def found(done, limit_s):
        return [[step.name for step in run] for run in plan(steps, names, done, limit_s)]

    assert found(set(), 100) == [["make", "first", "small"], ["second"], ["long"]]
    assert found({"make", "first"}, 60) == [["second", "small"], ["long"]]
    assert found(set(names), 60) == []


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
    assert (out / "portions.txt").read_text().splitlines()[0] == "40"
    assert len((results / "toy.jsonl").read_text().splitlines()) == 1


def test_environment_of_a_step_holds_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = environment(tmp_path / "out", {"PYTHONPATH": "src:/site", "HOME": "/h", "VIVACE_CACHE": "/used"})
    assert found["PYTHONPATH"] == f"{ROOT}/src:{ROOT}:{tmp_path}/src:/site"
    assert found["VIVACE_CACHE"] == str(tmp_path / "out" / "cache" / "vivace_cache")
    assert found["HOME"] == "/h"


def test_last_document_stands_before_warnings(tmp_path):
    path = tmp_path / "output"
    path.write_text('{"old": 1}\n{"new": 2}\n{no json\nWarning: x\n', encoding="utf-8")
    assert last_document(path) == {"new": 2}
