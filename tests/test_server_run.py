"""``vivace serve`` as users start it: a process of its own, signals, and words instead of tracebacks."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from typer.testing import CliRunner

from tests.server_helpers import FakeService, post, read_all, read_head, wait_until
from vivace.cli import app
from vivace.config import ServerConfig
from vivace.engine import SynthesisRequest
from vivace.engine.loading import model_folder
from vivace.environment import api_keys
from vivace.errors import ModelFolderError, ServeError
from vivace.server.child import EngineSettings
from vivace.server.door import bind
from vivace.server.run import open_service, run_on_fast_loop, serve
from vivace.server.worker import open_engine

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")
UPGRADE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}
TEXT = "This is a sentence that takes a while to speak, so that there is time to send a signal."


def _start(*options, voices, **environment):
    command = (sys.executable, "-m", "vivace.cli", "serve", "--port", "0", *options)
    variables = {**os.environ, "VIVACE_VOICES": str(voices), "VIVACE_THREADS": "1", **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


class _Serving:
    def __init__(self, voices):
        self.process = _start(voices=voices)
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line + self.process.stderr.read()
        self.url, self.greeting = found.group(), line

    def end(self, seconds=30):
        out, error = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, error


@pytest.fixture
def serving(tmp_path):
    made = _Serving(tmp_path)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


def test_it_greets_speaks_drains_and_ends_well(serving):
    """One line with the address; on SIGTERM what runs is finished, what comes is refused, and the exit code is 0."""
    assert "vivace-mini" in serving.greeting
    with (
        httpx.Client(base_url=serving.url, timeout=60) as client,
        httpx.Client(base_url=serving.url) as other,
    ):
        assert client.get("/health/ready").json() == {"status": "ready"}
        body = {"input": TEXT, "response_format": "pcm"}
        with client.stream("POST", "/v1/audio/speech", json=body) as response:
            pieces = response.iter_bytes()
            audio = next(pieces)
            serving.process.send_signal(signal.SIGTERM)
            refused = other.post("/v1/audio/speech", json=body)
            while refused.status_code == 200:  # the signal was not seen yet
                refused = other.post("/v1/audio/speech", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"]
            assert other.get("/health/ready").json() == {"status": "draining"}
            assert other.get("/health/live").status_code == 200
            audio += b"".join(pieces)
    assert len(audio) > 100_000
    code, out, error = serving.end()
    assert (code, out, error) == (0, "", "")


def test_a_second_signal_ends_at_once(serving):
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        body = {"input": TEXT * 20, "response_format": "pcm"}
        with client.stream("POST", "/v1/audio/speech", json=body) as response:
            pieces = response.iter_bytes()  # kept: dropping it would close the answer
            next(pieces)
            serving.process.send_signal(signal.SIGINT)
            refused = client.post("/v1/audio/speech", json=body).status_code
            while refused == 200:
                refused = client.post("/v1/audio/speech", json=body).status_code
            serving.process.send_signal(signal.SIGINT)
            code, _, error = serving.end(20)
    assert code == 0
    assert "Traceback" not in error


def test_what_still_runs_after_the_drain_ends_with_an_error(tmp_path, caplog):
    """Its connection is cut, so that the answer cannot look complete, and nothing is left to wait for."""
    config = ServerConfig(port=0, drain_seconds=0.2)
    service = FakeService(tmp_path)
    service.script = [0.1, service.wait_until_closed]
    answers = []

    def talk(line):
        port = int(re.search(r":(\d+)/", line).group(1))

        def run():
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(post({"input": "Hi.", "response_format": "pcm"}))
                head = read_head(connection)
                os.kill(os.getpid(), signal.SIGTERM)
                answers.append((head, read_all(connection)))

        threading.Thread(target=run).start()

    async def open_service():
        return service

    with bind(config) as listener:
        run_on_fast_loop(serve(open_service, config, listener, talk))
    wait_until(lambda: answers)
    head, body = answers[0]
    assert b"200 OK" in head
    assert not body.endswith(b"0\r\n\r\n")
    assert not caplog.records


def test_a_signal_while_the_model_loads(tmp_path):
    process = _start(voices=tmp_path)
    timer = threading.Timer(0.7, process.send_signal, (signal.SIGTERM,))
    timer.start()
    process.communicate(timeout=30)
    assert process.returncode != 1


def _talk_while_it_loads(config, open_service, talk):
    """``serve`` with a thread that talks to it at once; what that returns."""
    said = []
    with bind(config) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: said.append(talk(url)))
        thread.start()
        try:
            run_on_fast_loop(serve(open_service, config, listener, said.append))
        finally:
            thread.join(30)
    return said


def test_while_the_model_loads_it_says_so(tmp_path):
    """Alive, not ready, and all else is to come again; host and key are checked as ever. Then it serves."""
    loaded = threading.Event()
    config = ServerConfig(port=0, api_keys=("correct-horse-battery",))
    key = {"authorization": "Bearer correct-horse-battery"}

    async def open_service():
        while not loaded.is_set():
            await asyncio.sleep(0.005)
        return FakeService(tmp_path)

    def talk(url):
        try:
            with httpx.Client(base_url=url, headers=key, timeout=30) as client:
                seen = [
                    client.get(path) for path in ("/health/live", "/health/ready", "/health", "/v1/models")
                ]
                seen.append(client.post("/v1/audio/speech", json={"input": "Hi."}))
                seen.append(client.get("/v1/audio/speech/stream", headers=UPGRADE))
                seen += [
                    client.get("/health", headers={"host": "evil.example"}),
                    httpx.get(f"{url}/v1/models"),
                ]
                figures = client.get("/metrics").text
                loaded.set()
                wait_until(lambda: client.get("/health").status_code == 200)
                seen.append(client.post("/v1/audio/speech", json={"input": "Hi."}))
                return seen, figures, client.get("/metrics").text
        finally:
            loaded.set()
            os.kill(os.getpid(), signal.SIGTERM)

    greeting, (seen, figures, later) = _talk_while_it_loads(config, open_service, talk)
    assert greeting.startswith("Vivace speaks at ")
    assert [answer.status_code for answer in seen] == [200, 503, 503, 503, 503, 503, 421, 401, 200]
    assert [answer.json()["status"] for answer in seen[:3]] == ["live", "starting", "starting"]
    assert {answer.json()["error"]["code"] for answer in seen[3:6]} == {"starting"}
    assert all(answer.headers["retry-after"] for answer in seen[1:5])
    assert 'vivace_state{state="starting"} 1.0' in figures
    assert 'vivace_errors_total{code="starting"} 3.0' in later  # what was counted before stays counted


def test_a_signal_ends_the_loading(tmp_path):
    ended = []

    async def open_service():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    def talk(url):
        assert httpx.get(f"{url}/health").json() == {"status": "starting"}
        os.kill(os.getpid(), signal.SIGTERM)

    assert _talk_while_it_loads(ServerConfig(port=0), open_service, talk) == [None]
    assert ended == [True]


def test_a_model_that_does_not_load_ends_the_server(tmp_path):
    async def open_service():
        await asyncio.sleep(0.1)
        raise ModelFolderError("cosyvoice3.yaml: is missing")

    with bind(ServerConfig(port=0)) as listener:
        address = listener.getsockname()
        with pytest.raises(ModelFolderError, match="is missing"):
            run_on_fast_loop(serve(open_service, ServerConfig(port=0), listener, print))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--host", "0.0.0.0"), "cannot_serve"),
        (("--host", "127.0.0.1", "--api-keys", "KEYS"), "cannot_serve"),
        (("--port", "-1"), None),
        (("--port", "65536"), None),
        (("--port", "x"), None),
        (("--port", ""), None),
        (("--max-characters", "0"), None),
        (("--unknown",), None),
        (("--port",), None),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(tmp_path, options, code, monkeypatch):
    """Usage errors end with exit code 2, those of ours carry a code that ``main`` turns into 2."""
    monkeypatch.setitem(sys.modules, "vivace.server.run", None)
    keys = tmp_path / "keys"
    keys.write_text("correct-horse-battery\n")
    keys.chmod(0o644)
    given = [str(keys) if option == "KEYS" else option for option in options]
    result = CliRunner().invoke(app, ["serve", *given])
    if code is None:
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)
    else:
        assert isinstance(result.exception, ServeError)


def test_a_port_that_is_taken(tmp_path):
    with bind(ServerConfig(port=0)) as taken:
        taken.listen()
        process = _start("--port", str(taken.getsockname()[1]), voices=tmp_path)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error.count("\n") == 1
    assert "in use" in error


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the second bind fails")
def test_a_port_that_another_server_takes_while_this_one_loads(tmp_path):
    """Linux lets both have the address until one of them listens."""
    config = ServerConfig(port=0)

    async def open_service():
        return FakeService(tmp_path)

    with bind(config) as first, bind(config, port=first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(ServeError, match="already in use; choose another with --port"):
            run_on_fast_loop(serve(open_service, config, second, print))


def test_a_model_that_cannot_read_text_is_not_served(tmp_path):
    """It could do nothing over HTTP; ``--tokenizer`` helps."""
    mini = model_folder("mini")
    for path in mini.iterdir():
        if path.name != "CosyVoice-BlankEN":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "CosyVoice-BlankEN").mkdir()
    (tmp_path / "CosyVoice-BlankEN" / "config.json").symlink_to(mini / "CosyVoice-BlankEN" / "config.json")
    with pytest.raises(ModelFolderError, match="text cannot be spoken"):
        asyncio.run(open_service(EngineSettings(tmp_path)))

    async def speak():
        settings = EngineSettings(
            tmp_path, tokenizer=mini / "CosyVoice-BlankEN", voices_folder=tmp_path / "voices"
        )
        async with await open_engine(settings.header()) as engine:
            return [chunk async for chunk in engine.stream(SynthesisRequest("Hello."))]

    assert asyncio.run(speak())[-1].is_last


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("VIVACE_API_KEYS", "correct-horse-battery, another-key\nthird-key")
    assert api_keys() == ("correct-horse-battery", "another-key", "third-key")
    monkeypatch.delenv("VIVACE_API_KEYS")
    assert api_keys() == ()


def test_the_socket_is_not_open_to_others_by_default():
    with bind(ServerConfig(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.family == socket.AF_INET
