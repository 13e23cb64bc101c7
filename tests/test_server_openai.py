"""OpenAI's own client against a real server with the embedded model."""

import asyncio
import base64
import io
import json
from importlib.util import find_spec

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.helpers import speech_like_wav
from tests.server_helpers import LoopbackServer, wait_until
from vivace.engine import AsyncEngine
from vivace.server.local import LocalService

TEXT = "Good morning."


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    async def open_service():
        engine = await AsyncEngine.open(
            "mini", voices_folder=tmp_path_factory.mktemp("voices"), warm_up=False
        )
        return LocalService(engine)

    with LoopbackServer(open_service) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def pcm(client):
    """What the whole answer to ``TEXT`` is."""
    return client.audio.speech.create(
        model="tts-1", voice="alloy", input=TEXT, response_format="pcm", extra_body={"stream": False}
    ).content


def test_the_answer_is_speech(pcm):
    samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    assert 0.3 < len(samples) / 24_000 < 4
    assert np.abs(samples).max() > 0.05


def test_streaming_gives_the_same_bytes_in_pieces(client, pcm):
    with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="alloy", input=TEXT, response_format="pcm"
    ) as response:
        assert response.headers["content-type"] == "audio/pcm"
        pieces = list(response.iter_bytes())
    assert b"".join(pieces) == pcm


@pytest.mark.parametrize("name", ["mp3", "opus", "flac", "wav"])
def test_every_format(client, pcm, name):
    data = client.audio.speech.create(model="tts-1", voice="nova", input=TEXT, response_format=name).content
    assert soundfile.info(io.BytesIO(data)).samplerate == 24_000


@pytest.mark.skipif(find_spec("av") is None, reason="PyAV is missing")
def test_aac(client):
    data = client.audio.speech.create(model="tts-1", voice="nova", input=TEXT, response_format="aac").content
    assert data[0] == 0xFF
    assert data[1] & 0xF0 == 0xF0


def test_events(client, pcm):
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input=TEXT, response_format="pcm", stream_format="sse"
    ) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == pcm
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["usage"]["output_tokens"] > 0


def test_speed_seed_and_instructions(client, pcm):
    fast = client.audio.speech.create(
        model="tts-1", voice="alloy", input=TEXT, response_format="pcm", speed=2.0, instructions="Quickly."
    )
    assert len(fast.content) < 0.8 * len(pcm)
    again = client.audio.speech.create(
        model="tts-1",
        voice="alloy",
        input=TEXT,
        response_format="pcm",
        extra_body={"seed": 1, "language": "en"},
    )
    assert again.content != pcm


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.speech.create(model="tts-1", voice="alloy", input=" ")
    assert (caught.value.code, caught.value.param) == ("empty_input", "input")
    assert caught.value.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError) as caught:
        client.audio.speech.create(model="tts-1", voice="nobody", input="Hi.")
    assert caught.value.code == "voice_not_found"
    with pytest.raises(openai.NotFoundError):
        client.audio.speech.create(model="whisper", voice="alloy", input="Hi.")


def test_models(client):
    names = [model.id for model in client.models.list()]
    assert names[0] == "vivace-mini"
    assert client.models.retrieve("tts-1-hd").id == "tts-1-hd"


def test_the_models_own_voice_is_marked(server):
    voices = httpx.get(f"{server.url}/v1/audio/voices").json()["data"]
    assert [voice["id"] for voice in voices if voice["default"]] == ["heart"]


def test_a_voice_from_a_recording(client):
    made = client.audio.voices.create(
        name="test-voice",
        audio_sample=("sample.wav", speech_like_wav(), "audio/wav"),
        consent="true",
        extra_body={"ref_text": "What the recording says."},
    )
    assert made.id == "test-voice"
    with pytest.raises(openai.ConflictError):
        client.audio.voices.create(
            name="test-voice", audio_sample=("s.wav", speech_like_wav(), "audio/wav"), consent="true"
        )
    speech = client.audio.speech.create(
        model="tts-1", voice={"id": "test-voice"}, input="Hi.", response_format="pcm"
    )
    assert len(speech.content) > 2_000
    assert client.audio.voices.delete("test-voice").deleted


def test_the_asynchronous_client(server, pcm):
    async def speak():
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused")
        call = client.audio.speech.with_streaming_response.create(
            model="tts-1", voice="alloy", input=TEXT, response_format="pcm"
        )
        async with client, call as response:
            return [piece async for piece in response.iter_bytes()]

    assert b"".join(asyncio.run(speak())) == pcm


def test_leaving_ends_the_engines_request(server):
    text = (
        "This is a rather long text that would take several seconds to speak from its start to its end. " * 4
    )
    body = {"input": text, "response_format": "pcm"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=30) as response:
        pieces = response.iter_bytes()  # kept: dropping it would close the answer
        next(pieces)
        assert server.service.num_running == 1
    wait_until(lambda: server.service.num_running == 0)
