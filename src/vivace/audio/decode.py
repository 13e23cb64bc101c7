"""Untrusted audio files to checked mono samples.

A file is decoded by a child process that lives for this one file, is limited in memory and time, can open
nothing and is killed when it takes too long (``decode_child``). Its answer is bounded before it is read. What
comes back is checked here, so that prompt audio which cannot make a voice is refused before any model work.
"""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from vivace.audio.containers import sniff
from vivace.environment import child_environment
from vivace.errors import InvalidAudioError, VivaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from vivace.config import Limits

    Float32 = NDArray[np.float32]

SILENCE_RMS = 1e-3
"""-60 dBFS. Audio whose loudest 50 ms (constant offset removed) lie below it is silent."""
CLIPPED_LEVEL = 0.999
CLIPPED_SHARE = 0.1
"""Audio with this share of its samples at full scale or beyond is clipped beyond use (a full sine: 3 %)."""
START_SECONDS = 30.0
"""How long a child may take to start: imports on a busy machine. Not part of ``Limits.decode_seconds``."""

_PARAM = "prompt_audio"

AudioSource = bytes | str | Path
"""A file's content, or its path."""


def decode_audio(
    source: AudioSource, limits: Limits, *, command: Sequence[str] | None = None
) -> tuple[Float32, int]:
    """Decode, mix down to mono and check.

    Args:
        source: the file's bytes, or its path.
        command: the child to run instead of our own; its settings are appended (tests plant faulty children).

    Returns:
        Samples float32 ``[n]`` in -1 … 1 and their rate in Hz.

    Raises:
        InvalidAudioError: with the code of what is wrong; the message never holds any of the input.
        VivaceError: the child process could not be started.
    """
    given: object = source
    if not isinstance(given, bytes | str | os.PathLike):
        raise InvalidAudioError(
            "The recording must be the path of a file, or its bytes.", code="invalid_type", param=_PARAM
        )
    data = source if isinstance(source, bytes) else _read_file(source, limits.prompt_file_bytes)
    if len(data) > limits.prompt_file_bytes:
        raise InvalidAudioError(
            f"The audio file is larger than {limits.prompt_file_bytes} bytes. Cut it, or send FLAC or MP3.",
            code="payload_too_large",
            param=_PARAM,
        )
    settings = json.dumps(
        {
            "container": sniff(data),
            "seconds_max": limits.prompt_seconds_max,
            "rate_hz_min": limits.prompt_rate_hz_min,
            "rate_hz_max": limits.prompt_rate_hz_max,
            "cpu_seconds": math.ceil(limits.decode_seconds) + 1,
        }
    )
    child = command or (sys.executable, "-P", "-m", "vivace.audio.decode_child")
    samples, rate_hz = _decode_in_child([*child, settings], data, limits)
    return check_prompt_audio(samples, rate_hz, limits), rate_hz


def check_prompt_audio(samples: Float32, rate_hz: int, limits: Limits) -> Float32:
    """The samples, clamped to -1 … 1, if they can serve as a prompt.

    Raises:
        InvalidAudioError: ``unsupported_sample_rate``, ``invalid_audio`` (nothing in it),
            ``audio_too_short`` and ``audio_too_long`` (the bounds themselves are allowed),
            ``non_finite_samples``, ``audio_silent``, ``audio_clipped``.
    """

    def refuse(code: str, message: str) -> InvalidAudioError:
        return InvalidAudioError(message, code=code, param=_PARAM)

    if not limits.prompt_rate_hz_min <= rate_hz <= limits.prompt_rate_hz_max:
        raise refuse("unsupported_sample_rate", "The sample rate is out of bounds. Export at 24000 Hz.")
    if len(samples) == 0:
        raise refuse("invalid_audio", "The file holds no audio. Export it again.")
    if len(samples) < limits.prompt_seconds_min * rate_hz:
        raise refuse(
            "audio_too_short",
            f"The recording must last at least {limits.prompt_seconds_min:g} s; for a voice 5 to 15 s work best.",
        )
    if len(samples) > limits.prompt_seconds_max * rate_hz:
        raise refuse(
            "audio_too_long",
            f"The recording must last at most {limits.prompt_seconds_max:g} s; for a voice 5 to 15 s work best.",
        )
    if not np.isfinite(samples).all():
        raise refuse("non_finite_samples", "The audio holds NaN or infinite samples. Export it again.")
    clamped = np.clip(samples, -1.0, 1.0)
    if _loudest_rms(clamped, rate_hz) < SILENCE_RMS:
        raise refuse("audio_silent", "The audio is silent. Check the recording and its level.")
    if np.mean(np.abs(clamped) >= CLIPPED_LEVEL) >= CLIPPED_SHARE:
        raise refuse("audio_clipped", "The audio is heavily clipped. Record or export it at a lower level.")
    return clamped


