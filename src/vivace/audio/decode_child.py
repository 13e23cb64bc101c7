"""The process that decodes one untrusted file and ends: ``python -m vivace.audio.decode_child SETTINGS``.

It imports only NumPy and soundfile (and PyAV for MP4 and WebM, if installed), takes limits on itself, reads
the file from its standard input and answers on its standard output:

1. ``ready\\n`` once imports are done and the limits are set,
2. one line of JSON: ``{"rate_hz", "frames"}`` or ``{"code", "message"}``,
3. ``frames`` float32 values, little endian: the channels' mean.

After the limits it can open nothing, neither a file nor a socket, whatever a damaged file makes a decoder do.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import soundfile

from vivace.audio.containers import (
    MAX_CHANNELS,
    downmix,
    invalid,
    parse_wav,
    read_wav,
    unsupported,
    unsupported_channels,
)
from vivace.errors import InvalidAudioError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

MEMORY_BYTES = 256 * 1024 * 1024
"""Address space that decoding may take on top of what the imports took."""
BLOCK_VALUES = 1 << 19
"""Values (frames x channels) read at a time: 2 MiB of float32."""

_LIBSNDFILE_KINDS = {
    "flac": {("FLAC", "PCM_S8"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24")},
    "ogg": {("OGG", "VORBIS"), ("OGG", "OPUS"), ("OGG", "PCM_S8"), ("OGG", "PCM_16"), ("OGG", "PCM_24")},
    "mp3": {("MP3", f"MPEG_LAYER_{layer}") for layer in ("I", "II", "III")},
}
_PYAV_FORMATS = {"mp4": "mov", "webm": "matroska"}
_PYAV_CODECS = {
    "pcm_s16le",
    "aac",
    "alac",
    "flac",
    "mp3",
    "mp3float",
    "opus",
    "libopus",
    "vorbis",
    "libvorbis",
}


class Bounds:
    """Rates and lengths that decoding keeps to.

    Args:
        settings: ``seconds_max``, ``rate_hz_min``, ``rate_hz_max`` of the command line.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.seconds_max = float(settings["seconds_max"])
        self.rate_hz_min = int(settings["rate_hz_min"])
        self.rate_hz_max = int(settings["rate_hz_max"])

    def max_frames(self, rate_hz: int, channels: int) -> int:
        """How many frames to read at most: one more than allowed, which shows that there are too many.

        Raises:
            InvalidAudioError: ``unsupported_sample_rate``, ``unsupported_channels``.
        """
        if not self.rate_hz_min <= rate_hz <= self.rate_hz_max:
            raise InvalidAudioError(
                f"The sample rate must be {self.rate_hz_min} to {self.rate_hz_max} Hz. Export at 24000 Hz.",
                code="unsupported_sample_rate",
                param="prompt_audio",
            )
        if not 1 <= channels <= MAX_CHANNELS:
            raise unsupported_channels()
        return int(self.seconds_max * rate_hz) + 1


def decode(data: bytes, container: str, bounds: Bounds) -> tuple[Float32, int]:
    """Mono samples and their rate, by the decoder that the container asks for."""
    if container == "wav":
        layout = parse_wav(data)
        return read_wav(data, layout, bounds.max_frames(layout.rate_hz, layout.channels)), layout.rate_hz
    if container in _PYAV_FORMATS:
        return _decode_pyav(data, _PYAV_FORMATS[container], bounds.max_frames)
    return _decode_libsndfile(data, container, bounds)


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """A file read from front to back.

    soundfile seeks to where it already is after every block; in an MP3 that changes the samples that follow.
    """

    def seekable(self) -> bool:
        return False


