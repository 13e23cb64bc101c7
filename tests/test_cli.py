"""The ``vivace`` command: what it writes, what it prints, and how it ends."""

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import wave
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile

from tests.helpers import speech_like_wav
from vivace import __version__
from vivace.audio.formats import WavWriter
from vivace.audio.pcm import UNKNOWN_SIZE, wav_header
from vivace.cli.end_signals import end_signals_cancel_task, end_signals_held
from vivace.cli.speech import standard_input
from vivace.datatypes import SamplingParams
from vivace.engine import open_voices
from vivace.environment import cpu_threads, engine_environment
from vivace.errors import InvalidRequestError
from vivace.voice import save_voice


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "recording.wav"
    path.write_bytes(speech_like_wav())
    return path


def test_say_writes_a_wav_and_a_summary(vivace, random_model_folder, tmp_path):
    out = tmp_path / "hello.wav"
    code, lines, _ = vivace(
        "say", "Hi", "there.", "-m", random_model_folder, "-o", out, "--json", "--seed", 3
    )
    assert code == 0
    with wave.open(str(out)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        seconds = file.getnframes() / 24_000
    document = json.loads(lines[-1])
    assert document["audio_seconds"] == pytest.approx(seconds)
    assert document["spoken_text"] == ["Hi there."]
    assert document["finish_reason"] in ("stop", "length")
    assert {"ttfb_ms", "rtf", "tps", "num_speech_tokens", "times", "out"} <= document.keys()
    assert "samples" not in document
    summary = lines[-2]
    for word in ("TTFB", "RTF", "TPS", "s of audio", "LM", "flow", "vocoder"):
        assert word in summary


def test_say_names_what_the_embedded_model_cannot_read(vivace, tmp_path):
    out = tmp_path / "hello.wav"
    code, lines, errors = vivace("say", "Hello, 你好, and goodbye.", "-o", out, "--json")
    assert code == 0
    assert errors == ["vivace: Not spoken, since the model cannot read it: 你好"]
    document = json.loads(lines[-1])
    assert (document["spoken_text"], document["skipped_text"]) == (["Hello, and goodbye."], ["你好"])
    code, _, errors = vivace("say", "你好，世界。", "-o", tmp_path / "none.wav")
    assert code == 1
    assert len(errors) == 1
    assert errors[0].startswith("vivace: The embedded model reads English only")
    assert errors[0].endswith("for Chinese and other languages. (unpronounceable_input)")
    assert not (tmp_path / "none.wav").exists()


def test_say_reads_standard_input_and_repeats_itself(vivace, random_model_folder, tmp_path):
    options = ("-m", random_model_folder, "--speed", 2)
    for name in ("one.wav", "two.wav"):
        code, _, _ = vivace("say", "-", *options, "-o", tmp_path / name, stdin="Hi.\n")
        assert code == 0
    assert (tmp_path / "one.wav").read_bytes() == (tmp_path / "two.wav").read_bytes()


class _Pipe(io.RawIOBase):
    """Standard input whose writer sends one piece at a time and never says that a line has ended."""

    def __init__(self, *pieces):
        self.pieces = list(pieces)

    def readable(self):
        return True

    def readinto(self, buffer):
        piece = self.pieces.pop(0) if self.pieces else b""
        buffer[: len(piece)] = piece
        return len(piece)


def test_standard_input_that_was_closed_holds_nothing(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert list(standard_input()) == []


def test_say_takes_standard_input_before_a_line_ends(monkeypatch):
    pipe = _Pipe(b"Hello, my na", b"me is Zo\xc3", b"\xab.\r", b"\nYes.")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(pipe), encoding="utf-8"))
    pieces = standard_input()
    assert next(pieces) == "Hello, my na"
    assert len(pipe.pieces) == 3
    assert "".join(pieces) == "me is Zoë.\nYes."


@pytest.mark.parametrize("sent", [(b"Hello \xff there.",), (b"Hello.\n", b"Zo\xc3")])
def test_say_refuses_standard_input_that_is_not_utf8(vivace, random_model_folder, tmp_path, sent):
    stdin = io.TextIOWrapper(io.BufferedReader(_Pipe(*sent)), encoding="utf-8")
    code, _, errors = vivace("say", "-", "-m", random_model_folder, "-o", tmp_path / "no.wav", stdin=stdin)
    assert code == 1
    assert errors == ["vivace: Standard input is not valid UTF-8. (invalid_utf8)"]
    assert not (tmp_path / "no.wav").exists()


