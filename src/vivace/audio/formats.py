"""Writing audio while it is made: WAV that is valid at any moment, FLAC, MP3, OGG block by block, streams of bytes."""

from __future__ import annotations

import errno
import struct
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
import soundfile
import soxr

from vivace.audio.encoders import check_stream_format, open_encoder
from vivace.audio.pcm import (
    BLOCK_SECONDS,
    PROVENANCE,
    SOFTWARE,
    UNKNOWN_SIZE,
    WAV_HEADER_BYTES,
    description_chunk,
    opus_rate_hz,
    pcm16,
    wav_header,
    write_all,
)
from vivace.errors import InvalidRequestError, SynthesisError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

_ENCODED = {
    ".flac": ("FLAC", "PCM_16"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
}
_STREAMED = (".pcm", ".aac")


class AudioWriter(ABC):
    """Appends samples to a file. As a context manager: an exception inside the block aborts."""

    @abstractmethod
    def write(self, samples: Float32) -> None:
        """Append samples ``[n]`` in -1 … 1."""

    @abstractmethod
    def close(self) -> None:
        """Finish the file. A second call does nothing."""

    @abstractmethod
    def abort(self) -> None:
        """End without success: a file opened by path is removed, so that it cannot pass for complete."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class _OwnTarget(AudioWriter):
    """Writes to a path (created or replaced), or to a binary file object, which stays open after ``close``.

    Unbuffered: what has been written is in the file at once.
    """

    def __init__(self, target: Path | BinaryIO) -> None:
        self._path = target if isinstance(target, Path) else None
        self._file: BinaryIO | None = (
            cast("BinaryIO", open(target, "wb", buffering=0))  # noqa: SIM115 (closed by close or abort)
            if isinstance(target, Path)
            else target
        )

    @abstractmethod
    def _finish(self) -> None:
        """Writes what stands behind the last samples; again, after ``close``, nothing."""

    def close(self) -> None:
        try:
            self._finish()
        except BaseException:  # a full disk
            self.abort()
            raise
        self._release()

    def abort(self) -> None:
        self._release()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _release(self) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
        self._file = None


class WavWriter(_OwnTarget):
    """Mono 16-bit WAV with one header, readable at every moment while it grows.

    Samples are written before the sizes in the header, which are then put right in place, so a reader never
    finds fewer samples than the header promises. A target that cannot seek (a pipe) gets no size.

    Args:
        target: a path (created or replaced), or a binary file object, which stays open after ``close``.
    """

    def __init__(self, target: Path | str | BinaryIO, rate_hz: int) -> None:
        super().__init__(Path(target) if isinstance(target, str) else target)
        assert self._file is not None
        self._rate_hz = rate_hz
        self._data_bytes = 0
        self._start = self._file.tell() if self._file.seekable() else None
        try:
            write_all(self._file, wav_header(rate_hz, UNKNOWN_SIZE if self._start is None else 0))
            self._file.flush()
        except BaseException:  # a full disk
            self.abort()
            raise

    @property
    def num_samples(self) -> int:
        """Samples written so far."""
        return self._data_bytes // 2

    def write(self, samples: Float32) -> None:
        if self._file is None:
            raise ValueError("write to a closed WavWriter")
        pcm = pcm16(samples)
        write_all(self._file, pcm)
        self._data_bytes += len(pcm)
        if self._start is not None:
            self._file.flush()
            self._file.seek(self._start)
            write_all(self._file, wav_header(self._rate_hz, self._data_bytes))
            self._file.seek(self._start + WAV_HEADER_BYTES + self._data_bytes)
        self._file.flush()

    def _finish(self) -> None:
        """Says behind the samples where they come from, in a file of our own."""
        tail = description_chunk()
        riff_size = WAV_HEADER_BYTES - 8 + self._data_bytes + len(tail)
        if self._file is None or self._path is None or self._start is None or riff_size > UNKNOWN_SIZE:
            return
        write_all(self._file, tail)
        self._file.seek(self._start + 4)
        write_all(self._file, struct.pack("<I", riff_size))


class EncodedWriter(AudioWriter):
    """Mono FLAC, MP3, Vorbis (``.ogg``) or Opus (``.opus``), encoded in short blocks while samples arrive.

    Args:
        path: created or replaced; its suffix decides the format.
    """

    def __init__(self, path: Path, rate_hz: int) -> None:
        container, encoding = _ENCODED[path.suffix.lower()]
        self._path = path
        out_hz = opus_rate_hz(rate_hz) if encoding == "OPUS" else rate_hz
        self._resampler = (
            None
            if out_hz == rate_hz
            else soxr.ResampleStream(rate_hz, out_hz, 1, dtype="float32", quality="HQ")
        )
        self._block_samples = max(1, int(BLOCK_SECONDS * out_hz))
        self._target = _Target(path)
        self._file: soundfile.SoundFile | None = None
        try:
            self._file = soundfile.SoundFile(
                self._target, "w", samplerate=out_hz, channels=1, format=container, subtype=encoding
            )
            self._file.comment, self._file.software = PROVENANCE, SOFTWARE
        except soundfile.SoundFileError:
            self.abort()
            self._target.check()
            raise
        except BaseException:
            self.abort()
            raise

    def write(self, samples: Float32) -> None:
        if self._file is None:
            raise ValueError("write to a closed EncodedWriter")
        if not np.isfinite(samples).all():
            raise SynthesisError("The audio holds NaN or infinite samples.")
        self._encode(samples if self._resampler is None else self._resampler.resample_chunk(samples))

    def _encode(self, samples: Float32) -> None:
        assert self._file is not None
        for start in range(0, len(samples), self._block_samples):
            self._file.write(np.clip(samples[start : start + self._block_samples], -1.0, 1.0))
            self._target.check()

    def close(self) -> None:
        if self._file is not None and self._resampler is not None:
            try:
                self._encode(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
            except BaseException:  # a full disk
                self.abort()
                raise
        if self._finish() and self._target.error is not None:
            self._path.unlink(missing_ok=True)
            self._target.check()

    def abort(self) -> None:
        self._finish()
        self._path.unlink(missing_ok=True)

    def _finish(self) -> bool:
        """Closes the file; False if it was closed already."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._target.close()
        return file is not None


class StreamWriter(_OwnTarget):
    """Bytes that are never taken back, so that they can go into a pipe: a format of the HTTP interface.

    Args:
        target: a path (created or replaced), or a binary file object, which stays open after ``close``.
        name: wav (whose header knows no length), pcm (16 bit, little-endian, no header), flac, mp3, opus, aac.

    Raises:
        InvalidRequestError: ``unsupported_value`` for another name, or AAC without PyAV.
    """

    def __init__(self, target: Path | BinaryIO, name: str, rate_hz: int) -> None:
        self._encoder = open_encoder(name, rate_hz)
        super().__init__(target)

    def write(self, samples: Float32) -> None:
        if self._file is None:
            raise ValueError("write to a closed StreamWriter")
        self._put(self._encoder.encode(samples))

    def _finish(self) -> None:
        if self._file is not None:
            self._put(self._encoder.finish())

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        write_all(self._file, data)
        self._file.flush()


class _Target:
    """The file that libsndfile writes. It keeps the errors of writing, of which libsndfile does not tell."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 (closed by close)
        self.read, self.seek, self.tell = self._file.read, self._file.seek, self._file.tell
        self.close = self._file.close

    def write(self, data: bytes) -> int:
        try:
            write_all(cast("BinaryIO", self._file), data)
        except OSError as error:
            self.error = self.error or error
        return len(data)

    def check(self) -> None:
        """Raises the first error there was."""
        if self.error is not None:
            raise self.error


def open_writer(path: Path | str, rate_hz: int) -> AudioWriter:
    """The writer that the path's suffix asks for: .wav, .flac, .mp3, .ogg, .opus, .pcm, or .aac (needs PyAV).

    Raises:
        InvalidRequestError: ``unsupported_value`` for any other suffix.
        OSError: the path cannot be written.
    """
    path = Path(path)
    check_target(path)
    suffix = path.suffix.lower()
    if suffix in _STREAMED:
        return StreamWriter(path, suffix[1:], rate_hz)
    return WavWriter(path, rate_hz) if suffix == ".wav" else EncodedWriter(path, rate_hz)


def check_target(path: Path | str) -> None:
    """Finds out before any work whether ``open_writer`` can take a path; it changes nothing.

    Raises:
        InvalidRequestError: ``unsupported_value`` for an unknown suffix, and for .aac without PyAV.
        OSError: its folder does not exist, or it is a folder itself.
    """
    path = Path(path)
    known = (".wav", *_ENCODED, *_STREAMED)
    suffix = path.suffix.lower()
    if suffix not in known:
        raise InvalidRequestError(
            f"The output file must end in {', '.join(known)}.", code="unsupported_value", param="out"
        )
    if suffix in _STREAMED:
        check_stream_format(suffix[1:])
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; make it first", str(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file", str(path))
