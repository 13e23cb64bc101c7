"""Home Assistant's protocol with its own client, and what a client can do wrong, on real sockets."""

import asyncio
import json
import os
import socket
import sys
import warnings
from contextlib import asynccontextmanager, suppress

import pytest

from tests.talk_helpers import DEADLINE_S, TalkService, spoken
from vivace.config import ServerConfig
from vivace.server.metrics import Metrics
from vivace.server.wyoming import wyoming_server

with warnings.catch_warnings():  # the package imports a module that newer Pythons lack
    warnings.simplefilter("ignore", DeprecationWarning)
    from wyoming.audio import AudioChunk, AudioStart, AudioStop
    from wyoming.client import AsyncTcpClient
    from wyoming.error import Error
    from wyoming.info import Describe, Info
    from wyoming.ping import Ping, Pong
    from wyoming.tts import (
        Synthesize,
        SynthesizeChunk,
        SynthesizeStart,
        SynthesizeStop,
        SynthesizeStopped,
        SynthesizeVoice,
    )

QUICK = ServerConfig(websocket_idle_seconds=0.4, header_seconds=0.3, write_stall_seconds=0.4)


class Door:
    """A running server, its service and its port."""

    def __init__(self, service, port):
        self.service = service
        self.port = port

    @asynccontextmanager
    async def client(self):
        client = AsyncTcpClient("127.0.0.1", self.port)
        await client.connect()
        try:
            yield client
        finally:
            await client.disconnect()


def serve(folder, scenario, config=None):
    """Runs ``scenario(door)``; afterwards nothing is left."""

    async def main():
        service = TalkService(folder)
        config_ = config or ServerConfig()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            door = Door(service, listener.getsockname()[1])
            async with wyoming_server(listener, service, config_, Metrics(service)):
                async with asyncio.timeout(DEADLINE_S):
                    await scenario(door)
                    while service.running:
                        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


async def speech(client, *, is_stream=False):
    """The audio of one answer, and the kinds of events around it."""
    kinds, audio = [], b""
    while True:
        async with asyncio.timeout(DEADLINE_S):
            event = await client.read_event()
        kinds.append(event.type)
        if AudioChunk.is_type(event.type):
            chunk = AudioChunk.from_event(event)
            assert (chunk.rate, chunk.width, chunk.channels) == (24_000, 2, 1)
            audio += chunk.audio
        if (SynthesizeStopped if is_stream else AudioStop).is_type(event.type):
            return audio, kinds


def test_describe(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no voice")  # has a name, and is not offered

    async def scenario(door):
        async with door.client() as client:
            await client.write_event(Describe().event())
            info = Info.from_event(await client.read_event())
            (program,) = info.tts
            assert program.supports_synthesize_streaming
            assert program.installed
            assert [voice.name for voice in program.voices] == ["daniel", "emma", "heart"]
            assert "en" in program.voices[0].languages
            await client.write_event(Ping(text="x").event())
            assert Pong.from_event(await client.read_event()).text == "x"

    serve(tmp_path, scenario)


def test_synthesize(tmp_path):
    async def scenario(door):
        async with door.client() as client:
            for text, voice in (("Hello there.", SynthesizeVoice(name="emma")), ("Again.", None)):
                await client.write_event(Synthesize(text=text, voice=voice).event())
                audio, kinds = await speech(client)
                assert spoken(audio) == text
                assert kinds[0] == AudioStart(24_000, 2, 1).event().type
                assert kinds[-1] == AudioStop().event().type
            await client.write_event(
                Synthesize(text="Hallo.", voice=SynthesizeVoice(language="de_DE")).event()
            )
            await speech(client)
        assert [request.voice for request in door.service.requests] == ["emma", None, None]

    serve(tmp_path, scenario)


def test_streamed_text(tmp_path):
    """As Home Assistant sends it, with the compatible ``synthesize`` that must not be spoken twice."""

    async def scenario(door):
        async with door.client() as client:
            await client.write_event(SynthesizeStart(voice=SynthesizeVoice(name="heart")).event())
            await client.write_event(SynthesizeChunk(text=" First sec").event())
            assert (await client.read_event()).type == "audio-start"  # before the text is complete
            first = AudioChunk.from_event(await client.read_event())
            assert spoken(first.audio) == "First "
            await client.write_event(SynthesizeChunk(text="ond.").event())
            await client.write_event(Synthesize(text="First second.").event())
            await client.write_event(SynthesizeStop().event())
            audio, kinds = await speech(client, is_stream=True)
            assert spoken(audio) == "second."
            assert kinds[-2:] == ["audio-stop", "synthesize-stopped"]
            await client.write_event(SynthesizeStart().event())
            await client.write_event(SynthesizeChunk(text=" ").event())
            await client.write_event(SynthesizeStop().event())
            assert (await speech(client, is_stream=True))[1] == ["synthesize-stopped"]
        assert door.service.words == ["First ", "second."]

    serve(tmp_path, scenario)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (Synthesize(text="fail "), "internal_error"),
        (Synthesize(text=""), "empty_input"),
        (Synthesize(text="a", voice=SynthesizeVoice(name="nobody")), "voice_not_found"),
        (Synthesize(text="<speak/>", text_format="ssml"), "unsupported_value"),
        (Synthesize(text="x" * 40_000), "input_too_long"),
        (SynthesizeChunk(text="a"), "unexpected_message"),
        (SynthesizeStop(), "unexpected_message"),
    ],
)
def test_errors_are_told_and_never_look_complete(tmp_path, event, code):
    async def scenario(door):
        async with door.client() as client:
            await client.write_event(event.event())
            kinds = []
            while (answer := await client.read_event()) is not None:
                kinds.append(answer.type)
                if Error.is_type(answer.type):
                    assert Error.from_event(answer).code == code
            assert kinds[-1] == "error"
            assert "audio-stop" not in kinds

    serve(tmp_path, scenario)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"nonsense\n", "invalid_json"),
        (b"\n", "invalid_json"),
        (b"[]\n", "invalid_type"),
        (b"{}\n", "missing_field"),
        (b'{"type": 5}\n', "invalid_type"),
        (b'{"type": "describe", "data": 5}\n', "invalid_type"),
        (b'{"type": "describe", "data_length": -1}\n', "value_out_of_range"),
        (b'{"type": "describe", "data_length": 99999999999}\n', "value_out_of_range"),
        (b'{"type": "describe", "payload_length": 1e9}\n', "value_out_of_range"),
        (b'{"type": "describe", "data_length": 2}\n[]', "invalid_type"),
        (b'{"type": "synthesize", "data": {"text": 5}}\n', "invalid_type"),
        (b'{"type": "synthesize", "data": {"text": "\\ud800"}}\n', "invalid_utf8"),
        (b'{"type": "synthesize"}\n', "missing_field"),
        (b"\xff\xfe\n", "invalid_utf8"),
        (b" " * 70_000, "payload_too_large"),
        (b"{", "request_timeout"),
    ],
)
def test_what_is_no_event(tmp_path, data, code):
    async def scenario(door):
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        line = json.loads(await reader.readline())
        assert line["type"] == "error"
        assert json.loads(await reader.readexactly(line["data_length"]))["code"] == code
        assert await reader.read() == b""
        writer.close()

    serve(tmp_path, scenario, QUICK)


