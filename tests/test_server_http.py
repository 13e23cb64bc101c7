"""The HTTP server against an engine that follows a script."""

import asyncio
import base64
import json
import re
import threading
import time

import httpx
import numpy as np
import pytest

from tests.helpers import speech_like_wav
from tests.server_helpers import (
    RATE,
    FakeService,
    LoopbackServer,
    at_once,
    post,
    read_all,
    read_head,
    status_and_code,
    wait_until,
)
from vivace.config import ServerConfig
from vivace.errors import (
    CancelledRequestError,
    InvalidTextError,
    ModelFolderError,
    OverloadedError,
    SynthesisError,
    VivaceError,
)
from vivace.server.metrics import Metrics
from vivace.server.playback import Playback
from vivace.server.voice_names import OPENAI_VOICES


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LoopbackServer(lambda: FakeService(tmp_path_factory.mktemp("voices"))) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(server):
    server.service.script = [0.2, 0.2]
    server.service.state = "ready"
    server.service.requests.clear()
    server.service.ended.clear()
    server.service.figures = {}


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=10) as made:
        yield made


def _speak(client, **members):
    return client.post(
        "/v1/audio/speech", json={"model": "tts-1", "input": "Hello.", "voice": "alloy", **members}
    )


def _error(response):
    return response.status_code, response.json()["error"]["code"]


def test_pcm_is_the_samples(client):
    response = _speak(client, response_format="pcm")
    assert response.status_code == 200
    assert response.headers["content-type"] == "audio/pcm"
    assert response.headers["transfer-encoding"] == "chunked"
    assert response.headers["x-content-provenance"] == "synthetic-speech"
    assert response.headers["x-request-id"].startswith("req_")
    assert len(response.content) == 2 * int(0.4 * RATE)


