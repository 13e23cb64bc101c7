"""What one launch of the vocoder's kernels computes: plain data that the Triton and the plain version share.

All intermediate results of a row lie in one float32 vector, the row's arena. A ``Buffer`` is a stretch of it:
rows of channels (channels last), the first ``history`` of them carried over from the piece before. Position 0 is the
first row behind the history.

With precision "half" the operands of products are float16, which has the ten bits of TF32 but less range: values beyond
it become the largest one. The buffers that only products read then hold float16, and their offsets count elements of
the arena seen as float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Param(IntEnum):
    """Columns of the parameters ``[rows, len(Param)]`` (int64), written by the host for every piece.

    "Frames" without more are those that enter the upsampling stages; ``F0_…`` those whose F0 becomes known.
    """

    SLOT = 0
    NEW_FRAMES = 1  # mel frames that are new
    F0_FRAMES = 2
    FRAMES = 3
    F0_MEL_ROW = 4  # first of the F0 frames as a row of the mel buffer
    MEL_ROW = 5  # first of the frames as a row of the mel buffer
    MEL_ROWS = 6  # rows of the mel buffer that hold mel; zeros follow
    F0_START = 7  # absolute index of the first F0 frame
    START = 8  # absolute index of the first frame
    IS_FIRST = 9  # nothing came before: histories are zero
    IS_LAST = 10
    NOISE_KEY = 11


class Activation(IntEnum):
    """What follows a convolution."""

    NONE = 0
    SNAKE = 1
    ELU = 2
    LEAKY = 3


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows ``-history … capacity - 1`` of ``channels`` values, from ``start`` on in the arena, in elements."""

    start: int
    history: int
    capacity: int
    channels: int
    is_half: bool = False

    @property
    def origin(self) -> int:
        """Where row 0 begins."""
        return self.start + self.history * self.channels


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows a launch computes: ``params[field] * rate + extra`` if there are frames at all."""

    field: Param
    rate: int
    extra: int = 0

    def most(self, frames: int) -> int:
        return frames * self.rate + self.extra


@dataclass(frozen=True, slots=True)
class ConvGroup:
    """One of the convolutions that share a launch. Offsets are elements of the arena or of the weights.

    Attributes:
        taps: kernel size.
        x: what tap 0 of row 0 reads.
        tap_stride: from one tap's input to the next one's.
        weight: where the weights ``[channels_out, taps, channels_in]`` begin.
        residual: row 0 of what is added; -1 without.
        raw: row 0 of where the sum goes; -1 if nobody needs it.
        activated: row 0 of where the activated sum goes; -1 if nobody needs it.
    """

    taps: int
    x: int
    tap_stride: int
    weight: int
    residual: int = -1
    raw: int = -1
    activated: int = -1


@dataclass(frozen=True, slots=True)
class Conv:
    """A launch of convolutions of equal width.

    Attributes:
        name: for tables of measurements.
        rows: outputs.
        row_stride: elements from one row's input to the next one's.
        channels_in: per tap.
        channels_out: of the result.
        weight: flat, of all groups.
        bias: ``[groups, channels_out]``.
        alpha: of the snake that follows and its inverse, ``[2, groups, channels_out]``.
        slope: of the leaky rectifier that follows.
        mel_row: column of the parameters with the first input row (inputs are the mel); None otherwise.
        precision: own precision, whatever that of the others is; None otherwise.
        scale: of the products, ``[groups, channels_out]``, where float16 weights were scaled; None otherwise.

    With precision "tf32" inputs come rounded, and so does the activated result leave; not the raw one.
    """

    name: str
    rows: Rows
    row_stride: int
    channels_in: int
    channels_out: int
    groups: tuple[ConvGroup, ...]
    weight: Tensor
    bias: Tensor
    activation: Activation = Activation.NONE
    alpha: Tensor | None = None
    slope: float = 0.0
    mel_row: Param | None = None
    precision: str | None = None
    scale: Tensor | None = None

    @property
    def is_half(self) -> bool:
        """Whether operands and activated results are float16."""
        return self.weight.dtype == torch.float16

    @property
    def flops_per_row(self) -> int:
        """Floating-point operations of one output row."""
        return 2 * self.channels_in * self.channels_out * sum(group.taps for group in self.groups)


@dataclass(frozen=True, slots=True)
class Join:
    """Upsampled rows plus those of the source: the sum, and its snake for every residual block.

    ``shift`` is 1 in the last stage, which has one row more: row ``q`` reads upsampled row ``q - 1``, the very first
    one the mirrored row 1.
    """

    rows: Rows
    channels: int
    upsampled: int
    source: int
    raw: int
    activated: tuple[int, ...]
    alpha: Tensor  # and its inverse, [2, blocks, channels]
    shift: int
    is_half: bool = False  # the snakes


@dataclass(frozen=True, slots=True)
class Mean:
    """Average of the residual blocks, leaky rectified."""

    rows: Rows
    channels: int
    inputs: tuple[int, ...]
    output: int
    slope: float
    is_rounded: bool  # with precision "tf32"
    is_half: bool = False  # the output


@dataclass(frozen=True, slots=True)
class Source:
    """F0 read-out, phases and samples of the harmonic source.

    Attributes:
        hidden: F0 network's last layer, row 0 of ``[frames, channels]``.
        channels: of it.
        weight: of the read-out, float64 ``[channels + 1]``, the bias last.
        mix: of the harmonics, float32 ``[harmonics + 1]``, the bias last.
        f0: where F0 goes, one value a frame.
        starts: where the phases at the beginning of a frame go, 16 values a frame, in cycles (those at its end if
            ``per_sample`` is off).
        samples: sample 0 of this piece in the arena.
    """

    hidden: int
    channels: int
    weight: Tensor
    mix: Tensor
    harmonics: int
    hop: int
    rate_hz: int
    amplitude: float
    voiced_noise: float
    threshold_hz: float
    per_sample: bool
    f0: int
    starts: int
    samples: int


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Columns of the source's spectrum: ``before`` columns ahead of the piece, those of the piece and one more."""

    rows: Rows
    samples: int
    output: int
    before: int
    basis: Tensor  # [n_fft, 2 * bins]
    n_fft: int
    hop: int
    hop_frame: int
    is_half: bool = False  # the output


@dataclass(frozen=True, slots=True)
class Post:
    """Last convolution, the frames of the inverse STFT that its result describes, and their overlap-add.

    ``weight`` is ``[2, bins, taps, channels]``: log magnitudes, phases. ``frames`` is where row 0 of the windowed
    frames ``[columns, n_fft]`` goes.
    """

    rows: Rows
    channels: int
    taps: int
    x: int
    weight: Tensor
    bias: Tensor  # [2, bins]
    frames: int
    basis: Tensor  # [2 * bins, n_fft]
    window: Tensor  # [n_fft]
    bins: int
    n_fft: int
    hop: int
    hop_frame: int
    limit: float
    max_log: float


@dataclass(frozen=True, slots=True)
class States:
    """Where each slot keeps its histories.

    ``table`` is int64 ``[blocks, 5]``: first element in the arena, first element in the slot, count (at most
    ``block``), column of the parameters that counts frames, elements per frame.
    """

    pool: Tensor
    phases: Tensor
    table: Tensor
    block: int
