"""``POST /v1/audio/transform``: voice conversion over HTTP, by a real tiny model and a scripted one."""

import base64
import io
import json

import httpx
import pytest
import soundfile

from tests.helpers import noise_voice, speech_like_wav
from tests.server_helpers import FakeService, LoopbackServer, wait_until
from vivace import AsyncEngine, Engine
from vivace.audio.pcm import pcm16
from vivace.config import ServerConfig
from vivace.server.local import LocalService

PATH = "/v1/audio/transform"


def loopback(make_service, **limits):
    return LoopbackServer(make_service, ServerConfig(**limits))


def real(folder, voices):
    async def make():
        return LocalService(await AsyncEngine.open(folder, voices_folder=voices, warm_up=False))

    return make


@pytest.fixture
def fake(tmp_path):
    with loopback(lambda: FakeService(tmp_path), max_uploads=1) as server:
        yield server


def post(server, source=b"RIFF", **form):
    files = {} if source is None else {"audio": ("a.wav", source)}
    return httpx.post(
        server.url + PATH, data={"other": "ignored", **form}, files=files or {"none": b""}, timeout=60
    )


def error(response):
    document = response.json()["error"]
    return response.status_code, document["code"], document["param"]


def test_the_answer_is_what_the_engine_makes(random_model_folder, tmp_path):
    source = speech_like_wav()
    with Engine.open(random_model_folder, voices_folder=tmp_path, warm_up=False) as engine:
        samples = engine.transform(source, "noise", speed=1.25).collect().samples
    with loopback(real(random_model_folder, tmp_path)) as server:
        streamed = post(server, source, voice="noise", speed="1.25", response_format="pcm")
        assert streamed.status_code == 200
        assert streamed.headers["x-content-provenance"] == "synthetic-speech"
        assert streamed.content == pcm16(samples)
        whole = post(server, source, speed="1.25", response_format="wav", stream="false")
        assert float(whole.headers["x-vivace-audio-seconds"]) == pytest.approx(
            len(samples) / 24_000, abs=0.001
        )
        assert soundfile.info(io.BytesIO(whole.content)).frames == len(samples)
        assert error(post(server, b"no audio")) == (415, "unsupported_media_type", "audio")


def test_a_model_without_a_speech_tokenizer_says_so(tiny_model_folder, tmp_path):
    voices = tmp_path / "voices"
    with loopback(real(tiny_model_folder, voices)) as server:
        voice = noise_voice(server.service._engine._engine._config)
        server.call(server.service.voices.add, voice)
        response = post(server, speech_like_wav(), voice=voice.name)
    assert error(response) == (501, "not_implemented", None)
    assert "speech tokenizer" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"


def test_events(fake):
    lines = post(fake, stream_format="sse", response_format="pcm").text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert events[-1]["type"] == "speech.audio.done"
    audio = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert len(audio) == 2 * 9_600


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"source": None}, (400, "missing_field", "audio")),
        ({"source": b"no audio"}, (400, "invalid_audio", "audio")),
        ({"source": bytes(2**20)}, (413, "payload_too_large", "audio")),
        ({"voice": "nobody"}, (404, "voice_not_found", "voice")),
        ({"model": "other"}, (404, "model_not_found", "model")),
        ({"speed": "9"}, (400, "value_out_of_range", "speed")),
        ({"speed": "fast"}, (400, "invalid_type", "speed")),
        ({"stream": "perhaps"}, (400, "invalid_type", "stream")),
        ({"response_format": "exe"}, (400, "unsupported_value", "response_format")),
    ],
)
def test_errors(tmp_path, form, expected):
    with loopback(lambda: FakeService(tmp_path), upload_bytes=2**20 - 1) as server:
        assert error(post(server, **form)) == expected


def test_an_upload_counts_until_its_audio_comes(fake):
    """However it ends: as audio, as an error, or because its client leaves."""
    service, slots = fake.service, fake.app.state.uploads
    for script, source in (([0.2], b"RIFF"), ([0.2, RuntimeError()], b"RIFF"), ([0.2], b"no audio")):
        service.script = script
        try:
            post(fake, source)
        except httpx.RemoteProtocolError:
            assert len(script) == 2  # cut off
        assert not slots.locked()
    service.script = [service.wait_until_closed]
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.3) as client:
        client.post(fake.url + PATH, files={"audio": ("a.wav", b"RIFF")})
    assert service.requests
    wait_until(lambda: not slots.locked())
    wait_until(lambda: service.ended[-1] in ("cancelled", "failed"))
