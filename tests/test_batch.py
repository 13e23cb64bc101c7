"""Batches: jobs and their faults, what is written and when, and that a run goes on where another one stopped."""

import asyncio
import errno
import json
import os
import re
import threading
import wave
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import soundfile
import torch

from tests.batch_fake import FakeEngine
from tests.helpers import noise_voice, quiet_engine
from vivace import (
    AsyncEngine,
    Engine,
    InvalidRequestError,
    OverloadedError,
    SamplingParams,
    SynthesisError,
    SynthesisRequest,
    VivaceError,
)
from vivace.audio.pcm import pcm16
from vivace.batch import BadJob, Batch, BatchJob, JobResult, ResultsFolder, read_jobs
from vivace.batch.jobs import MEMBERS
from vivace.batch.speak import MAX_REFUSALS, MAX_WRITERS, other_seed
from vivace.engine import EngineRouter
from vivace.engine.device_stages import DeviceStages
from vivace.engine.flow_runner import FlowRunner
from vivace.engine.request import MAX_SEED

TEXTS = ("Hello there.", "Once upon a time, a fox sang.", "One fox ran. Two dogs sat.", "A cat.", "Hi.")


def job(job_id, text="a", seed=0, **options):
    return BatchJob(job_id, SynthesisRequest(text, sampling=SamplingParams(seed=seed)), **options)


def run(engine, jobs, out, **options):
    """(summary, results in the order in which they came)"""
    results = []

    async def main():
        with ResultsFolder(out) as folder:
            batch = Batch(jobs, folder, on_result=results.append, **options)
            return await asyncio.wait_for(batch.run(engine), 60)

    return asyncio.run(main()), results


