"""Launches the speech LM's Triton kernels on torch tensors: grids, block sizes, warps.

The same methods as ``vivace.models.lm_ops.PlainOps``.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vivace.kernels import lm_linear, lm_prompt, lm_rows, sampling
from vivace.kernels.row_state import RING, RowState

TOP = 32
"""Largest ``top_k`` that the sampling kernels serve."""

_JOINED = 128
"""Columns of the attention's result that one program joins: one a thread, for each waits for all its parts."""


class KernelOps:
    """One model's sizes and row state, and how its kernels are launched.

    Args:
        heads, kv_heads, head_dim: of the attention. eps: of the norms.
        state: the rows. table: int32 ``[slots, max_pages]``. cos, sin: float32 ``[positions, head_dim / 2]``.
        ids: number of speech tokens, number of all rows of the head, the fill row, the end-of-sequence row.
        pdl: kernels overlap with the one before (compute capability 9.0 and later).
        splits: parts of the past that a row's attention is divided into; None chooses by the number of rows.
        part, top: neighbouring ids that one program of the sampler looks at, and how many of them it keeps.
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        state: RowState,
        table: Tensor,
        cos: Tensor,
        sin: Tensor,
        ids: tuple[int, int, int, int],
        pdl: bool,
        splits: int | None = None,
        part: int = 1024,
        top: int = TOP,
    ) -> None:
        self._heads, self._kv_heads, self._head_dim, self._eps = heads, kv_heads, head_dim, eps
        self._state, self._table, self._cos, self._sin = state, table, cos, sin
        self._ids, self._vocab = ids, ids[1]
        self._pdl = {"PDL": pdl, "launch_pdl": True} if pdl else {"PDL": False}
        self._splits, self._part, self._top = splits, part, top
        self._place = torch.zeros(2, dtype=torch.int32, device=table.device)

    def splits(self, rows: int) -> int:
        """Parts of the past per row: enough programs to fill the processors, no more than pay for the joining."""
        if self._splits is not None:
            return self._splits
        return 8 if rows <= 8 else 4 if rows <= 32 else 2

    def begin(self, commands: Tensor, slots: Tensor) -> None:
        """Takes over what the host asks of each row."""
        s = self._state
        lm_prompt.begin_kernel[(slots.shape[0],)](
            commands, slots, s.remaining, s.kind, s.min_place, s.out_count, num_warps=1
        )

    def report(self, slots: Tensor, launches: Tensor, results: Tensor) -> None:
        """Writes what the rows made into ``results [depth, rows, 2 + out_capacity]``."""
        s, (depth, rows, _) = self._state, results.shape
        capacity = s.out.shape[1]
        lm_prompt.report_kernel[(slots.shape[0],)](
            slots,
            s.stop,
            s.out,
            s.out_count,
            launches,
            results,
            capacity,
            rows,
            depth,
            WIDTH=triton.next_power_of_2(capacity),
            num_warps=1,
        )

    def embed(self, table: Tensor, slots: Tensor) -> Tensor:
        """The rows that are fed next, float32 ``[rows, hidden]``."""
        hidden = table.shape[1]
        x = torch.empty(slots.shape[0], hidden, dtype=torch.float32, device=table.device)
        block = triton.next_power_of_2(hidden)
        lm_rows.embed_kernel[(slots.shape[0],)](
            table, self._state.token, slots, x, H=hidden, BLOCK=block, num_warps=4, **self._pdl
        )
        return x

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """``x += delta``; the norm of it in the weights' dtype."""
        rows, hidden = x.shape
        out = torch.empty(rows, hidden, dtype=weight.dtype, device=x.device)
        lm_rows.add_norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            out,
            self._eps,
            H=hidden,
            BLOCK=triton.next_power_of_2(hidden),
            ADD=delta is not None,
            num_warps=4,
            **self._pdl,
        )
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        """``silu(first half) * second half`` of each row."""
        rows, size = x.shape[0], x.shape[1] // 2
        out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
        block = 1024
        lm_rows.silu_mul_kernel[(rows, triton.cdiv(size, block))](
            x, out, size, BLOCK=block, num_warps=4, **self._pdl
        )
        return out

    def attend(self, qkv: Tensor, bias: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        """Bias, rotary positions, cache write and attention of one position per row."""
        out, meta = self.attend_parts(qkv, bias, pool, slots, self.splits(qkv.shape[0]))
        return out if meta is None else self._combine(out, meta, qkv.dtype)

    def attend_parts(
        self, qkv: Tensor, bias: Tensor, pool: Tensor, slots: Tensor, splits: int
    ) -> tuple[Tensor, Tensor | None]:
        """The same, not joined yet where there are several ``splits``: parts and their ``meta``."""
        s, rows, width = self._state, qkv.shape[0], self._heads * self._head_dim
        device = qkv.device
        if splits == 1:
            out, meta = torch.empty(rows, width, dtype=qkv.dtype, device=device), None
        else:
            out = torch.empty(rows, splits, width, dtype=torch.float32, device=device)
            meta = torch.empty(rows, splits, self._heads, 2, dtype=torch.float32, device=device)
        lm_rows.attend_kernel[(rows, self._kv_heads, splits)](
            qkv,
            bias,
            self._cos,
            self._sin,
            pool,
            self._table,
            slots,
            s.length,
            s.stop,
            s.remaining,
            out,
            out if meta is None else meta,
            pool.stride(0),
            self._table.stride(0),
            self._head_dim**-0.5,
            HEADS=self._heads,
            KV_HEADS=self._kv_heads,
            GROUP=self._heads // self._kv_heads,
            D=self._head_dim,
            PAGE=pool.shape[3],
            BLOCK_T=64 if splits >= 8 else 128,
            SPLITS=splits,
            num_warps=4,
            num_stages=3 if rows == 1 else 2,
            **self._pdl,
        )
        return out, meta

    def _combine(self, part: Tensor, meta: Tensor, dtype: torch.dtype) -> Tensor:
        rows, splits, width = part.shape
        out = torch.empty(rows, width, dtype=dtype, device=part.device)
        lm_rows.combine_kernel[(rows, triton.cdiv(width, _JOINED))](
            part,
            meta,
            out,
            HEADS=self._heads,
            D=self._head_dim,
            BLOCK=_JOINED,
            SPLITS=splits,
            num_warps=4,
            **self._pdl,
        )
        return out

    def norm_linear(
        self,
        x: Tensor,
        gain: Tensor,
        weight: Tensor,
        *,
        gated: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """``norm(x) @ weight.T`` of few rows; ``gated``: ``silu`` of the first half times the second."""
        return self._norm_linear(x, (gain, None, self._eps), weight, gated=gated, dtype=dtype)

    def _norm_linear(
        self,
        x: Tensor,
        norm: tuple[Tensor, Tensor | None, float],
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        relu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See the kernel; ``norm`` is gain, offset and epsilon, without an offset that of the root mean square."""
        gain, offset, eps = norm
        rows, width = x.shape
        count = weight.shape[0] // (2 if gated else 1)
        out = torch.empty(rows, count, dtype=dtype or weight.dtype, device=x.device)
        block = 8 if gated or count > 4096 else 4
        lm_linear.norm_linear_kernel[(triton.cdiv(count, block), rows)](
            x,
            gain,
            gain if offset is None else offset,
            weight,
            gain if bias is None else bias,
            out,
            count,
            width,
            eps,
            BLOCK_N=block,
            BLOCK_K=triton.next_power_of_2(width),
            GATED=gated,
            LAYER=offset is not None,
            BIAS=bias is not None,
            RELU=relu,
            num_warps=4,
            **self._pdl,
        )
        return out

    def linear_add(
        self,
        x: Tensor,
        meta: Tensor | None,
        weight: Tensor,
        residual: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """``residual += x @ weight.T + bias`` of few rows; with ``meta`` ``x`` are the attention's parts."""
        count, width = weight.shape
        block = 4
        lm_linear.linear_add_kernel[(triton.cdiv(count, block), residual.shape[0])](
            x,
            x if meta is None else meta,
            weight,
            weight if bias is None else bias,
            residual,
            count,
            width,
            HEADS=self._heads,
            D=self._head_dim,
            SPLITS=0 if meta is None else x.shape[1],
            BLOCK_N=block,
            BLOCK_K=triton.next_power_of_2(width),
            BIAS=bias is not None,
            num_warps=8 if width > 2048 else 4,
            **self._pdl,
        )

    def sample(self, logits: Tensor, slots: Tensor) -> None:
        """Draws one token per row (``logits`` float32 ``[rows, >= vocab]``) and moves the rows on."""
        s, rows = self._state, slots.shape[0]
        parts = triton.next_power_of_2(triton.cdiv(self._vocab, self._part))
        keys = torch.empty(rows, parts, self._top, dtype=torch.int64, device=logits.device)
        stats = torch.empty(rows, parts, 3, dtype=torch.float32, device=logits.device)
        stride = logits.stride(0)
        sampling.candidates_kernel[(rows, parts)](
            logits,
            stride,
            slots,
            s.stop,
            s.remaining,
            s.kind,
            s.place,
            s.min_place,
            s.temperature,
            keys,
            stats,
            *self._ids,
            PART=self._part,
            PARTS=parts,
            TOP=self._top,
            num_warps=4,
            **self._pdl,
        )
        sampling.draw_kernel[(rows,)](
            logits,
            stride,
            keys,
            stats,
            slots,
            s.token,
            s.length,
            s.place,
            s.min_place,
            s.kind,
            s.seed,
            s.top_p,
            s.top_k,
            s.win_size,
            s.tau_r,
            s.temperature,
            s.recent,
            s.decoded,
            s.stop,
            s.remaining,
            s.out,
            s.out_count,
            s.out.shape[1],
            *self._ids,
            BLOCK=triton.next_power_of_2(self._vocab),
            PARTS=parts,
            TOP=self._top,
            RING=RING,
            num_warps=4,
            **self._pdl,
        )

    def prompt_begin(self, header: Tensor, slots: Tensor) -> None:
        """Takes over the state of the row whose prompt comes."""
        s = self._state
        lm_prompt.prompt_begin_kernel[(1,)](
            header,
            self._place,
            slots,
            s.token,
            s.length,
            s.place,
            s.min_place,
            s.kind,
            s.seed,
            s.top_p,
            s.top_k,
            s.win_size,
            s.tau_r,
            s.temperature,
            s.recent,
            s.decoded,
            s.stop,
            s.remaining,
            s.out_count,
            RING=RING,
            num_warps=2,
        )

    def embed_prompt(self, text: Tensor, speech: Tensor, ids: Tensor) -> Tensor:
        """Rows of the text table, or of the speech table for ids from its size on; float32."""
        hidden = text.shape[1]
        x = torch.empty(ids.shape[0], hidden, dtype=torch.float32, device=text.device)
        lm_prompt.embed_prompt_kernel[(ids.shape[0],)](
            text, speech, ids, x, text.shape[0], H=hidden, BLOCK=triton.next_power_of_2(hidden), num_warps=4
        )
        return x

    def attend_prompt(self, qkv: Tensor, bias: Tensor, pool: Tensor) -> Tensor:
        """Attention of many positions of one row, whose keys and values enter the pool."""
        count, width = qkv.shape[0], self._heads * self._head_dim
        queries = torch.empty(count, width, dtype=qkv.dtype, device=qkv.device)
        out = torch.zeros(count, width, dtype=qkv.dtype, device=qkv.device)
        length, plane, stride = self._state.length, pool.stride(0), self._table.stride(0)
        sizes = {"HEADS": self._heads, "KV_HEADS": self._kv_heads, "D": self._head_dim, "PAGE": pool.shape[3]}
        lm_prompt.prompt_write_kernel[(count,)](
            qkv,
            bias,
            self._cos,
            self._sin,
            pool,
            self._table,
            self._place,
            length,
            queries,
            plane,
            stride,
            HEADS_PAD=triton.next_power_of_2(self._heads + self._kv_heads),
            num_warps=4,
            **sizes,
        )
        block = 32
        lm_prompt.prompt_attend_kernel[(triton.cdiv(count, block), self._heads)](
            queries,
            pool,
            self._table,
            self._place,
            length,
            out,
            plane,
            stride,
            self._head_dim**-0.5,
            BLOCK_M=block,
            BLOCK_T=64,
            num_warps=4,
            num_stages=2,
            **sizes,
        )
        return out

    def prompt_end(self, x: Tensor) -> Tensor:
        """Counts the prompt's positions; the stream ``[1, hidden]`` at the last of them."""
        lm_prompt.prompt_end_kernel[(1,)](self._place, self._state.length, num_warps=1)
        return x.index_select(0, (self._place[1:] - 1).clamp(min=0).long())
