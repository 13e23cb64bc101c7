"""Our WebSocket protocol, on real sockets."""

import asyncio
import itertools
import re
import threading
import wave
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile

from tests.helpers import noise_voice, quiet_engine
from tests.server_helpers import LoopbackServer, wait_until
from tests.talk_helpers import TalkService, connect, session, spoken, url_of
from vivace import AsyncEngine, SamplingParams, SynthesisRequest
from vivace.audio.pcm import pcm16
from vivace.config import ServerConfig
from vivace.server.local import LocalService
from vivace.server.text_queue import TextQueue


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LoopbackServer(lambda: TalkService(tmp_path_factory.mktemp("voices"))) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    service = server.service
    service.state = "ready"
    service.requests.clear()
    service.words.clear()
    service.ended.clear()
    yield
    wait_until(lambda: not service.running)


def talk(server, scenario, **options):
    async def main():
        async with session(server, **options) as client:
            return await scenario(client)

    return asyncio.run(main())


def test_voices_that_cannot_speak_are_not_offered(server):
    async def scenario(client):
        return client.ready["voices"]

    broken = server.service.voices.folder / "broken.safetensors"
    broken.parent.mkdir(exist_ok=True)
    broken.write_bytes(b"no voice")
    try:
        assert "broken" in server.service.voices.names()
        assert talk(server, scenario) == ["daniel", "emma", "heart"]
    finally:
        broken.unlink()


def test_one_utterance_after_the_other_on_one_socket(server):
    async def scenario(client):
        assert client.ready == {
            "type": "session.ready",
            "model": "vivace-fake",
            "voices": ["daniel", "emma", "heart"],
            "sample_rate": 24_000,
        }
        for number, text in enumerate(("Hello there.", "And again."), start=1):
            await client.say("input.text", text=text)
            await client.say("input.done")
            done = await client.until("audio.done")
            assert spoken(done["audio"]) == text
            assert [event["type"] for event in done["events"]] == ["audio.start", "audio.done"]
            start = done["events"][0]
            assert start == {
                "type": "audio.start", "utterance": number, "sample_rate": 24_000, "format": "pcm",
            }  # fmt: skip
            figures = {name: done[name] for name in ("rtf", "tps", "finish_reason", "utterance")}
            assert figures == {"rtf": 0.1, "tps": 80.0, "finish_reason": "stop", "utterance": number}
            assert done["ttfb_ms"] >= 0
        await client.say("session.close")
        assert (await client.next())["type"] == "session.done"
        assert await client.closed() == 1000

    talk(server, scenario)


def test_the_end_of_an_utterance_names_what_was_not_spoken(server):
    async def scenario(client):
        for text, skipped in (("Say unread now.", ["你好"]), ("All of it.", None)):
            await client.say("input.text", text=text)
            await client.say("input.done")
            assert (await client.until("audio.done")).get("skipped_text") == skipped

    talk(server, scenario)


def test_audio_comes_while_text_still_arrives(server):
    async def scenario(client):
        await client.say("input.text", text="First sec")
        assert (await client.next())["type"] == "audio.start"
        assert spoken(await client.next()) == "First "
        await client.say("input.text", text="ond third")
        assert spoken(await client.next()) == "second "
        await client.say("input.done")
        assert spoken((await client.until("audio.done"))["audio"]) == "third"

    talk(server, scenario)


def test_utterances_sent_ahead_are_spoken_in_order(server):
    async def scenario(client):
        for text in ("slow one", "two", "three"):
            await client.say("input.text", text=text)
            await client.say("input.done")
        await client.say("session.close")  # what was asked for is still spoken
        texts = [spoken((await client.until("audio.done"))["audio"]) for _ in range(3)]
        assert texts == ["slow one", "two", "three"]
        assert (await client.next())["type"] == "session.done"

    talk(server, scenario)


def test_the_end_of_the_session_ends_the_text(server):
    async def scenario(client):
        await client.say("input.text", text="Not finished")
        await client.say("session.close")
        assert spoken((await client.until("audio.done"))["audio"]) == "Not finished"
        assert await client.closed() == 1000

    talk(server, scenario)


