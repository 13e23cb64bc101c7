"""Faults over real sockets: clients that leave at any moment, and disks that fill up.

After each of them a neighbour has heard what it should, nothing is left behind, and the figures add up.
"""

import asyncio
import errno
import os
import re
import socket
import struct
import threading

import pytest

from tests.beside import FakeServiceWithNeighbour, beside, own_temporary_folder
from tests.server_helpers import LoopbackServer, post, read_head, status_and_code, wait_until
from tests.test_bad_inputs_voices import AUDIO, CONSENT, FORM_KIND, NAME, _form
from vivace.voice import file as voice_file

NUM_CHUNKS = 5
REQUEST = post({"input": "Hi.", "response_format": "pcm"})
FORM = _form(NAME, CONSENT, AUDIO)
UPLOAD = (
    b"POST /v1/audio/voices HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: "
    + FORM_KIND.encode()
    + b"\r\nContent-Length: %d\r\n\r\n" % len(FORM)
    + FORM
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def server(folder):
    with LoopbackServer(lambda: FakeServiceWithNeighbour(folder)) as running:
        yield running


@pytest.fixture(autouse=True)
def nobody_notices(server, tmp_path):
    server.service.script = [0.02] * NUM_CHUNKS
    server.service.ended.clear()
    with own_temporary_folder(tmp_path), beside(server):
        yield
    figures = metrics(server)
    assert figures["accepted"] == figures["done"] + figures["failed"] + figures["cancelled"]


def metrics(server):
    """Requests by what became of them."""
    get = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    text = server.exchange(get).decode()
    accepted = re.findall(r"^vivace_requests_accepted_total\{.*\} ([\d.]+)$", text, re.MULTILINE)
    ended = re.findall(r'^vivace_requests_ended_total\{.*outcome="(\w+)"\} ([\d.]+)$', text, re.MULTILINE)
    counts = {"accepted": sum(map(float, accepted)), "done": 0.0, "failed": 0.0, "cancelled": 0.0}
    for outcome, count in ended:
        counts[outcome] += float(count)
    return counts


def leave(connection, way):
    """The connection's end as the other side sees it: a FIN, or a reset."""
    if way == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def wait_for_permission(permits):
    async def wait():
        while not permits:
            await asyncio.sleep(0.001)
        permits.pop()

    return wait


@pytest.mark.parametrize("way", ["fin", "reset"])
@pytest.mark.parametrize("num_heard", range(NUM_CHUNKS + 1))
def test_F1_a_client_leaves_after_any_chunk(server, num_heard, way):
    """The engine's request ends, without the rest being made."""
    permits = []
    gate = wait_for_permission(permits)
    server.service.script = [step for _ in range(NUM_CHUNKS) for step in (gate, 0.02)] + [
        asyncio.Event().wait
    ]
    with server.connect() as connection:
        connection.sendall(REQUEST)
        for number in range(num_heard):
            permits.append(1)
            if number == 0:
                assert b"200 OK" in read_head(connection)
            received = b""
            while len(received) < 0.02 * 48_000:
                received += connection.recv(65_536)
        wait_until(lambda: server.service.running)
        leave(connection, way)
    wait_until(lambda: not server.service.running)
    assert server.service.ended in (["cancelled"], ["failed"])
    assert len(permits) == 0


@pytest.mark.parametrize("way", ["fin", "reset"])
@pytest.mark.parametrize("part", ["header", "body", "upload"])
def test_F2_a_client_leaves_before_its_request_is_complete(server, folder, part, way):
    """Nothing of it reaches the engine or the store."""
    sent = {"header": REQUEST[:40], "body": REQUEST[:-3], "upload": UPLOAD[:-40]}[part]
    num_requests = len(server.service.requests)
    with server.connect() as connection:
        connection.sendall(sent)
        wait_until(lambda: len(server.server.server_state.connections) >= 2)
        leave(connection, way)
    wait_until(lambda: len(server.server.server_state.connections) == 1)
    assert len(server.service.requests) == num_requests
    assert list(folder.iterdir()) == []


def test_F2_a_client_leaves_while_it_waits_for_the_first_byte(server):
    server.service.script = [asyncio.Event().wait]
    with server.connect() as connection:
        connection.sendall(REQUEST)
        wait_until(lambda: server.service.running)
    wait_until(lambda: not server.service.running)


def _operations(monkeypatch, fail_at):
    """Counts what is done to files, and fails the one asked for with a full disk."""
    seen = []

    def counted(function):
        def run(*arguments, **options):
            seen.append(function.__name__)
            if len(seen) - 1 == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        return run

    for name in ("fsync", "link", "replace"):
        monkeypatch.setattr(voice_file.os, name, counted(getattr(os, name)))
    return seen


def test_F19_a_disk_that_fills_up_at_any_moment(server, folder, monkeypatch):
    """Each step of storing a voice fails once: a named error, nothing half, and speaking goes on."""
    for fail_at in range(20):
        with monkeypatch.context() as patch:
            seen = _operations(patch, fail_at)
            answer = status_and_code(server.exchange(UPLOAD))
            if fail_at >= len(seen):
                break
        assert answer in ((507, "storage_full"), (200, None))
        names = [path.name for path in folder.iterdir()]
        assert names == (["anna.safetensors"] if answer == (200, None) else [])
        for path in folder.iterdir():
            path.unlink()
        assert b"200 OK" in server.exchange(REQUEST.replace(b"Host:", b"Connection: close\r\nHost:"))
    assert fail_at >= 2
    assert answer == (200, None)
    (folder / "anna.safetensors").unlink()


def test_F21_a_voice_is_removed_while_another_client_makes_it(server, folder):
    """Whatever the order, each answer is one of those that a single client could get."""
    remove = b"DELETE /v1/audio/voices/anna HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = []

    def many(data):
        answers.extend(status_and_code(server.exchange(data)) for _ in range(10))

    threads = [threading.Thread(target=many, args=(data,)) for data in (UPLOAD, remove, UPLOAD, remove)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 40
    assert set(answers) <= {(200, None), (409, "voice_exists"), (404, "voice_not_found")}
    server.exchange(remove)
    assert list(folder.iterdir()) == []


def test_I5_requests_of_every_kind_add_up(server):
    server.exchange(post(b"no JSON", headers=("Connection: close",)))
    server.exchange(post({"input": "Hi.", "voice": "nobody"}, headers=("Connection: close",)))
    server.service.script = [0.02, RuntimeError("planted")]
    server.exchange(post({"input": "Hi.", "response_format": "pcm"}, headers=("Connection: close",)))
    server.service.script = [RuntimeError("planted")]
    server.exchange(post({"input": "Hi."}, headers=("Connection: close",)))
    figures = metrics(server)
    assert figures["failed"] >= 2