def lines_of(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def names(out):
    return sorted(path.name for path in out.iterdir())


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def read(tmp_path):
    """Writes a jobs file and reads it."""

    def jobs_of(*lines, **defaults):
        path = tmp_path / "jobs.jsonl"
        texts = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        path.write_bytes(b"\n".join(texts))
        return list(read_jobs(path, defaults))

    return jobs_of


# -- jobs ----------------------------------------------------------------------------------------------------------


def test_a_line_has_the_names_of_a_request(read, tmp_path):
    line = {
        "id": "a-1.x",
        "text": "Hi.",
        "voice": None,
        "instruction": "Slowly.",
        "cross_lingual": True,
        "language": "en",
        "speed": 2,
        "stream": False,
        "seed": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "format": "flac",
        "prompt_audio": "me.wav",
        "prompt_text": "Me.",
        "consent": True,
    }
    (found,) = read(line)
    found.check()
    request = SynthesisRequest(
        "Hi.",
        instruction="Slowly.",
        cross_lingual=True,
        language="en",
        speed=2,
        stream=False,
        sampling=SamplingParams(seed=7, temperature=0.5, top_p=0.9, top_k=5),
    )
    assert found == BatchJob("a-1.x", request, "flac", tmp_path / "me.wav", "Me.", consent=True, line=1)
    assert found.file_name == "a-1.x.flac"


def test_ids_numbers_of_lines_and_empty_lines(read):
    found = read(
        b"\xef\xbb\xbf" + b'{"text": "a"}', b"", b"  \r", {"id": 12, "text": "b"}, {"id": "é", "text": "c"}
    )
    assert [(each.id, each.line) for each in found] == [("000001", 1), ("12", 4), ("é", 5)]


def test_defaults_give_way_to_a_line(read):
    first, second, third = read(
        {"text": "a"},
        {"text": "a", "seed": 3, "voice": "ben"},
        {"text": "a", "prompt_audio": "x"},
        voice="anna",
        seed=2,
    )
    assert (first.request.voice, first.request.sampling.seed) == ("anna", 2)
    assert (second.request.voice, second.request.sampling.seed) == ("ben", 3)
    assert third.request.voice is None


@pytest.mark.parametrize(
    ("defaults", "code"),
    [
        ({"format": "wave"}, "unsupported_value"),
        ({"speed": 9}, "value_out_of_range"),
        ({"seed": -1}, "value_out_of_range"),
    ],
)
def test_a_wrong_default_is_found_before_the_first_job(tmp_path, defaults, code):
    with pytest.raises(InvalidRequestError) as raised:
        read_jobs(tmp_path / "jobs.jsonl", defaults)
    assert raised.value.code == code


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"not json", "invalid_json"),
        (b'{"text": "a", "text": "b"}', "invalid_json"),
        (b'{"text": "a", "speed": NaN}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"text": "\xff"}', "invalid_utf8"),
        (b'["text"]', "invalid_type"),
        (b'{"text": "a", "voise": "anna"}', "unsupported_value"),
        (b'{"id": "a"}', "missing_field"),
        (b'{"id": "a", "text": null}', "missing_field"),
        (b'{"id": true, "text": "a"}', "invalid_type"),
        (b'{"id": ["a"], "text": "a"}', "invalid_type"),
        (b'{"text": "a", "voice": 3}', "invalid_type"),
        (b'{"text": "a", "consent": "yes"}', "invalid_type"),
        (b'{"text": "a", "prompt_audio": 3}', "invalid_type"),
    ],
)
def test_a_bad_line_is_an_error_with_its_number(read, line, code):
    good, bad, last = read({"text": "a"}, line, {"text": "b"})
    assert isinstance(bad, BadJob)
    assert (bad.line, bad.error.code) == (2, code)
    assert isinstance(good, BatchJob)
    assert isinstance(last, BatchJob)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"id": ""}, "invalid_name"),
        ({"id": "../up"}, "invalid_name"),
        ({"id": "a/b"}, "invalid_name"),
        ({"id": ".hidden"}, "invalid_name"),
        ({"id": "a\n"}, "invalid_name"),
        ({"id": "nul\0"}, "invalid_name"),
        ({"id": "ü" * 101}, "invalid_name"),
        ({"id": "\ud800"}, "invalid_name"),
        ({"text": 3}, "invalid_type"),
        ({"text": "a" * 100_001}, "input_too_long"),
        ({"speed": 9}, "value_out_of_range"),
        ({"speed": 1e999}, "value_out_of_range"),
        ({"speed": "fast"}, "invalid_type"),
        ({"seed": -1}, "value_out_of_range"),
        ({"seed": 1.5}, "value_out_of_range"),
        ({"language": "not a language"}, "unsupported_value"),
        ({"stream": 1}, "invalid_type"),
        ({"format": "wave"}, "unsupported_value"),
        ({"prompt_text": "Me."}, "value_out_of_range"),
        ({"prompt_audio": "me.wav", "voice": "anna", "consent": True}, "value_out_of_range"),
        ({"prompt_audio": "me.wav"}, "consent_required"),
    ],
)
def test_a_wrong_job_is_reported_and_the_rest_is_done(read, engine, out, wrong, code):
    line = json.dumps({"id": "wrong", "text": "a"} | wrong).replace("Infinity", "1e999").encode()
    summary, results = run(engine, read({"id": "first", "text": "a"}, line, {"id": "last", "text": "a"}), out)
    (failure,) = summary.failures
    assert (failure.line, failure.code, failure.file) == (2, code, None)
    assert failure.message
    assert names(out) == ["first.wav", "last.wav", "results.jsonl"]
    assert {each.id for each in results if each.code is None} == {"first", "last"}
    assert len(engine.requests) == 2


def test_ids_that_would_share_a_file_are_reported(read, engine, out):
    jobs = read(
        {"id": "a", "text": "a"}, {"id": "A", "text": "b"}, {"id": "é", "text": "a"}, {"id": "é", "text": "a"}
    )
    summary, _ = run(engine, jobs, out)
    assert [(each.line, each.code, each.message) for each in summary.failures] == [
        (2, "duplicate_id", "Line 1 has the same id."),
        (4, "duplicate_id", "Line 3 has the same id."),
    ]
    assert summary.done == 2
    again, _ = run(engine, jobs, out)  # their failure does not hide that the first of each is done
    assert (again.done, again.skipped) == (0, 2)


