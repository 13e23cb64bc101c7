"""ElevenLabs' shape: what its SDK and the plugins of Pipecat and LiveKit send, on real sockets."""

import asyncio
import base64
import io
import json
import wave
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import soundfile
from websockets.exceptions import ConnectionClosed

from tests.helpers import speech_like_wav
from tests.server_helpers import RATE, LoopbackServer, wait_until
from tests.talk_helpers import DEADLINE_S, TalkService, connect, spoken, url_of
from vivace.audio.telephony import alaw, ulaw
from vivace.config import ServerConfig
from vivace.server.alignment import SegmentClock, SpokenSegment
from vivace.server.elevenlabs_format import OUTPUT_FORMATS, open_output

KEY = "secret-key-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    make = lambda: TalkService(tmp_path_factory.mktemp("voices"))  # noqa: E731
    with LoopbackServer(make, ServerConfig(api_keys=(KEY,))) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    service = server.service
    service.state = "ready"
    for kept in (service.requests, service.words, service.ended):
        kept.clear()
    yield
    wait_until(lambda: not service.running)
    wait_until(lambda: not server.server.server_state.tasks)


class Socket:
    def __init__(self, connection):
        self.connection = connection

    async def send(self, **message):
        await self.connection.send(json.dumps(message))

    async def next(self):
        async with asyncio.timeout(DEADLINE_S):
            return json.loads(await self.connection.recv())

    async def until_final(self, context=None):
        """Messages of one context up to its end, and all their audio."""
        messages, audio = [], b""
        while True:
            message = await self.next()
            if message.get("contextId") != context:
                continue
            messages.append(message)
            audio += base64.b64decode(message.get("audio") or "")
            if message.get("isFinal") or "error" in message:
                return messages, audio

    async def closed(self):
        with suppress(ConnectionClosed):
            async with asyncio.timeout(DEADLINE_S):
                async for _ in self.connection:
                    pass
        return self.connection.close_code


@asynccontextmanager
async def open_socket(server, path, **query):
    query = {"output_format": "pcm_24000", **query}
    address = url_of(server, f"{path}?{'&'.join(f'{name}={value}' for name, value in query.items())}")
    async with connect(address, additional_headers={"xi-api-key": KEY}, max_size=2**20) as connection:
        yield Socket(connection)


def talk(server, path, scenario, **query):
    async def main():
        async with open_socket(server, path, **query) as socket:
            return await scenario(socket)

    return asyncio.run(main())


SINGLE = "/elevenlabs/v1/text-to-speech/emma/stream-input"
MULTI = "/elevenlabs/v1/text-to-speech/emma/multi-stream-input"


def test_the_sdks_realtime_conversation(server):
    """As ``convert_realtime`` sends it."""

    async def scenario(socket):
        await socket.send(
            text=" ", try_trigger_generation=True, voice_settings={"stability": 0.5, "speed": 1.1},
            generation_config={"chunk_length_schedule": [50]},
        )  # fmt: skip
        for text in ("Hello, how are you? ", "Fine. "):
            await socket.send(text=text, try_trigger_generation=True)
        await socket.send(text="")
        messages, audio = await socket.until_final()
        assert spoken(audio) == "Hello, how are you? Fine. "
        assert all(message["isFinal"] is None for message in messages[:-1])
        assert await socket.closed() == 1000

    talk(server, SINGLE, scenario, model_id="eleven_flash_v2_5")
    (request,) = server.service.requests
    assert (request.voice, request.speed) == ("emma", 1.1)


def test_pipecats_turn(server):
    """Text by sentence, a flush and ``close_context`` at the end of the turn, ``isFinal`` behind the last audio."""

    async def scenario(socket):
        await socket.send(text="")  # keeps the connection alive before there is a context
        await socket.send(text=" ", context_id="turn-1", voice_settings={"speed": 1.0})
        await socket.send(text="slow Hello there. ", context_id="turn-1")
        await socket.send(text="How are you?", context_id="turn-1")
        await socket.send(text="", context_id="turn-1")
        await socket.send(context_id="turn-1", flush=True)
        await socket.send(context_id="turn-1", close_context=True)
        messages, audio = await socket.until_final("turn-1")
        assert spoken(audio) == "slow Hello there. How are you?"
        assert messages[-1]["isFinal"] is True
        assert all(message["isFinal"] is False for message in messages[:-1])
        timed = [message["alignment"] for message in messages if message.get("alignment")]
        assert ["".join(times["chars"]) for times in timed] == ["slow Hello there. ", "How are you? "]
        for times in timed:
            assert times["charStartTimesMs"][0] == 0
            assert len(times["chars"]) == len(times["charStartTimesMs"]) == len(times["charDurationsMs"])
        await socket.send(close_socket=True)
        assert await socket.closed() == 1000

    talk(server, MULTI, scenario, model_id="eleven_turbo_v2_5", auto_mode="true", language_code="en")
    assert server.service.requests[0].language == "en"
    assert server.service.ended == ["done"]


