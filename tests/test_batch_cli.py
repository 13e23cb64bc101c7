"""``vivace batch`` as a command: what it prints, how it ends, and that its death costs no more than what ran."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import soundfile

from tests.helpers import speech_like_wav

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of POSIX")


@pytest.fixture
def write(tmp_path):
    def jobs(*lines):
        path = tmp_path / "jobs.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return jobs


@pytest.fixture
def many(write):
    return write(*({"id": f"{index:02d}", "text": "Hi.", "seed": index} for index in range(24)))


def results_of(out):
    lines = (out / "results.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    return [json.loads(line) for line in lines]


def test_speaks_all_and_goes_on(vivace, write, random_model_folder, tmp_path):
    recording = tmp_path / "me.wav"
    recording.write_bytes(speech_like_wav())
    jobs = write(
        {"id": "one", "text": "Hi."},
        {"id": "two", "text": "Hi there.", "seed": 7, "speed": 2, "format": "flac"},
        {"id": "me", "text": "Hi.", "prompt_audio": "me.wav", "prompt_text": "Said."},
    )
    out = tmp_path / "new" / "out"
    command = ("batch", jobs, "--out", out, "-m", random_model_folder, "--consent", "--seed", 3, "--json")
    code, lines, errors = vivace(*command)
    assert (code, errors) == (0, [])
    document = json.loads(lines[-1])
    assert (document["done"], document["skipped"], document["failed"]) == (3, 0, 0)
    assert lines[-2].startswith(f"{out}: 3 done, 0 done before, 0 failed; ")
    results = {result["id"]: result for result in results_of(out)}
    assert {name: result["seed"] for name, result in results.items()} == {"one": 3, "two": 7, "me": 3}
    for result in results.values():
        info = soundfile.info(out / result["file"])
        assert info.samplerate == 24_000
        assert info.duration == pytest.approx(result["audio_seconds"], abs=1e-3)
    code, lines, errors = vivace(*command)
    assert (code, errors) == (0, [])
    assert lines[-2].startswith(f"{out}: 0 done, 3 done before, 0 failed; ")


def test_failures_are_listed_and_the_rest_is_done(vivace, write, random_model_folder, tmp_path):
    jobs = write(
        {"id": "a", "text": " "}, "{", {"id": "b", "text": "Hi."}, {"id": "c", "text": "Hi.", "voice": "x"}
    )
    out = tmp_path / "out"
    code, lines, errors = vivace("batch", jobs, "-o", out, "-m", random_model_folder, "--json")
    assert code == 1
    assert [error.split(":")[1].strip() for error in errors] == ["line 1, a", "line 2", "line 4, c"]
    assert [error.split(" ")[-1] for error in errors] == [
        "(empty_input)",
        "(invalid_json)",
        "(voice_not_found)",
    ]
    assert json.loads(lines[-1])["failed"] == 3
    assert sorted(path.name for path in out.iterdir()) == ["b.wav", "results.jsonl"]


def test_what_the_embedded_model_cannot_read_is_in_the_results(vivace, write, tmp_path):
    jobs, out = (
        write({"id": "a", "text": "Say 你好 too."}, {"id": "b", "text": "你好，世界。"}),
        tmp_path / "out",
    )
    code, lines, errors = vivace("batch", jobs, "-o", out, "--json")
    assert code == 1
    assert errors[0].startswith("vivace: line 2, b: The embedded model reads English only")
    assert errors[1].startswith("vivace: Of 1 texts words were not spoken")
    assert json.loads(lines[-1])["incomplete"] == 1
    results = {
        each["id"]: each for each in map(json.loads, (out / "results.jsonl").read_text("utf-8").splitlines())
    }
    assert (results["a"]["code"], results["a"]["skipped_text"]) == (None, ["你好"])
    assert results["b"]["code"] == "unpronounceable_input"


def test_a_long_list_of_failures_is_cut(vivace, write, random_model_folder, tmp_path):
    code, _, errors = vivace("batch", write(*["{"] * 60), "-o", tmp_path / "out", "-m", random_model_folder)
    assert code == 1
    assert len(errors) == 51
    assert errors[-1] == "vivace: and 10 more, which the results name"


def test_an_id_reaches_the_terminal_without_control_codes(vivace, write, random_model_folder, tmp_path):
    jobs = write({"id": "\x1b[31mred", "text": "Hi."})
    _, _, errors = vivace("batch", jobs, "-o", tmp_path / "out", "-m", random_model_folder)
    assert "\x1b" not in "".join(errors)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("MISSING", "--out", "out"), 1, "does not exist; give one JSON object a line"),
        ((".", "--out", "out"), 1, "is a folder, not a jobs file"),
        (("JOBS", "--out", "JOBS"), 1, "File exists"),
        (("JOBS", "--out", "JOBS/out"), 1, "Not a directory"),
        (("JOBS", "--out", "out", "--format", "wave"), 1, "vivace: format must be one of mp3, opus"),
        (("JOBS", "--out", "out", "--speed", "9"), 1, "value_out_of_range"),
        (("JOBS", "--out", "out", "-m", "MISSING"), 2, "no such model folder"),
    ],
)
def test_what_stops_all_jobs_is_one_line(vivace, many, random_model_folder, tmp_path, arguments, code, word):
    places = {"MISSING": tmp_path / "nowhere", "JOBS": many}
    filled = [str(places.get(each, each)).replace("JOBS", str(many)) for each in arguments]
    ended, _, errors = vivace("batch", "-m", random_model_folder, *filled)
    assert (ended, len(errors)) == (code, 1)
    assert word in errors[0]
    assert not list(tmp_path.rglob("*.wav"))


def piped(*lines):
    return io.TextIOWrapper(io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))


def test_jobs_come_through_standard_input(vivace, random_model_folder, tmp_path):
    """Paths in them are seen from the current folder; the same jobs again are done already."""
    (tmp_path / "me.wav").write_bytes(speech_like_wav())
    lines = [
        {"text": "Hi."},
        {"id": "me", "text": "Hi, é.", "prompt_audio": "me.wav", "prompt_text": "Said.", "consent": True},
    ]
    command = ("batch", "-", "-o", tmp_path / "out", "-m", random_model_folder, "--json")
    code, printed, errors = vivace(*command, stdin=piped(*lines))
    assert (code, errors) == (0, [])
    assert json.loads(printed[-1])["done"] == 2
    assert sorted(path.name for path in (tmp_path / "out").glob("*.wav")) == ["000001.wav", "me.wav"]
    code, printed, _ = vivace(*command, stdin=piped(*lines))
    assert (code, json.loads(printed[-1])["skipped"]) == (0, 2)
    code, _, errors = vivace(*command, stdin=piped({"id": "bad", "text": ""}))
    assert (code, errors[0].split(":")[1].strip()) == (1, "line 1, bad")


@needs_posix
def test_a_pipe_with_a_name_is_read_once(vivace, random_model_folder, tmp_path):
    """As of a shell's <(…)."""
    os.mkfifo(tmp_path / "pipe")
    sender = threading.Thread(target=(tmp_path / "pipe").write_text, args=('{"id": "a", "text": "Hi."}\n',))
    sender.start()
    code, printed, errors = vivace("batch", "pipe", "-o", "out", "-m", random_model_folder, "--json")
    sender.join()
    assert (code, errors) == (0, [])
    assert json.loads(printed[-1])["done"] == 1


