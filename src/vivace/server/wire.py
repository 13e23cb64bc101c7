"""What the server and its engine process say to each other: frames, and values as frames.

A frame is two little-endian uint32 (bytes of the header, bytes of the payload), a header in JSON, and a payload:
samples as float32, a voice as the content of a voice file, or a recording. Nothing in a frame can run code.

Frames of the server: ``open`` (settings, the first), ``speak`` ``text`` ``text_end`` ``credit`` ``cancel``,
``transform`` (as ``speak``, with a recording),
``voice`` (a voice to keep under a key) ``forget``, ``make_voice``, ``probe``.
Frames of the engine process: ``ready`` or ``unusable``, ``beat``, ``chunk`` ``end`` ``error``, ``made_voice``,
``probed``, ``broken``.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vivace import errors
from vivace.datatypes import AudioChunk, SamplingParams, StageTimes, SynthesisResult
from vivace.engine import SynthesisRequest
from vivace.errors import OverloadedError, SynthesisError, VivaceError

if TYPE_CHECKING:
    import asyncio

    from vivace.voice import Voice

Header = dict[str, Any]

MAX_HEADER_BYTES = 8 * 1024 * 1024
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
_SIZES = struct.Struct("<II")

_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, VivaceError)
}


class WireError(Exception):
    """The other side sent what is no frame: it is broken, and nothing more can be understood."""


def pack(header: Header, payload: bytes = b"") -> bytes:
    """One frame."""
    head = json.dumps(header).encode()
    if len(head) > MAX_HEADER_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError("a frame is too large")
    return _SIZES.pack(len(head), len(payload)) + head + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    """The next frame.

    Raises:
        EOFError: the other side has ended (asyncio's ``IncompleteReadError`` is one). OSError: so it has.
        WireError: the bytes are no frame.
    """
    head_bytes, payload_bytes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    if head_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise WireError("a frame is too large")
    head = await reader.readexactly(head_bytes)
    payload = await reader.readexactly(payload_bytes)
    try:
        header = json.loads(head)
        if not isinstance(header, dict) or not isinstance(header["kind"], str):
            raise WireError("a frame has no kind")
    except (ValueError, KeyError, RecursionError) as error:
        raise WireError("the header of a frame is damaged") from error
    return header, payload


def request_header(request: SynthesisRequest) -> Header:
    """A request but for its voice, which travels apart. Its text must be a str, or streamed."""
    return {
        "text": request.text if isinstance(request.text, str) else None,
        "instruction": request.instruction,
        "cross_lingual": request.cross_lingual,
        "language": request.language,
        "speed": request.speed,
        "stream": request.stream,
        "sampling": asdict(request.sampling),
    }


def request_of(header: Header, voice: str | Voice | None) -> SynthesisRequest:
    """What ``request_header`` was made of; streamed text is empty here."""
    text = header["text"]
    return SynthesisRequest(
        text=() if text is None else text,
        voice=voice,
        instruction=header["instruction"],
        cross_lingual=header["cross_lingual"],
        language=header["language"],
        speed=header["speed"],
        stream=header["stream"],
        sampling=SamplingParams(**header["sampling"]),
    )


def chunk_frame(
    request_id: int, chunk: AudioChunk, so_far: SynthesisResult, num_told: int = 0, num_skipped: int = 0
) -> bytes:
    """A chunk, with the figures of the request so far.

    Args:
        num_told: segments whose text has been sent before. num_skipped: the same of ``skipped_text``.
    """
    new_text = {
        "spoken_text": so_far.spoken_text[num_told:],
        "skipped_text": so_far.skipped_text[num_skipped:],
    }
    header = {
        "kind": "chunk",
        "id": request_id,
        "index": chunk.index,
        "segment": chunk.segment,
        "start_s": chunk.start_s,
        "elapsed_ms": chunk.elapsed_ms,
        "times": astuple(chunk.times),
        "is_last": chunk.is_last,
        "result": result_header(so_far) | new_text,
    }
    return pack(header, np.ascontiguousarray(chunk.samples, "<f4").tobytes())


def chunk_of(header: Header, payload: bytes) -> AudioChunk:
    """What ``chunk_frame`` was made of."""
    return AudioChunk(
        samples=np.frombuffer(payload, "<f4").astype(np.float32),
        sample_rate_hz=header["result"]["sample_rate_hz"],
        index=header["index"],
        segment=header["segment"],
        start_s=header["start_s"],
        elapsed_ms=header["elapsed_ms"],
        times=StageTimes(*header["times"]),
        is_last=header["is_last"],
    )


def result_header(result: SynthesisResult) -> Header:
    """The figures of a request, without samples."""
    header = {name: getattr(result, name) for name in result.__slots__ if name not in ("samples", "times")}
    return header | {"times": astuple(result.times)}


def result_of(header: Header) -> SynthesisResult:
    """What ``result_header`` was made of."""
    times = StageTimes(*header["times"])
    return SynthesisResult(**{**header, "times": times, "samples": np.zeros(0, np.float32)})


def error_header(error: Exception) -> Header:
    """An error; what is not ours crosses as a failed synthesis that tells its type only."""
    if not isinstance(error, VivaceError):
        error = SynthesisError(f"internal error ({type(error).__name__})")
    return {
        "error": type(error).__name__,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "retry_after_s": getattr(error, "retry_after_s", None),
    }


def error_of(header: Header) -> VivaceError:
    """What ``error_header`` was made of."""
    kind = _ERRORS.get(header["error"], VivaceError)
    message, code = header["message"], header["code"]
    if issubclass(kind, OverloadedError):
        return kind(message, retry_after_s=cast("float", header["retry_after_s"]), code=code)
    return kind(message, code=code, param=header["param"])
