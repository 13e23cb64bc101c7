"""Rows J of the bad inputs: the JSON body of a speech request.

J11 (duplicate names) is refused, although JSON test suites accept it: two parsers could hear two texts.
J21 refuses every address but ``data:``, which is the recording itself and fetches nothing.
"""

import base64
import json

import pytest

from tests.beside import FakeServiceWithNeighbour, beside_each_row, memory_below
from tests.helpers import speech_like_wav
from tests.server_helpers import LoopbackServer, at_once, post, status_and_code
from vivace.server.json_body import parse_json

INVALID_JSON, INVALID_TYPE = (400, "invalid_json"), (400, "invalid_type")
OUT_OF_RANGE, UNSUPPORTED = (400, "value_out_of_range"), (400, "unsupported_value")
UTF8, TOO_LONG, MISSING = (400, "invalid_utf8"), (400, "input_too_long"), (400, "missing_field")
NO_MODEL, NO_VOICE = (404, "model_not_found"), (404, "voice_not_found")
OK = (200, None)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LoopbackServer(lambda: FakeServiceWithNeighbour(tmp_path_factory.mktemp("voices"))) as running:
        running.service.script = [0.05]
        yield running


@pytest.fixture(autouse=True)
def nobody_notices(request, tmp_path_factory):
    yield from beside_each_row(request, tmp_path_factory, "server")


def _with(**members):
    return json.dumps({"input": "Hi.", **members}).encode()


def _raw(name, value):
    """A member written as it stands."""
    return b'{"input":"Hi.","%s":%s}' % (name.encode(), value.encode())


WAV = base64.b64encode(speech_like_wav(1.2)).decode()

