"""Audio formats as byte streams: samples go in as they are made, bytes come out at once.

    encoder = open_encoder("mp3", 24_000)
    send(encoder.encode(samples)); send(encoder.encode(more)); send(encoder.finish())

All bytes joined are a file that any player reads; only its header cannot know the length. ``encode_whole``
makes a file whose header does. Files say that their speech is synthetic wherever the format has a place for it
without moving the samples: WAV in whole (a list behind the samples), FLAC, MP3 and Opus; a WAV that is streamed,
AAC and PCM have none.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import soundfile
import soxr

from vivace.audio.pcm import (
    BLOCK_SECONDS,
    PROVENANCE,
    SOFTWARE,
    UNKNOWN_SIZE,
    description_chunk,
    opus_rate_hz,
    pcm16,
    wav_header,
)
from vivace.errors import InvalidRequestError, SynthesisError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

StreamFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
STREAM_FORMATS: tuple[StreamFormat, ...] = get_args(StreamFormat)
MEDIA_TYPES: dict[StreamFormat, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}

_LIBSNDFILE: dict[str, tuple[str, str]] = {
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
    "flac": ("FLAC", "PCM_16"),
}
_SET_OGG_PAGE_LATENCY_MS = 0x1302
"""libsndfile's command: how much audio an Ogg page may hold. Without it pages of Opus come once a second."""
_OGG_PAGE_MS = 50.0
_AAC_BITS_PER_SECOND = 96_000


class StreamEncoder(ABC):
    """Samples in, bytes out. For one stream and one thread at a time."""

    @abstractmethod
    def encode(self, samples: Float32) -> bytes:
        """Bytes that are ready after these samples ``[n]`` in -1 … 1; there may be none yet.

        Raises:
            SynthesisError: a sample is NaN or infinite.
        """

    @abstractmethod
    def finish(self) -> bytes:
        """The last bytes."""


class PcmEncoder(StreamEncoder):
    """Signed 16-bit little-endian samples, no header."""

    def encode(self, samples: Float32) -> bytes:
        return pcm16(samples)

    def finish(self) -> bytes:
        return b""


class WavEncoder(StreamEncoder):
    """WAV whose header says that its length is unknown; it comes with the first samples."""

    def __init__(self, rate_hz: int) -> None:
        self._header = wav_header(rate_hz, UNKNOWN_SIZE)

    def encode(self, samples: Float32) -> bytes:
        header, self._header = self._header, b""
        return header + pcm16(samples)

    def finish(self) -> bytes:
        header, self._header = self._header, b""
        return header


class _Growing:
    """A file in memory that only ever keeps what has not been taken.

    Encoders put a header right when they close; where its bytes have been taken already, that is left out.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._start = 0
        self._position = 0

    def write(self, data: bytes) -> int:
        size = len(data)
        hidden = max(0, self._start - self._position)
        if hidden < size:
            at = self._position + hidden - self._start
            self._bytes[at : at + size - hidden] = bytes(data)[hidden:]
        self._position += size
        return size

    def read(self, size: int = -1) -> bytes:
        at = max(0, self._position - self._start)
        data = bytes(self._bytes[at:] if size < 0 else self._bytes[at : at + size])
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, self._start + len(self._bytes))[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def take(self) -> bytes:
        """What came since the last call."""
        taken = bytes(self._bytes)
        self._start += len(taken)
        self._bytes.clear()
        return taken


class SoundfileEncoder(StreamEncoder):
    """MP3, FLAC and Ogg Opus by libsndfile, in short blocks.

    Args:
        is_whole: keep everything until ``finish``, so that the header knows the length.
    """

    def __init__(self, name: StreamFormat, rate_hz: int, *, is_whole: bool = False) -> None:
        container, encoding = _LIBSNDFILE[name]
        self._sink = _Growing()
        self._is_whole = is_whole
        self._block_samples = max(1, int(BLOCK_SECONDS * rate_hz))
        # A constant bit rate lets players work out the length of an MP3 whose header does not know it.
        rate_control = {"bitrate_mode": "CONSTANT", "compression_level": 0.5} if name == "mp3" else {}
        self._file = soundfile.SoundFile(
            self._sink,
            "w",
            samplerate=rate_hz,
            channels=1,
            format=container,
            subtype=encoding,
            **rate_control,
        )
        self._file.comment, self._file.software = PROVENANCE, SOFTWARE
        if name == "opus":
            _shorten_pages(self._file)

    def encode(self, samples: Float32) -> bytes:
        if not np.isfinite(samples).all():
            raise SynthesisError("The audio holds NaN or infinite samples.")
        clipped = np.clip(samples, -1.0, 1.0)
        for start in range(0, len(clipped), self._block_samples):
            self._file.write(clipped[start : start + self._block_samples])
        return b"" if self._is_whole else self._sink.take()

    def finish(self) -> bytes:
        self._file.close()
        return self._sink.take()


def _shorten_pages(file: soundfile.SoundFile) -> None:
    """Makes Ogg pages short. The command is libsndfile's own; soundfile has no name for it."""
    ffi, library = getattr(soundfile, "_ffi", None), getattr(soundfile, "_snd", None)
    handle = getattr(file, "_file", None)
    if ffi is not None and library is not None and handle is not None:
        library.sf_command(handle, _SET_OGG_PAGE_LATENCY_MS, ffi.new("double *", _OGG_PAGE_MS), 8)


