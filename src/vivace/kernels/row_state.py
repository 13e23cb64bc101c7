"""What a row of a decoding batch is made of, on the device: one element per row slot in separate tensors.

Kernels read and write it directly, so the host need not know a token before the next step starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

RING = 64
"""Decoded ids kept for the repetition guard: the longest window the kernels serve."""

RUNS, SPECIAL, NOT_FINITE = 0, 1, 2
"""Values of ``RowState.stop``."""


@dataclass(frozen=True, slots=True)
class RowState:
    """State of ``S`` row slots; every tensor ``[S]`` unless said.

    Attributes:
        token: speech row to feed next. length: positions in the key-value cache.
        place: sampling position of the next draw. min_place: before it only speech tokens may be drawn.
        kind: which rows may be drawn (``sampler.TokenKind``).
        seed, top_p, top_k, win_size, tau_r, temperature: as ``sampler.SamplingRows``.
        recent: ``[S, RING]``, the last decoded ids, the n-th at n mod RING. decoded: how many there were.
        stop: ``RUNS``, ``SPECIAL`` (a special row was drawn) or ``NOT_FINITE``.
        remaining: tokens the row may still make. 0: it rests.
        out: ``[S, capacity]``, drawn ids since ``out_count`` was last set to 0, special ones included.
    """

    token: Tensor
    length: Tensor
    place: Tensor
    min_place: Tensor
    kind: Tensor
    seed: Tensor
    top_p: Tensor
    top_k: Tensor
    win_size: Tensor
    tau_r: Tensor
    temperature: Tensor
    recent: Tensor
    decoded: Tensor
    stop: Tensor
    remaining: Tensor
    out: Tensor
    out_count: Tensor

    @classmethod
    def empty(cls, num_slots: int, out_capacity: int, device: torch.device) -> RowState:
        """All slots at rest."""

        def zeros(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(num_slots, *width, dtype=dtype, device=device)

        kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            field.name: (torch.int32, ()) for field in fields(cls)
        }
        kinds |= dict.fromkeys(("place", "min_place", "seed"), (torch.int64, ()))
        kinds |= dict.fromkeys(("top_p", "temperature"), (torch.float32, ()))
        kinds["tau_r"] = (torch.float64, ())
        kinds["recent"] = (torch.int32, (RING,))
        kinds["out"] = (torch.int32, (out_capacity,))
        return cls(**{name: zeros(dtype, *width) for name, (dtype, width) in kinds.items()})