def test_configuration_holds_for_what_begins_after_it(server):
    async def scenario(client):
        await client.say("input.text", text="a")
        await client.say("input.done")
        await client.until("audio.done")
        await client.say(
            "session.config", voice={"id": "emma"}, speed=1.5, seed=7, language="en", instructions="Softly.",
            model="tts-1", timing=True, unknown=[1],
        )  # fmt: skip
        await client.say("session.config", seed=8)  # the others stay
        await client.say("input.text", text="b c")
        await client.say("input.done")
        done = await client.until("audio.done")
        timings = [event for event in done["events"] if event["type"] == "audio.timing"]
        assert [event["index"] for event in timings] == [0, 1]
        assert timings[1] == {
            "type": "audio.timing", "utterance": 2, "index": 1, "start_s": 0.0001, "duration_s": 0.0,
            "elapsed_ms": 1.5, "text_tokens": 5, "speech_tokens": 25,
            "times": {"text_ms": 0.0, "prompt_ms": 0.0, "lm_ms": 1.0, "flow_ms": 0.0, "vocoder_ms": 0.0,
                      "waiting_ms": 0.0},
        }  # fmt: skip
        await client.say("session.config", voice="", instructions="", timing=False)
        await client.say("input.text", text="d")
        await client.say("input.done")
        assert len((await client.until("audio.done"))["events"]) == 2

    talk(server, scenario)
    plain, set_, reset = server.service.requests
    assert plain == SynthesisRequest("")
    assert set_ == SynthesisRequest(
        "", voice="emma", instruction="Softly.", language="en", speed=1.5, sampling=SamplingParams(seed=8)
    )
    assert reset == replace(set_, voice=None, instruction=None)


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "opus"])
def test_other_formats(server, name, tmp_path):
    async def scenario(client):
        await client.say("session.config", response_format=name)
        await client.say("input.text", text="word " * 2000)
        await client.say("input.done")
        return (await client.until("audio.done"))["audio"]

    path = tmp_path / f"speech.{'ogg' if name == 'opus' else name}"
    path.write_bytes(talk(server, scenario))
    with soundfile.SoundFile(path) as file:  # the length in a stream's header means nothing
        assert file.samplerate == 24_000
        assert len(file.read(9_500)) == 9_500


@pytest.mark.parametrize("kind", ["cancel", "clear"])
def test_barge_in_stops_at_once_and_drops_what_was_queued(server, kind):
    async def scenario(client):
        await client.say("input.text", text="endless ")
        await client.until("audio.start")
        await client.say("input.done")
        await client.say("input.text", text="never heard")
        await client.say("input.done")
        await client.say("input.text", text="nor this")
        await client.say(kind)
        first = await client.until("audio.cancelled")
        assert first["utterance"] == 1
        assert first["audio_seconds"] >= 1
        for number in (2, 3):
            cancelled = await client.next()
            assert cancelled == {"type": "audio.cancelled", "utterance": number, "audio_seconds": 0.0}
        assert server.service.ended == ["cancelled"]
        await client.say("input.text", text="Yes?")  # the session goes on
        await client.say("input.done")
        done = await client.until("audio.done")
        assert (spoken(done["audio"]), done["utterance"]) == ("Yes?", 4)
        await client.say(kind)
        assert await client.next() == {"type": "audio.cancelled", "utterance": None, "audio_seconds": 0.0}

    talk(server, scenario)
    assert server.service.words == ["endless ", "Yes?"]


def test_a_failed_utterance_leaves_the_session(server):
    async def scenario(client):
        await client.say("input.text", text="well then fail ")
        error = await client.until("error")
        assert spoken(error["audio"]) == "well then "
        assert (error["code"], error["utterance"]) == ("internal_error", 1)
        await client.say("input.text", text="this belongs to it and is dropped")
        await client.say("input.done")
        await client.say("input.text", text="New.")
        await client.say("input.done")
        done = await client.until("audio.done")
        assert (spoken(done["audio"]), done["utterance"]) == ("New.", 2)

    talk(server, scenario)


def test_restarting_and_draining(server):
    async def scenario(client):
        server.service.state = "restarting"
        await client.say("input.text", text="a ")
        error = await client.until("error")
        assert error["code"] == "engine_restarting"
        await client.say("input.done")
        server.service.state = "draining"
        await client.say("input.text", text="a ")
        assert (await client.until("error"))["code"] == "draining"
        assert await client.closed() == 1012

    talk(server, scenario)


def test_a_client_that_leaves_ends_its_request(server):
    async def scenario(client):
        await client.say("input.text", text="endless ")
        await client.until("audio.start")
        client.connection.transport.abort()
        with suppress(Exception):
            await client.closed()

    talk(server, scenario)
    wait_until(lambda: server.service.ended == ["cancelled"])


def test_ping(server):
    async def scenario(client):
        await client.say("ping")
        assert await client.next() == {"type": "pong"}

    talk(server, scenario)


def test_the_engine_has_a_deadline_once_the_text_is_there(tmp_path):
    config = ServerConfig(request_seconds=0.2)
    with LoopbackServer(lambda: TalkService(tmp_path), config) as server:

        async def scenario(client):
            await client.say("input.text", text="block ")
            await asyncio.sleep(0.4)  # waiting for text does not count
            await client.say("ping")
            assert (await client.next())["type"] == "pong"
            await client.say("input.done")
            error = await client.next()
            assert (error["code"], error["utterance"]) == ("deadline_exceeded", 1)

        talk(server, scenario)
        assert server.service.ended == ["cancelled"]