def test_say_refuses_words_beside_standard_input(vivace, random_model_folder, tmp_path):
    code, _, errors = vivace("say", "-", "Hi.", "-m", random_model_folder, "-o", tmp_path / "no.wav")
    assert code == 1
    assert "give it alone" in errors[0]
    assert not (tmp_path / "no.wav").exists()


def test_say_writes_other_formats_and_clones(vivace, random_model_folder, recording, tmp_path):
    out = tmp_path / "clone.flac"
    code, _, _ = vivace(
        "say",
        "Hi.",
        "--prompt-audio",
        recording,
        "--prompt-text",
        "Said.",
        "--consent",
        "-m",
        random_model_folder,
        "-o",
        out,
    )
    assert code == 0
    assert soundfile.info(out).duration > 0.1


@pytest.fixture
def standard_output(monkeypatch, vivace, random_model_folder):
    """Runs ``vivace say --out -``: (exit code, bytes of standard output, lines of standard error)."""

    def run(*options, stdout=None):
        sink = stdout or io.TextIOWrapper(io.BytesIO())
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", sink)
            code, _, errors = vivace("say", "Hi there.", "-m", random_model_folder, "-o", "-", *options)
        return code, sink.buffer.getvalue() if stdout is None else b"", errors

    return run


def test_say_speaks_to_standard_output(vivace, standard_output, random_model_folder, tmp_path):
    """The samples of the file, behind a header that any player takes while the rest is made, and nothing else."""
    assert vivace("say", "Hi there.", "-m", random_model_folder, "-o", tmp_path / "a.wav")[0] == 0
    with wave.open(str(tmp_path / "a.wav")) as file:
        samples = file.readframes(file.getnframes())
    code, audio, errors = standard_output("--json")
    assert (code, audio) == (0, wav_header(24_000, UNKNOWN_SIZE) + samples)
    assert json.loads(errors[-1])["audio_seconds"] == pytest.approx(len(samples) / 48_000)
    assert errors[-2].startswith("-: ")
    code, audio, errors = standard_output("--format", "pcm")
    assert (code, audio, len(errors)) == (0, samples, 1)
    code, audio, errors = standard_output("--format", "ogg")
    assert (code, audio) == (1, b"")
    assert errors[0].startswith("vivace: --format must be one of mp3, opus")


def test_say_does_not_speak_to_a_terminal(standard_output):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    code, _, errors = standard_output(stdout=Terminal(io.BytesIO()))
    assert (code, len(errors)) == (1, 1)
    assert "| aplay" in errors[0]


def test_say_to_a_reader_that_leaves_ends_quietly(standard_output):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        assert standard_output(stdout=nobody) == (141, b"", [])


def test_sampling_is_asked_for_as_over_http(vivace, monkeypatch):
    asked = []

    def note(request, limits):
        asked.append(request.sampling)
        raise InvalidRequestError("enough")

    monkeypatch.setattr("vivace.engine.request.check_request", note)
    vivace("say", "Hi.", "--seed", 3, "--temperature", 0.5, "--top-p", 0.9, "--top-k", 7)
    vivace("say", "Hi.")
    assert asked == [SamplingParams(seed=3, temperature=0.5, top_p=0.9, top_k=7), SamplingParams()]


@pytest.mark.parametrize(
    "command", [("transform", "RECORDING"), ("voice", "add", "anna", "RECORDING", "--consent")]
)
def test_every_command_that_opens_a_model_takes_its_choices(vivace, monkeypatch, recording, command):
    opened = []

    def note(model, device, dtype=None, lm=None, *, tokenizer=None, **_):
        opened.append((lm, tokenizer))
        raise InvalidRequestError("enough")

    for module in ("speech", "voices"):
        monkeypatch.setattr(f"vivace.cli.{module}.open_engine", note)
    words = [recording if word == "RECORDING" else word for word in command]
    vivace(*words, "--lm", "rl", "--tokenizer", "ranks")
    assert opened == [("rl", Path("ranks"))]