ROWS = {
    "J1-empty": (b"", INVALID_JSON),
    "J1-null": (b"null", INVALID_TYPE),
    "J1-list": (b"[]", INVALID_TYPE),
    "J1-string": (b'"x"', INVALID_TYPE),
    "J1-number": (b"5", INVALID_TYPE),
    "J2-truncated": (b'{"model":"m","input":"hi', INVALID_JSON),
    "J3-nan": (_raw("speed", "NaN"), INVALID_JSON),
    "J3-infinity": (_raw("speed", "Infinity"), INVALID_JSON),
    "J3-minus-infinity": (_raw("speed", "-Infinity"), INVALID_JSON),
    "J4-1e999": (_raw("speed", "1e999"), OUT_OF_RANGE),
    "J4-1e-999": (_raw("speed", "1e-999"), OUT_OF_RANGE),
    "J4-minus-zero": (_raw("speed", "-0.0"), OUT_OF_RANGE),
    **{f"J5-{value}": (_raw("speed", value), OUT_OF_RANGE) for value in ("0", "0.2499", "4.0001", "-1")},
    "J5-400-digits": (_raw("speed", "9" * 400), OUT_OF_RANGE),
    **{f"J6-{value}": (_raw("speed", value), INVALID_TYPE) for value in ('"1.5"', "true", "[1]", "{}")},
    "J7-lone-surrogate": (b'{"input":"a\\ud800b"}', UTF8),
    "J7-second-half": (b'{"input":"a\\udc00b"}', UTF8),
    "J7-pair": (b'{"input":"a \\ud83d\\ude00 b"}', OK),
    "J7-elsewhere": (b'{"input":"Hi.","instructions":"\\ud800"}', UTF8),
    "J8-raw-bytes": (b'{"input":"\xff\xfe"}', UTF8),
    "J8-utf-16": ('{"input":"Hi."}'.encode("utf-16"), UTF8),
    "J8-utf-16-no-mark": ('{"input":"Hi."}'.encode("utf-16-le"), INVALID_JSON),
    "J8-utf-8-mark": (b'\xef\xbb\xbf{"input":"Hi."}', INVALID_JSON),
    "J8-overlong": (b'{"input":"\xc0\x80"}', UTF8),
    "J9-brackets": (b"[" * 100_000, INVALID_JSON),
    "J9-deep-in-unknown-key": (_raw("x", "[" * 5_000 + "]" * 5_000), INVALID_JSON),
    "J9-33-deep": (_raw("x", "[" * 32 + "]" * 32), INVALID_JSON),
    "J9-objects": (_raw("x", '{"a":' * 5_000 + "1" + "}" * 5_000), INVALID_JSON),
    "J9-brackets-in-text": (_with(input="hi [[[[" * 200), OK),
    "J9-escaped-quotes": (_with(input='hi "[[[' * 200), OK),
    "J10-5000-digits": (_raw("seed", "9" * 5_000), INVALID_JSON),
    "J10-5000-digits-unknown": (_raw("x", "9" * 5_000), INVALID_JSON),
    "J10-2**64": (_with(seed=2**64), OUT_OF_RANGE),
    "J10-2**63": (_with(seed=2**63), OUT_OF_RANGE),
    "J10-largest": (_with(seed=2**63 - 1), OK),
    "J10-negative": (_with(seed=-1), OUT_OF_RANGE),
    "J10-fraction": (_with(seed=1.5), OUT_OF_RANGE),
    "J10-true": (_with(seed=True), INVALID_TYPE),
    "J11-duplicate": (b'{"input":"a","input":"b"}', INVALID_JSON),
    "J11-duplicate-within": (b'{"input":"a","x":{"y":1,"y":2}}', INVALID_JSON),
    "J12-many-keys": (("{" + ",".join(f'"k{n}":1' for n in range(80_000)) + ',"input":"Hi."}').encode(), OK),
    "J12-proto": (_with(__proto__={"x": 1}, __class__="y", constructor=1), OK),
    "J13-comment": (b'{"input":"Hi."/* x */}', INVALID_JSON),
    "J13-line-comment": (b'{"input":"Hi."} // x', INVALID_JSON),
    "J13-trailing-comma": (b'{"input":"Hi.",}', INVALID_JSON),
    "J13-single-quotes": (b"{'input':'Hi.'}", INVALID_JSON),
    "J13-nul": (b'{"input":\0"Hi."}', INVALID_JSON),
    "J13-control-character": (b'{"input":"H\ni."}', INVALID_JSON),
    "J13-two-documents": (b'{"input":"Hi."}{"input":"Hi."}', INVALID_JSON),
    "J14-missing": (b"{}", MISSING),
    "J14-null": (_with(input=None), MISSING),
    "J14-number": (_with(input=5), INVALID_TYPE),
    "J14-list": (_with(input=["Hi."]), INVALID_TYPE),
    "J14-empty": (_with(input=""), (400, "empty_input")),
    "J15-4097": (_with(input="a" * 4_097), TOO_LONG),
    "J15-4096-of-four-bytes": (json.dumps({"input": "𠮷" * 4_096}, ensure_ascii=False).encode(), OK),
    "J16-unknown": (_with(model="gpt-5"), NO_MODEL),
    "J16-empty": (_with(model=""), NO_MODEL),
    "J16-megabyte": (_with(model="m" * 1_000_000), TOO_LONG),
    "J16-list": (_with(model=["tts-1"]), INVALID_TYPE),
    **{
        f"J17-{value!r}": (_with(response_format=value), UNSUPPORTED)
        for value in ("exe", "WAV", "", None, "wav\r\nX: y", "../wav")
    },
    "J17-number": (_with(response_format=1), INVALID_TYPE),
    "J18-object": (_with(voice={"id": "emma"}), OK),
    "J18-unknown": (_with(voice="nobody"), NO_VOICE),
    "J18-unknown-id": (_with(voice={"id": "nobody"}), NO_VOICE),
    "J18-empty-object": (_with(voice={}), MISSING),
    "J18-number": (_with(voice=5), INVALID_TYPE),
    "J18-number-as-id": (_with(voice={"id": 5}), INVALID_TYPE),
    "J18-path": (_with(voice="../../etc/passwd"), NO_VOICE),
    "J18-nul": (_with(voice="a\0b"), NO_VOICE),
    "J19-events-of-mp3": (_with(stream_format="sse", response_format="mp3"), OK),
    "J19-unknown": (_with(stream_format="xml"), UNSUPPORTED),
    "J20-megabyte": (_with(instructions="a" * 1_000_000), TOO_LONG),
    **{
        f"J21-{url}": (_with(ref_audio=url, consent=True), UNSUPPORTED)
        for url in (
            "http://localhost/x.wav", "https://example.org/x", "file:///etc/passwd", "ftp://example.org/x",
            "gopher://example.org/x", "data:text/html,x", "FILE:///etc/passwd", "javascript:1",
        )
    },
    "J21-data": (_with(ref_audio=f"data:audio/wav;base64,{WAV}", consent=True), OK),
    "J22-padding": (_with(ref_audio=WAV.rstrip("=")[:-1], consent=True), (400, "invalid_audio")),
    "J22-not-base64": (_with(ref_audio="not base64!", consent=True), (400, "invalid_audio")),
    "J22-empty": (_with(ref_audio="", consent=True), (400, "invalid_audio")),
    "J22-twice": (
        _with(ref_audio=base64.b64encode(WAV.encode()).decode(), consent=True),
        (400, "invalid_audio"),
    ),
    "J22-100-MB": (_with(ref_audio="A" * 100_000_000, consent=True), (413, "payload_too_large")),
    "J22-no-consent": (_with(ref_audio=WAV), (403, "consent_required")),
    "J22-consent-as-text": (_with(ref_audio=WAV, consent="true"), INVALID_TYPE),
    **{f"J23-temperature-{value}": (_raw("temperature", value), OUT_OF_RANGE) for value in ("-1", "1e9", "1e999")},
    "J23-temperature-nan": (_raw("temperature", "NaN"), INVALID_JSON),
    **{f"J23-top_p-{value}": (_raw("top_p", value), OUT_OF_RANGE) for value in ("0", "-1", "1.01")},
    **{f"J23-top_k-{value}": (_raw("top_k", value), OUT_OF_RANGE) for value in ("0", "-1", "1e3", "10000000")},
    "J23-not-offered": (_with(n=10**9, max_tokens=-1), OK),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_row(server, row):
    data, wanted = ROWS[row]
    request = post(data, headers=("Connection: close",))
    with memory_below(megabytes=32), at_once(2.5):
        answer = server.exchange(request)
    assert status_and_code(answer) == wanted
    assert b"\r\nX: y" not in answer
    if wanted != OK:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not any(word in error["message"] for word in ("nobody", "gpt-5", "passwd", "exe", "aaa"))


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (_raw("speed", "0"), "speed"),
        (_with(seed=-1), "seed"),
        (b"{}", "input"),
        (_with(response_format="exe"), "response_format"),
        (_with(voice="nobody"), "voice"),
        (_with(model="x"), "model"),
    ],
)
def test_the_member_at_fault_is_named(server, data, param):
    answer = server.exchange(post(data, headers=("Connection: close",)))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == param


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json+pickle",
        "application/jsonx",
        "multipart/form-data; boundary=x",
        "",
    ],
)
def test_J24_other_content_types(server, kind):
    request = post(_with(), headers=("Connection: close",))
    line = f"Content-Type: {kind}\r\n" if kind else ""
    request = request.replace(b"Content-Type: application/json\r\n", line.encode())
    assert status_and_code(server.exchange(request)) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/json;"])