class AacEncoder(StreamEncoder):
    """AAC in ADTS frames by PyAV (the extra ``containers``)."""

    def __init__(self, rate_hz: int) -> None:
        self._av: Any = import_module("av")
        self._rate_hz = rate_hz
        self._sink = _Growing()
        self._container: Any = self._av.open(self._sink, "w", format="adts")
        self._stream: Any = self._container.add_stream("aac", rate=rate_hz, layout="mono")
        self._stream.bit_rate = _AAC_BITS_PER_SECOND
        self._position = 0

    def encode(self, samples: Float32) -> bytes:
        pcm = np.frombuffer(pcm16(samples), "<i2").reshape(1, -1)
        if pcm.shape[1]:
            frame = self._av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
            frame.sample_rate = self._rate_hz
            frame.pts = self._position
            self._position += pcm.shape[1]
            self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()


class ResamplingEncoder(StreamEncoder):
    """Brings samples to another rate in front of an encoder; any split of the samples gives the same result."""

    def __init__(self, inner: StreamEncoder, rate_in_hz: int, rate_out_hz: int) -> None:
        self._inner = inner
        self._resampler = soxr.ResampleStream(rate_in_hz, rate_out_hz, 1, dtype="float32", quality="HQ")

    def encode(self, samples: Float32) -> bytes:
        return self._inner.encode(self._resampler.resample_chunk(samples))

    def finish(self) -> bytes:
        rest = self._resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        return self._inner.encode(rest) + self._inner.finish()


def check_stream_format(name: str, param: str = "response_format") -> StreamFormat:
    """The format of that name, if this installation can make it.

    Args:
        param: what the caller knows the name as.

    Raises:
        InvalidRequestError: ``unsupported_value``.
    """
    if name not in STREAM_FORMATS:
        raise _unsupported(f"{param} must be one of {', '.join(STREAM_FORMATS)}", param)
    if name == "aac" and find_spec("av") is None:
        raise _unsupported(
            "AAC needs PyAV where the speech is made (pip install 'vivace-tts[containers]'); ask for mp3 or opus",
            param,
        )
    return name


def open_encoder(name: str, rate_hz: int, out_hz: int | None = None) -> StreamEncoder:
    """An encoder for a stream of mono samples.

    Args:
        rate_hz: of the samples that go in.
        out_hz: of the audio that comes out; ``rate_hz`` if None, for Opus the next rate that it knows.

    Raises:
        InvalidRequestError: ``unsupported_value``.
    """
    return _open(check_stream_format(name), rate_hz, out_hz, is_whole=False)


def encode_whole(name: str, rate_hz: int, samples: Float32, out_hz: int | None = None) -> bytes:
    """A complete file whose header knows its length; rates as for ``open_encoder``.

    Raises:
        InvalidRequestError: ``unsupported_value``. SynthesisError: a sample is NaN or infinite.
    """
    checked = check_stream_format(name)
    if checked == "wav" and out_hz in (None, rate_hz):
        return _whole_wav(rate_hz, pcm16(samples))
    encoder = _open(checked, rate_hz, out_hz, is_whole=True)
    body = encoder.encode(samples)
    return body + encoder.finish()


def _open(name: StreamFormat, rate_hz: int, out_hz: int | None, *, is_whole: bool) -> StreamEncoder:
    out_hz = rate_hz if out_hz is None else out_hz
    out_hz = opus_rate_hz(out_hz) if name == "opus" else out_hz
    encoder: StreamEncoder
    if name == "pcm":
        encoder = PcmEncoder()
    elif name == "wav":
        encoder = WavEncoder(out_hz)
    elif name == "aac":
        encoder = AacEncoder(out_hz)
    else:
        encoder = SoundfileEncoder(name, out_hz, is_whole=is_whole)
    return encoder if out_hz == rate_hz else ResamplingEncoder(encoder, rate_hz, out_hz)


def _whole_wav(rate_hz: int, pcm: bytes) -> bytes:
    """WAV with its description behind the samples: many clients take the samples to start at byte 44."""
    tail = description_chunk()
    header = wav_header(rate_hz, len(pcm))
    riff_size = len(header) + len(pcm) + len(tail) - 8
    return b"RIFF" + struct.pack("<I", riff_size) + header[8:] + pcm + tail


def _unsupported(what: str, param: str = "response_format") -> InvalidRequestError:
    return InvalidRequestError(what, code="unsupported_value", param=param)
