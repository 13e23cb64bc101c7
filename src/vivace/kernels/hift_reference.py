"""What the kernels of the vocoder compute, in plain PyTorch, row by row. Slow, and the definition."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.kernels.hift_plan import (
    Activation,
    Conv,
    ConvGroup,
    Join,
    Mean,
    Param,
    Post,
    Rows,
    Source,
    Spectrum,
    States,
)

HALF_LIMIT = 65504.0
"""Largest finite value of float16."""


def _count(rows: Rows, params: Tensor) -> int:
    frames = int(params[rows.field])
    return frames * rows.rate + rows.extra if frames else 0


def _rows(arena: Tensor, origin: int, count: int, channels: int) -> Tensor:
    """``[count, channels]``, a view."""
    return arena[origin : origin + count * channels].view(count, channels)


def _snake(x: Tensor, alpha: Tensor, inverse: Tensor) -> Tensor:
    sine = torch.sin(x * alpha)
    return x + sine * sine * inverse


def to_tf32(x: Tensor) -> Tensor:
    """Rounded to the 10 bits that the matrix units keep, which would cut the others off."""
    bits = (x.contiguous().view(torch.int32) + 0x1000) & -0x2000
    return torch.where(x == x, bits.view(torch.float32), x)


def to_half(x: Tensor) -> Tensor:
    """Rounded to float16; what lies beyond it becomes its largest value."""
    return x.clamp(-HALF_LIMIT, HALF_LIMIT).half()


def _put(arena: Tensor, origin: int, rows: Tensor, is_half: bool) -> None:
    """Rows into a buffer of either type."""
    if is_half:
        arena, rows = arena.view(torch.float16), to_half(rows)
    _rows(arena, origin, *rows.shape).copy_(rows)


def conv(op: Conv, arena: Tensor, params: Tensor, frames: int, precision: str, tile: object = None) -> None:
    """Convolutions of equal width, with what follows them."""
    for row, numbers in zip(arena, params, strict=True):
        for index, group in enumerate(op.groups):
            _conv_group(op, group, index, row, numbers, (op.precision or precision) == "tf32")


def _conv_group(
    op: Conv, group: ConvGroup, index: int, arena: Tensor, params: Tensor, is_rounded: bool
) -> None:
    count = _count(op.rows, params)
    if count == 0:
        return
    size = op.channels_out * group.taps * op.channels_in
    weight = op.weight[group.weight : group.weight + size].view(op.channels_out, -1)
    first = int(params[op.mel_row]) if op.mel_row is not None else 0
    source = arena.view(torch.float16) if op.is_half and op.mel_row is None else arena
    x = source[group.x + first * op.channels_in :].as_strided(
        (count, group.taps, op.channels_in),
        (op.row_stride, group.tap_stride, 1),
        source.storage_offset() + group.x + first * op.channels_in,
    )
    if op.mel_row is not None:
        rows = torch.arange(count, device=arena.device)
        reads = rows[:, None] + torch.arange(group.taps, device=arena.device)
        x = torch.where((reads < int(params[Param.MEL_ROWS]) - first)[..., None], x, 0.0)
        x = to_half(x) if op.is_half else to_tf32(x) if is_rounded else x
    y = x.flatten(1).float() @ weight.float().T
    y = (y if op.scale is None else y * op.scale[index]) + op.bias[index]
    if group.residual >= 0:
        y = y + _rows(arena, group.residual, count, op.channels_out)
    if group.raw >= 0:
        _rows(arena, group.raw, count, op.channels_out).copy_(y)
    if group.activated >= 0:
        y = _activate(op, index, y)
        y = to_tf32(y) if is_rounded else y
        _put(arena, group.activated, y, op.is_half)


def _activate(op: Conv, index: int, y: Tensor) -> Tensor:
    if op.activation is Activation.SNAKE:
        assert op.alpha is not None
        return _snake(y, op.alpha[0, index], op.alpha[1, index])
    if op.activation is Activation.ELU:
        return F.elu(y)
    if op.activation is Activation.LEAKY:
        return F.leaky_relu(y, op.slope)
    return y


def load_states(op: States, arena: Tensor, params: Tensor, pdl: bool = False) -> None:
    """Histories of the rows' slots into the arena; zeros for streams that begin."""
    for row, numbers in zip(arena, params, strict=True):
        kept = op.pool[int(numbers[Param.SLOT])]
        for in_arena, in_slot, count, _, _ in op.table.tolist():
            if int(numbers[Param.IS_FIRST]):
                row[in_arena : in_arena + count] = 0.0
            else:
                row[in_arena : in_arena + count] = kept[in_slot : in_slot + count]


