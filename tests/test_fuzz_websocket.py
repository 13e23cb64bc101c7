"""Clients that say anything at all: whatever comes, every utterance ends once, and the server goes on.

A seed makes a session. ``VIVACE_FUZZ_SESSIONS`` sets how many are run; the default takes a few seconds.
"""

import asyncio
import json
import os
import random
from contextlib import suppress

import pytest
from websockets.exceptions import ConnectionClosed

from tests.server_helpers import LoopbackServer, wait_until
from tests.talk_helpers import Client, TalkService, connect, session, spoken, url_of
from vivace.config import ServerConfig

NUM_SESSIONS = int(os.environ.get("VIVACE_FUZZ_SESSIONS", "150"))
CANARY = "kanarienvogel"
"""Part of every text: no message of the server may hold it."""
PROPER_CLOSES = {1000, 1003, 1007, 1008, 1009}
CODES = {
    *("invalid_json", "invalid_type", "missing_field", "unsupported_value", "value_out_of_range"),
    *("empty_input", "input_too_long", "invalid_utf8", "voice_not_found", "model_not_found"),
    *("unexpected_message", "internal_error"),
}
_VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    2**70,
    "",
    "a",
    CANARY,
    "\ud800",
    "emma",
    [],
    {},
    [[]],
    {"id": "heart"},
    "pcm",
]


def text_of(rng):
    words = ["Hello", "slow", "fail", "endless", "block", "中文", "😀", CANARY, "", "\ud83d", "\n", "\x00"]
    return rng.choice([" ", ""]).join(rng.choices(words, weights=[9, 2, 1, 1, 1, 3, 3, 5, 1, 0.3, 1, 1], k=4))


def message_of(rng):
    """A frame: mostly sense, sometimes not."""
    kind = rng.random()
    if kind < 0.45:
        return json.dumps({"type": "input.text", "text": text_of(rng)})
    if kind < 0.65:
        return json.dumps({"type": rng.choice(["input.done", "input.done", "cancel", "clear", "ping"])})
    if kind < 0.8:
        names = ["voice", "speed", "seed", "timing", "response_format", "language", "instructions", "model"]
        members = {name: rng.choice(_VALUES) for name in rng.sample(names, 2)}
        return json.dumps({"type": "session.config", **members})
    if kind < 0.93:
        names = ["type", "text", "voice", CANARY]
        return json.dumps({rng.choice(names): rng.choice(_VALUES) for _ in range(3)})
    if kind < 0.98:
        whole = json.dumps({"type": "input.text", "text": CANARY})
        position = rng.randrange(len(whole))
        return whole[:position] + rng.choice(["", "{", "\\", "\x00", "9" * 400, "é"]) + whole[position + 1 :]
    return rng.choice([json.dumps({"type": "session.close"}), CANARY.encode(), "x" * 70_000, "[" * 60_000])


class Observer:
    """What a session has shown so far, and whether it made sense."""

    def __init__(self):
        self.ended = set()
        self.started = set()

    def see(self, message):
        if isinstance(message, bytes):
            assert self.started - self.ended, "audio of no utterance"
            return
        assert CANARY not in message
        event = json.loads(message, parse_constant=lambda name: pytest.fail(name))
        number = event.get("utterance")
        if event["type"] == "audio.start":
            assert number not in self.started | self.ended
            self.started.add(number)
        elif event["type"] in ("audio.done", "audio.cancelled", "error") and number is not None:
            assert number not in self.ended, "an utterance ended twice"
            self.ended.add(number)
        if event["type"] == "error":
            assert event["code"] in CODES


async def fuzz(server, seed):
    rng = random.Random(seed)
    observer = Observer()
    async with connect(url_of(server), max_size=None) as connection:

        async def listen():
            async for message in connection:
                observer.see(message)

        listening = asyncio.create_task(listen())
        try:
            for _ in range(rng.randrange(1, 30)):
                await connection.send(message_of(rng))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.5:
                connection.transport.abort()
            else:
                await connection.send(json.dumps({"type": "cancel"}))
                await connection.send(json.dumps({"type": "session.close"}))
        except ConnectionClosed:
            pass
        async with asyncio.timeout(20):
            with suppress(ConnectionClosed):
                await listening
    assert connection.close_code in PROPER_CLOSES | {1006}


