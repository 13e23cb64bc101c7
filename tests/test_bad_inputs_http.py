"""Rows H of the bad inputs: HTTP and headers, as raw bytes. Every row leaves a server that answers others."""

import resource

import pytest

from tests.beside import FakeServiceWithNeighbour, beside_each_row, memory_below
from tests.server_helpers import LoopbackServer, at_once, post, read_all, read_head, status_and_code
from vivace.config import ServerConfig

KEY = "correct-horse-battery"
BODY = b'{"input":"Hi."}'
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
TE = b"Transfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    config = ServerConfig(header_seconds=0.5, body_seconds=0.5, keep_alive_seconds=1.0)
    with LoopbackServer(
        lambda: FakeServiceWithNeighbour(tmp_path_factory.mktemp("voices")), config
    ) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    config = ServerConfig(api_keys=(KEY,), header_seconds=0.5)
    with LoopbackServer(
        lambda: FakeServiceWithNeighbour(tmp_path_factory.mktemp("voices")), config
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def nobody_notices(request, tmp_path_factory):
    yield from beside_each_row(request, tmp_path_factory, "server", "locked")


def _request(
    extra=b"",
    *,
    line=b"POST /v1/audio/speech HTTP/1.1",
    host=b"Host: localhost\r\n",
    kind=b"Content-Type: application/json\r\n",
    length=b"Content-Length: 15\r\n",
    body=BODY,
):
    return line + b"\r\n" + host + kind + length + extra + b"Connection: close\r\n\r\n" + body


def _line(line):
    return _request(line=line)


def _length(length, body=BODY):
    return _request(length=length, body=body)


def _kind(kind, path=b"/v1/audio/speech"):
    return _request(line=b"POST " + path + b" HTTP/1.1", kind=b"Content-Type: " + kind + b"\r\n")


MANY = b"".join(b"X%d: y\r\n" % number for number in range(200_000))
INVALID, TOO_LARGE = (400, "invalid_request"), (431, "headers_too_large")
OK = (200, None)

ROWS = {
    "H1-33-kB": (_request(b"X: " + b"a" * 32_768 + b"\r\n"), TOO_LARGE),
    "H1-60-MB": (_request(b"X: " + b"a" * 60_000_000 + b"\r\n"), TOO_LARGE),
    "H2-101": (_request(MANY[: MANY.index(b"X101")]), TOO_LARGE),
    "H2-200000": (_request(MANY), TOO_LARGE),
    "H4-none": (_request(host=b""), (400, "invalid_host")),
    "H4-two": (_request(host=b"Host: localhost\r\nHost: localhost\r\n"), (400, "invalid_host")),
    "H4-query": (_request(host=b"Host: a/?x=\r\n"), (400, "invalid_host")),
    "H4-empty": (_request(host=b"Host: \r\n"), (400, "invalid_host")),
    "H4-unknown": (_request(host=b"Host: evil.example\r\n"), (421, "unknown_host")),
    "H4-looks-local": (_request(host=b"Host: localhost.evil.example\r\n"), (421, "unknown_host")),
    "H5-length-and-chunked": (_request(TE), INVALID),
    "H5-length-twice": (_request(b"Content-Length: 15\r\n"), INVALID),
    "H5-lengths-differ": (_request(b"Content-Length: 3\r\n"), INVALID),
    "H5-plus": (_length(b"Content-Length: +4\r\n"), INVALID),
    "H5-minus": (_length(b"Content-Length: -1\r\n"), INVALID),
    "H5-hexadecimal": (_length(b"Content-Length: 0x10\r\n"), INVALID),
    "H5-chunked-identity": (_length(b"Transfer-Encoding: chunked, identity\r\n", CHUNKED), INVALID),
    "H5-gzip-chunked": (_length(b"Transfer-Encoding: gzip, chunked\r\n", CHUNKED), INVALID),
    "H5-folded": (_request(b"X-A: b\r\n c\r\n"), INVALID),
    "H5-blank-before-colon": (_request(b"X-A : b\r\n"), INVALID),
    "H5-bare-line-feeds": (_request().replace(b"\r\n", b"\n"), INVALID),
    "H5-nul": (_request(b"X-A: a\0b\r\n"), INVALID),
    "H5-chunk-end": (_length(TE, CHUNKED.replace(b"}\r\n", b"}XX")), INVALID),
    "H5-chunk-size": (_length(TE, b"zz\r\n" + CHUNKED), INVALID),
    "H6-a-byte-each": (_length(TE, b"1\r\n \r\n" * 65_537 + CHUNKED), OK),
    "H7-gzip": (_request(b"Content-Encoding: gzip\r\n"), (415, "unsupported_media_type")),
    "H9-long": (_request(b"X-Request-Id: " + b"a" * 10_000 + b"\r\n"), OK),
    "H9-address": (_request(b"X-Request-Id: 10.0.0.1\r\n"), OK),
    "H10-forwarded": (_request(b"X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Proto: https\r\n"), OK),
    "H11-range": (_request(b"Range: bytes=" + b"0-0," * 5_000 + b"\r\nIf-Range: x\r\n"), OK),
    "H11-range-huge": (_request(b"Range: bytes=" + b"0-0," * 100_000 + b"\r\n"), TOO_LARGE),
    "H12-trace": (_line(b"TRACE /v1/audio/speech HTTP/1.1"), (405, "method_not_allowed")),
    "H12-put": (_line(b"PUT /v1/audio/speech HTTP/1.1"), (405, "method_not_allowed")),
    "H12-connect": (_line(b"CONNECT localhost:80 HTTP/1.1"), INVALID),
    "H12-connect-path": (_line(b"CONNECT /v1/audio/speech HTTP/1.1"), (405, "method_not_allowed")),
    "H12-nul": (_line(b"G\0T / HTTP/1.1"), INVALID),
    "H12-unknown-method": (_line(b"FOO / HTTP/1.1"), INVALID),
    "H12-http-3": (_line(b"POST /v1/audio/speech HTTP/3.0"), INVALID),
    "H12-http-2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", INVALID),
    "H12-http-0.9": (b"GET /\r\n", (408, "request_timeout")),  # 0.9 has no headers; we wait for some
    "H12-tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), INVALID),
    "H13-parameters": (_kind(b"application/json; " + b"a=b;" * 5_000), INVALID),
    "H13-parameters-100-kB": (_kind(b"application/json; " + b"a=b;" * 25_000), TOO_LARGE),
    "H13-boundary": (_kind(b"multipart/form-data; boundary=" + b"b" * 10_000, b"/v1/audio/voices"), INVALID),
    "H14-accept": (_request(b"Accept: nonsense/;;q=9\r\nAccept-Encoding: \xff, br;q=x\r\n"), OK),
    "H15-foreign": (_request(b"Origin: https://evil.example\r\n"), (403, "forbidden_origin")),
    "H15-null": (_request(b"Origin: null\r\n"), (403, "forbidden_origin")),
    "H15-two": (
        _request(b"Origin: http://localhost\r\nOrigin: http://localhost\r\n"),
        (403, "forbidden_origin"),
    ),
    "H15-preflight": (
        _request(b"Origin: https://evil.example\r\n", line=b"OPTIONS /v1/audio/speech HTTP/1.1"),
        (403, "forbidden_origin"),
    ),
    "H16-two-slashes": (_line(b"POST //v1/audio/speech HTTP/1.1"), (404, "not_found")),
    "H16-dots": (_line(b"POST /v1/../v1/audio/speech HTTP/1.1"), (404, "not_found")),
    "H16-semicolon": (_line(b"POST /v1/audio/speech;x HTTP/1.1"), (404, "not_found")),
    "H16-trailing-slash": (_line(b"POST /v1/audio/speech/ HTTP/1.1"), (404, "not_found")),
    "H16-8-kB": (_line(b"POST /" + b"a" * 8_192 + b" HTTP/1.1"), (404, "not_found")),
    "H16-bad-escape": (_line(b"POST /v1/%ff%zz HTTP/1.1"), (404, "not_found")),
    "H16-raw-bytes": (_line("POST /v1/é HTTP/1.1".encode()), INVALID),
    # An escaped slash names the same address here; keys are asked for all the same (see below).
    "H16-escaped-slash": (_line(b"POST /v1%2faudio/speech HTTP/1.1"), OK),
    "H18-http-1.0": (post({"input": "Hi."}, version="1.0"), OK),
}