def test_keys_travel_in_headers_or_as_a_subprotocol(tmp_path):
    config = ServerConfig(api_keys=("secret-key-1",))
    with LoopbackServer(lambda: TalkService(tmp_path), config) as server:

        async def main():
            key = "vivace.key.c2VjcmV0LWtleS0x"
            for options in (
                {"additional_headers": {"Authorization": "Bearer secret-key-1"}},
                {"subprotocols": ["vivace", key]},
            ):
                async with session(server, **options) as client:
                    assert client.connection.subprotocol in (None, "vivace")
            for options in ({}, {"subprotocols": ["vivace", "vivace.key.AAAA"]}):
                with pytest.raises(Exception, match="401"):
                    async with connect(url_of(server), **options):
                        pass
            with pytest.raises(Exception, match="401"):
                async with connect(url_of(server, "/v1/audio/speech/stream?api_key=secret-key-1")):
                    pass

        asyncio.run(main())


def test_metrics_add_up(server):
    def value(name, **labels):
        return server.app.state.metrics._registry.get_sample_value(name, labels) or 0.0

    async def scenario(client):
        for text in ("a", "fail"):
            await client.say("input.text", text=text)
            await client.say("input.done")
        await client.until("audio.done")
        await client.until("error")
        await client.say("input.text", text="endless ")
        await client.until("audio.start")
        await client.say("cancel")
        await client.until("audio.cancelled")

    def figures():
        ended = [value("vivace_requests_ended_total", front_end="websocket", outcome=outcome)
                 for outcome in ("done", "failed", "cancelled")]  # fmt: skip
        return [value("vivace_requests_accepted_total", front_end="websocket"), *ended]

    before = figures()
    talk(server, scenario)
    assert [now - was for now, was in zip(figures(), before, strict=True)] == [3, 1, 1, 1]


def test_the_same_audio_as_the_engine_makes_however_the_text_is_cut(random_model_folder, tmp_path):
    engine = quiet_engine(random_model_folder, voices=tmp_path, num_steps=2, token_text_ratio=(2.0, 2.6))
    engine.voices.add(replace(noise_voice(engine._config), name="mine"))
    text = "Hello there. A fox sang in the rain, once."
    request = SynthesisRequest(iter([text]), voice="mine", sampling=SamplingParams(seed=3))
    expected = pcm16(engine.synthesize(request).samples)

    async def open_service():
        return LocalService(AsyncEngine(engine))

    async def scenario(client):
        await client.say("session.config", voice="mine", seed=3)
        for pieces in ([text], list(text)):
            for piece in pieces:
                await client.say("input.text", text=piece)
            await client.say("input.done")
            assert (await client.until("audio.done"))["audio"] == expected

    with LoopbackServer(open_service) as server:
        talk(server, scenario)


def test_text_queue_joins_halves_of_characters():
    async def main():
        text = "a😀b😀"
        units = text.encode("utf-16-be")
        halves = [chr(int.from_bytes(units[i : i + 2], "big")) for i in range(0, len(units), 2)]
        for cuts in itertools.product([False, True], repeat=len(halves) - 1):
            queue = TextQueue()
            piece = halves[0]
            for cut, half in zip(cuts, halves[1:], strict=True):
                if cut:
                    queue.push(piece)
                    piece = ""
                piece += half
            queue.push(piece)
            queue.finish()
            assert "".join([piece async for piece in queue]) == text
            assert queue.num_bytes == len(text.encode())

    asyncio.run(main())


def test_many_idle_sessions_disturb_nobody(server):
    async def main():
        idle = [await connect(url_of(server)) for _ in range(200)]
        async with session(server) as client:
            await client.say("input.text", text="Still here.")
            await client.say("input.done")
            assert spoken((await client.until("audio.done"))["audio"]) == "Still here."
        await asyncio.gather(*(connection.close() for connection in idle))

    threads = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() <= threads + 8  # sessions are not threads


def test_sessions_side_by_side_hear_their_own_text(server):
    async def one(number):
        async with session(server) as client:
            text = f"slow number {number}"
            for piece in (text[:5], text[5:]):
                await client.say("input.text", text=piece)
            await client.say("input.done")
            assert spoken((await client.until("audio.done"))["audio"]) == text

    async def main():
        await asyncio.gather(*(one(number) for number in range(30)))

    asyncio.run(main())


def test_the_client_of_the_documentation(server, tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"), {"__name__": "__main__"})
    with wave.open("speech.wav") as file:
        assert file.getframerate() == 24_000
        assert spoken(file.readframes(file.getnframes())) == "Hello, how are you?"
