"""Decoding one row of the speech LM in one resident kernel, several tokens per launch (``lm_persistent*.cu``).

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

from vivace.kernels.cuda import open_module
from vivace.kernels.gpu import gpu_of, num_multiprocessors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vivace.config import SpeechLMConfig
    from vivace.kernels.row_state import RowState

PAGE_TOKENS = 32
HEAD_DIM = 64
SPLITS = 8
"""Most parts into which the past is divided, each with a block of its own per head."""

MOST_TOP_K = 64
MOST_PAGES = 512
_BIAS_BYTES = 32
_OWN_PAIRS = 4
_X_STRIDE = 16
"""Words from one block's words of the hidden state to the next block's."""

_PIECE = 1024
"""Numbers of a tile of 16 rows that one warp reads; they lie in one chunk of the ring."""

_MOST_ROWS = 96
"""Of the gate and up product, or of the head, that one block has."""

SOURCES = (
    "lm_persistent_device.cu",
    "lm_persistent.cu",
    "lm_persistent_attention.cu",
    "lm_persistent_sampling.cu",
    "lm_persistent_layer.cu",
    "lm_persistent_decode.cu",
)
"""Files of the kernel, in the order in which they are joined."""


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
    def threads(self) -> int:
        """Of a block: one for two numbers of the hidden state, and two warps beside them."""
        return self.hidden // 2 + 64

    @classmethod
    def of(cls, config: SpeechLMConfig) -> Shape:
        """The sizes of a speech LM."""
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            vocab=config.num_speech_rows,
            speech=config.speech_token_size,
            eps=config.rms_norm_eps,
        )

    @property
    def qkv_pairs(self) -> int:
        """Rows of queries, keys and values in pairs that rotate together."""
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM // 2

    @property
    def vocab_pairs(self) -> int:
        """Pairs of rows of the head; the last may be half empty."""
        return (self.vocab + 1) // 2

    def most_units(self, grid: int) -> int:
        """Most inner numbers of the MLP that one of ``grid`` blocks has."""
        return _most(self.intermediate, grid)

    def down_columns(self, grid: int) -> int:
        """Columns of the down product that every block reads."""
        return _filled_units(self.intermediate, grid)

    def most_held(self, grid: int) -> int:
        """Most bytes of weights that lie in the ring before a warp gives any of them back, in whole pieces."""
        row, piece = 2 * self.hidden, 2 * _PIECE
        held = max(
            row + _BIAS_BYTES + 2 * _most(self.qkv_pairs, grid) * row,
            row + piece + self.hidden // HEAD_DIM * piece,
            row * self.down_columns(grid),
            piece + 2 * _most(self.vocab_pairs, grid) * row,
        )
        return _most(held, piece) * piece

    def num_words(self, grid: int) -> int:
        """Words of 8 bytes that blocks exchange."""
        parts = SPLITS * self.heads * (HEAD_DIM // 2 + 1)
        return (
            2 * _X_STRIDE * grid
            + self.qkv_pairs
            + parts
            + grid * grid * _OWN_PAIRS
            + 2 * self.vocab_pairs
            + 2
        )

    def problem(self, grid: int) -> str | None:
        """Why the kernel cannot serve this model with so many blocks; None where it can."""
        if self.hidden % 128 or self.heads * HEAD_DIM != self.hidden:
            return "the model's widths are no multiples of what the kernel works on"
        if self.hidden > 896 or self.heads % self.kv_heads:
            return "the model is wider than one block's threads"
        if self.hidden // 2 < grid or -(-self.hidden // 2 // grid) > _OWN_PAIRS or self.intermediate < grid:
            return f"{grid} multiprocessors cannot share the model's rows"
        if 2 * max(self.most_units(grid), -(-self.vocab_pairs // grid)) > min(_MOST_ROWS, self.hidden // 2):
            return f"{grid} multiprocessors cannot share the model's rows"
        if -(-self.qkv_pairs // grid) > 8 or grid <= self.heads * SPLITS:
            return f"{grid} multiprocessors are too few for the model's heads"
        return None


@dataclass(frozen=True, slots=True)
class Tuning:
    """The ring of weights in shared memory: ``stages`` chunks of ``chunk_bytes``; choices of the source by name."""

    stages: int = 24
    chunk_bytes: int = 8192
    choices: tuple[tuple[str, int], ...] = ()

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.chunk_bytes

    def problem(self, shape: Shape, grid: int) -> str | None:
        """Why ``shape`` cannot be served from this ring; None where it can."""
        if self.chunk_bytes % (2 * _PIECE):
            return f"chunks must have a multiple of {2 * _PIECE} bytes"
        if (
            shape.most_held(grid) > self.ring_bytes - self.chunk_bytes + 2 * _PIECE
        ):  # starts with any piece of a chunk
            return f"{self.stages} chunks do not hold what a block reads at once"
        return None


def share(count: int, block: int, grid: int) -> slice:
    """Which of ``count`` things belong to ``block``."""
    return slice(block * count // grid, (block + 1) * count // grid)


def _most(count: int, grid: int) -> int:
    """The largest share of ``count`` things."""
    return -(-count // grid)


def _filled_units(units: int, grid: int) -> int:
    """The largest share of inner numbers, filled up to whole eights."""
    return 8 * _most(_most(units, grid), 8)


def rotated_pairs(rows: Tensor) -> Tensor:
    """Rows of queries, keys or values ``[heads * HEAD_DIM, …]`` in pairs that rotate together, ``[pairs, 2, …]``."""
    halves = rows.reshape(-1, 2, HEAD_DIM // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(-1, 2, *rows.shape[1:])


def quad_rows(pairs: Tensor) -> Tensor:
    """Pairs of rows ``[n, 2, width]`` in the order in which lanes take them.

    Of 8 pairs 16 columns after the other, then the next 8 pairs. A lane has 2 columns of the first row, the same of
    the second, and the next 2 of both.
    """
    tiles = []
    for tile in torch.split(pairs, 8):
        # [pair, row, run of 32, lane, half, piece, column]
        columns = tile.reshape(len(tile), 2, -1, 4, 2, 2, 2)
        tiles.append(columns.permute(2, 4, 0, 3, 5, 1, 6).reshape(-1))
    return torch.cat(tiles)


def quad_halves(rows: Tensor) -> Tensor:
    """Rows ``[n, width]`` as ``quad_rows``, with the two halves of every 64 columns in place of the rows of a pair."""
    columns = rows.reshape(len(rows), -1, 2, 4, 2, 2, 2)  # [row, warp, run of 32, lane, half, piece, column]
    return columns.permute(1, 4, 0, 3, 5, 2, 6).reshape(-1)


def quad_down(columns: Tensor) -> Tensor:
    """Columns ``[hidden, 8 n]`` of the down product in the order in which lanes take them.

    First 16 columns of all tiles, then the next 16; an odd last 8 of two neighbouring tiles together. A tile has 16
    rows, first the even ones of 16 neighbours, then the odd ones.
    """
    tiles = columns.reshape(columns.shape[0] // 16, 8, 2, -1, 4, 2)  # [tile, pair, odd, eight, lane, column]
    eights = tiles.shape[3]
    whole = tiles[:, :, :, : eights // 2 * 2].reshape(len(tiles), 8, 2, eights // 2, 2, 4, 2)
    parts = [whole.permute(3, 0, 1, 5, 4, 2, 6).reshape(-1)]
    if eights % 2:
        last = tiles[:, :, :, -1].reshape(-1, 2, 8, 2, 4, 2)  # [two tiles, tile, pair, odd, lane, column]
        parts.append(last.permute(0, 2, 4, 1, 3, 5).reshape(-1))
    return torch.cat(parts)


def _filled(parts: list[Tensor], size: int) -> list[Tensor]:
    """The parts and zeros behind them, up to a multiple of ``size`` elements."""
    missing = -sum(len(part) for part in parts) % size
    return [*parts, parts[0].new_zeros(missing)]


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
        rotated_pairs(out.T).reshape(out.shape[1], -1).T.contiguous(),
        between,
        torch.stack((gate, up), dim=1),
        down,
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """One layer: norms, pairs of biases, pairs of rows of ``qkv`` and ``gate_up``, ``out``, ``down``.

    Columns of ``out`` stand in pairs whose queries are rotated together.
    """

    before: Tensor
    bias: Tensor
    qkv: Tensor
    out: Tensor
    between: Tensor
    gate_up: Tensor
    down: Tensor

    def stream(self, block: int, grid: int) -> list[Tensor]:
        """What ``block`` reads, in order."""
        own = share(self.out.shape[0] // 2, block, grid)
        units = share(self.gate_up.shape[0], block, grid)
        pairs = share(self.qkv.shape[0], block, grid)
        bias = self.bias[pairs].reshape(-1)
        down = self.down[:, units]
        missing = _filled_units(self.gate_up.shape[0], grid) - down.shape[1]
        bias = torch.cat((bias, bias.new_zeros(_BIAS_BYTES // 2 - len(bias))))
        products = [quad_rows(self.qkv[pairs]), quad_halves(self.out[2 * own.start : 2 * own.stop])]
        parts = _filled([self.before, bias, *products], 64)
        parts = _filled([*parts, self.between], _PIECE)
        parts = _filled([*parts, quad_rows(self.gate_up[units])], _PIECE)
        return [*parts, quad_down(torch.nn.functional.pad(down, (0, missing)))]


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
        own = pairs[share(pairs.shape[0], block, grid)]
        parts += [*_filled([last], _PIECE), quad_rows(own)]
        streams.append(torch.cat(parts))
    unit = chunk_bytes // 2
    longest = max(-(-len(stream) // unit) * unit for stream in streams)
    packed = head.new_zeros(grid, longest)
    for block, stream in enumerate(streams):
        packed[block, : len(stream)] = stream
    return packed


def compile_options(shape: Shape, tuning: Tuning, grid: int) -> list[str]:
    """Sizes, as the kernel's source takes them."""
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
        "GRID": grid,
        "STAGES": tuning.stages,
        "CHUNK": tuning.chunk_bytes,
        "SPLITS": SPLITS,
        **dict(tuning.choices),
    }
    return [f"-D{name}={value}" for name, value in values.items()]


