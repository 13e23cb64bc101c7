"""Decoding one row of the speech LM in one resident kernel, several tokens per launch (``lm_persistent.cu``).

The plain version is ``models.speech_lm.SpeechLM`` with the sampler's rule. Weights are packed anew, in the order in
which each block of the kernel reads them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.kernels.cuda import CudaModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vivace.kernels.row_state import RowState

PAGE_TOKENS = 32
HEAD_DIM = 64
SPLITS = 8
"""Parts into which the past is divided, each with a block of its own per head."""

MOST_TOP_K = 64
MOST_PAGES = 512
_PART_WORDS = 64
_BIAS_BYTES = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, as the kernel is compiled for them."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    speech: int
    eps: float

    @property
    def qkv_pairs(self) -> int:
        """Rows of queries, keys and values in pairs that rotate together."""
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM // 2

    @property
    def vocab_pairs(self) -> int:
        """Pairs of rows of the head; the last may be half empty."""
        return (self.vocab + 1) // 2

    @property
    def num_words(self) -> int:
        """Words of 8 bytes that blocks exchange."""
        parts = SPLITS * self.heads * _PART_WORDS
        shared = 2 * self.hidden + 2 * self.qkv_pairs + parts + self.intermediate // 2
        return shared + 2 * self.vocab_pairs + 2

    def problem(self, grid: int) -> str | None:
        """Why the kernel cannot serve this model with so many blocks; None where it can."""
        if self.hidden % 128 or self.intermediate % 256 or self.heads * HEAD_DIM != self.hidden:
            return "the model's widths are no multiples of what the kernel works on"
        if self.hidden > 1024 or self.heads % self.kv_heads:
            return "the model is wider than one block's threads"
        if self.hidden // grid < 1 or -(-self.hidden // grid) > 8 or -(-self.intermediate // 2 // grid) > 32:
            return f"{grid} multiprocessors cannot share the model's rows"
        if -(-self.qkv_pairs // grid) > 8 or grid <= self.heads * SPLITS:
            return f"{grid} multiprocessors are too few for the model's heads"
        return None


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the kernel is built. ``threads`` do arithmetic; 32 more copy weights."""

    threads: int = 480
    stages: int = 24
    chunk_bytes: int = 8192

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.chunk_bytes


