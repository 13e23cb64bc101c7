"""What clients may not do to the server, tried with raw sockets."""

import asyncio
import contextlib
import json
import os
import socket
import struct
import time

import httpx
import pytest

from tests.server_helpers import (
    RATE,
    FakeService,
    LoopbackServer,
    post,
    read_all,
    read_head,
    status_and_code,
    wait_until,
)
from vivace.config import ServerConfig
from vivace.errors import ServeError
from vivace.server.door import bind, check_access, fit_to_open_files, read_aliases, read_keys
from vivace.server.guard import UPLOAD_PATHS

KEY = "correct-horse-battery"
QUICK = ServerConfig(
    header_seconds=0.4,
    body_seconds=0.5,
    write_stall_seconds=0.6,
    request_seconds=1.0,
    keep_alive_seconds=1.0,
    max_connections=40,
)
GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LoopbackServer(lambda: FakeService(tmp_path_factory.mktemp("voices")), QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    config = ServerConfig(api_keys=(KEY, "another-key-of-ours"), allowed_origins=("https://good.example",))
    with LoopbackServer(lambda: FakeService(tmp_path_factory.mktemp("voices")), config) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(server):
    server.service.script = [0.1]
    server.service.ended.clear()


def _is_closed_within(connection, seconds):
    connection.settimeout(seconds)
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass
    return time.monotonic() - started < seconds


# -- slow and silent peers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: b"])
def test_a_header_that_never_ends(server, start):
    with server.connect() as connection:
        connection.sendall(start)
        answer = read_all(connection)
    assert (status_and_code(answer) == (408, "request_timeout")) if start else answer == b""


def test_a_header_in_drops_is_no_reason_to_wait(server):
    with server.connect() as connection:
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in GET[:-4] * 3:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
                if time.monotonic() - started > 1.5:
                    break
        assert _is_closed_within(connection, 1.0)


def test_a_second_header_that_never_ends(server):
    with server.connect() as connection:
        connection.sendall(GET + b"GET / HT")
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1") == 2
    assert b"request_timeout" in answer


def test_a_header_that_never_ends_does_not_disturb_an_answer_under_way(server):
    server.service.script = [0.1, lambda: asyncio.sleep(0.8), 0.1]
    with server.connect() as connection:
        connection.sendall(post({"input": "Hi.", "response_format": "pcm"}) + b"GET /")
        answer = read_all(connection)
    _, _, body = answer.partition(b"\r\n\r\n")
    assert b"408" not in body[: 2 * int(0.2 * RATE)]
    assert b"\r\n0\r\n\r\n" in body


def test_an_idle_connection_is_closed(server):
    with server.connect() as connection:
        connection.sendall(GET)
        assert b"200 OK" in read_head(connection)
        assert _is_closed_within(connection, 3.0)


def test_a_body_that_never_ends(server):
    head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = server.exchange(head + b"Content-Length: 100\r\n\r\n{")
    assert status_and_code(answer) == (408, "request_timeout")


def test_a_reader_that_takes_nothing_ends_alone(server, caplog):
    server.service.script = [1.0] * 400  # 19 MB: more than the kernel takes
    with server.connect() as connection, httpx.Client(base_url=server.url) as other:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post({"input": "Hi.", "response_format": "pcm"}))
        wait_until(lambda: server.service.running)
        assert other.get("/health/live").status_code == 200
        wait_until(lambda: not server.service.running, 8.0)
        wait_until(lambda: not server.server.server_state.tasks)
        connection.settimeout(0.05)  # the rest trickles through a tiny window
        assert not read_all(connection).endswith(b"0\r\n\r\n")
        assert 'vivace_errors_total{code="write_stall"} 1.0' in other.get("/metrics").text
    assert server.service.ended[-1] in ("failed", "cancelled")
    assert not caplog.records


def test_a_reader_that_is_slow_gets_everything(server):
    server.service.script = [0.5] * 8
    with server.connect() as connection:
        connection.sendall(post({"input": "Hi.", "response_format": "pcm"}, headers=("Connection: close",)))
        received = b""
        while data := connection.recv(16_384):
            received += data
            time.sleep(0.02)
    assert received.endswith(b"0\r\n\r\n")


def test_work_that_takes_too_long(server):
    server.service.script = [lambda: asyncio.sleep(30)]
    answer = server.exchange(post({"input": "Hi."}, headers=("Connection: close",)))
    assert status_and_code(answer) == (504, "deadline_exceeded")
    wait_until(lambda: not server.service.running)


