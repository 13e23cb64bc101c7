"""The two networks that read prompt audio: ONNX files beside the weights, run on the CPU.

=====================  ==============================  ==========================================
``SpeechTokenizer``    ``speech_tokenizer_v3.onnx``    Whisper log-mel → speech tokens, 25 a second
``SpeakerEncoder``     ``campplus.onnx``               Kaldi filter bank → embedding ``[192]``
=====================  ==============================  ==========================================

They run once for each new voice, so one thread each leaves the cores to synthesis. Inputs are taken by position
and checked by shape, as the official files of different years name them differently. ``onnxruntime`` is
imported only when a file is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vivace.audio.features import fbank80, log_mel128
from vivace.environment import keep_to_ourselves
from vivace.errors import InvalidAudioError, ModelFolderError, SynthesisError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Source = str | Path | bytes
    Dimension = int | None

RATE_HZ = 16_000
SHORTEST_SAMPLES = RATE_HZ // 10
LONGEST_SECONDS = 30
CPU = ("CPUExecutionProvider",)


class SpeechTokenizer:
    """Speech to speech tokens. May be used from several threads.

    Args:
        source: path of the ONNX file, or its bytes.
        speech_token_size: size of the codebook, from the model's configuration.
        providers: ONNX Runtime's execution providers, in order of preference.

    Raises:
        ModelFolderError: no ONNX file, or one with other inputs or outputs.
    """

    def __init__(self, source: Source, speech_token_size: int, providers: Sequence[str] = CPU) -> None:
        self._name = _name(source, "speech_tokenizer_v3.onnx")
        self._session = _open(source, self._name, providers)
        self._size = speech_token_size
        inputs = _check(
            self._session.get_inputs(),
            [("tensor(float)", (1, 128, None)), ("tensor(int32)", (1,))],
            f"{self._name}: is no speech tokenizer: its inputs should be log-mel [1, 128, frames] and int32 [1]",
        )
        self._features, self._length = inputs
        if len(self._session.get_outputs()) != 1:
            raise ModelFolderError(f"{self._name}: is no speech tokenizer: it should have one output")

    def encode(self, samples: NDArray[np.float32]) -> NDArray[np.int32]:
        """16 kHz samples ``[n]``, 0.1 to 30 s, to speech tokens int32 ``[ceil(n // 160 / 4)]``.

        Raises:
            InvalidAudioError: too short, too long, or non-finite samples.
            ModelFolderError: tokens outside the codebook: the file belongs to another model.
            SynthesisError: the network failed.
        """
        features = log_mel128(_checked_samples(samples))
        length = np.array([features.shape[1]], np.int32)
        tokens = _run(self._session, {self._features: features[None], self._length: length}, self._name)
        tokens = tokens.reshape(-1)
        if tokens.dtype.kind not in "iu":
            raise ModelFolderError(f"{self._name}: gives {tokens.dtype} instead of whole numbers")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._size):
            raise ModelFolderError(
                f"{self._name}: gives tokens from {tokens.min()} to {tokens.max()}, but the model knows only "
                f"{self._size}; take the file that came with this model"
            )
        return tokens.astype(np.int32)


class SpeakerEncoder:
    """Speech to a speaker embedding. May be used from several threads.

    Args:
        source: path of the ONNX file, or its bytes.
        embedding_size: length of the embedding that the flow expects.
        providers: ONNX Runtime's execution providers, in order of preference.

    Raises:
        ModelFolderError: no ONNX file, or one with other inputs or outputs.
    """

    def __init__(self, source: Source, embedding_size: int = 192, providers: Sequence[str] = CPU) -> None:
        self._name = _name(source, "campplus.onnx")
        self._session = _open(source, self._name, providers)
        self._size = embedding_size
        (self._features,) = _check(
            self._session.get_inputs(),
            [("tensor(float)", (1, None, 80))],
            f"{self._name}: is no speaker encoder: its input should be a filter bank [1, frames, 80]",
        )
        _check(
            self._session.get_outputs(),
            [("tensor(float)", (1, embedding_size))],
            f"{self._name}: is no speaker encoder of this model: its output should be [1, {embedding_size}]",
        )

    def embed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """16 kHz samples ``[n]``, 0.1 to 30 s, to a speaker embedding float32 ``[192]`` (any length; not 0).

        Raises:
            InvalidAudioError: too short, too long, or non-finite samples.
            SynthesisError: the network failed or gave non-finite numbers.
        """
        features = fbank80(_checked_samples(samples))
        embedding = _run(self._session, {self._features: features[None]}, self._name).reshape(-1)
        if embedding.shape != (self._size,):
            raise ModelFolderError(f"{self._name}: gives {embedding.shape} instead of [{self._size}]")
        if not np.isfinite(embedding).all() or not embedding.any():
            raise SynthesisError("The speaker encoder gave no usable embedding for this audio.")
        return embedding.astype(np.float32)


def _name(source: Source, default: str) -> str:
    """What messages call the file."""
    return default if isinstance(source, bytes) else Path(source).name


def _open(source: Source, name: str, providers: Sequence[str]) -> Any:
    """An ONNX Runtime session with one thread."""
    keep_to_ourselves()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors reach us as exceptions; warnings would go to the user's terminal
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise ModelFolderError(f"{name}: is missing from {Path(source).parent}; download it again")
    known = [provider for provider in providers if provider in onnxruntime.get_available_providers()]
    try:
        return onnxruntime.InferenceSession(
            source if isinstance(source, bytes) else str(source), options, providers=known or list(CPU)
        )
    except Exception as error:  # the runtime's errors share no base class of their own
        raise ModelFolderError(f"{name}: cannot be read as an ONNX model; download it again") from error


def _check(
    found: Sequence[Any], expected: Sequence[tuple[str, tuple[Dimension, ...]]], message: str
) -> list[str]:
    """Names of inputs or outputs after a check of number, types and fixed dimensions.

    Args:
        expected: type and dimensions of each; None fits any size. A free dimension of the file fits all.
        message: what to raise when they differ.
    """
    if len(found) != len(expected):
        raise ModelFolderError(message)
    for entry, (kind, shape) in zip(found, expected, strict=True):
        if entry.type != kind or len(entry.shape) != len(shape):
            raise ModelFolderError(message)
        for size, wanted in zip(entry.shape, shape, strict=True):
            if isinstance(size, int) and wanted is not None and size != wanted:
                raise ModelFolderError(message)
    return [str(entry.name) for entry in found]


def _run(session: Any, inputs: dict[str, NDArray[Any]], name: str) -> NDArray[Any]:
    """The first output."""
    try:
        return np.asarray(session.run(None, inputs)[0])
    except Exception as error:
        raise SynthesisError(f"{name}: failed on this audio.") from error


def _checked_samples(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Float32 ``[n]`` of a length that the networks accept."""
    samples = np.ascontiguousarray(samples, np.float32).reshape(-1)
    if len(samples) < SHORTEST_SAMPLES:
        raise InvalidAudioError(
            "The audio is too short to be encoded; give at least 0.1 s.", code="audio_too_short"
        )
    if len(samples) > LONGEST_SECONDS * RATE_HZ:
        raise InvalidAudioError(
            f"The audio is too long to be encoded; give at most {LONGEST_SECONDS} s.", code="audio_too_long"
        )
    if not np.isfinite(samples).all():
        raise InvalidAudioError("The audio holds non-finite samples.", code="non_finite_samples")
    return samples