@pytest.mark.parametrize(
    ("name", "kind", "start"),
    [
        ("mp3", "audio/mpeg", b"ID3"),
        ("opus", "audio/ogg", b"OggS"),
        ("flac", "audio/flac", b"fLaC"),
        ("wav", "audio/wav", b"RIFF"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_formats(client, name, kind, start, stream):
    response = _speak(client, response_format=name, stream=stream)
    assert response.headers["content-type"] == kind
    assert response.content.startswith(start)
    assert ("content-length" in response.headers) is not stream


def test_a_whole_answer_says_how_long_it_took(client):
    response = _speak(client, response_format="wav", stream=False)
    assert int.from_bytes(response.content[40:44], "little") == 2 * int(0.4 * RATE)
    assert float(response.headers["x-vivace-ttfb-ms"]) == 12.5
    assert float(response.headers["x-vivace-audio-seconds"]) == 0.4
    assert response.headers["x-vivace-finish-reason"] == "stop"


def test_streamed_and_whole_pcm_are_the_same_bytes(client):
    assert (
        _speak(client, response_format="pcm").content
        == _speak(client, response_format="pcm", stream=False).content
    )


@pytest.mark.parametrize("stream", [True, False])
def test_events(client, stream):
    response = _speak(client, response_format="pcm", stream_format="sse", stream=stream)
    assert response.headers["content-type"] == "text/event-stream"
    lines = [line for line in response.text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    audio = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    assert len(audio) == 2 * int(0.4 * RATE)
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["usage"] == {"input_tokens": 5, "output_tokens": 25, "total_tokens": 30}
    assert events[-1]["timing"]["ttfb_ms"] == 12.5


def test_the_first_chunk_arrives_while_the_second_is_made(server):
    """Against a real socket: a test client would wait for the whole body."""
    second = asyncio.Event()
    server.service.script = [0.2, second.wait, 0.2]
    with server.connect() as connection:
        connection.sendall(post({"input": "Hi.", "response_format": "pcm"}))
        head = read_head(connection)
        assert b"200 OK" in head
        size = int(connection.makefile("rb").readline(), 16)
        assert size == 2 * int(0.2 * RATE)
        server.call(second.set)


def test_everything_of_a_call_reaches_the_engine(client, server):
    _speak(
        client,
        voice={"id": "emma"},
        speed=1.5,
        seed=7,
        language="en",
        instructions="Whisper.",
        cross_lingual=True,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
    )
    request = server.service.requests[-1]
    assert (request.text, request.voice, request.speed, request.language) == ("Hello.", "emma", 1.5, "en")
    assert (request.instruction, request.cross_lingual) == ("Whisper.", True)
    sampling = request.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 5)


def test_all_openai_voices_speak_and_spread(client, server):
    for name in (*OPENAI_VOICES, "Alloy"):
        assert _speak(client, voice=name).status_code == 200
    chosen = [request.voice for request in server.service.requests]
    assert set(chosen) == {"daniel", "emma", "heart"}


def test_aliases_of_voices_come_before_openais(tmp_path):
    config = ServerConfig(voice_aliases={"alloy": "daniel", "boss": "emma", "lost": "nobody"})
    with (
        LoopbackServer(lambda: FakeService(tmp_path), config) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for name in ("alloy", "boss", "nova"):
            assert _speak(client, voice=name).status_code == 200
        assert [request.voice for request in server.service.requests] == ["daniel", "emma", "heart"]
        assert _error(_speak(client, voice="lost")) == (404, "voice_not_found")


def test_the_lag_of_the_event_loop_is_a_figure(server):
    async def lag():
        metrics = Metrics(server.service)
        watching = asyncio.ensure_future(metrics.watch_loop())
        await asyncio.sleep(0.02)
        time.sleep(0.4)
        await asyncio.sleep(0.15)
        watching.cancel()
        return metrics.render().decode()

    found = re.search(r"^vivace_loop_lag_seconds (\S+)$", asyncio.run(lag()), re.MULTILINE)
    assert float(found.group(1)) > 0.2


@pytest.mark.parametrize("voice", [None, "default"])
def test_no_voice_is_the_default_one(client, server, voice):
    members = {} if voice is None else {"voice": voice}
    client.post("/v1/audio/speech", json={"input": "Hi.", **members})
    assert server.service.requests[-1].voice is None


def test_members_that_are_null_count_as_absent(client):
    names = ("instructions", "seed", "language", "speed", "stream_format", "voice", "model", "ref_audio")
    assert client.post("/v1/audio/speech", json={"input": "Hi.", **dict.fromkeys(names)}).status_code == 200


@pytest.mark.parametrize("prefix", ["", "data:audio/wav;base64,"])
def test_a_recording_in_the_body_is_the_voice(client, server, prefix):
    audio = prefix + base64.b64encode(speech_like_wav()).decode()
    assert _speak(client, ref_audio=audio, ref_text="what it says", consent=True).status_code == 200
    assert server.service.requests[-1].voice.prompt_text == "what it says"
    assert _error(_speak(client, ref_audio=audio)) == (403, "consent_required")


# -- errors --------------------------------------------------------------------------------------------------


def test_an_error_before_the_first_byte_has_its_status(client, server):
    server.service.script = [InvalidTextError("The text is empty.", code="empty_input", param="text")]
    response = _speak(client)
    assert _error(response) == (400, "empty_input")
    assert response.json()["error"]["param"] == "input"
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_overload_says_when_to_come_back(client, server):
    server.service.script = [OverloadedError("The queue is full.", retry_after_s=2.5)]
    response = _speak(client)
    assert _error(response) == (503, "overloaded")
    assert response.headers["retry-after"] == "3"


def test_draining(client, server):
    server.service.state = "draining"
    assert _error(_speak(client)) == (503, "draining")
    assert client.get("/health/ready").status_code == 503
    assert client.get("/health/live").status_code == 200


def test_a_fault_of_ours_is_internal_and_says_nothing(client, server):
    server.service.script = [SynthesisError("NaN in /secret/path")]
    response = _speak(client)
    assert _error(response) == (500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-should-retry"] == "false"


def test_a_request_that_the_server_ended_may_be_tried_again(client, server):
    server.service.script = [CancelledRequestError("the request was cancelled")]
    response = _speak(client)
    assert _error(response) == (503, "engine_restarting")
    assert response.headers["retry-after"] == "1"


def test_an_unexpected_exception_is_internal(client, server):
    server.service.script = [RuntimeError("secret")]
    response = _speak(client)
    assert _error(response) == (500, "internal_error")
    assert "secret" not in response.text


@pytest.mark.parametrize("error", [SynthesisError("failed"), RuntimeError("unexpected")])
@pytest.mark.parametrize("audio_format", ["pcm", "wav", "mp3"])
def test_an_error_after_the_first_byte_never_looks_complete(client, server, error, audio_format):
    server.service.script = [0.5, error]
    with pytest.raises(httpx.RemoteProtocolError):
        _speak(client, response_format=audio_format)


def test_an_error_after_the_first_byte_has_no_final_chunk(server):
    server.service.script = [0.1, SynthesisError("failed")]
    answer = server.exchange(post({"input": "Hi.", "response_format": "pcm"}))
    assert answer.startswith(b"HTTP/1.1 200")
    assert not answer.endswith(b"0\r\n\r\n")


def test_an_error_after_the_first_event_is_an_event(client, server):
    server.service.script = [0.2, SynthesisError("failed")]
    response = _speak(client, response_format="pcm", stream_format="sse")
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["type"] == "speech.audio.error"
    assert last["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_in_the_midst_of_a_whole_answer_has_its_status(client, server, stream):
    server.service.script = [0.2, SynthesisError("failed")]
    assert _error(_speak(client, stream=False))[0] == 500


def test_http_1_0_gets_the_whole_body(server):
    answer = server.exchange(post({"input": "Hi.", "response_format": "pcm"}, version="1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert f"content-length: {len(body)}".encode() in head
    assert len(body) == 2 * int(0.4 * RATE)


# -- clients that leave --------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_a_client_that_leaves_ends_its_request(server, num_chunks, events):
    server.service.script = [*[0.05] * num_chunks, asyncio.Event().wait]
    with server.connect() as connection:
        connection.sendall(
            post({"input": "Hi.", "response_format": "pcm", "stream_format": "sse" if events else "audio"})
        )
        wait_until(lambda: server.service.running)
        if num_chunks:
            read_head(connection)
    with at_once(2.0):
        wait_until(lambda: not server.service.running)
    assert server.service.ended == ["failed"] or server.service.ended == ["cancelled"]


def test_a_client_that_leaves_a_whole_answer_ends_its_request(server):
    server.service.script = [0.05, asyncio.Event().wait]
    with server.connect() as connection:
        connection.sendall(post({"input": "Hi.", "stream": False}))
        wait_until(lambda: server.service.running)
    wait_until(lambda: not server.service.running)


def test_others_go_on_when_one_leaves(server, client):
    go = asyncio.Event()
    server.service.script = [0.1, go.wait, 0.1]
    answers = []
    other = threading.Thread(target=lambda: answers.append(_speak(client, response_format="pcm")))
    other.start()
    with server.connect() as connection:
        connection.sendall(post({"input": "Hi."}))
        wait_until(lambda: len(server.service.running) == 2)
    wait_until(lambda: len(server.service.running) == 1)
    server.call(go.set)
    other.join(10)
    assert len(answers[0].content) == 2 * int(0.2 * RATE)


# -- models, voices, health ----------------------------------------------------------------------------------


def test_models(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == [
        "vivace-fake",
        "tts-1",
        "tts-1-hd",
        "gpt-4o-mini-tts",
    ]
    assert client.get("/v1/models/tts-1").json()["object"] == "model"
    assert _error(client.get("/v1/models/gpt-5")) == (404, "model_not_found")
    assert client.get("/v1/audio/models").json()["models"][0]["id"] == "vivace-fake"


def test_voices_from_upload_to_removal(client, server):
    files = {"audio_sample": ("any name.wav", speech_like_wav(), "audio/wav")}
    fields = {"name": "Anna", "ref_text": "what it says", "consent": "true"}
    made = client.post("/v1/audio/voices", data=fields, files=files).json()
    assert (made["id"], made["object"], made["type"]) == ("anna", "audio.voice", "audio_sample")
    listed = client.get("/v1/audio/voices").json()
    assert "anna" in [voice["id"] for voice in listed["data"]]
    assert {"id": "anna", "name": "anna"} in listed["voices"]
    assert {"id": "alloy", "name": "alloy"} in listed["voices"]
    assert _speak(client, voice="anna").status_code == 200
    assert server.service.requests[-1].voice == "anna"
    gone = client.delete("/v1/audio/voices/anna")
    assert gone.json() == {"id": "anna", "object": "audio.voice.deleted", "deleted": True}
    assert _error(_speak(client, voice="anna")) == (404, "voice_not_found")


def test_health(client, server):
    for path in ("/health", "/health/ready"):
        assert client.get(path).json() == {"status": "ready"}
    server.service.figures = {"heartbeat_age_seconds": 60.0}
    response = client.get("/health/ready")
    assert (response.status_code, response.json()) == (503, {"status": "stalled"})
    server.service.figures = {"heartbeat_age_seconds": 0.1}
    assert client.get("/health/ready").status_code == 200


def test_metrics_add_up(client, server):
    def figures():
        lines = client.get("/metrics").text.splitlines()
        return {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if not line.startswith("#")
        }

    before = figures()
    server.service.figures = {"queue_length": 3, "batch_size": 8, "gpu_busy_ratio": 0.5, "unknown": 1}
    _speak(client)
    server.service.script = [SynthesisError("failed")]
    _speak(client)
    after = figures()

    def grown(name):
        return after.get(name, 0) - before.get(name, 0)

    assert grown('vivace_requests_accepted_total{front_end="http"}') == 2
    assert grown('vivace_requests_ended_total{front_end="http",outcome="done"}') == 1
    assert grown('vivace_requests_ended_total{front_end="http",outcome="failed"}') == 1
    assert grown('vivace_errors_total{code="internal_error"}') == 1
    assert grown("vivace_ttfb_seconds_count") == 1
    assert grown("vivace_rtf_count") == 1
    assert after["vivace_queue_length"] == 3
    assert after["vivace_gpu_busy_ratio"] == 0.5
    assert after['vivace_state{state="ready"}'] == 1
    assert "vivace_unknown" not in after


def test_the_root_answers(client):
    assert client.get("/").status_code == 200


def test_openapi_describes_the_body(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert "input" in str(paths["/v1/audio/speech"]["post"]["requestBody"])


def test_a_chunk_that_comes_too_late_is_an_underrun(server):
    metrics, now = Metrics(server.service), [0.0]
    playback = Playback(metrics, "http", clock=lambda: now[0])
    stream = server.service.stream(None)
    for at in (1.0, 1.15, 1.5, 1.65):  # of 0.2 s each: the third comes 0.1 s late, the fourth in time
        now[0] = at
        playback.note(stream._chunk(0.2))
    playback.held(5.0)  # a reader with a full buffer
    now[0] = 6.7
    playback.note(stream._chunk(0.2))
    assert "vivace_underruns_total 1.0" in metrics.render().decode()
    assert status_and_code(b"HTTP/1.1 200 OK\r\n\r\n") == (200, None)
    assert np.isclose(metrics.ttfb_seconds._sum.get(), 1.0)


def test_a_slow_reader_is_no_underrun(server, client):
    """What waits for its reader did not come late."""
    server.service.script = [1.0] * 12
    before = client.get("/metrics").text
    with client.stream(
        "POST", "/v1/audio/speech", json={"input": "Hi.", "response_format": "pcm"}
    ) as response:
        for _ in response.iter_bytes(65_536):
            time.sleep(0.01)
    name = re.compile(r"^vivace_underruns_total .*$", re.MULTILINE)
    assert name.search(before).group() == name.search(client.get("/metrics").text).group()


def test_answers_are_closed_when_the_reader_is_done(server):
    with server.connect() as connection:
        connection.sendall(post({"input": "Hi.", "response_format": "pcm"}, headers=("Connection: close",)))
        assert read_all(connection).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SynthesisError("not finite"), "Try another seed"),
        (ModelFolderError("/srv/x: campplus.onnx: is missing"), "lacks"),
        (VivaceError("the engine process did not start"), "log says why"),
    ],
)
def test_a_failure_advises_what_may_help_and_names_no_path(client, server, error, said):
    server.service.script = [error]
    response = _speak(client)
    assert _error(response) == (500, "internal_error")
    assert said in response.json()["error"]["message"]
    assert "/srv" not in response.text


def test_pcm_has_openais_rate_whatever_the_models(client, server):
    """Its clients play it at 24 kHz unasked; the other formats say their rate."""
    whole = _speak(client, response_format="pcm", stream=False)
    server.service.sample_rate_hz = 12_000  # the script's samples last twice as long then
    try:
        for stream in (True, False):
            answer = _speak(client, response_format="pcm", stream=stream)
            assert answer.headers["x-sample-rate"] == "24000"
            assert len(answer.content) == 2 * len(whole.content)
        assert _speak(client, response_format="wav").headers["x-sample-rate"] == "12000"
    finally:
        server.service.sample_rate_hz = RATE
