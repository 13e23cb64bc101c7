"""What a WebSocket client can do wrong: the rows W1 to W16, each against a real server.

Two rows are decided otherwise than a strict reading: text before a configuration is spoken with the defaults, as over
HTTP (W8), and ``input.done`` without text is an error of the message, since no utterance exists that could end (W9).
"""

import asyncio
import json
import os
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.beside import Neighbourly, beside_each_row, memory_below
from tests.server_helpers import LoopbackServer, at_once, wait_until
from tests.talk_helpers import Client, RawSocket, TalkService, connect, frame, session, spoken, url_of
from vivace.config import ServerConfig


class TalkServiceWithNeighbour(Neighbourly, TalkService):
    pass


TEXT, BINARY, CLOSE, PING, PONG, CONTINUE = 1, 2, 8, 9, 10, 0
QUICK = ServerConfig(
    websocket_idle_seconds=0.4, write_stall_seconds=0.5, header_seconds=0.4, request_seconds=60.0
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LoopbackServer(lambda: TalkServiceWithNeighbour(tmp_path_factory.mktemp("voices"))) as running:
        yield running


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A server with short times."""
    with LoopbackServer(
        lambda: TalkServiceWithNeighbour(tmp_path_factory.mktemp("voices")), QUICK
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def nobody_notices(request, tmp_path_factory):
    """Each row runs beside a stream of HTTP; after it nothing is left behind, and the next client is served."""
    yield from beside_each_row(request, tmp_path_factory, "server", "quick")
    for name in {"server", "quick"} & set(request.fixturenames):
        speaks(request.getfixturevalue(name))


def speaks(server):
    async def main():
        async with session(server) as client:
            await client.say("input.text", text="Fine.")
            await client.say("input.done")
            assert spoken((await client.until("audio.done"))["audio"]) == "Fine."

    asyncio.run(main())


def talk(server, scenario):
    async def main():
        async with session(server) as client:
            return await scenario(client)

    return asyncio.run(main())


FAULTS = [
    ("nonsense", "invalid_json"),
    ('{"type": "ping"', "invalid_json"),
    ('{"type": "ping", "type": "ping"}', "invalid_json"),
    ('{"type": NaN}', "invalid_json"),
    ("[" * 5000, "invalid_json"),
    ("[]", "invalid_type"),
    ("null", "invalid_type"),
    ('"ping"', "invalid_type"),
    ("{}", "missing_field"),
    ('{"type": null}', "missing_field"),
    ('{"type": 5}', "invalid_type"),
    ('{"type": "sing"}', "unsupported_value"),
    (json.dumps({"type": "x" * 65}), "input_too_long"),
    ('{"type": "pi\\ud800ng"}', "invalid_utf8"),
    ('{"type": "input.text"}', "missing_field"),
    ('{"type": "input.text", "text": 5}', "invalid_type"),
    ('{"type": "input.text", "text": ["a"]}', "invalid_type"),
    ('{"type": "session.config", "speed": 0}', "value_out_of_range"),
    ('{"type": "session.config", "speed": "1.5"}', "invalid_type"),
    ('{"type": "session.config", "speed": true}', "invalid_type"),
    ('{"type": "session.config", "seed": -1}', "value_out_of_range"),
    ('{"type": "session.config", "seed": 1.5}', "value_out_of_range"),
    ('{"type": "session.config", "seed": 9223372036854775808}', "value_out_of_range"),
    ('{"type": "session.config", "response_format": "exe"}', "unsupported_value"),
    ('{"type": "session.config", "response_format": ""}', "unsupported_value"),
    ('{"type": "session.config", "language": "wav\\r\\nX: y"}', "unsupported_value"),
    ('{"type": "session.config", "voice": "../../etc/passwd"}', "voice_not_found"),
    ('{"type": "session.config", "voice": {"name": "x"}}', "missing_field"),
    ('{"type": "session.config", "voice": 5}', "invalid_type"),
    ('{"type": "session.config", "model": "other"}', "model_not_found"),
    ('{"type": "session.config", "timing": 1}', "invalid_type"),
    (json.dumps({"type": "session.config", "instructions": "x" * 1001}), "input_too_long"),
]


@pytest.mark.parametrize(("text", "code"), FAULTS)
def test_w1_messages_that_make_no_sense(server, text, code):
    async def scenario(client):
        await client.connection.send(text)
        error = await client.next()
        assert (error["type"], error["code"], error["utterance"]) == ("error", code, None)
        assert "etc" not in error["message"]
        await client.say("input.text", text="Goes on.")  # with the settings as they were
        await client.say("input.done")
        assert spoken((await client.until("audio.done"))["audio"]) == "Goes on."

    talk(server, scenario)
    assert server.service.requests[-1].speed == 1.0


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"type": "input.text"}, "text"),
        ({"type": "input.text", "text": 5}, "text"),
        ({"type": "input.done"}, "text"),
        ({"type": "session.config", "instructions": 5}, "instructions"),
        ({"type": "session.config", "speed": 0}, "speed"),
    ],
)
def test_w1_the_error_names_the_member_that_the_client_sent(server, message, param):
    async def scenario(client):
        await client.connection.send(json.dumps(message))
        assert (await client.next())["param"] == param

    talk(server, scenario)


def test_w1_ten_of_them_end_the_session(server):
    async def scenario(client):
        for _ in range(10):
            await client.connection.send("nonsense")
            assert (await client.next())["code"] == "invalid_json"
        assert await client.closed() == 1008

    talk(server, scenario)


def test_w2_binary_frame(server):
    async def scenario(client):
        await client.connection.send(b"audio?")
        assert await client.closed() == 1003

    talk(server, scenario)


@pytest.mark.parametrize("size", [64 * 1024 + 1, 16 * 1024 * 1024 + 1])
def test_w3_a_frame_too_large(server, size):
    with RawSocket(server) as raw:
        assert raw.status() == 101
        data = frame(TEXT, bytes(size))
        sender = threading.Thread(target=_send_quietly, args=(raw.socket, data))
        with memory_below(megabytes=8):
            sender.start()
            assert raw.close_code() == 1009
            sender.join()


def test_w3_the_largest_frame_and_a_compressed_one(server):
    async def scenario(client):
        message = json.dumps({"type": "ping", "padding": ""})
        await client.connection.send(message[:-2] + "x" * (64 * 1024 - len(message)) + message[-2:])
        assert await client.next() == {"type": "pong"}

    talk(server, scenario)
    with RawSocket(server, headers=["Sec-WebSocket-Extensions: permessage-deflate"]) as raw:
        assert raw.status() == 101
        raw.send(TEXT, b"anything", reserved=4)  # compression was not agreed on
        assert raw.close_code() == 1002


def test_w4_a_message_in_a_million_pieces(server):
    with RawSocket(server) as raw:
        assert raw.status() == 101
        raw.send(TEXT, b" ", is_last=False)
        pieces = frame(CONTINUE, b" ", is_last=False) * 70_000
        sender = threading.Thread(target=lambda: _send_quietly(raw.socket, pieces))
        sender.start()
        assert raw.close_code() == 1009
        sender.join()


def test_w4_pieces_that_hold_nothing(server):
    with RawSocket(server) as raw:
        assert raw.status() == 101
        raw.send(TEXT, b"", is_last=False)
        pieces = frame(CONTINUE, b"", is_last=False) * 70_000
        sender = threading.Thread(target=lambda: _send_quietly(raw.socket, pieces))
        sender.start()
        assert raw.close_code() == 1008
        sender.join()


def test_w4_a_message_that_never_ends(quick):
    with RawSocket(quick) as raw:
        assert raw.status() == 101
        raw.send(TEXT, b"{", is_last=False)
        assert raw.close_code() == 1008


def _send_quietly(connection, data):
    with suppress(OSError):
        connection.sendall(data)


def test_w5_invalid_utf8(server, caplog):
    for pieces in ([b'{"type": "\xff\xfe"}'], [b"\xed\xa0\x80"], [b'{"\xe2\x82', b'"}']):
        with RawSocket(server) as raw:
            assert raw.status() == 101
            for number, piece in enumerate(pieces):
                raw.send(CONTINUE if number else TEXT, piece, is_last=number == len(pieces) - 1)
            assert raw.close_code() == 1007
    assert not caplog.records


@pytest.mark.parametrize(
    ("opcode", "payload", "options"),
    [
        (TEXT, b"{}", {"reserved": 1}),
        (TEXT, b"{}", {"reserved": 4}),
        (3, b"", {}),
        (11, b"", {}),
        (TEXT, b"{}", {"is_masked": False}),
        (PING, bytes(126), {}),
        (PING, b"", {"is_last": False}),
        (CONTINUE, b"{}", {}),
        (CLOSE, struct.pack(">H", 1005), {}),
        (CLOSE, struct.pack(">H", 999), {}),
        (CLOSE, b"\x03", {}),
    ],
)
def test_w6_broken_frames(server, opcode, payload, options):
    with RawSocket(server) as raw:
        assert raw.status() == 101
        raw.send(opcode, payload, **options)
        assert raw.close_code() == 1002


def test_w6_data_in_the_midst_of_a_message(server):
    with RawSocket(server) as raw:
        assert raw.status() == 101
        raw.send(TEXT, b"{", is_last=False)
        raw.send(TEXT, b"{}")
        assert raw.close_code() == 1002


@pytest.mark.parametrize("opcode", [PING, PONG])
def test_w7_floods_of_control_frames(server, opcode):
    with RawSocket(server) as raw:
        assert raw.status() == 101
        sender = threading.Thread(
            target=lambda: _send_quietly(raw.socket, frame(opcode, b"x" * 125) * 10_000)
        )
        sender.start()
        assert raw.close_code() == 1008
        sender.join()


def test_w7_a_few_pings_are_answered(server):
    with RawSocket(server) as raw:
        assert raw.status() == 101
        assert raw.receive()[0] == TEXT  # the greeting
        for number in range(20):
            raw.send(PING, bytes([number]))
            assert raw.receive() == (PONG, bytes([number]))


STATES = [
    # messages, and what comes back
    (["input.done"], ["empty_input"]),
    (["input.done", "input.done"], ["empty_input", "empty_input"]),
    (["text", "session.config"], ["unexpected_message"]),
    (["text", "input.done", "input.done"], ["empty_input"]),
    (["empty text", "input.done"], ["empty_input"]),
    (["session.config", "session.config"], []),
    (["session.close", "text"], ["unexpected_message"]),
    (["session.close", "session.config"], ["unexpected_message"]),
    (["session.close", "input.done"], ["unexpected_message"]),
    (["cancel", "cancel"], ["audio.cancelled", "audio.cancelled"]),
    (["text", "cancel", "input.done"], ["audio.cancelled", "empty_input"]),
    (["text", "clear", "session.config"], ["audio.cancelled"]),
]
_MESSAGES = {
    "text": {"type": "input.text", "text": "block "},
    "empty text": {"type": "input.text", "text": ""},
}


@pytest.mark.parametrize(("messages", "expected"), STATES)
def test_w8_w9_messages_out_of_order(server, messages, expected):
    async def scenario(client):
        if messages[0] == "session.close":  # something must be left to say, or the session is over at once
            await client.connection.send(json.dumps(_MESSAGES["text"]))
        for name in messages:
            await client.connection.send(json.dumps(_MESSAGES.get(name, {"type": name})))
        await client.say("ping")
        answer = await client.until("pong")
        seen = [event.get("code", event["type"]) for event in answer["events"][:-1]]
        assert seen == expected

    talk(server, scenario)


def test_w8_text_before_any_configuration_is_spoken_with_the_defaults(server):
    speaks(server)
    assert server.service.requests[-1].voice is None


def test_w9_nothing_to_speak_is_an_error_of_the_utterance(server):
    """The engine says so; the session goes on."""

    async def scenario(client):
        await client.say("input.text", text="\u200b")
        await client.say("input.done")
        await client.say("session.close")
        kinds = []
        while await client_is_open(client, kinds):
            pass
        assert kinds[-1] == "session.done"

    talk(server, scenario)


async def client_is_open(client, kinds):
    message = await client.next()
    kinds.append("audio" if isinstance(message, bytes) else message["type"])
    return kinds[-1] != "session.done"


def test_w10_one_character_a_frame(server):
    text = "Each of them alone, also 中文 and 😀. " * 50

    async def scenario(client):
        units = text.encode("utf-16-be")
        for position in range(0, len(units), 2):
            unit = int.from_bytes(units[position : position + 2], "big")
            await client.connection.send(f'{{"type": "input.text", "text": "\\u{unit:04x}"}}')
        await client.say("input.done")
        assert spoken((await client.until("audio.done"))["audio"]) == text

    talk(server, scenario)


@pytest.mark.parametrize("pieces", [["\\ud83d", "x"], ["\\ude00"], ["ok \\ud83d"], ["\\ud83d\\ud83d"]])
def test_w10_halves_of_characters_that_never_meet(server, pieces):
    async def scenario(client):
        for piece in pieces:
            await client.connection.send(f'{{"type": "input.text", "text": "{piece}"}}')
        await client.say("input.done")
        error = await client.until("error")
        assert (error["code"], error["param"], error["utterance"]) == ("invalid_utf8", "text", 1)
        await client.say("input.text", text="On.")
        await client.say("input.done")
        assert spoken((await client.until("audio.done"))["audio"]) == "On."

    talk(server, scenario)


def test_w11_too_much_text_that_waits(server):
    async def scenario(client):
        await client.say("input.text", text="block ")
        with suppress(Exception):
            for _ in range(20):
                await client.say("input.text", text="x" * 4000)
        assert (await client.until("error"))["code"] == "input_too_long"
        assert await client.closed() == 1009

    talk(server, scenario)


def test_w11_what_was_spoken_no_longer_counts(server):
    async def scenario(client):
        for _ in range(12):
            await client.say("input.text", text="x" * 4000)
            await client.say("input.done")
            await client.until("audio.done")

    talk(server, scenario)


def test_w12_silent_clients_are_closed_and_speaking_ones_are_not(quick):
    async def main():
        idle = [Client(await connect(url_of(quick))) for _ in range(100)]
        async with session(quick) as client:
            await client.say("input.text", text="block ")
            await client.say("input.done")
            with at_once(5.0):
                assert {await other.closed() for other in idle} == {1008}
            await client.say("ping")  # the engine works for this one
            assert (await client.until("pong"))["type"] == "pong"

    asyncio.run(main())


def test_w12_an_utterance_that_is_never_finished_is_not_waited_for(quick):
    async def scenario(client):
        await client.say("input.text", text="word ")
        assert await client.closed() == 1008

    talk(quick, scenario)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_w12_idle_sessions_cost_little(server):
    async def main():
        warm = [await connect(url_of(server)) for _ in range(20)]
        before = memory_bytes()
        idle = [await connect(url_of(server)) for _ in range(300)]
        cost = (memory_bytes() - before) / 300
        await asyncio.gather(*(connection.close() for connection in [*warm, *idle]))
        assert cost < 200_000  # both ends; a client's takes most of it

    asyncio.run(main())


def memory_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_w13_a_peer_that_never_reads(quick, monkeypatch):
    monkeypatch.setattr("vivace.server.websocket_protocol.LINGER_SECONDS", 0.5)
    with RawSocket(quick, receive_bytes=4096) as raw:
        assert raw.status() == 101
        raw.send(TEXT, b'{"type": "input.text", "text": "endless "}')
        wait_until(lambda: quick.service.ended[-1:] == ["cancelled"], 20)
        wait_until(lambda: len(quick.server.server_state.connections) <= 1, 20)  # the neighbour's


def test_w13_the_reason_reaches_a_peer_that_reads_again(quick):
    with RawSocket(quick, receive_bytes=4096) as raw:
        assert raw.status() == 101
        raw.send(TEXT, b'{"type": "input.text", "text": "endless "}')
        wait_until(lambda: quick.service.ended[-1:] == ["cancelled"], 20)
        assert raw.close_code() == 1008


@pytest.mark.parametrize("opening", [b'{"type": "input.text", "text": "endless "}', None])
def test_w14_reset(server, opening):
    with RawSocket(server) as raw:
        assert raw.status() == 101
        if opening:
            raw.send(TEXT, opening)
            raw.receive()
            raw.receive()
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not server.service.running)


def test_w14_a_peer_that_vanished_is_pinged(tmp_path, monkeypatch):
    monkeypatch.setattr("vivace.server.run.WEBSOCKET_PING_SECONDS", 0.2)
    with LoopbackServer(lambda: TalkService(tmp_path)) as server, RawSocket(server) as raw:
        assert raw.status() == 101
        assert raw.close_code() == 1011  # no pong came


def handshake(server, *changed, without=()):
    lines = {
        "Host": f"127.0.0.1:{server.port}",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    lines = {name: value for name, value in lines.items() if name not in without} | dict(changed)
    head = ["GET /v1/audio/speech/stream HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
    with RawSocket(server, request=head) as raw:
        return raw.status()


def test_w15_handshakes(server):
    assert handshake(server) == 101
    assert handshake(server, without=["Sec-WebSocket-Key"]) == 400
    assert handshake(server, ("Sec-WebSocket-Key", "short")) == 400
    assert handshake(server, ("Sec-WebSocket-Version", "8")) == 400
    assert handshake(server, ("Origin", "https://evil.example")) == 403
    assert handshake(server, ("Origin", f"http://127.0.0.1:{server.port}")) == 101
    assert handshake(server, ("Host", "evil.example")) == 421
    assert handshake(server, ("Content-Length", "5")) == 400


def test_w16_wrong_doors(server):
    head = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    upgrade = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{head}{key}\r\n".encode()
    assert _status(server, upgrade) in (403, 404)
    for method, status in (("POST", (404, 405)), ("GET", (404, 405, 426))):
        plain = f"{method} /v1/audio/speech/stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
        assert _status(server, plain.encode()) in status


def _status(server, data):
    with server.connect() as connection:
        connection.sendall(data)
        return int(connection.recv(65536).split()[1])