def test_pipecats_interruption(server):
    """``close_context`` in the midst of the text: silence at once, and the next context speaks."""

    async def scenario(socket):
        await socket.send(text=" ", context_id="a")
        await socket.send(text="endless ", context_id="a")
        assert (await socket.next())["audio"]
        await socket.send(context_id="a", close_context=True)
        await socket.until_final("a")
        assert server.service.ended == ["cancelled"]
        await socket.send(text=" ", context_id="b")
        await socket.send(text="Yes?", context_id="b", flush=True)
        await socket.send(context_id="b", close_context=True)
        _, audio = await socket.until_final("b")
        assert spoken(audio) == "Yes?"

    talk(server, MULTI, scenario)


def test_livekits_sentences_and_a_late_interruption(server):
    """A flush with each sentence, an empty one at the end; closing a second time stops what is still spoken."""

    async def scenario(socket):
        await socket.send(text=" ", context_id="c", voice_settings={}, generation_config={})
        for text in ("One. ", "Two. "):
            await socket.send(text=text, context_id="c", flush=True)
        await socket.send(text="", context_id="c", flush=True)
        await socket.send(context_id="c", close_context=True)
        _, audio = await socket.until_final("c")
        assert spoken(audio) == "One. Two. "
        await socket.send(text="endless ", context_id="d", flush=True)
        await socket.send(context_id="d", close_context=True)
        for _ in range(3):
            assert (await socket.next())["contextId"] == "d"
        await socket.send(context_id="d", close_context=True)
        messages, _ = await socket.until_final("d")
        assert messages[-1]["isFinal"] is True

    talk(server, MULTI, scenario, sync_alignment="true", inactivity_timeout="180", enable_logging="true")
    assert server.service.words[:2] == ["One. ", "Two. "]
    assert len(server.service.requests) == 3


def test_contexts_speak_side_by_side(server):
    async def scenario(socket):
        for name in ("a", "b"):
            await socket.send(text="slow ", context_id=name)
            await socket.send(text=f"from {name}.", context_id=name, flush=True)
            await socket.send(context_id=name, close_context=True)
        audio, ended = {"a": b"", "b": b""}, set()
        while len(ended) < 2:
            message = await socket.next()
            audio[message["contextId"]] += base64.b64decode(message["audio"] or "")
            if message["isFinal"]:
                ended.add(message["contextId"])
        assert {name: spoken(data) for name, data in audio.items()} == {
            "a": "slow from a.",
            "b": "slow from b.",
        }

    talk(server, MULTI, scenario)


def test_errors_belong_to_a_context(server):
    async def scenario(socket):
        await socket.send(text="fail ", context_id="a")
        messages, _ = await socket.until_final("a")
        assert messages[-1]["error"] == "internal_error"
        await socket.send(text="lost", context_id="a")
        await socket.send(context_id="a", close_context=True)
        await socket.send(text="b", context_id="b", flush=True)
        await socket.send(context_id="b", close_context=True)
        assert spoken((await socket.until_final("b"))[1]) == "b"
        await socket.connection.send("nonsense")
        assert (await socket.next())["error"] == "invalid_json"
        for number in range(11):
            await socket.send(text="block ", context_id=f"n{number}")
        assert (await socket.next())["error"] == "overloaded"

    talk(server, MULTI, scenario)
    assert "lost" not in server.service.words


def test_the_only_stream_ends_with_its_error(server):
    async def scenario(socket):
        await socket.send(text="fail ")
        messages, _ = await socket.until_final()
        assert messages[-1]["error"] == "internal_error"
        assert await socket.closed() == 1011

    talk(server, SINGLE, scenario)


@pytest.mark.parametrize(
    ("path", "query", "code"),
    [
        ("/v1/text-to-speech/nobody/stream-input", {}, "voice_not_found"),
        (SINGLE, {"output_format": "exe_1"}, "unsupported_value"),
        (MULTI, {"model_id": "other"}, "model_not_found"),
        (MULTI, {"language_code": "nonsense!"}, "unsupported_value"),
    ],
)
def test_wrong_addresses_are_told_and_closed(server, path, query, code):
    async def scenario(socket):
        assert (await socket.next())["error"] == code
        assert await socket.closed() == 1008

    talk(server, path, scenario, **query)


def test_a_client_without_the_key(server):
    async def main():
        with pytest.raises(Exception, match="401"):
            async with connect(url_of(server, SINGLE)):
                pass

    asyncio.run(main())


