"""Rows A and V of the bad inputs over HTTP: uploads of recordings, names and paths of voices.

What is wrong with a recording is tested where it is decoded (``test_decode.py``), what the store does with its files
where it lies (``test_voice.py``): here the answers, and the form around them. V12 (voices of other keys) has no
test: every key sees every voice.
"""

import asyncio
import contextlib
import json
import os
import threading
import zipfile
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.beside import (
    LocalServiceWithNeighbour,
    beside_each_row,
    memory_below,
)
from tests.helpers import speech_like_wav
from tests.server_helpers import (
    FakeService,
    LoopbackServer,
    at_once,
    post,
    read_all,
    status_and_code,
    wait_until,
)
from vivace.audio.pcm import pcm16, wav_header
from vivace.config import ServerConfig
from vivace.engine import AsyncEngine
from vivace.server.door import bind
from vivace.voice import VoiceRegistry

WAV = speech_like_wav()
B = b"boundary"
FORM_KIND = "multipart/form-data; boundary=boundary"
INVALID_FORM, INVALID_NAME, MISSING = (400, "invalid_form"), (400, "invalid_name"), (400, "missing_field")
INVALID_AUDIO, WRONG_KIND = (400, "invalid_audio"), (415, "unsupported_media_type")
NO_CONSENT, NOT_FOUND, OK = (403, "consent_required"), (404, "voice_not_found"), (200, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def server(folder):
    async def open_service():
        service = LocalServiceWithNeighbour(
            await AsyncEngine.open("mini", voices_folder=folder, warm_up=False)
        )
        await service.make_voice(WAV)  # what the first one opens stays open
        return service

    with LoopbackServer(open_service) as running:
        yield running


@pytest.fixture(autouse=True)
def nobody_notices(request, tmp_path_factory):
    yield from beside_each_row(request, tmp_path_factory, "server")


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as made:
        yield made


@pytest.fixture(autouse=True)
def no_voice_is_left(folder):
    yield
    for path in folder.glob("*.safetensors"):
        path.unlink()


def _part(name, data, *, extra=b"", filename=b"x.wav"):
    file = b'; filename="%s"' % filename if filename is not None else b""
    return b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n%s\r\n%s\r\n' % (
        B,
        name,
        file,
        extra,
        data,
    )


def _field(name, data):
    return _part(name, data, filename=None)


def _form(*parts):
    return b"".join(parts) + b"--%s--\r\n" % B


NAME, CONSENT, AUDIO = _field(b"name", b"anna"), _field(b"consent", b"true"), _part(b"audio_sample", WAV)


def _upload(client, body, kind=FORM_KIND):
    response = client.post("/v1/audio/voices", content=body, headers={"content-type": kind})
    return response.status_code, response.json().get("error", {}).get("code")


def _zip():
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("x", "y")
    return packed.getvalue()


def _recording(data, extra=b""):
    return _form(NAME, CONSENT, _part(b"audio_sample", data, extra=extra))


def _spoken(text):
    return _form(NAME, CONSENT, AUDIO, _field(b"ref_text", text))


