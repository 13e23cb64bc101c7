"""Launches of the vocoder's Triton kernels. ``hift_reference`` defines what each function computes.

Every function launches one kernel over all rows of a batch. Counts and positions come from ``params`` on the device,
so that a captured launch serves any number of frames up to ``frames``, which only sizes the grid. With ``pdl`` (Hopper
and later) a launch may start while the one before it in its stream still runs, and waits for it inside.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vivace.kernels.hift_kernels import conv_kernel, join_kernel, mean_kernel, states_kernel
from vivace.kernels.hift_output_kernels import inverse_kernel, post_kernel
from vivace.kernels.hift_plan import Conv, Join, Mean, Post, Source, Spectrum, States
from vivace.kernels.hift_source_kernels import phases_kernel, readout_kernel, samples_kernel, spectrum_kernel
from vivace.kernels.hift_tiles import Tile, default_tile


def _rounding(precision: str, is_half: bool) -> int:
    """How operands are rounded, in the kernels' terms."""
    return 2 if is_half else int(precision == "tf32")


def _operands(arena: Tensor, is_half: bool) -> Tensor:
    return arena.view(torch.float16) if is_half else arena


def conv(
    op: Conv,
    arena: Tensor,
    params: Tensor,
    frames: int,
    precision: str,
    pdl: bool = False,
    tile: Tile | None = None,
) -> None:
    """Convolutions of equal width, with what follows them."""
    precision = op.precision or ("half" if op.is_half else precision)
    tile = tile or default_tile(op, precision, arena.shape[0], frames)
    groups, m, n = op.groups, op.rows.most(frames), op.channels_out
    numbers = [arena.stride(0), op.row_stride, op.channels_in, *(g.weight for g in groups)]
    for group in groups:
        numbers += [
            group.x,
            group.tap_stride,
            *(max(v, 0) for v in (group.residual, group.raw, group.activated)),
        ]
    align = 16 if all(number % 16 == 0 for number in numbers) else 1
    conv_kernel[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), len(groups), arena.shape[0])](
        arena,
        _operands(arena, op.is_half),
        arena.stride(0),
        params,
        op.weight,
        op.bias if op.scale is None else op.scale,
        op.bias,
        op.alpha if op.alpha is not None else op.bias,
        tuple(g.x for g in groups),
        tuple(g.tap_stride for g in groups),
        tuple(g.weight for g in groups),
        tuple(max(g.residual, 0) for g in groups),
        tuple(max(g.raw, 0) for g in groups),
        tuple(max(g.activated, 0) for g in groups),
        TAPS=tuple(g.taps for g in groups),
        RESIDUAL=groups[0].residual >= 0,
        RAW=groups[0].raw >= 0,
        ACTIVATED=groups[0].activated >= 0,
        GROUPS=len(groups),
        ALIGN=align,
        ROW_STRIDE=op.row_stride,
        KC=op.channels_in,
        N=n,
        FIELD=int(op.rows.field),
        RATE=op.rows.rate,
        EXTRA=op.rows.extra,
        MEL_ROW=-1 if op.mel_row is None else int(op.mel_row),
        ACTIVATION=int(op.activation),
        SLOPE=op.slope,
        PRECISION="tf32" if op.is_half else precision,
        ROUNDING=_rounding(precision, op.is_half),
        SCALED=op.scale is not None,
        TAPS_INSIDE=tile.taps_inside,
        SWAPPED=tile.swapped,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
        PDL=pdl,
        launch_pdl=pdl,
    )


def _states(op: States, arena: Tensor, params: Tensor, save: bool, pdl: bool) -> None:
    states_kernel[(op.table.shape[0], arena.shape[0])](
        arena,
        arena.stride(0),
        params,
        op.pool,
        op.pool.stride(0),
        op.table,
        SAVE=save,
        BLOCK=op.block,
        num_warps=4,
        PDL=pdl,
        launch_pdl=pdl,
    )


def load_states(op: States, arena: Tensor, params: Tensor, pdl: bool = False) -> None:
    """Histories of the rows' slots into the arena; zeros for streams that begin."""
    _states(op, arena, params, save=False, pdl=pdl)


def save_states(op: States, arena: Tensor, params: Tensor, pdl: bool = False) -> None:
    """Last rows of every buffer into the rows' slots."""
    _states(op, arena, params, save=True, pdl=pdl)


def readout(op: Source, arena: Tensor, params: Tensor, frames: int, pdl: bool = False) -> None:
    """F0 of the new frames, added up in float64."""
    block = 2
    readout_kernel[(triton.cdiv(frames, block), arena.shape[0])](
        arena,
        arena.stride(0),
        params,
        op.weight,
        op.hidden,
        op.f0,
        C=op.channels,
        BC=triton.next_power_of_2(op.channels),
        BT=block,
        num_warps=4,
        PDL=pdl,
        launch_pdl=pdl,
    )


def phases(
    op: Source, arena: Tensor, params: Tensor, states: States, flags: Tensor, pdl: bool = False
) -> None:
    """The phase of every harmonic in the new frames; the rows' flags become zero."""
    phases_kernel[(arena.shape[0],)](
        arena,
        arena.stride(0),
        params,
        states.phases,
        states.phases.stride(0),
        flags,
        flags.stride(0),
        op.f0,
        op.starts,
        HARMONICS=op.harmonics,
        HOP=op.hop,
        RATE_HZ=op.rate_hz,
        PER_SAMPLE=op.per_sample,
        BT=64,
        num_warps=4,
        PDL=pdl,
        launch_pdl=pdl,
    )