def test_limits(server):
    async def too_much(socket):
        await socket.send(text="block ", context_id="a")
        for _ in range(9):
            await socket.send(text="x" * 4000, context_id="a")
        assert (await socket.next())["error"] == "input_too_long"
        assert await socket.closed() == 1009

    async def nonsense(socket):
        for _ in range(10):
            await socket.connection.send("{")
        assert await socket.closed() == 1008

    talk(server, MULTI, too_much)
    talk(server, MULTI, nonsense)


def test_silence_ends_the_connection(tmp_path):
    with LoopbackServer(lambda: TalkService(tmp_path), ServerConfig(websocket_idle_seconds=0.3)) as server:

        async def scenario(socket):
            await socket.send(text="word ", context_id="a")
            assert await socket.closed() == 1008

        talk(server, MULTI, scenario)
        wait_until(lambda: not server.service.running)


# -- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, headers={"xi-api-key": KEY}, timeout=10) as made:
        yield made


@pytest.mark.parametrize("prefix", ["", "/elevenlabs"])
@pytest.mark.parametrize("end", ["", "/stream"])
def test_speech(server, client, prefix, end):
    response = client.post(
        f"{prefix}/v1/text-to-speech/emma{end}?output_format=pcm_24000&optimize_streaming_latency=3",
        json={
            "text": "Hello.",
            "model_id": "eleven_multilingual_v2",
            "seed": 4,
            "voice_settings": {"speed": 0.9},
        },
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "audio/pcm"
    assert spoken(response.content) == "Hello."
    request = server.service.requests[0]
    assert (request.sampling.seed, request.speed, request.voice) == (4, 0.9, "emma")


def test_speech_in_the_default_format(client):
    response = client.post("/v1/text-to-speech/emma", json={"text": "word " * 800})
    samples, rate_hz = soundfile.read(io.BytesIO(response.content))
    assert rate_hz == 44_100
    assert len(samples) / rate_hz == pytest.approx(4_000 / RATE, abs=0.2)


def test_times_of_characters(client):
    response = client.post(
        "/v1/text-to-speech/emma/with-timestamps?output_format=pcm_24000", json={"text": "One two. Three."}
    )
    document = response.json()
    assert spoken(base64.b64decode(document["audio_base64"])) == "One two. Three."
    times = document["alignment"]
    assert "".join(times["characters"]) == "One two. Three. "
    starts, ends = times["character_start_times_seconds"], times["character_end_times_seconds"]
    assert len(starts) == len(ends) == len(times["characters"])
    assert starts == sorted(starts)
    assert ends[-1] == pytest.approx(15 / RATE, abs=0.001)


@pytest.mark.parametrize("route", ["speech-to-speech/emma", "voice-changer/emma/stream"])
def test_a_recording_in_another_voice(server, client, route):
    query = {"output_format": "pcm_16000"}
    form = {"model_id": "eleven_multilingual_sts_v2", "voice_settings": '{"speed": 1.5, "stability": 0.5}'}
    recording = {"audio": ("source.wav", speech_like_wav())}
    path = f"/elevenlabs/v1/{route}"
    response = client.post(path, params=query, data=form, files=recording)
    assert (response.status_code, response.headers["content-type"]) == (200, "audio/pcm")
    assert len(response.content) == pytest.approx(0.4 * 2 * 16_000, abs=100)
    raw = {"audio": ("source.pcm", bytes(32_000))}
    assert client.post(path, params=query, data={"file_format": "pcm_s16le_16"}, files=raw).status_code == 200
    (source, *asked), (wrapped, *_) = server.service.sources[-2:]
    assert (source, asked) == (speech_like_wav(), ["emma", 1.5])
    with wave.open(io.BytesIO(wrapped)) as file:
        assert (file.getframerate(), file.getnframes()) == (16_000, 16_000)
    for data, files, code in (
        ({}, {"other": ("a", b"")}, "missing_field"),
        ({"file_format": "mp3"}, recording, "unsupported_value"),
        ({"voice_settings": "{"}, recording, "invalid_type"),
        ({}, {"audio": ("a", b"no audio")}, "invalid_audio"),
    ):
        answer = client.post(path, data=data, files=files)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_lists(client):
    voices = client.get("/elevenlabs/v1/voices").json()["voices"]
    assert [(voice["voice_id"], voice["name"], voice["category"]) for voice in voices] == [
        (name, name, "premade") for name in ("daniel", "emma", "heart")
    ]
    (model,) = client.get("/elevenlabs/v1/models").json()
    assert (model["model_id"], model["can_do_voice_conversion"]) == ("vivace-fake", True)


def test_a_model_that_cannot_read_speech_is_listed_as_such(server, client, monkeypatch):
    monkeypatch.setattr(server.service.voices, "takes_recordings", False)
    (model,) = client.get("/elevenlabs/v1/models").json()
    assert (model["can_do_text_to_speech"], model["can_do_voice_conversion"]) == (True, False)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("emma", {}, 400, "missing_field"),
        ("emma", {"text": ""}, 400, "empty_input"),
        ("emma", {"text": 5}, 400, "invalid_type"),
        ("emma", {"text": "x" * 4097}, 400, "input_too_long"),
        ("emma", {"text": "a", "voice_settings": []}, 400, "invalid_type"),
        ("emma", {"text": "a", "voice_settings": {"speed": 9}}, 400, "value_out_of_range"),
        ("emma", {"text": "a", "seed": -1}, 400, "value_out_of_range"),
        ("emma", {"text": "a", "model_id": "gpt"}, 404, "model_not_found"),
        ("emma?output_format=pcm_7", {"text": "a"}, 400, "unsupported_value"),
        ("nobody", {"text": "a"}, 404, "voice_not_found"),
        ("..%2f..%2fetc", {"text": "a"}, 404, None),
        ("fail", {"text": "a"}, 404, "voice_not_found"),
    ],
)
def test_wrong_calls(client, path, body, status, code):
    response = client.post(f"/v1/text-to-speech/{path}", json=body)
    assert response.status_code == status
    assert code is None or response.json()["error"]["code"] == code


