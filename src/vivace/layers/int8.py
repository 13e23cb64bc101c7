"""Linear layers whose products are of 8-bit integers, for processors that multiply those faster than halves.

Weights have one scale per output channel, chosen once. Activations have one per row (position or frame), chosen at
each call: what a row becomes depends on that row alone, and sums of integers are exact, so results do not change
with the company of rows or the number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

LEVELS = 127
"""Values run from -127 to 127; -128 is not used, so that scales are the same for both signs."""

SMALLEST_SCALE = 1e-30
"""Of rows of zeros, so that nothing is divided by zero."""


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 ``[M, N]`` to the nearest of 255 levels per row.

    Returns:
        int8 ``[M, N]`` and scales ``[M, 1]``: their product is ``rows``, at most half a scale off. A row with values
        that are not finite has a scale that is not.
    """
    scales = rows.abs().amax(dim=1, keepdim=True).div_(LEVELS).clamp_min_(SMALLEST_SCALE)
    return torch.div(rows, scales).round_().to(torch.int8), scales


class Int8Linear(nn.Module):
    """``x @ weight.T + bias``, both factors rounded to 8 bits, sums exact, result float32.

    Args:
        weight: int8 ``[out, in]``.
        scales: of its rows, float32 ``[out]``.
        bias: float32 ``[out]``.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, *layers: nn.Linear) -> Int8Linear:
        """One layer whose outputs are those of ``layers``, one after the other: their input is rounded once."""
        weights = torch.cat([layer.weight.detach().float() for layer in layers])
        biases = [layer.bias.detach().float() for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "either all of the layers have a bias or none"
        weight, scales = to_int8(weights)
        return cls(weight, scales[:, 0], torch.cat(biases) if biases else None)

    @classmethod
    def joined(cls, layers: Sequence[Int8Linear]) -> Int8Linear:
        """As ``of``, of layers that are rounded already."""
        biases = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "either all of the layers have a bias or none"
        return cls(
            torch.cat([layer.weight for layer in layers]),
            torch.cat([layer.scales for layer in layers]),
            torch.cat(biases) if biases else None,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Float32 ``[..., in]`` to ``[..., out]``."""
        rows, row_scales = to_int8(x.reshape(-1, x.shape[-1]))
        out = self._products(rows)
        out = out.mul_(row_scales) if self.bias is None else torch.addcmul(self.bias, out, row_scales)
        return out.view(*x.shape[:-1], -1)

    def _products(self, rows: Tensor) -> Tensor:
        """Int8 ``[M, in]`` to float32 ``[M, out]``, the rows' scales left out."""
        return torch._int_mm(rows, self.weight.t()) * self.scales


class FineInt8Linear(Int8Linear):
    """The same with 16 bits of the input: what rounding left of it takes a second product with the same weights.

    For inputs of which a few values are far larger than the others, such as those of an MLP's last layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Float32 ``[..., in]`` to ``[..., out]``."""
        given = x.reshape(-1, x.shape[-1])
        rows, row_scales = to_int8(given)
        rest, rest_scales = to_int8(torch.addcmul(given, rows, row_scales, value=-1))
        out = self._products(rows).mul_(row_scales).addcmul_(self._products(rest), rest_scales)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)


def products_are_exact() -> bool:
    """Whether this processor adds up products of 8-bit integers without loss, one row and several.

    Instructions older than VNNI keep sums of two products in 16 bits, and cut them off.
    """
    extreme = torch.full((64, 64), LEVELS, dtype=torch.int8)
    expected = 64 * LEVELS**2
    return all(
        bool((torch._int_mm(sign * extreme[:rows], extreme.t()) == sign * expected).all())
        for rows in (1, 17)
        for sign in (1, -1)
    )


def gain_over_bfloat16(size: int = 1024) -> float:
    """How many times faster than bfloat16 one row times a matrix ``[size, size]`` is here; takes milliseconds."""
    layer = nn.Linear(size, size, bias=False)
    row = torch.ones(1, size)
    small, half, half_row = Int8Linear.of(layer), layer.bfloat16(), row.bfloat16()
    with torch.inference_mode():
        return _shortest_s(lambda: half(half_row)) / _shortest_s(lambda: small(row))


def _shortest_s(work: Callable[[], object], runs: int = 40) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])