def save_states(op: States, arena: Tensor, params: Tensor, pdl: bool = False) -> None:
    """Last rows of every buffer into the rows' slots."""
    for row, numbers in zip(arena, params, strict=True):
        kept = op.pool[int(numbers[Param.SLOT])]
        for in_arena, in_slot, count, field, per_frame in op.table.tolist():
            start = in_arena + int(numbers[field]) * per_frame
            kept[in_slot : in_slot + count] = row[start : start + count]


def readout(op: Source, arena: Tensor, params: Tensor, frames: int, pdl: bool = False) -> None:
    """F0 of the new frames, added up in float64."""
    for row, numbers in zip(arena, params, strict=True):
        count = int(numbers[Param.F0_FRAMES])
        hidden = _rows(row, op.hidden, count, op.channels).double()
        row[op.f0 : op.f0 + count] = (hidden @ op.weight[:-1] + op.weight[-1]).abs().float()


def phases(
    op: Source, arena: Tensor, params: Tensor, states: States, flags: Tensor, pdl: bool = False
) -> None:
    """The phase of every harmonic in the new frames; the rows' flags become zero."""
    flags[:, 0] = 0
    multiples = torch.arange(1, op.harmonics + 1, dtype=torch.float32, device=arena.device)
    for row, numbers in zip(arena, params, strict=True):
        frames, kept = int(numbers[Param.F0_FRAMES]), states.phases[int(numbers[Param.SLOT]), : op.harmonics]
        if int(numbers[Param.IS_FIRST]):
            kept.zero_()
        f0 = row[op.f0 : op.f0 + frames]
        step = torch.remainder(f0[:, None] * multiples / op.rate_hz, 1.0)
        moved = step.double() * op.hop
        ends = moved.cumsum(0) + kept
        given = torch.remainder(ends - moved if op.per_sample else ends, 1.0).float()
        _rows(row, op.starts, frames, 16)[:, : op.harmonics] = given
        if frames:
            kept.copy_(torch.remainder(ends[-1], 1.0))


def samples(op: Source, arena: Tensor, params: Tensor, frames: int, pdl: bool = False) -> None:
    """The harmonic source's samples of the new frames."""
    for row, numbers in zip(arena, params, strict=True):
        _samples_row(op, row, numbers)


def _samples_row(op: Source, arena: Tensor, params: Tensor) -> None:
    frames = int(params[Param.F0_FRAMES])
    f0 = arena[op.f0 : op.f0 + frames, None, None]
    cycles = _rows(arena, op.starts, frames, 16)[:, None, : op.harmonics]
    device = arena.device
    multiples = torch.arange(1, op.harmonics + 1, dtype=torch.float32, device=device)
    if op.per_sample:
        step = torch.remainder(f0 * multiples / op.rate_hz, 1.0)
        cycles = cycles + step * torch.arange(1, op.hop + 1, dtype=torch.float32, device=device)[:, None]
    waves = torch.sin(cycles * (2 * math.pi)) * op.amplitude  # [frames, hop or 1, harmonics]
    voiced = (f0 > op.threshold_hz).float()
    level = voiced * op.voiced_noise + (1 - voiced) * (op.amplitude / 3)
    index = torch.arange(frames * op.hop * op.harmonics, device=device)
    index += int(params[Param.F0_START] * op.hop * op.harmonics)
    noise = _hash(index, int(params[Param.NOISE_KEY])).view(frames, op.hop, op.harmonics)
    mixed = (waves * voiced + level * noise) @ op.mix[:-1] + op.mix[-1]
    start = op.samples + int(params[Param.F0_START] - params[Param.START]) * op.hop
    arena[start : start + frames * op.hop] = torch.tanh(mixed).flatten()


def _hash(index: Tensor, key: int) -> Tensor:
    """Uniform noise in [0, 1) of 24 bits (``CounterNoise`` with its key)."""
    value = (index + key) & 0xFFFF_FFFF
    for shift, factor in ((16, 0x21F0_AAAD), (15, 0x735A_2D97)):
        value = ((value ^ (value >> shift)) * factor) & 0xFFFF_FFFF
    return ((value ^ (value >> 15)) >> 8).float() * 2.0**-24