def test_the_page_shows_jobs_results_and_every_member(read):
    page = (Path(__file__).parent.parent / "docs" / "batch.md").read_text(encoding="utf-8")
    jobs, result = re.findall(r"^```json\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    for each in read(*jobs.encode().splitlines()):
        assert isinstance(each, BatchJob)
        each.check()
    assert json.loads(result).keys() == asdict(JobResult("a")).keys()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(MEMBERS)


# -- what is written -----------------------------------------------------------------------------------------------


def test_one_line_of_result_for_each_job(engine, out):
    engine.script["bad"] = VivaceError("not\ntoday", code="some_code")
    summary, results = run(engine, [job("a", "a\na", seed=9), job("b", "bad")], out)
    spoken, failed = sorted(lines_of(out), key=lambda line: line["id"])
    assert sorted(each.id for each in results) == ["a", "b"]
    with wave.open(str(out / "a.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (24_000, 24_000)
    assert spoken == {
        "id": "a",
        "line": None,
        "file": "a.wav",
        "bytes": (out / "a.wav").stat().st_size,
        "audio_seconds": 1.0,
        "ttfb_ms": 12.0,
        "wall_ms": 100.0,
        "rtf": 0.2,
        "tps": 50.0,
        "num_text_tokens": 3,
        "num_speech_tokens": 25,
        "finish_reason": "stop",
        "skipped_text": None,
        "seed": 9,
        "attempts": 1,
        "code": None,
        "message": None,
        "fingerprint": job("a", "a\na", seed=9).fingerprint(),
    }
    assert (failed["code"], failed["message"], failed["file"]) == ("some_code", "Not today.", None)
    assert summary.to_dict() | {"wall_seconds": 0, "audio_seconds_per_second": 0} == {
        "jobs": 2,
        "done": 1,
        "skipped": 0,
        "failed": 1,
        "incomplete": 0,
        "audio_seconds": 1.0,
        "wall_seconds": 0,
        "audio_seconds_per_second": 0,
        "failures": [{"id": "b", "line": None, "code": "some_code", "message": "Not today."}],
    }
    assert names(out) == ["a.wav", "results.jsonl"]


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus"])
def test_formats(engine, out, name):
    run(engine, [job("a", format=name)], out)
    assert soundfile.info(out / f"a.{name}").duration == pytest.approx(0.5, abs=0.1)


def test_files_have_the_permissions_of_any_other(engine, out):
    mask = os.umask(0o027)
    try:
        run(engine, [job("a")], out)
    finally:
        os.umask(mask)
    assert (out / "a.wav").stat().st_mode & 0o777 == 0o640


def test_as_many_in_flight_as_the_engine_serves_and_no_more_jobs_than_that_are_asked_for(engine, out):
    asked = []

    def jobs():
        for index in range(100):
            asked.append(index)
            yield job(f"{index}")

    async def main():
        engine.gate = asyncio.Event()
        with ResultsFolder(out) as folder:
            running = asyncio.create_task(Batch(jobs(), folder).run(engine))
            while engine.running < 5:
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert len(asked) < 10
            engine.gate.set()
            return await running

    summary = asyncio.run(main())
    assert summary.done == 100
    assert engine.most == 5  # four that run, and one that waits for a free place


def test_one_at_a_time_where_more_gain_nothing(out):
    engine = FakeEngine(streams_at_once=1)
    summary, _ = run(engine, [job(f"{index}") for index in range(10)], out)
    assert (summary.done, engine.most) == (10, 1)


def test_a_recording_is_encoded_once(engine, out):
    def of(job_id, name, text=""):
        return job(job_id, prompt_audio=Path(name), prompt_text=text, consent=True)

    jobs = [of("a", "x.wav"), of("b", "x.wav"), of("c", "y.wav"), of("d", "x.wav", "Said."), job("e")]
    summary, _ = run(engine, jobs, out)
    assert summary.done == 5
    assert sorted(engine.recordings) == [(Path("x.wav"), ""), (Path("x.wav"), "Said."), (Path("y.wav"), "")]
    voices = {str(request.voice) for request in engine.requests}
    assert voices == {"voice of x.wav", "voice of y.wav", "None"}


# -- second tries --------------------------------------------------------------------------------------------------


NO_SPEECH = SynthesisError("none", code="no_speech")


@pytest.mark.parametrize("quiet", ["_", "a\n_", "_\na", "a\n~", "", NO_SPEECH], ids=repr)
def test_near_silence_is_tried_once_more_with_another_seed(engine, out, quiet):
    engine.script["x"] = lambda request: quiet if request.sampling.seed == 3 else "a\na"
    summary, (result,) = run(engine, [job("a", "x", seed=3)], out)
    assert (result.seed, result.attempts, result.audio_seconds) == (other_seed(3), 2, 1.0)
    assert summary.done == 1
    again, _ = run(engine, [job("a", "x", seed=3)], out)  # the job is done, though with another seed
    assert again.skipped == 1


@pytest.mark.parametrize("quiet", ["_", NO_SPEECH], ids=repr)
def test_near_silence_twice_is_a_failure_without_a_file(engine, out, quiet):
    engine.script["x"] = quiet
    _, (result,) = run(engine, [job("a", "x", seed=MAX_SEED)], out)
    assert (result.code, result.seed, result.attempts) == ("no_speech", 0, 2)
    assert names(out) == ["results.jsonl"]
    assert len(engine.requests) == 2


def test_other_errors_are_not_tried_again(engine, out):
    engine.script |= {"x": SynthesisError("NaN"), "y": ZeroDivisionError()}
    _, results = run(engine, [job("a", "x"), job("b", "y")], out)
    assert {result.id: result.code for result in results} == {"a": "synthesis_failed", "b": "internal_error"}
    assert len(engine.requests) == 2


def test_a_request_for_which_there_is_no_room_waits_for_the_end_of_another(engine, out):
    def full(request):
        return OverloadedError("full", retry_after_s=3600) if engine.running > 1 else "a"

    engine.script["x"] = full
    summary, _ = run(engine, [job(f"{index}", "x") for index in range(12)], out)
    assert summary.done == 12


def test_the_end_of_a_request_that_failed_makes_room_too(engine, out):
    def full(request):
        return OverloadedError("full", retry_after_s=3600) if engine.running > 1 else SynthesisError("NaN")

    engine.script["x"] = full
    summary, _ = run(engine, [job(f"{index}", "x") for index in range(3)], out)
    assert [failure.code for failure in summary.failures] == ["synthesis_failed"] * 3


def test_a_request_for_which_there_is_never_room_fails(engine, out):
    engine.script["x"] = OverloadedError("full", retry_after_s=0.001)
    summary, _ = run(engine, [job("a", "x")], out)
    assert [failure.code for failure in summary.failures] == ["overloaded"]
    assert len(engine.requests) == 1 + MAX_REFUSALS


# -- going on ------------------------------------------------------------------------------------------------------


def test_what_is_done_is_skipped_and_what_failed_is_tried_again(engine, out):
    jobs = [job("a"), job("b", "x"), job("c")]
    engine.script["x"] = SynthesisError("not yet")
    first, _ = run(engine, jobs, out)
    assert (first.done, first.skipped, len(first.failures)) == (2, 0, 1)
    del engine.script["x"], engine.requests[:]
    second, _ = run(engine, jobs, out)
    assert (second.done, second.skipped, len(second.failures)) == (1, 2, 0)
    assert [request.text for request in engine.requests] == ["x"]


def test_nothing_to_do_needs_no_engine(engine, out):
    run(engine, [job("a")], out)
    with ResultsFolder(out) as folder:
        batch = Batch([job("a")], folder)
        assert not batch.has_work()
        assert batch.summary.skipped == 1


@pytest.mark.parametrize(
    "change",
    [
        {"request": SynthesisRequest("other")},
        {"request": SynthesisRequest("a", voice="anna")},
        {"request": SynthesisRequest("a", sampling=SamplingParams(seed=1))},
        {"request": SynthesisRequest("a", speed=2.0)},
        {"request": SynthesisRequest("a", stream=False)},
        {"format": "flac"},
        {"prompt_audio": Path("me.wav"), "consent": True},
    ],
)
def test_a_job_that_has_changed_is_done_again(engine, out, change):
    run(engine, [job("a")], out)
    summary, _ = run(engine, [replace(job("a"), **change)], out)
    assert (summary.done, summary.skipped) == (1, 0)


def test_another_model_speaks_again(engine, out):
    for model, skipped in (("one", 0), ("one", 1), ("two", 0), ("two", 1)):
        assert run(engine, [job("a")], out, model=model)[0].skipped == skipped


@pytest.mark.parametrize("damage", ["gone", "shorter", "empty", "no line", "half a line", "failed since"])
def test_a_result_without_its_whole_file_or_line_does_not_count(engine, out, damage):
    run(engine, [job("a"), job("b")], out)
    path, results = out / "a.wav", out / "results.jsonl"
    lines = results.read_bytes().splitlines(keepends=True)
    lines.sort(key=lambda line: json.loads(line)["id"], reverse=True)  # b, a
    results.write_bytes(b"".join(lines))
    if damage == "gone":
        path.unlink()
    elif damage == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no line":
        results.write_bytes(lines[0])
    elif damage == "half a line":
        results.write_bytes(lines[0] + lines[1][:-20])
    else:
        known = json.loads(lines[1]) | {"code": "some_code"}
        results.write_bytes(lines[0] + lines[1] + json.dumps(known).encode() + b"\n")
    summary, _ = run(engine, [job("a"), job("b")], out)
    assert (summary.done, summary.skipped) == (1, 1)
    again, _ = run(engine, [job("a"), job("b")], out)
    assert again.skipped == 2


def test_other_words_in_the_results_are_left_alone(engine, out):
    out.mkdir()
    strange = (
        b'\xff\xfe\nnull\n[]\n{"id": 3}\n{"id": "a", "code": null, "fingerprint": 5, "bytes": "x"}\n'
        + b"[" * 100_000
    )
    (out / "results.jsonl").write_bytes(strange)
    assert run(engine, [job("a")], out)[0].done == 1
    assert (out / "results.jsonl").read_bytes().startswith(strange + b"\n{")
    assert run(engine, [job("a")], out)[0].skipped == 1


def test_a_file_is_whole_or_not_there(engine, out, monkeypatch):
    """Whatever step of writing fails: no file under the final name, no line of success, and a clear end."""
    steps = ("open", "fsync", "replace")
    for step in steps:
        with monkeypatch.context() as patch:

            def full(*_, **__):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr(f"vivace.voice.file.os.{step}", full)
            with pytest.raises(VivaceError, match="No space left") as raised:
                run(engine, [job("a"), job("b")], out)
        assert raised.value.code == "storage_full"
        assert names(out) == ["results.jsonl"]
        assert lines_of(out) == []
    assert run(engine, [job("a"), job("b")], out)[0].done == 2


def test_results_that_cannot_be_written_end_the_run(engine, out, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("vivace.batch.results.write_all", full)
        with pytest.raises(OSError, match=r"No space left.*results\.jsonl"):
            run(engine, [job("a")], out)
    assert run(engine, [job("a")], out)[0].done == 1


def test_an_engine_that_ended_ends_the_run_and_fails_no_job(engine, out):
    def end(request):
        engine.is_running = False
        return InvalidRequestError("the engine is closed", code="engine_closed")

    engine.script["x"] = end
    with pytest.raises(InvalidRequestError, match="closed"):
        run(engine, [job("a", "x"), *(job(f"{index}") for index in range(100))], out)
    assert all(line["code"] is None for line in lines_of(out))
    assert engine.running == 0


def test_cancelling_leaves_a_folder_to_go_on_with(engine, out):
    jobs = [job(f"{index}") for index in range(40)]
    spoken = []

    async def main():
        with ResultsFolder(out) as folder:
            running = asyncio.create_task(Batch(jobs, folder, on_result=spoken.append).run(engine))
            while len(spoken) < 10:
                await asyncio.sleep(0)
            engine.gate = asyncio.Event()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert engine.running == 0

    asyncio.run(main())
    engine.gate = None
    assert not [name for name in names(out) if name.startswith(".")]
    summary, _ = run(engine, jobs, out)
    assert summary.skipped == len(spoken)
    assert summary.done == 40 - len(spoken)


@pytest.fixture
def disk(monkeypatch):
    """A disk that takes nothing until it is told to: [how many wait for it, the event that tells it]."""
    state, save = [0, threading.Event()], ResultsFolder.save

    def slow(self, each, data):
        state[0] += 1
        assert state[1].wait(30)
        save(self, each, data)

    monkeypatch.setattr(ResultsFolder, "save", slow)
    return state


def test_what_is_being_written_when_a_run_is_cancelled_is_done(engine, out, disk):
    spoken = []

    async def main():
        with ResultsFolder(out) as folder:
            batch = Batch([job("a")], folder, on_result=spoken.append)
            running = asyncio.create_task(batch.run(engine))
            while not disk[0]:
                await asyncio.sleep(0.001)
            running.cancel()
            asyncio.get_running_loop().call_later(0.02, disk[1].set)
            with pytest.raises(asyncio.CancelledError):
                await running
            return batch.summary

    assert asyncio.run(main()).done == 1
    assert [each.id for each in spoken] == ["a"]
    assert [line["id"] for line in lines_of(out)] == ["a"]
    assert names(out) == ["a.wav", "results.jsonl"]


def test_a_slow_disk_does_not_hold_up_the_threads_that_bring_requests(out, disk):
    async def main():
        with ResultsFolder(out) as folder:
            jobs = (job(f"{index}") for index in range(200))
            running = asyncio.create_task(Batch(jobs, folder).run(FakeEngine(streams_at_once=64)))
            while disk[0] < MAX_WRITERS:
                await asyncio.sleep(0.001)
            try:
                await asyncio.wait_for(asyncio.to_thread(str), 5)
            finally:
                disk[1].set()
            return await running

    assert asyncio.run(main()).done == 200


def test_an_iterator_that_fails_ends_the_run(engine, out):
    def jobs():
        yield job("a")
        raise OSError(errno.EIO, "gone", "jobs.jsonl")

    with pytest.raises(OSError, match="gone"):
        run(engine, jobs(), out)


def test_one_run_at_a_time_in_a_folder(out):
    with ResultsFolder(out), pytest.raises(InvalidRequestError) as raised:
        ResultsFolder(out)
    assert raised.value.code == "folder_in_use"
    ResultsFolder(out).close()


def test_what_a_killed_run_left_is_removed_and_nothing_else(out):
    out.mkdir()
    for name in (".a.wav.0123456789abcdef.tmp", ".mine.tmp", "b.tmp", "c.wav"):
        (out / name).touch()
    ResultsFolder(out).close()
    assert names(out) == [".mine.tmp", "b.tmp", "c.wav", "results.jsonl"]


# -- with a real engine ----------------------------------------------------------------------------------------------


def real_engine(folder, *, paged=False):
    engine = quiet_engine(folder, num_steps=2, token_text_ratio=(2.0, 2.6))
    if paged:
        assets = engine._assets
        engine.use_device(DeviceStages.build(assets.model, assets.limits, max_rows=8, deterministic=True))
    return engine


def real_jobs(engine, count):
    voices = [noise_voice(engine._config, size, seed=size) for size in (40, 3)]
    for index in range(count):
        sampling = SamplingParams(seed=index)
        request = SynthesisRequest(TEXTS[index % len(TEXTS)], voice=voices[index % 2], sampling=sampling)
        yield BatchJob(f"{index}", request, "pcm")


@pytest.mark.parametrize("paged", [False, True], ids=["one at a time", "deterministic, together"])
def test_company_changes_no_byte(random_model_folder, out, paged):
    with real_engine(random_model_folder, paged=paged) as engine:
        alone = [pcm16(engine.synthesize(each.request).samples) for each in real_jobs(engine, 12)]

    async def main():
        engine = real_engine(random_model_folder, paged=paged)
        async with AsyncEngine(engine) as speaker:
            assert speaker.streams_at_once == (8 if paged else 1)
            with ResultsFolder(out) as folder:
                summary = await Batch(real_jobs(engine, 12), folder).run(speaker)
            assert speaker.num_running == 0
        return summary

    summary = asyncio.run(main())
    assert (summary.done, summary.failures) == (12, [])
    for index, samples in enumerate(alone):
        assert (out / f"{index}.pcm").read_bytes() == samples, index
    assert summary.audio_seconds == pytest.approx(sum(map(len, alone)) / 48_000, abs=0.02)


def test_several_engines_share_a_batch(random_model_folder, out):
    engines = [real_engine(random_model_folder) for _ in range(2)]
    jobs = list(real_jobs(engines[0], 8))

    async def main():
        async with EngineRouter([AsyncEngine(engine) for engine in engines]) as router:
            assert router.streams_at_once == 2
            with ResultsFolder(out) as folder:
                return await Batch(jobs, folder).run(router)

    assert asyncio.run(main()).done == 8
    with real_engine(random_model_folder) as engine:
        for each in jobs:
            assert (out / each.file_name).read_bytes() == pcm16(engine.synthesize(each.request).samples)


def test_an_unclonable_recording_is_a_result(random_model_folder, out):
    async def main():
        async with AsyncEngine(real_engine(random_model_folder)) as speaker:
            with ResultsFolder(out) as folder:
                missing = job("a", prompt_audio=out / "missing.wav", consent=True)
                return await Batch([missing, job("b", "Hi."), job("c", " ")], folder).run(speaker)

    summary = asyncio.run(main())
    assert {each.id: each.code for each in summary.failures} == {"a": "invalid_audio", "c": "empty_input"}
    assert summary.done == 1


def test_a_long_segment_that_the_model_left_silent_is_spoken_with_another_seed(out, monkeypatch):
    """The engine has handed out its beginning before it could tell. The embedded model, whose silence is silent."""
    step, muted, fox = FlowRunner.step, [], job("a", "Once upon a time there was a fox.")

    def quiet_step(self, stream, tokens, *, is_last):
        mel = step(self, stream, tokens, is_last=is_last)
        if True in muted:
            return mel
        muted.append(is_last)
        return torch.full_like(mel, -8.0)

    async def main():
        async with AsyncEngine(Engine.open("mini", warm_up=False)) as speaker:
            monkeypatch.setattr(FlowRunner, "step", quiet_step)
            with ResultsFolder(out) as folder:
                await Batch([fox], folder, on_result=results.append).run(speaker)

    results = []
    asyncio.run(main())
    assert len(muted) > 2
    assert [(each.code, each.attempts, each.seed) for each in results] == [(None, 2, 1)]