def _loudest_rms(samples: Float32, rate_hz: int) -> float:
    """RMS of the loudest whole 50 ms window after removing the mean; there must be one at least."""
    window = max(1, rate_hz // 20)
    centred = samples[: len(samples) // window * window] - samples.mean(dtype=np.float64)
    power = (centred.reshape(-1, window) ** 2).mean(axis=1)
    return float(np.sqrt(power.max()))


def _read_file(path: str | Path, max_bytes: int) -> bytes:
    """At most ``max_bytes + 1`` bytes of a regular file; a FIFO or a device is refused, not waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read(max_bytes + 1)
    except (OSError, ValueError):
        pass
    raise InvalidAudioError("The audio file cannot be read. Check its path.", param=_PARAM)


class _Deadline:
    """Kills a process when time is up; remembers that it did."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._timer: threading.Timer | None = None
        self.passed = False

    def set(self, seconds: float) -> None:
        self.clear()
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.passed = True
        self._kill()


def _decode_in_child(command: list[str], data: bytes, limits: Limits) -> tuple[Float32, int]:
    """Run the child on ``data``. It has ended, one way or the other, when this returns or raises."""
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = child_environment() | {"PYTHONPATH": paths}
    max_values = int(limits.prompt_seconds_max * limits.prompt_rate_hz_max) + 1
    with _start(command, environment) as process:
        deadline = _Deadline(process.kill)
        try:
            deadline.set(START_SECONDS)
            if _read_exactly(process, 6) != b"ready\n":
                raise _not_started()
            deadline.set(limits.decode_seconds)
            _write_all(process, data)
            return _read_answer(process, max_values)
        except _ChildFailedError:
            process.kill()
            process.wait()
            took_long = deadline.passed
            raise InvalidAudioError(
                f"Decoding the audio {'took too long' if took_long else 'failed'}. Export it again as WAV.",
                code="invalid_audio",
                param=_PARAM,
            ) from None
        finally:
            deadline.clear()
            process.kill()  # also on KeyboardInterrupt; leaving the block waits for the process


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
    except OSError as error:  # no memory, no descriptors, too many processes
        raise _not_started() from error


def _not_started() -> VivaceError:
    return VivaceError("The audio decoder process could not be started; see `vivace doctor`.")


class _ChildFailedError(Exception):
    """The child ended, or was killed, before it answered in full; or its answer is not of the protocol."""


def _write_all(process: subprocess.Popen[bytes], data: bytes) -> None:
    if process.stdin is None:
        raise _ChildFailedError
    try:
        view = memoryview(data)
        while view:
            view = view[process.stdin.write(view) :]
        process.stdin.close()
    except OSError:
        raise _ChildFailedError from None


def _read_exactly(process: subprocess.Popen[bytes], num_bytes: int) -> bytes:
    """``num_bytes`` bytes of the child's output, or fewer where it ends."""
    pieces = []
    while num_bytes > 0 and process.stdout is not None:
        piece = process.stdout.read(min(num_bytes, 1 << 20))
        if not piece:
            break
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _read_answer(process: subprocess.Popen[bytes], max_values: int) -> tuple[Float32, int]:
    """The child's answer; its length is checked against ``max_values`` before anything is read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = _read_exactly(process, 1)
        if not byte or len(line) >= 1000:
            raise _ChildFailedError
        line += byte
    try:
        reply = cast("dict[str, object]", json.loads(line))
        if "code" in reply:
            raise InvalidAudioError(str(reply["message"]), code=str(reply["code"]), param=_PARAM)
        rate_hz, num_values = int(str(reply["rate_hz"])), int(str(reply["frames"]))
    except InvalidAudioError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _ChildFailedError from error
    if not 0 <= num_values <= max_values:
        raise _ChildFailedError
    payload = _read_exactly(process, 4 * num_values)
    if len(payload) != 4 * num_values:
        raise _ChildFailedError
    return np.frombuffer(payload, "<f4").astype(np.float32), rate_hz