def shared_bytes(shape: Shape, tuning: Tuning, grid: int) -> int:
    """At least the size of the kernel's ``Shared``."""
    rows = 2 * max(shape.most_units(grid), -(-shape.vocab_pairs // grid))
    sums = 20 * (32 + -(-rows // 16) * 16)
    vectors = shape.hidden + shape.down_columns(grid) + max(1280, 128 * (shape.hidden // HEAD_DIM))
    rest = 64 + 32 + 32 + 32 + 8 + MOST_PAGES + 64 + 2 * tuning.stages + 16 + 2 * 16 + 64
    return tuning.ring_bytes + 4 * (sums + vectors + rest) + 1024


class Arguments(ctypes.Structure):
    """``Args`` of the kernel."""

    _fields_ = tuple(
        [
            (name, ctypes.c_void_p)
            for name in (
                *("weights", "speech", "rotary", "pool", "table", "words", "epoch", "slots"),
                *("token", "length", "place", "min_place", "kind", "seed", "top_p", "top_k", "win_size"),
                *("tau_r", "temperature", "recent", "decoded", "stop", "remaining", "out", "out_count"),
            )
        ]
        + [("num_pages", ctypes.c_longlong), ("block_bytes", ctypes.c_longlong)]
        + [(name, ctypes.c_int) for name in ("table_width", "out_capacity", "num_steps")]
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

    Attributes:
        words: what blocks exchange. epoch: layers and heads of all steps so far, modulo 2³²; int32 ``[1]``.

    Raises:
        KernelUnavailableError: it cannot be compiled here.
        ValueError: the model does not fit (``Shape.problem``, ``Tuning.problem``).
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
    ) -> None:
        device, tuning = head.device, tuning or Tuning()
        self.shape, self._tuning = shape, tuning
        self._grid = grid or num_multiprocessors(device)
        problem = shape.problem(self._grid) or tuning.problem(shape, self._grid)
        if problem is not None:
            raise ValueError(problem)
        self._shared, gpu = shared_bytes(shape, tuning, self._grid), gpu_of(device)
        if gpu is not None and self._shared > gpu.block_bytes:
            raise ValueError(
                f"a block needs {self._shared} bytes of shared memory, here are {gpu.block_bytes}"
            )
        self._weights = pack(layers, last, head, self._grid, tuning.chunk_bytes)
        self._tensors = {"speech": speech, "rotary": rotary}
        self.words = torch.zeros(shape.num_words(self._grid), 2, dtype=torch.int32, device=device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self._load(compile_options(shape, tuning, self._grid))

    def _load(self, options: list[str]) -> None:
        """Compiles the kernel."""
        folder = files("vivace.kernels")
        source = "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES)
        self._function = open_module(source, options=options, name="lm_persistent").function("decode")
        self._function.set_shared_bytes(self._shared)
        if not self._function.max_blocks_per_multiprocessor(self.shape.threads, self._shared):
            raise ValueError("a block of the kernel does not fit on a multiprocessor")

    def _start(self, values: Arguments) -> None:
        """Enqueues the kernel."""
        threads = (self.shape.threads,)
        self._function.launch((self._grid,), threads, [values], shared_bytes=self._shared)

    @property
    def logits(self) -> Tensor:
        """Of the last step, float32 ``[vocab]``; for checks."""
        start = self.shape.num_words(self._grid) - 2 - 2 * self.shape.vocab_pairs
        return self.words[start : start + self.shape.vocab, 0].contiguous().view(torch.float32)

    def launch(self, state: RowState, slots: Tensor, pool: Tensor, table: Tensor, num_steps: int) -> None:
        """Enqueues up to ``num_steps`` tokens of one row; fewer where ``remaining`` or ``stop`` says so.

        Can be captured in a graph: which row it is, and how many tokens, is read on the device.

        Args:
            slots: int32 ``[1]``, the row; below 0 nothing happens.
            pool: ``[layers, 2, pages, kv_heads, PAGE_TOKENS, HEAD_DIM]`` bfloat16.
            table: int32 ``[slots, max_pages]``; the row has every page that the steps reach.
        """
        values = Arguments(
            weights=self._weights.data_ptr(),
            pool=pool.data_ptr(),
            table=table.data_ptr(),
            words=self.words.data_ptr(),
            epoch=self.epoch.data_ptr(),
            slots=slots.data_ptr(),
            num_pages=pool.shape[2],
            block_bytes=self._weights.shape[1] * 2,
            table_width=table.shape[1],
            out_capacity=state.out.shape[1],
            num_steps=num_steps,
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
            **{name: getattr(state, name).data_ptr() for name in _ROW_FIELDS},
        )
        self._start(values)
