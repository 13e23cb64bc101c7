"""Plain PyTorch versions of the kernels in ``chunk_rows``: the definition, and what runs without Triton.

They read values back from the device, so that they cannot be captured in a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.kernels.unet_reference import Norm, PlainUNetOps

START, COUNT, HERE, BEFORE, BEHIND = range(5)
"""Columns of the packet."""


class PlainChunkOps(PlainUNetOps):
    """Rows are the guidance branches of each chunk, one behind the other.

    Args:
        packet: int64 ``[chunks, width]``: first frame, valid frames, own page, page before, how many chunks of its
            stream stand before it in this launch, and from column ``table`` on all pages of the stream.
        step: Euler step, int64 ``[1]``.
    """

    def __init__(self, packet: Tensor, step: Tensor, table: int) -> None:
        self._packet, self._step, self._table = packet, step, table

    def join_context(self, x: Tensor, contexts: Tensor, first: int) -> Tensor:
        """``[rows, context + chunk, C]``: the last inputs of the chunk before, then ``x [rows, chunk, C]``.

        The last ones of ``x`` go into the chunk's page.

        Args:
            contexts: ``[pages, steps, branches, context, channels]``. first: this convolution's first channel.
        """
        _, _, branches, length, _ = contexts.shape
        mine = contexts[:, int(self._step), ..., first : first + x.shape[2]]
        last = x[:, -length:].unflatten(0, (-1, branches))  # type: ignore[no-untyped-call]
        mine[self._packet[:, HERE]] = last  # where a chunk of this launch stood before, it is read again now
        return torch.cat((mine[self._packet[:, BEFORE]].flatten(0, 1), x), dim=1)

    def layer_norm_mish(
        self,
        y: Tensor,
        bias: Tensor,
        norm: Norm,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``mish(layer_norm(y + bias))`` of ``[rows, chunk, C]``, then the step's row of ``shift`` and ``residual``."""
        gain, offset, eps = norm
        z = F.mish(F.layer_norm(y.float() + bias.float(), gain.shape, gain.float(), offset.float(), eps))
        if shift is not None:
            z = z + shift[int(self._step)].float()
        if residual is not None:
            z = z + residual.float()
        return z.to(y.dtype)

    def attend_pages(self, qkv: Tensor, pool: Tensor, block: int) -> Tensor:
        """Attention of a chunk to all earlier ones and to its own valid frames: ``[rows, chunk, heads * dim_head]``.

        Its keys and values enter its page.

        Args:
            qkv: ``[rows, chunk, 3 * heads * dim_head]``.
            pool: ``[pages, steps, blocks, 2, branches, heads, chunk, dim_head]``.
        """
        _, _, _, _, branches, heads, chunk, _ = pool.shape
        mine = pool[:, int(self._step), block]
        out = []
        for number, numbers in enumerate(self._packet.tolist()):
            rows = slice(number * branches, (number + 1) * branches)
            parts = qkv[rows].view(branches, chunk, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mine[numbers[HERE]] = parts[1:]
            past = mine[numbers[self._table : self._table + numbers[START] // chunk]]
            keys, values = past.movedim(0, 3).flatten(3, 4).unbind(0)
            count = max(1, numbers[COUNT])
            keys = torch.cat((keys, parts[1, :, :, :count]), dim=2)
            values = torch.cat((values, parts[2, :, :, :count]), dim=2)
            mixed = F.scaled_dot_product_attention(parts[0], keys, values)
            out.append(mixed.transpose(1, 2).flatten(2))
        return torch.cat(out)