def share(count: int, block: int, grid: int) -> slice:
    """Which of ``count`` things belong to ``block``."""
    return slice(block * count // grid, (block + 1) * count // grid)


def blocked(rows: Tensor) -> Tensor:
    """Rows ``[n, width]`` in the order in which a warp reads them: 32 columns of every row, then the next 32."""
    return rows.reshape(rows.shape[0], -1, 32).transpose(0, 1).reshape(-1)


def rotated_pairs(rows: Tensor) -> Tensor:
    """Rows of queries, keys or values ``[heads * HEAD_DIM, …]`` in pairs that rotate together, ``[pairs, 2, …]``."""
    halves = rows.reshape(-1, 2, HEAD_DIM // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(-1, 2, *rows.shape[1:])


def pack_layer(
    before: Tensor,
    qkv: Tensor,
    bias: Tensor,
    out: Tensor,
    between: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
) -> Packed:
    """One layer: norms, biases, and matrices as rows that blocks take shares of."""
    return Packed(
        before,
        rotated_pairs(bias),
        rotated_pairs(qkv),
        out,
        between,
        torch.stack((gate, up), dim=1),
        down,
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """One layer: norms, pairs of biases, pairs of rows of ``qkv`` and ``gate_up``, rows of ``out`` and ``down``."""

    before: Tensor
    bias: Tensor
    qkv: Tensor
    out: Tensor
    between: Tensor
    gate_up: Tensor
    down: Tensor

    def stream(self, block: int, grid: int) -> list[Tensor]:
        """What ``block`` reads, in order."""
        rows = share(self.out.shape[0], block, grid)
        units = share(self.gate_up.shape[0] // 2, block, grid)
        pairs = share(self.qkv.shape[0], block, grid)
        bias = self.bias[pairs].reshape(-1)
        return [
            self.before,
            torch.cat((bias, bias.new_zeros(_BIAS_BYTES // 2 - len(bias)))),
            blocked(self.qkv[pairs].flatten(0, 1)),
            blocked(self.out[rows]),
            self.between,
            blocked(self.gate_up[2 * units.start : 2 * units.stop].flatten(0, 1)),
            blocked(self.down[rows]),
        ]


def pack_head(head: Tensor) -> Tensor:
    """The head's rows ``[vocab, hidden]`` in pairs; an odd last row gets a neighbour of zeros."""
    if head.shape[0] % 2:
        head = torch.cat((head, head.new_zeros(1, head.shape[1])))
    return head.reshape(-1, 2, head.shape[1])


def pack(layers: Sequence[Packed], last: Tensor, head: Tensor, grid: int, chunk_bytes: int) -> Tensor:
    """Every block's stream ``[grid, bytes / 2]``, padded with zeros to whole chunks."""
    pairs = pack_head(head)
    streams = []
    for block in range(grid):
        parts = [part for layer in layers for part in layer.stream(block, grid)]
        parts.append(last)
        parts.append(blocked(pairs[share(pairs.shape[0], block, grid)].flatten(0, 1)))
        streams.append(torch.cat(parts))
    unit = chunk_bytes // 2
    longest = max(-(-len(stream) // unit) * unit for stream in streams)
    packed = head.new_zeros(grid, longest)
    for block, stream in enumerate(streams):
        packed[block, : len(stream)] = stream
    return packed


class Arguments(ctypes.Structure):
    """``Args`` of the kernel."""

    _fields_ = tuple(
        [
            (name, ctypes.c_void_p)
            for name in (
                *("weights", "speech", "rotary", "pool", "table", "words", "epoch"),
                *("token", "length", "place", "min_place", "kind", "seed", "top_p", "top_k", "win_size"),
                *(
                    "tau_r",
                    "temperature",
                    "recent",
                    "decoded",
                    "stop",
                    "remaining",
                    "out",
                    "out_count",
                    "host",
                ),
                "stamps",
            )
        ]
        + [("num_pages", ctypes.c_longlong), ("block_bytes", ctypes.c_longlong)]
        + [(name, ctypes.c_int) for name in ("table_len", "out_capacity", "num_steps")]
    )


_ROW_FIELDS = (
    *("token", "length", "place", "min_place", "kind", "seed", "top_p", "top_k", "win_size"),
    *("tau_r", "temperature", "recent", "decoded", "stop", "remaining", "out", "out_count"),
)


class PersistentKernel:
    """The kernel, compiled for one model and device, with the model's packed weights.

    Launches must follow each other on one stream: its blocks wait for each other.

    Args:
        shape: the model's sizes.
        layers, head: packed matrices, bfloat16 on the device.
        last: weights of the norm before the head.
        speech: embedding of speech rows, bfloat16.
        rotary: cosine and sine of every position, float32 ``[positions, HEAD_DIM / 2, 2]``.

    Raises:
        KernelUnavailableError: it cannot be compiled here.
        ValueError: the model does not fit (``Shape.problem``).
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[Packed],
        last: Tensor,
        head: Tensor,
        speech: Tensor,
        rotary: Tensor,
        tuning: Tuning | None = None,
        grid: int | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        device, tuning = head.device, tuning or Tuning()
        self.shape, self._tuning = shape, tuning
        self._grid = grid or torch.cuda.get_device_properties(device).multi_processor_count
        problem = shape.problem(self._grid)
        if problem is not None:
            raise ValueError(problem)
        self._weights = pack(layers, last, head, self._grid, tuning.chunk_bytes)
        self._tensors = {"speech": speech, "rotary": rotary}
        self.words = torch.zeros(shape.num_words, 2, dtype=torch.int32, device=device)
        self._epoch = torch.zeros(1, dtype=torch.int32, device=device)
        source = files("vivace.kernels").joinpath("lm_persistent.cu").read_text(encoding="utf-8")
        module = CudaModule(source, options=[*self._options(), *extra], name="lm_persistent.cu")
        self.stamps: Tensor | None = None
        self._function = module.function("decode")
        self._shared = self._shared_bytes()
        self._function.set_shared_bytes(self._shared)
        if not self._function.max_blocks_per_multiprocessor(tuning.threads + 32, self._shared):
            raise ValueError("a block of the kernel does not fit on a multiprocessor")

    def _options(self) -> list[str]:
        shape, tuning = self.shape, self._tuning
        values = {
            "HIDDEN": shape.hidden,
            "INTER": shape.intermediate,
            "LAYERS": shape.layers,
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "VOCAB": shape.vocab,
            "VOCAB_PAIRS": shape.vocab_pairs,
            "SPEECH": shape.speech,
            "EPS": f"{shape.eps!r}f",
            "PAGE": PAGE_TOKENS,
            "MAX_PAGES": MOST_PAGES,
            "GRID": self._grid,
            "THREADS": tuning.threads,
            "STAGES": tuning.stages,
            "CHUNK": tuning.chunk_bytes,
            "SPLITS": SPLITS,
        }
        return [f"-D{name}={value}" for name, value in values.items()]

    def _shared_bytes(self) -> int:
        """At least the size of the kernel's ``Shared``."""
        shape, tuning = self.shape, self._tuning
        warps = tuning.threads // 32
        gate_rows = 4 * -(-shape.intermediate // 2 // self._grid)
        tiles = -(-max(gate_rows, 2 * -(-shape.vocab_pairs // self._grid)) // 16)
        floats = 3 * shape.hidden // 2 + max(shape.intermediate // 2, 1280) + 256 * tiles + warps * 66 + 128
        return tuning.ring_bytes + 4 * (floats + MOST_PAGES) + 8 * (tuning.stages + warps) + 512

    @property
    def logits(self) -> Tensor:
        """Of the last step, float32 ``[vocab]``; for checks."""
        start = self.shape.num_words - 2 - 2 * self.shape.vocab_pairs
        return self.words[start : start + self.shape.vocab, 0].contiguous().view(torch.float32)

    def launch(
        self,
        state: RowState,
        slot: int,
        pool: Tensor,
        table: Tensor,
        num_steps: int,
        host: Tensor | None = None,
    ) -> None:
        """Enqueues up to ``num_steps`` tokens of one row; fewer where ``remaining`` or ``stop`` says so.

        Args:
            pool: ``[layers, 2, pages, kv_heads, PAGE_TOKENS, HEAD_DIM]`` bfloat16.
            table: the row's pages, int32, every page that the steps reach.
            host: pinned int32: count, stop, then the drawn ids, as ``out_count``, ``stop`` and ``out``.
        """
        values = Arguments(
            weights=self._weights.data_ptr(),
            pool=pool.data_ptr(),
            table=table.data_ptr(),
            words=self.words.data_ptr(),
            epoch=self._epoch.data_ptr(),
            host=None if host is None else host.data_ptr(),
            stamps=None if self.stamps is None else self.stamps.data_ptr(),
            num_pages=pool.shape[2],
            block_bytes=self._weights.shape[1] * 2,
            table_len=min(table.shape[0], MOST_PAGES),
            out_capacity=state.out.shape[1],
            num_steps=num_steps,
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
            **{name: getattr(state, name)[slot].data_ptr() for name in _ROW_FIELDS},
        )
        block = (self._tuning.threads + 32,)
        self._function.launch((self._grid,), block, [values], shared_bytes=self._shared)