def test_work_that_takes_too_long_after_the_first_byte(server):
    server.service.script = [0.1, lambda: asyncio.sleep(30)]
    answer = server.exchange(post({"input": "Hi.", "response_format": "pcm"}))
    assert b"200 OK" in answer
    assert not answer.endswith(b"0\r\n\r\n")


def test_a_reset_ends_the_request(server):
    server.service.script = [0.1, asyncio.Event().wait]
    with server.connect() as connection:
        connection.sendall(post({"input": "Hi."}))
        wait_until(lambda: server.service.running)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not server.service.running)


def test_many_connections_leave_room_for_none(server):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(server.connect()) for _ in range(QUICK.max_connections)]
        for connection in held:
            connection.sendall(b"G")
        wait_until(lambda: len(server.server.server_state.connections) == QUICK.max_connections)
        assert status_and_code(server.exchange(b"")) == (503, "overloaded")
    wait_until(lambda: not server.server.server_state.connections)
    assert b"200 OK" in server.exchange(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))


# -- sizes ---------------------------------------------------------------------------------------------------


def _raw_post(path="/v1/audio/speech", *headers, body=b"", kind="application/json"):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_an_announced_body_is_refused_before_it_comes(server):
    answer = server.exchange(_raw_post("/v1/audio/speech", f"Content-Length: {2**20 + 1}"))
    assert status_and_code(answer) == (413, "payload_too_large")


def test_a_body_of_the_largest_size_is_read(server):
    body = json.dumps({"input": "Hi.", "x": ""}).encode()
    body = body.replace(b'""', b'"' + b"y" * (2**20 - len(body)) + b'"')
    assert len(body) == 2**20
    assert b"200 OK" in server.exchange(
        _raw_post("/v1/audio/speech", f"Content-Length: {2**20}", "Connection: close", body=body)
    )


def test_a_body_without_length_is_refused_where_it_is_too_large(server):
    chunk = b"%x\r\n%s\r\n" % (65_536, b" " * 65_536)
    answer = server.exchange(_raw_post("/v1/audio/speech", "Transfer-Encoding: chunked", body=chunk * 17))
    assert status_and_code(answer) == (413, "payload_too_large")


def test_the_sender_of_a_huge_upload_gets_to_see_the_answer(server):
    """Even one that reads only once it has sent everything."""
    size = 14 * 2**20
    files = {"audio_sample": ("x.wav", b"\0" * size)}
    response = httpx.post(f"{server.url}/v1/audio/voices", data={"name": "x"}, files=files, timeout=20)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "payload_too_large")


def test_an_upload_that_waits_for_permission_is_not_invited(server):
    headers = (f"Content-Length: {2**30}", "Expect: 100-continue")
    answer = server.exchange(_raw_post("/v1/audio/voices", *headers, kind="multipart/form-data; boundary=b"))
    assert answer.startswith(b"HTTP/1.1 413")


def test_an_upload_that_waits_for_permission_is_invited_where_it_is_welcome(server):
    body = json.dumps({"input": "Hi."}).encode()
    headers = (f"Content-Length: {len(body)}", "Expect: 100-continue", "Connection: close")
    with server.connect() as connection:
        connection.sendall(_raw_post("/v1/audio/speech", *headers))
        assert read_head(connection) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert b"200 OK" in read_head(connection)


def test_a_body_in_many_small_chunks(server):
    body = json.dumps({"input": "Hi.", "x": "y" * 60_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answer = server.exchange(
        _raw_post("/v1/audio/speech", "Transfer-Encoding: chunked", "Connection: close", body=chunks)
    )
    assert b"200 OK" in answer


def test_headers_up_to_the_limits_are_read(server):
    lines = b"".join(b"X-%d: y\r\n" % number for number in range(98))
    big = b"X-Big: " + b"z" * 30_000 + b"\r\n"
    for extra in (lines, big):
        request = GET[:-2] + extra + b"Connection: close\r\n\r\n"
        assert b"200 OK" in server.exchange(request)


# -- keys, hosts, origins ------------------------------------------------------------------------------------


def _get(server, path, *headers, host="localhost"):
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "Connection: close"]
    return server.exchange("\r\n".join([*lines, "", ""]).encode())


@pytest.mark.parametrize(
    "header",
    [
        f"Authorization: Bearer {KEY}",
        f"authorization: bearer {KEY}",
        f"xi-api-key: {KEY}",
        "xi-api-key: another-key-of-ours",
    ],
)
def test_a_key_opens(locked, header):
    assert b"200 OK" in _get(locked, "/v1/models", header)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/v1/audio/voices", "/openapi.json", "/nowhere", "/v1/audio/speech"]
)
def test_every_path_needs_a_key(locked, path):
    answer = _get(locked, path)
    assert status_and_code(answer) == (401, "invalid_api_key")
    assert b"www-authenticate: Bearer" in answer