def samples(op: Source, arena: Tensor, params: Tensor, frames: int, pdl: bool = False) -> None:
    """The harmonic source's samples of the new frames."""
    block = 128
    samples_kernel[(triton.cdiv(frames * op.hop, block), arena.shape[0])](
        arena,
        arena.stride(0),
        params,
        op.mix,
        op.f0,
        op.starts,
        op.samples,
        HARMONICS=op.harmonics,
        HOP=op.hop,
        RATE_HZ=op.rate_hz,
        AMPLITUDE=op.amplitude,
        VOICED=op.voiced_noise,
        THRESHOLD=op.threshold_hz,
        PER_SAMPLE=op.per_sample,
        BLOCK=block,
        num_warps=4,
        PDL=pdl,
        launch_pdl=pdl,
    )


def spectrum(
    op: Spectrum, arena: Tensor, params: Tensor, frames: int, precision: str, pdl: bool = False
) -> None:
    """Columns of the source's spectrum, zero before the first one."""
    bins, block = op.basis.shape[1] // 2, 64
    assert 2 * bins <= 32
    spectrum_kernel[(triton.cdiv(op.rows.most(frames) + op.before, block), arena.shape[0])](
        arena,
        _operands(arena, op.is_half),
        arena.stride(0),
        params,
        op.basis,
        op.samples,
        op.output,
        BEFORE=op.before,
        N_FFT=op.n_fft,
        HOP=op.hop,
        HOP_FRAME=op.hop_frame,
        RATE=op.rows.rate,
        EXTRA=op.rows.extra,
        BINS=bins,
        BM=block,
        num_warps=4,
        ROUNDING=_rounding(precision, op.is_half),
        PDL=pdl,
        launch_pdl=pdl,
    )


def join(op: Join, arena: Tensor, params: Tensor, frames: int, precision: str, pdl: bool = False) -> None:
    """Upsampled rows plus the source's; raw, and behind the snake of each residual block."""
    block = 1024
    join_kernel[(triton.cdiv(op.rows.most(frames) * op.channels, block), arena.shape[0])](
        arena,
        _operands(arena, op.is_half),
        arena.stride(0),
        params,
        op.alpha,
        op.upsampled,
        op.source,
        op.raw,
        op.activated,
        GROUPS=len(op.activated),
        C=op.channels,
        RATE=op.rows.rate,
        EXTRA=op.rows.extra,
        SHIFT=op.shift,
        BLOCK=block,
        num_warps=4,
        ROUNDING=_rounding(precision, op.is_half),
        PDL=pdl,
        launch_pdl=pdl,
    )


def mean(op: Mean, arena: Tensor, params: Tensor, frames: int, precision: str, pdl: bool = False) -> None:
    """Average of the residual blocks behind a leaky rectifier."""
    block = 1024
    mean_kernel[(triton.cdiv(op.rows.most(frames) * op.channels, block), arena.shape[0])](
        arena,
        _operands(arena, op.is_half),
        arena.stride(0),
        params,
        op.inputs,
        op.output,
        GROUPS=len(op.inputs),
        C=op.channels,
        RATE=op.rows.rate,
        EXTRA=op.rows.extra,
        SLOPE=op.slope,
        BLOCK=block,
        num_warps=4,
        ROUNDING=_rounding(precision if op.is_rounded else "ieee", op.is_half),
        PDL=pdl,
        launch_pdl=pdl,
    )


def post(op: Post, arena: Tensor, params: Tensor, frames: int, precision: str, pdl: bool = False) -> None:
    """Last convolution, and from its log magnitudes and phases the windowed frames of the inverse STFT."""
    block = 32
    assert op.bins <= 16
    post_kernel[(triton.cdiv(op.rows.most(frames), block), arena.shape[0])](
        arena,
        arena.stride(0),
        params,
        op.weight,
        op.bias,
        op.basis,
        op.x,
        op.frames,
        ALIGN=4 if arena.stride(0) % 4 == 0 else 1,
        C=op.channels,
        TAPS=op.taps,
        BINS=op.bins,
        N_FFT=op.n_fft,
        WIDE=max(16, triton.next_power_of_2(op.n_fft)),
        MAX_LOG=op.max_log,
        RATE=op.rows.rate,
        EXTRA=op.rows.extra,
        PRECISION=precision,
        BM=block,
        BK=64,
        num_warps=4,
        PDL=pdl,
        launch_pdl=pdl,
    )


def inverse(
    op: Post, arena: Tensor, params: Tensor, frames: int, out: Tensor, header: int, pdl: bool = False
) -> None:
    """Samples into ``out [rows, header + …]``; element 0, read as an integer, tells of values that are no numbers."""
    block, behind = 128, op.n_fft // 2 - op.hop
    inverse_kernel[(triton.cdiv(frames * op.hop_frame + behind, block), arena.shape[0])](
        arena,
        arena.stride(0),
        params,
        op.window,
        out,
        out.view(torch.int32),
        out.stride(0),
        op.frames,
        N_FFT=op.n_fft,
        HOP=op.hop,
        HOP_FRAME=op.hop_frame,
        LIMIT=op.limit,
        HEADER=header,
        BLOCK=block,
        num_warps=4,
        PDL=pdl,
        launch_pdl=pdl,
    )