FORMS = {
    "A1-empty": (_recording(b""), INVALID_AUDIO),
    "A1-header-alone": (_recording(WAV[:44]), INVALID_AUDIO),
    "A1-cut-header": (_recording(WAV[:43]), INVALID_AUDIO),
    "A2-text": (_recording(b"just some text"), WRONG_KIND),
    "A2-png": (_recording(b"\x89PNG\r\n\x1a\n" + bytes(100)), WRONG_KIND),
    "A2-elf": (_recording(b"\x7fELF" + bytes(100)), WRONG_KIND),
    "A2-zip": (_recording(_zip()), WRONG_KIND),
    "A3-playlist": (_recording(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"), WRONG_KIND),
    "A11-too-short": (_recording(speech_like_wav(0.5)), (400, "audio_too_short")),
    "A11-too-long": (_recording(speech_like_wav(30.1)), (400, "audio_too_long")),
    "A20-wrong-boundary": (_recording(WAV).replace(B, b"another"), INVALID_FORM),
    "A20-no-end": (NAME + CONSENT + AUDIO, INVALID_FORM),
    "A20-empty": (b"", INVALID_FORM),
    "A20-preamble": (bytes(8 * 2**20) + _recording(WAV), INVALID_FORM),
    "A20-10000-parts": (_form(*[_field(b"f%d" % n, b"") for n in range(10_000)]), INVALID_FORM),
    "A20-long-part-header": (_recording(WAV, b"X: " + b"y" * 2**20 + b"\r\n"), INVALID_FORM),
    "A20-file-twice": (_form(NAME, CONSENT, AUDIO, AUDIO), INVALID_FORM),
    "A20-nested": (_recording(WAV, b"Content-Type: multipart/mixed; boundary=b\r\n"), INVALID_FORM),
    "A20-base64": (_recording(WAV, b"Content-Transfer-Encoding: base64\r\n"), INVALID_FORM),
    "A20-part-without-name": (_form(b"--%s\r\nContent-Disposition: form-data\r\n\r\nx\r\n" % B), INVALID_FORM),
    "A20-part-without-header": (_form(b"--%s\r\nx\r\n" % B), INVALID_FORM),
    "A21-file-first": (_form(AUDIO, CONSENT, NAME), OK),
    "A21-no-file": (_form(NAME, CONSENT), MISSING),
    "A21-no-name": (_form(CONSENT, AUDIO), MISSING),
    "A21-no-filename": (_form(NAME, CONSENT, _field(b"audio_sample", WAV)), OK),
    "A22-no-text": (_spoken(b""), OK),
    "A22-other-language": (_spoken("你好".encode()), OK),
    "A22-megabyte": (_spoken(b"a" * 2**20), (400, "input_too_long")),
    "A22-3000": (_spoken(b"a" * 3_000), (400, "input_too_long")),
    "A22-bytes": (_spoken(b"\xff"), (400, "invalid_utf8")),
    "A22-token": (_spoken(b"<|im_end|> hi"), (400, "special_token_not_allowed")),
    "A24-wav-and-zip": (_recording(WAV + _zip()), OK),
    "A24-trailing-bytes": (_recording(WAV + bytes(9 * 2**20)), OK),
    "consent-missing": (_form(NAME, AUDIO), NO_CONSENT),
    "consent-no": (_form(NAME, _field(b"consent", b"false"), AUDIO), NO_CONSENT),
    "consent-empty": (_form(NAME, _field(b"consent", b" "), AUDIO), NO_CONSENT),
    "from-a-description": (_form(NAME, _field(b"type", b"prompt")), (400, "unsupported_value")),
    "V6-built-in": (_form(_field(b"name", b"heart"), CONSENT, AUDIO), (409, "voice_exists")),
    **{
        f"V9-{name!r}": (_form(NAME, CONSENT, _part(b"audio_sample", WAV, filename=name)), OK)
        for name in (b"../../x.wav", b"x.wav;touch y", b"$(id).wav", b"a" * 2_000, b"", b"x")
    },
}  # fmt: skip


@pytest.mark.parametrize("row", FORMS)
def test_row(client, folder, row):
    body, wanted = FORMS[row]
    with memory_below(megabytes=48):
        assert _upload(client, body) == wanted
    assert [path.name for path in folder.iterdir()] == (["anna.safetensors"] if wanted == OK else [])


@pytest.mark.parametrize(
    "kind",
    ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=" + "b" * 71],
)
def test_A20_no_boundary(client, kind):
    assert _upload(client, FORMS["A21-file-first"][0], kind) == INVALID_FORM


@pytest.mark.parametrize("kind", ["application/json", "multipart/mixed; boundary=boundary", "audio/wav"])
def test_A20_other_kinds_of_body(client, kind):
    assert _upload(client, FORMS["A21-file-first"][0], kind) == WRONG_KIND


def test_A18_a_recording_of_the_largest_size_is_read_and_one_byte_more_is_not(client):
    limit = 10 * 2**20
    assert _upload(client, _recording(WAV + bytes(limit - len(WAV)))) == OK
    client.delete("/v1/audio/voices/anna")
    assert _upload(client, _recording(WAV + bytes(limit - len(WAV) + 1))) == (413, "payload_too_large")


def _wav(samples):
    data = pcm16(samples.astype(np.float32))
    return wav_header(16_000, len(data)) + data


def _two_people():
    """One voice, another an octave higher, then both at once."""
    time_s = np.arange(3 * 16_000) / 16_000
    low, high = (0.3 * np.sin(2 * np.pi * hz * time_s + 3 * np.sin(9 * time_s)) for hz in (110, 230))
    return np.concatenate((low, high, low + high))


def _music():
    """Chords with a beat."""
    time_s = np.arange(8 * 16_000) / 16_000
    chord = sum(np.sin(2 * np.pi * hz * time_s) for hz in (220.0, 277.2, 329.6, 440.0)) / 8
    return chord * (0.3 + 0.7 * np.exp(-8 * (time_s % 0.5)))


def _breath():
    """Thirty seconds of soft noise that swells and fades."""
    time_s = np.arange(30 * 16_000) / 16_000
    return 0.02 * np.random.default_rng(0).standard_normal(len(time_s)) * (1.1 + np.sin(2 * time_s))


@pytest.mark.parametrize("sound", [_two_people, _music, _breath], ids=lambda sound: sound.__name__[1:])
def test_A23_sounds_that_are_not_one_person_speaking(client, sound):
    """They make a voice of some kind, and it speaks."""
    assert _upload(client, _recording(_wav(sound()))) == OK
    body = {"input": "Hi.", "voice": "anna", "response_format": "pcm"}
    assert len(client.post("/v1/audio/speech", json=body).content) > 4_000


@pytest.mark.parametrize("has_length", [True, False])
def test_A18_A19_a_gigabyte_is_refused_early(server, has_length):
    """With a length before anything is read, without one after 10 MiB, of which no second copy is made."""
    kind = "Content-Length: 1073741824" if has_length else "Transfer-Encoding: chunked"
    head = f"POST /v1/audio/voices HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM_KIND}\r\n{kind}\r\n\r\n"
    block = b"\0" * 65_536 if has_length else b"10000\r\n" + b"\0" * 65_536 + b"\r\n"
    sent = 0
    with memory_below(megabytes=4 if has_length else 32), server.connect() as connection:
        connection.sendall(head.encode())
        try:
            for _ in range(16_384):
                connection.sendall(block)
                sent += 1
        except ConnectionError:
            pass
        answer = read_all(connection)
    assert sent < 1_200
    assert not answer or status_and_code(answer) == (413, "payload_too_large")


def test_A25_an_upload_that_stalls(tmp_path):
    config = ServerConfig(body_seconds=0.3)
    head = f"POST /v1/audio/voices HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM_KIND}\r\n"
    head += "Content-Length: 99\r\n\r\n-"
    with LoopbackServer(lambda: FakeService(tmp_path), config) as server:
        for _ in range(2 * config.max_uploads):  # its slot is free again
            assert status_and_code(server.exchange(head.encode())) == (408, "request_timeout")


def test_A26_many_uploads_at_once_take_turns(tmp_path):
    """No more than four are in memory at once, and a stream goes on meanwhile."""
    inside, most, lock = 0, 0, threading.Lock()

    class Slow(FakeService):
        async def make_voice(self, *arguments, **options):
            nonlocal inside, most
            with lock:
                inside, most = inside + 1, max(most, inside + 1)
            await asyncio.sleep(0.03)
            inside -= 1
            return await super().make_voice(*arguments, **options)

    statuses = []
    with LoopbackServer(lambda: Slow(tmp_path)) as server:

        def upload(number):
            body = _form(_field(b"name", b"voice-%d" % number), CONSENT, AUDIO)
            with httpx.Client(base_url=server.url, timeout=30) as client:
                statuses.append(_upload(client, body))

        threads = [threading.Thread(target=upload, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        assert b"200 OK" in server.exchange(post({"input": "Hi."}, headers=("Connection: close",)))
        for thread in threads:
            thread.join(30)
    assert statuses == [OK] * 16
    assert most <= 4


BAD_NAMES = [
    "../../etc/passwd", "..\\..\\x", "/etc/passwd", "C:\\x", "\\\\host\\share", "file:///x", "~root", "-rf", "a\0b",
    "a\nb", "a/b", "a:b", "CON", "nul.wav", "a::$DATA", "dot.", "blank ", "", "a" * 65, "a" * 10_000, "ä" * 40,
    "..", ".", "%2e%2e/x",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_V1_V2_V3_V4_names_that_cannot_be(client, folder, name):
    assert _upload(client, _form(_field(b"name", name.encode()), CONSENT, AUDIO)) == INVALID_NAME
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", BAD_NAMES[:-1], ids=ascii)
def test_V1_V2_V3_V4_asking_for_them_is_like_asking_for_any_unknown_one(client, name):
    if not name:
        return
    unknown = client.post("/v1/audio/speech", json={"input": "Hi.", "voice": "nobody"})
    strange = client.post("/v1/audio/speech", json={"input": "Hi.", "voice": name})
    if len(name) <= 256:
        assert strange.status_code == 404
        assert strange.json() == unknown.json()
    else:
        assert strange.json()["error"]["code"] == "input_too_long"


@pytest.mark.parametrize("name", ["a", "a" * 64, "Anna", "a-b_c"])
def test_V4_names_that_can_be(client, name):
    assert _upload(client, _form(_field(b"name", name.encode()), CONSENT, AUDIO)) == OK


PATHS = [
    "../../etc/passwd",
    "..%2f..%2fetc",
    "%2e%2e/x",
    "%252e%252e%252fx",
    "..%5c..%5cx",
    "%00",
    "%ff",
    "nobody",
    "a" * 5_000,
]


@pytest.mark.parametrize("path", PATHS)
def test_V1_removing_by_strange_paths(server, path):
    data = f"DELETE /v1/audio/voices/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert status_and_code(server.exchange(data.encode())) == NOT_FOUND


def test_V5_fifty_at_once_one_wins(tmp_path):
    statuses = []
    with LoopbackServer(lambda: FakeService(tmp_path)) as server:

        def upload():
            with httpx.Client(base_url=server.url, timeout=30) as client:
                statuses.append(_upload(client, _form(NAME, CONSENT, AUDIO)))

        threads = [threading.Thread(target=upload) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(statuses) == [OK] + [(409, "voice_exists")] * 49
    assert [path.name for path in tmp_path.iterdir()] == ["anna.safetensors"]


def test_V7_removing(client, server):
    assert client.delete("/v1/audio/voices/heart").json()["error"]["code"] == "builtin_voice"
    assert client.delete("/v1/audio/voices/heart").status_code == 403
    assert _upload(client, _form(NAME, CONSENT, AUDIO)) == OK
    body = {"input": "This goes on with the voice it has.", "voice": "anna", "response_format": "pcm"}
    with client.stream("POST", "/v1/audio/speech", json=body) as response:
        pieces = response.iter_bytes()
        first = next(pieces)
        assert client.delete("/v1/audio/voices/anna").status_code == 200
        assert len(first + b"".join(pieces)) > 20_000
    wait_until(lambda: server.service.num_running == 0)
    assert client.post("/v1/audio/speech", json=body).status_code == 404


def test_V7_removing_a_voice_that_eight_streams_use(client, server):
    """All of them go on with the voice they have, to the last byte."""
    assert _upload(client, _form(NAME, CONSENT, AUDIO)) == OK
    body = {"input": "Hi.", "voice": "anna", "response_format": "pcm"}
    alone = {seed: client.post("/v1/audio/speech", json={**body, "seed": seed}).content for seed in (1, 2)}
    assert alone[1] != alone[2]
    with contextlib.ExitStack() as stack:
        streams = []
        for number in range(8):
            other = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, verify=False))
            seed = 1 + number % 2
            response = stack.enter_context(
                other.stream("POST", "/v1/audio/speech", json={**body, "seed": seed})
            )
            streams.append((seed, response))
        assert client.delete("/v1/audio/voices/anna").status_code == 200
        for seed, response in streams:
            assert response.status_code == 200
            assert response.read() == alone[seed]
    assert client.post("/v1/audio/speech", json=body).status_code == 404


def test_V8_a_full_store_and_a_list_in_pages(tmp_path, monkeypatch):
    def make():
        service = FakeService(tmp_path)
        service.voices = VoiceRegistry(tmp_path, max_voices=3)
        return service

    monkeypatch.setattr("vivace.server.voices.PAGE_SIZE", 2)
    with LoopbackServer(make) as server, httpx.Client(base_url=server.url) as client:
        for name in (b"a", b"b", b"c"):
            assert _upload(client, _form(_field(b"name", name), CONSENT, AUDIO)) == OK
        assert _upload(client, _form(NAME, CONSENT, AUDIO)) == (507, "storage_full")
        first = client.get("/v1/audio/voices").json()
        assert ([voice["id"] for voice in first["data"]], first["has_more"]) == (["a", "b"], True)
        rest = client.get("/v1/audio/voices", params={"after": "b"}).json()
        assert ([voice["id"] for voice in rest["data"]], rest["has_more"]) == (["c"], False)


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
def test_V10_V11_strange_files_in_the_store_are_not_listed(client, folder):
    (folder / "link.safetensors").symlink_to("/etc/passwd")
    (folder / "empty.safetensors").write_bytes(b"")
    os.mkfifo(folder / "pipe.safetensors")
    listed = [voice["id"] for voice in client.get("/v1/audio/voices").json()["data"]]
    assert not {"link", "empty", "pipe"} & set(listed)
    for name, code in (("link", "voice_not_found"), ("pipe", "voice_not_found"), ("empty", "invalid_voice")):
        answer = client.post("/v1/audio/speech", json={"input": "Hi.", "voice": name})
        assert answer.json()["error"]["code"] == code
    assert client.delete("/v1/audio/voices/empty").status_code == 200


def test_recordings_leave_nothing_behind(client, folder, tmp_path_factory):
    before = set(Path("/tmp").iterdir()) if os.name == "posix" else set()
    assert _upload(client, _form(NAME, CONSENT, AUDIO)) == OK
    assert not [path for path in set(Path("/tmp").iterdir()) - before if path.suffix == ".wav"]
    assert oct((folder / "anna.safetensors").stat().st_mode & 0o777) == "0o600"


def test_listing_says_nothing_of_the_text(client):
    assert _upload(client, _form(NAME, CONSENT, AUDIO, _field(b"ref_text", b"very private words"))) == OK
    assert "private" not in json.dumps(client.get("/v1/audio/voices").json())


def test_the_port_can_be_taken_again_at_once(tmp_path):
    with LoopbackServer(lambda: FakeService(tmp_path)) as server, server.connect():
        port = server.port
    with at_once(1.0), bind(ServerConfig(port=port)):
        pass