@pytest.mark.parametrize("path", ["/", "/health/live", "/health/ready"])
def test_page_and_health_need_none(locked, path):
    assert status_and_code(_get(locked, path))[0] == 200


def test_keys_are_not_in_the_settings_text():
    assert KEY not in repr(ServerConfig(api_keys=(KEY,)))


def test_an_allowed_origin(locked):
    origin = "Origin: https://good.example"
    answer = _get(locked, "/v1/models", origin, f"xi-api-key: {KEY}")
    assert b"access-control-allow-origin: https://good.example" in answer
    assert b"access-control-allow-credentials" not in answer
    preflight = (
        b"OPTIONS /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nOrigin: https://good.example\r\n"
        b"Access-Control-Request-Method: POST\r\nConnection: close\r\n\r\n"
    )
    answer = locked.exchange(preflight)
    assert answer.startswith(b"HTTP/1.1 204")
    assert b"access-control-allow-headers: authorization, content-type" in answer


def test_the_page_itself_may_call(server):
    host = f"localhost:{server.port}"
    assert b"200 OK" in _get(server, "/v1/models", f"Origin: http://{host}", host=host)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "127.0.0.2"])
def test_names_of_this_machine(server, host):
    assert b"200 OK" in _get(server, "/health/live", host=host)


def test_settings_that_would_be_open_to_everybody_are_refused():
    with pytest.raises(ServeError) as caught:
        check_access(ServerConfig(host="0.0.0.0"))
    assert "--api-keys" in caught.value.message
    check_access(ServerConfig(host="0.0.0.0", api_keys=(KEY,)))
    check_access(ServerConfig())
    for key in ("", "short", "has blanks in it", "späth-key-too"):
        with pytest.raises(ServeError):
            check_access(ServerConfig(api_keys=(key,)))


def test_a_port_that_is_taken_is_said_in_words():
    with bind(ServerConfig(port=0)) as taken:
        taken.listen()
        with pytest.raises(ServeError) as caught:
            bind(ServerConfig(port=taken.getsockname()[1]))
    assert "--port" in caught.value.message


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")],
        *[(host, False) for host in ("0.0.0.0", "::", "127.example.org", "10.0.0.1", "")],
    ],
)
def test_what_only_this_machine_can_reach(host, is_local):
    assert ServerConfig(host=host).is_local is is_local


@pytest.mark.skipif(os.name != "posix", reason="bounds of open files")
@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "connections"),
    [
        (1_024, 1_048_576, 4_352, 4_096),
        (1_024, 4_096, 4_096, 3_840),
        (64, 64, 64, 32),
        (8_192, 8_192, None, 4_096),
    ],
)
def test_connections_fit_the_files_that_may_be_open(monkeypatch, soft, hard, raised_to, connections):
    asked = []
    monkeypatch.setattr("resource.getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda kind, bounds: asked.append(bounds[0]))
    assert fit_to_open_files(ServerConfig()).max_connections == connections
    assert asked == ([] if raised_to is None else [raised_to])


def test_aliases():
    assert read_aliases(["alloy=anna", "x=y=z"]) == {"alloy": "anna", "x": "y=z"}
    for wrong in ("alloy", "=anna", "alloy="):
        with pytest.raises(ServeError):
            read_aliases([wrong])


@pytest.mark.parametrize("host", ["no-such-host.invalid", "300.1.1.1"])
def test_an_address_that_is_none(host):
    with pytest.raises(ServeError):
        bind(ServerConfig(host=host))


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY}\n\n  second-key-here \n")
    path.chmod(0o600)
    assert read_keys(path) == (KEY, "second-key-here")
    path.chmod(0o644)
    with pytest.raises(ServeError):
        read_keys(path)
    path.chmod(0o600)
    for content in (b"", b"# nothing\n", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ServeError):
            read_keys(path)


@pytest.mark.parametrize(
    ("path", "is_upload"),
    [
        ("/v1/audio/transform", True),
        ("/v1/speech-to-speech/anna", True),
        ("/elevenlabs/v1/voice-changer/anna/stream", True),
        ("/v1/audio/speech", False),
        ("/v1/audio/voices/anna", False),
        ("/v1/text-to-speech/speech-to-speech/anna", False),
    ],
)
def test_only_uploads_may_be_large(path, is_upload):
    assert bool(UPLOAD_PATHS.fullmatch(path)) == is_upload