def test_transform(vivace, random_model_folder, recording, tmp_path):
    out = tmp_path / "other.wav"
    code, lines, _ = vivace("transform", recording, "-m", random_model_folder, "-o", out, "--json")
    assert code == 0
    assert json.loads(lines[-1])["audio_seconds"] == pytest.approx(2.0)
    assert soundfile.info(out).duration == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("arguments", "stdin", "code"),
    [
        (("say", " "), "", "empty_input"),
        (("say", "-"), "", "empty_input"),
        (("say", "-"), io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xff"), "utf-8"), "invalid_utf8"),
        (("say", "Hi.", "--voice", "nobody"), "", "voice_not_found"),
        (("say", "Hi.", "--speed", "9"), "", "value_out_of_range"),
        (("say", "Hi.", "-o", "speech.txt"), "", "unsupported_value"),
        (("voice", "remove", "nobody"), "", "voice_not_found"),
        (("voice", "remove", "noise"), "", "builtin_voice"),
        (("bench", "streaming", "--seconds", "0"), "", "value_out_of_range"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_1(
    vivace, random_model_folder, tmp_path, arguments, stdin, code
):
    ended, _, errors = vivace(*arguments, "-m", random_model_folder, stdin=stdin)
    assert ended == 1
    assert len(errors) == 1
    assert errors[0].startswith("vivace: ")
    assert errors[0].endswith(f"({code})")
    assert not list(tmp_path.glob("speech.*"))  # nothing that could pass for a result


def test_a_place_that_cannot_be_written_is_one_line(vivace, random_model_folder, tmp_path):
    code, _, errors = vivace("say", "Hi.", "-m", random_model_folder, "-o", tmp_path / "no" / "where.wav")
    assert code == 1
    assert len(errors) == 1
    assert "where.wav" in errors[0]
    assert "make it first" in errors[0]


def test_an_older_file_survives_a_request_that_fails_before_its_audio(vivace, random_model_folder, tmp_path):
    out = tmp_path / "older.wav"
    out.write_bytes(b"older")
    assert vivace("say", "-", "-m", random_model_folder, "-o", out, stdin="!!!")[0] == 1
    assert out.read_bytes() == b"older"
    (tmp_path / "folder.wav").mkdir()
    code, _, errors = vivace("say", "Hi.", "-m", random_model_folder, "-o", tmp_path / "folder.wav")
    assert (code, len(errors)) == (1, 1)


@pytest.mark.parametrize(
    "options",
    [
        ("--voice", "noise", "--prompt-audio", "RECORDING"),
        ("--prompt-text", "Hm."),
        ("--language", "klingon"),
    ],
)
def test_options_that_would_be_ignored_are_refused(vivace, random_model_folder, recording, options):
    options = [recording if option == "RECORDING" else option for option in options]
    code, _, errors = vivace("say", "Hi.", "-m", random_model_folder, *options)
    assert (code, len(errors)) == (1, 1)
    assert errors[0].endswith("(unsupported_value)")


@pytest.mark.parametrize(
    "option",
    ["--speed=9", "--seed=-1", "--language=?", "--temperature=11", "--top-p=0", "--top-k=0", "--format=pcm"],
)
def test_wrong_values_are_said_before_the_model_is_loaded(vivace, option):
    code, _, errors = vivace("say", "Hi.", "-m", "no-such-model", option)
    assert (code, len(errors)) == (1, 1)
    assert option[2:].partition("=")[0].replace("-", "_") in errors[0]


def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise(vivace, monkeypatch):
    for given, set_to in ((None, "1000"), ("7", "7")):
        monkeypatch.setenv("GOMP_SPINCOUNT", given or "")
        if given is None:
            monkeypatch.delenv("GOMP_SPINCOUNT")
        assert vivace("--version")[0] == 0
        assert os.environ["GOMP_SPINCOUNT"] == set_to
        assert engine_environment()["GOMP_SPINCOUNT"] == set_to


@pytest.mark.parametrize(
    "command",
    [
        ("say", "Hi.", "--prompt-audio", "RECORDING"),
        ("transform", "RECORDING", "--prompt-audio", "RECORDING"),
        ("voice", "add", "anna", "RECORDING"),
    ],
)
def test_no_voice_is_cloned_without_consent(vivace, random_model_folder, recording, command):
    command = [recording if word == "RECORDING" else word for word in command]
    code, _, errors = vivace(*command, "-m", random_model_folder)
    assert (code, len(errors)) == (1, 1)
    assert errors[0].endswith("(consent_required)")
    assert "anna" not in open_voices(random_model_folder).names()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_while_the_file_is_opened_comes_behind_it(tmp_path):
    """When somebody removes it who knows of it; at any other time it comes at once."""

    def end(number, frame):
        raise SystemExit(128 + number)

    out, reached = tmp_path / "cut.wav", []
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit) as ended, ExitStack() as stack:  # noqa: PT012
            with end_signals_held():
                stack.enter_context(WavWriter(out, 24_000))
                os.kill(os.getpid(), signal.SIGTERM)
                reached.append("opened")
            reached.append("went on")
        assert signal.getsignal(signal.SIGTERM) is end
        with pytest.raises(SystemExit), end_signals_held():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert reached == ["opened"]
    assert ended.value.code == 143
    assert not out.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_is_no_other_tasks_exception():
    """One that is busy when it comes goes on; the waiting one unwinds, and then the command ends."""

    def end(number, frame):
        raise SystemExit(128 + number)

    told = []

    async def busy():
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10_000):  # Python handles signals between its instructions
            pass
        told.append("busy")

    async def main():
        other = asyncio.create_task(busy())
        with end_signals_cancel_task():
            try:
                await asyncio.sleep(30)
            finally:
                told.append("unwound")
                await other

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit) as ended:
            asyncio.run(main())
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert told == ["busy", "unwound"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_half_written_file(random_model_folder, tmp_path, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("whoever started the tests has this signal ignored, and so does every command under them")
    out = tmp_path / "cut.wav"
    command = [sys.executable, "-m", "vivace.cli", "say", "-", "-m", str(random_model_folder), "-o", str(out)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b"One two three four five six, seven eight nine ten.\n" * 20)
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not out.exists() and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert out.exists()
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert b"Traceback" not in errors
    assert not out.exists()
    kept = tmp_path / "cut.part.wav"
    assert kept.exists() == (number == signal.SIGINT)  # Ctrl-C keeps what there is, under a name that says so
    if kept.exists():
        with wave.open(str(kept)) as file:
            seconds = file.getnframes() / file.getframerate()
        assert seconds > 0
        assert kept.stat().st_size == int.from_bytes(kept.read_bytes()[4:8], "little") + 8
        assert errors.decode().splitlines() == [
            f"vivace: stopped; the {seconds:.1f} s made so far are in {kept}"
        ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("say", "Hi.", "-m", "MISSING"),
        ("transform", "x.wav", "-m", "MISSING"),
        ("convert", "MISSING", "out"),
        ("voice", "list", "-m", "MISSING"),
        ("voice", "export", "a", "b", "-m", "MISSING"),
        ("bench", "streaming", "-m", "MISSING"),
        ("random-checkpoint", "EXISTS"),
        ("random-checkpoint", "new", "--size", "huge"),
        ("say", "Hi.", "-m", "MODEL", "--device", "abacus"),
        ("say", "Hi.", "-m", "MODEL", "--lm", "rl"),
    ],
)
def test_a_bad_model_folder_is_one_line_and_exit_code_2(vivace, random_model_folder, tmp_path, arguments):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").touch()
    places = {"MISSING": tmp_path / "nowhere", "EXISTS": tmp_path / "there", "MODEL": random_model_folder}
    code, _, errors = vivace(*(places.get(argument, argument) for argument in arguments))
    assert code == 2
    assert len(errors) == 1
    assert errors[0].startswith("vivace: ")


@pytest.mark.parametrize(
    "arguments", [("sing",), ("say",), ("say", "Hi.", "--loud"), ("say", "Hi.", "--seed", "x")]
)
def test_wrong_usage_is_exit_code_2(vivace, arguments):
    code, _, errors = vivace(*arguments)
    assert code == 2
    assert errors


def test_help_names_every_command(vivace):
    code, lines, _ = vivace("--help")
    assert code == 0
    for command in ("say", "transform", "convert", "doctor", "random-checkpoint", "voice", "bench"):
        assert any(command in line for line in lines)


def test_version(vivace):
    assert vivace("--version") == (0, [f"vivace {__version__}"], [])


def test_convert_and_say_with_the_result(vivace, random_model_folder, tmp_path):
    code, lines, _ = vivace("convert", random_model_folder, tmp_path / "native", "--json")
    assert code == 0
    assert json.loads(lines[-1])["dtype"] == "float32"
    assert (tmp_path / "native" / "vivace.json").is_file()
    for name, model in (("a.wav", random_model_folder), ("b.wav", tmp_path / "native")):
        assert vivace("say", "Hi.", "-m", model, "-o", tmp_path / name)[0] == 0
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


def test_convert_takes_a_tokenizer_along(vivace, random_model_folder, tmp_path):
    other = tmp_path / "tokenizer"
    shutil.copytree(random_model_folder / "CosyVoice-BlankEN", other)
    (other / "merges.txt").write_text(
        (other / "merges.txt").read_text(encoding="utf-8") + "\n", encoding="utf-8"
    )
    wanted = ("convert", random_model_folder, tmp_path / "native", "--tokenizer")
    code, _, errors = vivace(*wanted, tmp_path)
    assert code == 2
    assert "text cannot be spoken" in errors[0]
    assert vivace(*wanted, other)[0] == 0
    copied = tmp_path / "native" / "CosyVoice-BlankEN" / "merges.txt"
    assert copied.read_bytes() == (other / "merges.txt").read_bytes()


def test_doctor(vivace, random_model_folder, tmp_path):
    code, lines, _ = vivace("doctor", random_model_folder, "--json")
    assert code == 0
    document = json.loads(lines[-1])
    assert document["usable"] is True
    code, lines, _ = vivace("doctor", tmp_path / "nowhere", "--json")
    assert code == 2
    assert json.loads(lines[-1])["usable"] is False
    assert vivace("doctor")[0] == 0


def test_random_checkpoint(vivace, tmp_path):
    code, lines, _ = vivace("random-checkpoint", tmp_path / "new", "--size", "tiny", "--seed", 5)
    assert code == 0
    assert "random weights" in lines[-1]
    assert vivace("voice", "list", "-m", tmp_path / "new")[0] == 0


def test_the_life_of_a_stored_voice(vivace, random_model_folder, recording, tmp_path):
    model = ("-m", random_model_folder)
    code, lines, _ = vivace("voice", "add", "anna", recording, "--prompt-text", "Said.", "--consent", *model)
    assert (code, lines) == (0, ["anna: stored"])
    assert vivace("voice", "add", "anna", recording, "--consent", *model)[0] == 1  # the name is taken
    code, lines, _ = vivace("voice", "list", "--json", *model)
    entries = {entry["name"]: entry for entry in json.loads(lines[-1])["voices"]}
    assert entries["anna"]["kind"] == "stored"
    assert entries["anna"]["prompt_text"] == "Said."
    assert entries["anna"]["consent"] is True
    assert entries["noise"]["kind"] == "built-in"
    assert entries["noise"]["prompt_text"] == "A voice made of noise."
    assert vivace("say", "Hi.", "--voice", "anna", "-o", tmp_path / "anna.wav", *model)[0] == 0
    code, lines, _ = vivace("voice", "export", "anna", tmp_path / "anna.voice", *model)
    assert code == 0
    assert (tmp_path / "anna.voice").is_file()
    assert lines[-1].endswith(str(tmp_path / "anna.voice"))
    assert vivace("voice", "remove", "anna", *model)[0] == 0
    assert vivace("say", "Hi.", "--voice", "anna", *model)[0] == 1
    exported = tmp_path / "anna.voice"
    assert vivace("voice", "import", exported, "--name", "berta", *model)[1] == ["berta: stored"]
    assert vivace("voice", "import", exported, *model)[1] == ["anna: stored"]
    assert vivace("voice", "import", recording, *model)[0] == 1


def test_control_codes_of_a_voice_do_not_reach_the_terminal(vivace, random_model_folder, tmp_path):
    engine_voice = open_voices(random_model_folder).get("noise")
    save_voice(
        replace(engine_voice, name="eve", prompt_text="Red\x1b[31m\nalert."), tmp_path / "eve.safetensors"
    )
    assert vivace("voice", "import", tmp_path / "eve.safetensors", "-m", random_model_folder)[0] == 0
    lines = vivace("voice", "list", "-m", random_model_folder)[1]
    assert next(line for line in lines if line.startswith("eve ")).endswith("Red [31m alert.")
    assert all(line.isprintable() for line in lines)


def test_bench_streaming(vivace, random_model_folder):
    code, lines, _ = vivace(
        "bench", "streaming", "-m", random_model_folder, "--seconds", 2, "--runs", 1, "--dtype", "bfloat16"
    )
    assert code == 0
    document = json.loads(lines[-1])
    assert (document["bench"], document["precision"]) == ("streaming", "bfloat16")
    assert {"hardware", "torch", "model", "precision", "runs", "ratio_20_to_2"} <= document.keys()
    assert [row["second"] for row in document["seconds"]] == [1, 2]
    assert all(row["flow_ms"] > 0 and row["vocoder_ms"] > 0 for row in document["seconds"])
    assert len(lines) == 3


def test_the_installed_command_ends_with_its_exit_code(tmp_path):
    command = [sys.executable, "-m", "vivace.cli", "say", "Hi.", "--model", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("vivace: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "threads"), [("3", 3), ("0", None), ("", None), ("²", None), ("two", None)]
)
def test_threads_from_the_environment(monkeypatch, given, threads):
    monkeypatch.setenv("VIVACE_THREADS", given)
    assert cpu_threads() == threads
