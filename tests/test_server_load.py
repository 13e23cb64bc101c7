"""The load benchmark: each phase, small, ends by itself and tells what it saw."""

import json
import sys

import pytest

from benchmarks import server_load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_streams_and_connections(monkeypatch, capsys):
    arguments = "streams idle keep-alive --streams 3 --seconds 0.5 --sockets 10 --connections 20"
    monkeypatch.setattr("sys.argv", ["server_load", *arguments.split()])
    monkeypatch.setattr("benchmarks.load.phases.NUM_NEIGHBOURS", 2)
    monkeypatch.setattr("benchmarks.load.phases.IDLE_SECONDS", 0.0)
    server_load.main()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["bench"] == "server_load"
    for name in ("streams", "idle", "keep-alive"):
        (step,) = document[name]["steps"]
        heard = step.get("neighbours", step)
        assert heard["requests"] >= 2
        assert (heard["failed"], heard["wrong_bytes"], document[name]["exit_code"]) == (0, 0, 0)
    assert document["keep-alive"]["steps"][0]["statuses"] == {"200": 40}


@pytest.mark.parametrize("arguments", [["sing"], ["--streams", "501"], ["--connections", "100000"]])
def test_what_is_too_much_is_refused(monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["server_load", *arguments])
    with pytest.raises(SystemExit) as caught:
        server_load.main()
    assert caught.value.code == 2