def test_J24_spellings_of_the_right_one(server, kind):
    request = post(_with(), headers=("Connection: close",))
    request = request.replace(b"Content-Type: application/json", f"Content-Type: {kind}".encode())
    assert status_and_code(server.exchange(request)) == OK


ACCEPTED = [
    b" [] ", b"{}", b'{"a":[]}', b"[1,null,true]", b'"\\u0060\\u012a\\u12AB"', b'"\\uD801\\udc37"', b"-0", b"0e+1",
    b"1E-2", b'"\\u0000"', b'"\xe2\x82\xac"', b"[-237462374673276894279832749832423479823246327846]", b'{"":0}',
    b"\t[]\r\n",
]  # fmt: skip
REFUSED = [
    b"[1 true]", b"[a\xe5]", b'["": 1]', b'[""],', b"[,1]", b"[1,,2]", b'["x"]]', b'["x",]', b"[1:2]", b"[3[4]]",
    b"[nul]", b"[++1]", b"[+1]", b"[-01]", b"[-]", b"[-2.]", b"[.1]", b"[.5e]", b"[0.e1]", b"[0e]", b"[1.0e+]",
    b"[1e1m]", b"[0x1]", b"[012]", b"[1_000]", b"[Infinity]", b"[NaN]", b"[-NaN]", b'["\\u00A"]', b'["\\x00"]',
    b'["\\a"]', b'["\t"]', b'["', b'{"a":1', b'{"a" b}', b"{1:1}", b"{a: 1}", b'{"a":"b"}#', b'{"a":"b"}/**/', b"\x00",
    b"<.>", b"[\x0b]", b"\xef\xbb\xbf", b"\xe5", b"[\xff]", b"2@", b"{}}", b"*", b"[1\x00]", b"[\\n]", b"True", b"[1]x",
]  # fmt: skip


@pytest.mark.parametrize("data", ACCEPTED)
def test_J25_documents_that_are_json(data):
    parse_json(data)


@pytest.mark.parametrize("data", REFUSED)
def test_J25_documents_that_are_not(server, data):
    assert status_and_code(server.exchange(post(data, headers=("Connection: close",))))[0] == 400