def test_sessions_of_random_messages(tmp_path, caplog):
    config = ServerConfig(websocket_idle_seconds=5.0, write_stall_seconds=5.0)
    with LoopbackServer(lambda: TalkService(tmp_path), config) as server:

        async def main():
            for first in range(0, NUM_SESSIONS, 10):
                await asyncio.gather(*(fuzz(server, first + number) for number in range(10)))
            async with session(server) as client:
                assert isinstance(client, Client)
                await client.say("input.text", text="Fine.")
                await client.say("input.done")
                assert spoken((await client.until("audio.done"))["audio"]) == "Fine."

        asyncio.run(main())
        wait_until(lambda: not server.service.running)
        wait_until(lambda: not server.server.server_state.tasks)
        wait_until(lambda: not server.server.server_state.connections, 10)
    expected = ("Planted", "socket.send() raised")  # the fake engine's fault; clients that have left
    messages = [record.getMessage() for record in caplog.records]
    assert not [message for message in messages if not any(part in message for part in expected)]


def elevenlabs_message_of(rng):
    """A frame for ElevenLabs' sockets."""
    if rng.random() < 0.1:
        return message_of(rng)
    message = {}
    if rng.random() < 0.9:
        message["context_id"] = rng.choice(["a", "b", "c"])
    if rng.random() < 0.7:
        message["text"] = text_of(rng)
    for name, odds in (("flush", 0.3), ("close_context", 0.15), ("try_trigger_generation", 0.1)):
        if rng.random() < odds:
            message[name] = True
    if rng.random() < 0.1:
        message[rng.choice(["voice_settings", "generation_config", "text", "context_id"])] = rng.choice(
            _VALUES
        )
    if rng.random() < 0.02:
        message["close_socket"] = True
    return json.dumps(message)


async def fuzz_elevenlabs(server, seed):
    rng = random.Random(seed)
    kind = rng.choice(["stream-input", "multi-stream-input"])
    address = url_of(
        server, f"/v1/text-to-speech/emma/{kind}?output_format={rng.choice(['pcm_16000', 'ulaw_8000'])}"
    )
    async with connect(address, max_size=None) as connection:

        async def listen():
            async for message in connection:
                event = json.loads(message, parse_constant=lambda name: pytest.fail(name))
                assert CANARY not in event.get("message", "")
                assert "error" not in event or event["error"] in CODES | {"overloaded"}

        listening = asyncio.create_task(listen())
        with suppress(ConnectionClosed):
            for _ in range(rng.randrange(1, 30)):
                await connection.send(elevenlabs_message_of(rng))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.5:
                connection.transport.abort()
            else:
                for name in ("a", "b", "c", "default"):
                    for _ in range(2):  # the second one stops what is still spoken
                        await connection.send(json.dumps({"context_id": name, "close_context": True}))
                await connection.send(json.dumps({"close_socket": True}))
                await asyncio.sleep(0.2)
                connection.transport.abort()  # a context of another name may still be speaking
        async with asyncio.timeout(20):
            with suppress(ConnectionClosed):
                await listening
    assert connection.close_code in PROPER_CLOSES | {1006, 1011}


def test_sessions_of_random_messages_for_elevenlabs(tmp_path, caplog):
    config = ServerConfig(websocket_idle_seconds=5.0, write_stall_seconds=5.0)
    with LoopbackServer(lambda: TalkService(tmp_path), config) as server:

        async def main():
            for first in range(0, NUM_SESSIONS, 10):
                await asyncio.gather(*(fuzz_elevenlabs(server, first + number) for number in range(10)))

        asyncio.run(main())
        wait_until(lambda: not server.service.running)
        wait_until(lambda: not server.server.server_state.tasks)
        wait_until(lambda: not server.server.server_state.connections, 10)
    expected = ("Planted", "socket.send() raised")
    messages = [record.getMessage() for record in caplog.records]
    assert not [message for message in messages if not any(part in message for part in expected)]
