"""The benchmark of a server's speech: one listener of the embedded model, and what counts."""

import asyncio
import json
import os
import signal
import sys
import time

import pytest

from benchmarks import server_speech
from benchmarks.load.client import BYTES_PER_SECOND, Heard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_real_server_is_heard(capsys, monkeypatch):
    monkeypatch.setattr(server_speech, "TEXT", "Hello!")
    assert server_speech.main(["--streams", "1,2", "--seconds", "2"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["bench"] == "server_speech"
    assert document["exit_code"] == 0
    one, two = document["loads"]
    assert min(one["requests"], two["requests"]) >= 1
    assert one["failed"] == two["failed"] == 0
    assert one["audio_seconds"] > 0
    assert one["ttfb_ms"]["p50"] > 0
    assert one["engine_cpu_percent"] > 0


def test_figures_are_those_of_whole_answers():
    heard = [
        Heard(status=200, ttfb_ms=20.0, num_bytes=2 * BYTES_PER_SECOND, is_whole=True),
        Heard(status=200, ttfb_ms=40.0, num_bytes=BYTES_PER_SECOND, is_whole=True, underruns=3),
        Heard(status=200, ttfb_ms=999.0, num_bytes=BYTES_PER_SECOND),
        Heard(status=503),
    ]
    found = server_speech.figures(heard, 4)
    assert (found["requests"], found["failed"], found["underruns"]) == (4, 2, 1)
    assert found["statuses"] == {"200": 3, "503": 1}
    assert found["audio_seconds"] == 3.0
    assert (found["ttfb_ms"]["p50"], found["ttfb_ms"]["max"]) == (30.0, 40.0)


def test_what_was_not_heard_whole_is_not_sound():
    """Nor is a level of which no request counts, nor a server that fails at its end."""
    heard = {"requests": 3, "failed": 0}
    assert server_speech.is_sound({"loads": [heard, heard], "exit_code": 0})
    assert not server_speech.is_sound({"loads": [heard, heard], "exit_code": 1})
    for other in ({"requests": 3, "failed": 1}, {"requests": 0, "failed": 0}):
        assert not server_speech.is_sound({"loads": [heard, other], "exit_code": 0})


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--streams", streams] for streams in ("0", "1001", "2,0", "", "two", "1,")),
        *(["--seconds", seconds] for seconds in ("0", "-1", "nan")),
    ],
)
def test_arguments_out_of_range(arguments):
    with pytest.raises(SystemExit) as caught:
        server_speech.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("streams", ["1", "8"])
def test_a_server_that_dies_under_load(monkeypatch, capfd, streams):
    """One line and the exit code of a failure, and no wait for the end of the window."""
    begun, real = time.monotonic(), server_speech.load

    async def load(server, *arguments):
        asyncio.get_running_loop().call_later(0.5, os.kill, server.pid, signal.SIGKILL)
        return await real(server, *arguments)

    monkeypatch.setattr(server_speech, "TEXT", "Hello!")
    monkeypatch.setattr(server_speech, "load", load)
    with pytest.raises(SystemExit) as caught:
        server_speech.main(["--streams", streams, "--seconds", "600"])
    assert caught.value.code == "the server has ended before the benchmark did: signal 9"
    assert time.monotonic() - begun < 120
    assert "Traceback" not in capfd.readouterr().err


def test_a_server_that_does_not_start(capfd):
    with pytest.raises(SystemExit) as caught:
        server_speech.run("no-such-folder", "cpu", "auto", [1], 1.0)
    assert caught.value.code == "the server did not start"
    assert "no-such-folder" in capfd.readouterr().err
