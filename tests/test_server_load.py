"""The load benchmark: each phase, small, ends by itself and tells what it saw."""

import json
import os
import signal
import sys

import pytest

from benchmarks import server_load
from benchmarks.load.server import ServerLostError, ServerProcess, command_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("voices")
    running = ServerProcess(command_of("paced", folder), folder)
    yield running
    assert running.end() == 0


def test_every_phase_with_the_paced_engine(server, monkeypatch, capsys):
    names = ["streams", "idle", "keep-alive"]
    arguments = "--streams 3 --seconds 0.2 --sockets 10 --connections 20"
    monkeypatch.setattr("sys.argv", ["server_load", *names, *arguments.split()])
    monkeypatch.setattr("benchmarks.load.phases.NUM_NEIGHBOURS", 2)
    monkeypatch.setattr("benchmarks.load.phases.MOST_CHUNKS", 6)
    monkeypatch.setattr("benchmarks.load.phases.IDLE_SECONDS", 0.0)
    monkeypatch.setattr(server_load, "ServerProcess", lambda *_: server)
    monkeypatch.setattr(server, "end", lambda **_: 0)
    server_load.main()
    monkeypatch.undo()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["bench"] == "server_load"
    for name in names:
        (step,) = document[name]["steps"]
        heard = step.get("neighbours", step)
        assert heard["requests"] >= 2
        assert (heard["failed"], heard["wrong_bytes"]) == (0, 0)
    assert document["keep-alive"]["steps"][0]["statuses"] == {"200": 40}


def test_a_server_that_dies_is_told_in_one_line(monkeypatch, tmp_path):
    running = ServerProcess(command_of("paced", tmp_path), tmp_path)
    running.check()
    os.kill(running.pid, signal.SIGKILL)
    assert running.end(is_asked=True) == -signal.SIGKILL
    for ask in (running.take, running.cpu_seconds, running.engine_pid):
        with pytest.raises(ServerLostError, match="signal 9"):
            ask()
    monkeypatch.setattr("sys.argv", ["server_load", "streams", "--streams", "1", "--seconds", "0.1"])
    monkeypatch.setattr(server_load, "ServerProcess", lambda *_: running)
    with pytest.raises(SystemExit) as caught:
        server_load.main()
    assert caught.value.code == "streams: the server has ended before the benchmark did: signal 9"


@pytest.mark.parametrize("arguments", [["sing"], ["--streams", "501"], ["--connections", "100000"]])
def test_what_is_too_much_is_refused(monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["server_load", *arguments])
    with pytest.raises(SystemExit) as caught:
        server_load.main()
    assert caught.value.code == 2