def spectrum(
    op: Spectrum, arena: Tensor, params: Tensor, frames: int, precision: str, pdl: bool = False
) -> None:
    """Columns of the source's spectrum, zero before the first one."""
    for row, numbers in zip(arena, params, strict=True):
        count = _count(op.rows, numbers)
        if count == 0:
            continue
        column = torch.arange(-op.before, count, device=arena.device)
        start = int(numbers[Param.START]) * op.hop_frame
        taps = torch.arange(op.n_fft, device=arena.device)
        place = (column[:, None] * op.hop + start + taps - op.n_fft // 2).abs()
        if int(numbers[Param.IS_LAST]):
            end = start + int(numbers[Param.FRAMES]) * op.hop_frame
            place = torch.where(place >= end, 2 * (end - 1) - place, place)
        real = column * op.hop + start >= 0
        place = torch.where(real[:, None], place - start, 0)
        y = torch.where(real[:, None], row[op.samples + place] @ op.basis, 0.0)
        y = to_tf32(y) if precision == "tf32" else y
        _put(row, op.output, y, op.is_half)


def join(op: Join, arena: Tensor, params: Tensor, frames: int, precision: str, pdl: bool = False) -> None:
    """Upsampled rows plus the source's; raw, and behind the snake of each residual block."""
    for row, numbers in zip(arena, params, strict=True):
        count = _count(op.rows, numbers)
        if count == 0:
            continue
        up = _rows(row, op.upsampled - op.shift * op.channels, count, op.channels).clone()
        if op.shift and int(numbers[Param.START]) == 0:
            up[0] = up[2]
        x = up + _rows(row, op.source, count, op.channels)
        _rows(row, op.raw, count, op.channels).copy_(x)
        for place, alpha, inverse in zip(op.activated, *op.alpha, strict=True):
            y = _snake(x, alpha, inverse)
            _put(row, place, to_tf32(y) if precision == "tf32" else y, op.is_half)


def mean(op: Mean, arena: Tensor, params: Tensor, frames: int, precision: str, pdl: bool = False) -> None:
    """Average of the residual blocks behind a leaky rectifier."""
    for row, numbers in zip(arena, params, strict=True):
        count = _count(op.rows, numbers)
        x = torch.stack([_rows(row, place, count, op.channels) for place in op.inputs]).sum(0)
        y = F.leaky_relu(x / len(op.inputs), op.slope)
        y = to_tf32(y) if precision == "tf32" and op.is_rounded else y
        _put(row, op.output, y, op.is_half)


def post(op: Post, arena: Tensor, params: Tensor, frames: int, precision: str, pdl: bool = False) -> None:
    """Last convolution, and from its log magnitudes and phases the windowed frames of the inverse STFT."""
    for row, numbers in zip(arena, params, strict=True):
        count, size = _count(op.rows, numbers), op.taps * op.channels
        if count == 0:
            continue
        x = row.as_strided((count, size), (op.channels, 1), row.storage_offset() + op.x)
        log_magnitude, phase = (x @ op.weight.view(2, op.bins, size).mT + op.bias[:, None]).unbind(0)
        magnitude, phase = log_magnitude.clamp(max=op.max_log).exp(), torch.sin(phase)
        y = torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), dim=1)
        _rows(row, op.frames, count, op.n_fft).copy_(y @ op.basis)


def inverse(
    op: Post, arena: Tensor, params: Tensor, frames: int, out: Tensor, header: int, pdl: bool = False
) -> None:
    """Samples into ``out [rows, header + …]``; element 0, read as an integer, tells of values that are no numbers."""
    behind, per_frame = op.n_fft // 2 - op.hop, op.hop_frame // op.hop
    for row, numbers, y in zip(arena, params, out, strict=True):
        frames = int(numbers[Param.FRAMES])
        if frames == 0:
            continue
        start = int(numbers[Param.START])
        first = max(-(op.n_fft // op.hop - 1), -start * per_frame)
        count = frames * per_frame + 1 - first
        columns = _rows(row, op.frames + first * op.n_fft, count, op.n_fft)
        sums = torch.zeros(2, (count - 1) * op.hop + op.n_fft, device=arena.device)
        for index, column in enumerate(columns):
            place = slice(index * op.hop, index * op.hop + op.n_fft)
            sums[0, place] += column
            sums[1, place] += op.window.square()
        origin = op.n_fft // 2 - first * op.hop  # of the piece's sample 0
        a = 0 if start == 0 else -behind
        b = frames * op.hop_frame - (0 if int(numbers[Param.IS_LAST]) else behind)
        samples = (sums[0, origin + a : origin + b] / sums[1, origin + a : origin + b]).clamp(
            -op.limit, op.limit
        )
        y[header + behind + a : header + behind + b] = samples
        if not bool(torch.isfinite(samples).all()):
            y.view(torch.int32)[0] = 1