@pytest.mark.parametrize("place", ["-", "jobs.jsonl"])
def test_no_jobs_are_no_failure_and_are_told(vivace, write, random_model_folder, tmp_path, place):
    write("", "  ")
    code, printed, errors = vivace(
        "batch", place, "-o", "out", "-m", random_model_folder, "--json", stdin="\n"
    )
    name = "standard input" if place == "-" else place
    assert code == 0
    assert len(errors) == 1
    assert errors[0].startswith(f"vivace: {name}: no jobs, so there was nothing to do; give one JSON object")
    assert json.loads(printed[-1])["jobs"] == 0


def test_all_done_loads_no_model(vivace, write, random_model_folder, tmp_path, monkeypatch):
    command = ("batch", write({"id": "a", "text": "Hi."}), "-o", tmp_path / "out", "-m", random_model_folder)
    assert vivace(*command)[0] == 0

    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr("vivace.engine.engine.load_assets", fail)
    assert vivace(*command)[0] == 0


# -- dying ---------------------------------------------------------------------------------------------------------


def start(jobs, out, model, **options):
    command = [sys.executable, "-m", "vivace.cli", "batch", str(jobs), "--out", str(out), "-m", str(model)]
    return subprocess.Popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options)


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert condition()


@needs_posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_what_is_done_and_the_rest_is_done_later(
    vivace, many, random_model_folder, tmp_path, number
):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("whoever started the tests has this signal ignored, and so does every command under them")
    out = tmp_path / "out"
    with start(many, out, random_model_folder) as process:
        wait_until(lambda: len(list(out.glob("*.wav"))) >= 3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert b"Traceback" not in errors
    if number != signal.SIGKILL:
        assert errors.decode().splitlines()[0] == "vivace: stopped; the same command goes on from here"
        assert not list(out.glob(".*"))
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.wav")}
    for name in before:
        soundfile.read(out / name)  # each is whole
    known = {result["file"] for result in results_of(out)}
    assert known <= before.keys()
    assert len(known) < 24

    code, lines, _ = vivace("batch", many, "-o", out, "-m", random_model_folder, "--json")
    assert code == 0
    document = json.loads(lines[-1])
    assert (document["skipped"], document["done"]) == (len(known), 24 - len(known))
    assert sorted(path.name for path in out.iterdir()) == [
        *(f"{index:02d}.wav" for index in range(24)),
        "results.jsonl",
    ]
    assert all((out / name).stat().st_mtime_ns == before[name] for name in known)


@needs_posix
def test_a_terminal_shows_a_bar(write, random_model_folder, tmp_path):
    """And nothing else does: the other tests find standard error empty."""
    terminal, end = pytest.importorskip("pty").openpty()
    jobs = write({"id": "a", "text": "Hi."}, {"id": "b", "text": "Hi."})
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with start(jobs, tmp_path / "out", random_model_folder, stderr=end, env=environment) as process:
        os.close(end)
        seen = b""
        try:
            while piece := os.read(terminal, 65_536):
                seen += piece
        except OSError:  # its other side was closed
            pass
        assert process.wait(60) == 0
    os.close(terminal)
    assert b"2/2" in seen
    assert b"0 failed" in seen