@pytest.mark.parametrize("row", ROWS)
def test_row(server, row):
    data, wanted = ROWS[row]
    server.service.script = [0.05]
    with memory_below(megabytes=32), at_once(2.0):
        answer = server.exchange(data, timeout=5)
    assert status_and_code(answer) == wanted
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.count(b"x-request-id: req_") == 1
    assert b"a" * 100 not in answer, "nothing of the input comes back"
    assert b"200 OK" in server.exchange(
        _line(b"GET /health/live HTTP/1.1").replace(BODY, b"").replace(b"15", b"0")
    )


@pytest.mark.parametrize("row", ["H9-long", "H9-address"])
def test_H9_request_ids_are_ours(server, row):
    server.service.script = [0.05]
    head = server.exchange(ROWS[row][0]).partition(b"\r\n\r\n")[0]
    assert b"10.0.0.1" not in head
    assert head.count(b"x-request-id") == 1


def test_H3_hundreds_of_partial_requests_disturb_nobody(server):
    """Each is answered and closed in time; a real client is served meanwhile."""
    server.service.script = [0.05]
    held = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for _ in range(min(500, soft // 2 - 100)):  # both ends are in this process
            context = server.connect()
            connection = context.__enter__()
            held.append((context, connection))
            connection.sendall(b"POST /v1/aud")
        with at_once(2.0):
            assert b"200 OK" in server.exchange(_request())
        assert all(status_and_code(read_all(connection))[0] == 408 for _, connection in held)
    finally:
        for context, _ in held:
            context.__exit__(None, None, None)


H8 = {
    "none": b"",
    "wrong": b"Authorization: Bearer wrong-key-of-ours\r\n",
    "prefix": b"Authorization: Bearer " + KEY[:-1].encode() + b"\r\n",
    "longer": b"Authorization: Bearer " + KEY.encode() + b"x\r\n",
    "basic": b"Authorization: Basic " + KEY.encode() + b"\r\n",
    "bare": b"Authorization: " + KEY.encode() + b"\r\n",
    "two": b"Authorization: Bearer " + KEY.encode() + b"\r\nAuthorization: Bearer x\r\n",
    "twice": (b"Authorization: Bearer " + KEY.encode() + b"\r\n") * 2,
    "long": b"Authorization: Bearer " + b"k" * 20_000 + b"\r\n",
    "non-ascii": "Authorization: Bearer ключ\r\n".encode(),
    "empty": b"xi-api-key: \r\n",
}


@pytest.mark.parametrize("name", H8)
def test_H8_keys(locked, name):
    answer = locked.exchange(_request(H8[name]))
    assert status_and_code(answer) == (401, "invalid_api_key")
    assert KEY.encode() not in answer


def test_H8_a_key_in_the_address_is_refused(locked):
    line = f"POST /v1/audio/speech?api_key={KEY} HTTP/1.1".encode()
    assert status_and_code(locked.exchange(_line(line)))[0] == 401


def test_H8_a_key_of_a_megabyte(locked):
    answer = locked.exchange(_request(b"Authorization: Bearer " + b"k" * 1_000_000 + b"\r\n"))
    assert status_and_code(answer) == TOO_LARGE


def test_H8_the_case_of_bearer_does_not_matter(locked):
    answer = locked.exchange(_request(b"Authorization: bEaReR " + KEY.encode() + b"\r\n"))
    assert status_and_code(answer) == OK


@pytest.mark.parametrize(
    "path",
    [
        b"//v1/audio/speech",
        b"/v1/../v1/audio/speech",
        b"/v1%2faudio/speech",
        b"/static/../v1/audio/speech",
        b"/health/live/../../v1/models",
        b"http://localhost/v1/audio/speech",
    ],
)
def test_H16_no_spelling_of_a_path_goes_past_the_key(locked, path):
    assert status_and_code(locked.exchange(_line(b"POST " + path + b" HTTP/1.1")))[0] == 401


@pytest.mark.parametrize("host", [b"", b"Host: a/?x=\r\n", b"Host: x\r\nHost: y\r\n"])
def test_H4_no_host_goes_past_the_key(locked, host):
    assert status_and_code(locked.exchange(_request(host=host)))[0] == 400


def test_H15_no_wildcard_and_no_credentials(locked):
    answer = locked.exchange(_request(b"Origin: https://evil.example\r\n"))
    assert b"access-control-allow" not in answer.lower()


def test_H17_pipelined_requests_are_answered_in_order(server):
    server.service.script = [0.05]
    first = post({"input": "Hi.", "response_format": "pcm"})
    second = b"GET /v1/models/nobody HTTP/1.1\r\nHost: localhost\r\n\r\n"
    third = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = server.exchange(first + second + third)
    found = [answer.find(mark) for mark in (b"audio/pcm", b"model_not_found", b'"live"')]
    assert sorted(found) == found
    assert -1 not in found


def test_H17_an_error_with_unread_body_does_not_become_a_request(server):
    """What follows a refused body is never read as a request of its own."""
    smuggled = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
    answer = server.exchange(head + smuggled)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert status_and_code(answer) == (404, "not_found")


@pytest.mark.parametrize(
    "offer", [b"Upgrade: h2c\r\n", b"UPGRADE:h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"]
)
def test_an_offer_of_http_2_keeps_its_body(server, offer):
    """As Java's own client sends it."""
    server.service.script = [0.05]
    request = _request(offer + b"Connection: Upgrade, HTTP2-Settings\r\n").replace(
        b"Connection: close\r\n", b""
    )
    with server.connect() as connection:
        connection.sendall(request)
        assert b"200 OK" in read_head(connection)


def test_text_that_looks_like_such_an_offer_is_not_touched(server):
    server.service.script = [0.05]
    text = "a\r\n\r\nb\r\nupgrade: h2c\r\nc"
    assert status_and_code(server.exchange(post({"input": text}, headers=("Connection: close",)))) == OK
    assert server.service.requests[-1].text == text


@pytest.mark.parametrize("path", [b"/health/ready", b"/v1/models", b"/"])
def test_head_is_get_without_a_body(server, path):
    answer = server.exchange(b"HEAD " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


def test_H18_http_1_0_keeps_its_length(server):
    server.service.script = [0.05, 0.05]
    head, _, body = server.exchange(post({"input": "Hi."}, version="1.0")).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert b"transfer-encoding" not in head


def test_H15_a_foreign_page_opens_no_websocket(server):
    upgrade = (
        b"GET /v1/audio/speech/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    answer = server.exchange(upgrade + b"Origin: https://evil.example\r\n\r\n")
    assert status_and_code(answer) == (403, "forbidden_origin")