def test_with_the_real_sdk(server):
    client_module = pytest.importorskip("elevenlabs.client")
    options = {"voice_id": "emma", "model_id": "eleven_flash_v2_5", "output_format": "pcm_24000"}
    with httpx.Client() as connections:
        client = client_module.ElevenLabs(
            api_key=KEY, base_url=f"{server.url}/elevenlabs", httpx_client=connections
        )
        speech = client.text_to_speech
        assert spoken(b"".join(speech.convert(text="Hello.", **options))) == "Hello."
        assert spoken(b"".join(speech.stream(text="And on.", **options))) == "And on."
        timed = speech.convert_with_timestamps(text="One. Two.", **options)
        assert "".join(timed.alignment.characters) == "One. Two. "
        assert [voice.voice_id for voice in client.voices.get_all().voices] == ["daniel", "emma", "heart"]
        assert client.models.list()[0].model_id == "vivace-fake"


# -- formats and times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encode", "subtype"), [(ulaw, "ULAW"), (alaw, "ALAW")])
def test_g711_is_what_libsndfile_writes(encode, subtype):
    every = np.arange(-32768, 32768).astype(np.int16)
    file = io.BytesIO()
    soundfile.write(file, every, 8000, format="RAW", subtype=subtype)
    assert encode(every) == file.getvalue()


@pytest.mark.parametrize("name", OUTPUT_FORMATS)
def test_every_format_holds_the_whole_audio(name):
    tone = np.sin(np.arange(RATE) * 0.1).astype(np.float32) * 0.5
    encoder = open_output(name, RATE)
    data = b"".join([*(encoder.encode(part) for part in np.array_split(tone, 7)), encoder.finish()])
    codec, rate_hz = name.split("_")[0], int(name.split("_")[1])
    if codec in ("mp3", "opus"):
        samples, found_hz = soundfile.read(io.BytesIO(data))
        assert found_hz == rate_hz
        assert len(samples) / rate_hz == pytest.approx(1.0, abs=0.15)
    else:
        assert len(data) == rate_hz * (2 if codec == "pcm" else 1)


def test_times_of_a_segment_are_known_when_the_next_begins():
    def chunk(segment, start_s, seconds):
        return SimpleNamespace(
            segment=segment, start_s=start_s, samples=np.zeros(int(seconds * 100)), sample_rate_hz=100
        )

    clock, so_far = SegmentClock(), SimpleNamespace(spoken_text=[])
    assert clock.note(chunk(0, 0.0, 1.0), so_far) is None
    assert clock.note(chunk(0, 1.0, 1.0), so_far) is None
    so_far.spoken_text = ["Hi."]
    assert clock.note(chunk(1, 2.0, 0.5), so_far) == SpokenSegment("Hi.", 2.0)
    so_far.spoken_text = ["Hi.", "你好。"]
    last = clock.finish(so_far)
    assert last == SpokenSegment("你好。", 0.5)
    assert last.milliseconds() == {
        "chars": ["你", "好", "。"], "charStartTimesMs": [0, 167, 333], "charDurationsMs": [167, 166, 167],
    }  # fmt: skip
    assert SpokenSegment("Hi.", 2.0).characters() == ["H", "i", ".", " "]