def test_a_client_that_leaves_ends_its_request(tmp_path):
    async def scenario(door):
        async with door.client() as client:
            await client.write_event(Synthesize(text="endless ").event())
            await client.read_event()
        while door.service.ended != ["cancelled"]:
            await asyncio.sleep(0.01)

    serve(tmp_path, scenario)


def test_a_client_that_takes_nothing_is_left(tmp_path):
    async def scenario(door):
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port, limit=1024)
        writer.write(b'{"type": "synthesize", "data": {"text": "endless "}}\n')
        while door.service.ended != ["cancelled"]:
            await asyncio.sleep(0.01)
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()

    serve(tmp_path, scenario, QUICK)


def test_a_silent_client_is_closed_and_a_listening_one_is_not(tmp_path):
    async def scenario(door):
        silent, writer = await asyncio.open_connection("127.0.0.1", door.port)
        async with door.client() as client:
            await client.write_event(Synthesize(text="block ").event())
            assert await silent.read() == b""
            await asyncio.sleep(QUICK.websocket_idle_seconds * 2)
            await client.write_event(Ping().event())
            assert Pong.is_type((await client.read_event()).type)
        writer.close()

    serve(tmp_path, scenario, QUICK)


def test_connections_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("vivace.server.wyoming.MAX_CONNECTIONS", 2)

    async def scenario(door):
        async with door.client() as one, door.client() as other:
            for client in (one, other):
                await client.write_event(Ping().event())
                assert Pong.is_type((await client.read_event()).type)
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            await one.write_event(Synthesize(text="Still here.").event())
            assert spoken((await speech(one))[0]) == "Still here."

    serve(tmp_path, scenario)


def test_the_command_serves_it(tmp_path):
    """The real thing: the embedded model in its process, Home Assistant's client."""
    command = [sys.executable, "-m", "vivace.cli", "serve", "--port", "0", "--wyoming", "--wyoming-port", "0"]

    async def main():
        environment = {**os.environ, "VIVACE_VOICES": str(tmp_path), "VIVACE_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=environment
        )
        try:
            assert b"Vivace speaks at" in await process.stdout.readline()
            line = (await process.stdout.readline()).decode()
            client = AsyncTcpClient("127.0.0.1", int(line.rpartition(":")[2]))
            await client.connect()
            await client.write_event(Synthesize(text="Hello.").event())
            audio, _ = await speech(client)
            assert len(audio) > 24_000 * 2 * 0.2
            await client.disconnect()
        finally:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0

    asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))
