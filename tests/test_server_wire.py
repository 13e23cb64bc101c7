"""Frames between server and engine process: values cross unchanged, and damaged frames are noticed."""

import asyncio
import json
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest

from vivace import (
    CancelledRequestError,
    InvalidTextError,
    OverloadedError,
    SamplingParams,
    SynthesisError,
    SynthesisRequest,
    VivaceError,
    VoiceNotFoundError,
)
from vivace.datatypes import AudioChunk, StageTimes, SynthesisResult
from vivace.environment import engine_environment
from vivace.server import wire
from vivace.server.child import EngineSettings, Watch
from vivace.server.process import ProcessService


def read(data):
    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await wire.read_frame(reader)

    return asyncio.run(main())


def result(**changes):
    made = SynthesisResult(
        np.zeros(0, np.float32), 24_000, 1.5, 20.25, 80.125, 0.1 + 0.2, 1 / 3, 4, 25, 1, "stop",
        StageTimes(1.0, 2.0, 3.0), ["One.", "Two."], ["你", "好"],
    )  # fmt: skip
    return replace(made, **changes)


def test_a_chunk_crosses_bit_by_bit():
    samples = np.random.default_rng(0).standard_normal(1001).astype(np.float32)
    chunk = AudioChunk(samples, 24_000, 3, 1, 1 / 3, 12.345678901234, StageTimes(0.1, 0.2), True)
    header, payload = read(wire.chunk_frame(7, chunk, result(), num_told=1, num_skipped=1))
    assert (header["kind"], header["id"]) == ("chunk", 7)
    found = wire.chunk_of(header, payload)
    np.testing.assert_array_equal(found.samples, samples)
    assert replace(found, samples=samples) == replace(chunk, samples=samples)
    so_far = wire.result_of(header["result"])
    assert (so_far.rtf, so_far.tps, so_far.spoken_text) == (0.1 + 0.2, 1 / 3, ["Two."])
    assert so_far.skipped_text == ["好"]


@pytest.mark.parametrize(
    "request_",
    [
        SynthesisRequest("Hello 😀 \ud800", voice="x", instruction="a", cross_lingual=True, language="zh"),
        SynthesisRequest(
            "", speed=0.1 + 0.2, stream=False, sampling=SamplingParams(2**63 - 1, 0.5, 3, 4, 0.5, 2.0)
        ),
    ],
)
def test_a_request_crosses(request_):
    header, _ = read(wire.pack({"kind": "speak", "request": wire.request_header(request_)}))
    assert wire.request_of(header["request"], request_.voice) == request_


@pytest.mark.parametrize(
    "error",
    [
        InvalidTextError("no", code="empty_input", param="text"),
        VoiceNotFoundError("none", param="voice"),
        OverloadedError("full", retry_after_s=2.5, code="engine_restarting"),
        CancelledRequestError("gone", code="write_stall"),
        SynthesisError("failed"),
    ],
)
def test_an_error_crosses(error):
    found = wire.error_of(wire.error_header(error))
    assert type(found) is type(error)
    assert vars(found) == vars(error)
    assert found.http_status == error.http_status


def test_an_error_that_is_not_ours_tells_its_type_only():
    found = wire.error_of(wire.error_header(KeyError("/secret/path")))
    assert isinstance(found, SynthesisError)
    assert "secret" not in found.message
    assert isinstance(wire.error_of({**wire.error_header(found), "error": "os.system"}), VivaceError)


def frame(head, payload=b"", head_bytes=None, payload_bytes=None):
    sizes = (
        len(head) if head_bytes is None else head_bytes,
        len(payload) if payload_bytes is None else payload_bytes,
    )
    return struct.pack("<II", *sizes) + head + payload


@pytest.mark.parametrize(
    "data",
    [
        frame(b"{}"),
        frame(b"[]"),
        frame(b'{"kind": 5}'),
        frame(b"\xff\xfe"),
        frame(b"[" * 100_000),
        frame(b"{}", head_bytes=2**32 - 1),
        frame(b'{"kind": "x"}', payload_bytes=2**31),
    ],
)
def test_what_is_no_frame(data):
    with pytest.raises(wire.WireError):
        read(data)


def test_a_frame_that_is_cut_off():
    whole = wire.pack({"kind": "x"}, b"payload")
    for size in range(len(whole)):
        with pytest.raises(EOFError):
            read(whole[:size])
    assert read(whole) == ({"kind": "x"}, b"payload")


def test_too_much_for_a_frame():
    with pytest.raises(wire.WireError):
        wire.pack({"kind": "x"}, bytes(wire.MAX_PAYLOAD_BYTES + 1))


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX")
@pytest.mark.parametrize("answer", ["b'garbage ' * 100", "b''", "bytes(8)"])
def test_a_process_that_speaks_something_else(tmp_path, answer):
    program = f"import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall({answer})"
    settings = EngineSettings(voices_folder=tmp_path)
    with pytest.raises(VivaceError, match="did not start"):
        asyncio.run(
            ProcessService.open(settings, watch=Watch(start_s=20), command=(sys.executable, "-c", program))
        )


def test_the_engine_process_gets_no_secrets(monkeypatch):
    for name in ("VIVACE_API_KEYS", "AWS_SECRET_ACCESS_KEY", "HTTP_PROXY", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environment = engine_environment()
    assert "secret" not in json.dumps(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "PATH" in environment