def _decode_libsndfile(data: bytes, container: str, bounds: Bounds) -> tuple[Float32, int]:
    with _ForwardFile(io.BytesIO(data)) as file:
        if (file.format, file.subtype) not in _LIBSNDFILE_KINDS[container]:
            raise unsupported("This encoding cannot be read here")
        channels, rate_hz = int(file.channels), int(file.samplerate)
        remaining = bounds.max_frames(rate_hz, channels)
        block = np.empty((BLOCK_VALUES // channels, channels), np.float32)
        pieces = []
        # The header's frame count is never asked: reading goes on until nothing comes or the limit is passed.
        while remaining > 0:
            num_frames = int(file.buffer_read_into(block[:remaining], dtype="float32"))
            if num_frames <= 0:
                break
            pieces.append(downmix(block[:num_frames]))
            remaining -= num_frames
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32), rate_hz


def _warm_up_pyav() -> None:
    """Read a second of silence: PyAV imports parts of itself at first use, and later nothing can be opened."""
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(8_000, np.float32), 8_000, format="WAV")
    _decode_pyav(silence.getvalue(), "wav", lambda rate_hz, channels: rate_hz * channels)


def _decode_pyav(data: bytes, demuxer: str, max_frames_of: Callable[[int, int], int]) -> tuple[Float32, int]:
    av = cast("Any", importlib.import_module("av"))
    # The demuxer is named, so that no play list or script format is ever tried.
    with av.open(io.BytesIO(data), mode="r", format=demuxer) as file:
        if not file.streams.audio:
            raise unsupported("The file has no audio track")
        stream = file.streams.audio[0]
        if stream.codec_context.name not in _PYAV_CODECS:
            raise unsupported("This encoding cannot be read here")
        rate_hz, channels = int(stream.rate), len(stream.layout.channels)
        max_frames = max_frames_of(rate_hz, channels)
        stream.thread_count = 1
        to_float = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate_hz)
        pieces: list[Float32] = []
        num_frames = 0
        for frame in file.decode(stream):
            for converted in to_float.resample(frame):
                pieces.append(downmix(converted.to_ndarray().T))
                num_frames += len(pieces[-1])
            if num_frames >= max_frames:
                break
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        return samples[:max_frames], rate_hz


def restrict(cpu_seconds: int) -> None:
    """Set the limits of this process; what the system does not offer is left out (Windows: all of them)."""
    if importlib.util.find_spec("resource") is None:
        return
    import resource

    def limit(kind: int, value: int) -> None:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + cpu_seconds)
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)
    # Descriptors 0, 1 and 2 are taken, so that nothing more can be opened.
    limit(resource.RLIMIT_NOFILE, 3)


def main() -> None:
    """Decode standard input under limits and answer on standard output."""
    settings = json.loads(sys.argv[1])
    container, bounds = str(settings["container"]), Bounds(settings)
    if container in _PYAV_FORMATS and importlib.util.find_spec("av") is not None:
        _warm_up_pyav()
    # The pipe moves to another descriptor: what a C library prints must not reach the parent.
    with os.fdopen(os.dup(1), "wb") as answer:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        restrict(int(settings["cpu_seconds"]))
        answer.write(b"ready\n")
        answer.flush()
        try:
            if container in _PYAV_FORMATS and "av" not in sys.modules:
                raise unsupported(
                    "MP4, M4A and WebM need the PyAV package (pip install av), which is not installed"
                )
            samples, rate_hz = decode(sys.stdin.buffer.read(), container, bounds)
            reply: dict[str, Any] = {"rate_hz": rate_hz, "frames": len(samples)}
        except InvalidAudioError as error:
            samples, reply = np.zeros(0, np.float32), {"code": error.code, "message": error.message}
        except Exception:  # whatever a decoder raises on a damaged file; the text may hold parts of the file
            damaged = invalid("The audio file is damaged")
            samples, reply = np.zeros(0, np.float32), {"code": damaged.code, "message": damaged.message}
        answer.write(json.dumps(reply).encode() + b"\n")
        answer.write(samples.astype("<f4", copy=False).tobytes())


if __name__ == "__main__":
    main()
