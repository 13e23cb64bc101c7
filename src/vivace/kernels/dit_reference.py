"""Plain definitions of the kernels in ``dit``, on the same buffers and with the same arguments.

Groups, pages and the folded norm are explained there. Shapes below: ``G`` groups of ``C`` frames (a chunk), ``M``
their rows, ``S`` streams, ``D`` channels of the model, ``L`` frames that a position convolution looks back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

NORM_EPS = 1e-6


def default_options(_: torch.dtype, __: torch.device) -> dict[str, dict[str, Any]]:
    """Nothing to set here; see ``dit``."""
    return {}


class Rows(NamedTuple):
    """What the rows of a launch belong to. Page offsets count elements from the start of the arena.

    Attributes:
        chunk: frames of a group, ``C``.
        look_back: ``L``.
        starts, counts: absolute first frame and valid frames of each stream, int32 ``[G]``.
        steps: Euler step of each group, the same for all, int32 ``[G]``.
        here, before: block of the chunk at step 0, and that of the chunk before it, int64 ``[G]``.
        ahead: how many groups right ahead of each are the stream's chunks before it, int32 ``[G]``.
        table: blocks of all chunks of the stream at step 0, int64 ``[G, pages]``.
        step_stride: elements from the block of one step to that of the next.
        context_offset: elements from the start of a block to what the position convolutions keep.
        arena: a tensor of the pages' type; its start is offset 0.
        resolve: gives the elements from an offset on; the plain versions read pages through it.
        step: the Euler step.
    """

    chunk: int
    look_back: int
    starts: Tensor
    counts: Tensor
    steps: Tensor
    here: Tensor
    before: Tensor
    ahead: Tensor
    table: Tensor
    step_stride: int
    context_offset: int
    arena: Tensor
    resolve: Callable[[int], Tensor]
    step: int

    @property
    def groups(self) -> int:
        return self.steps.shape[0]

    @property
    def num_rows(self) -> int:
        """``M``."""
        return self.groups * self.chunk

    def each_row(self, values: Tensor) -> Tensor:
        """One value per group → one per row."""
        return values.repeat_interleave(self.chunk, 0)


class Normed(NamedTuple):
    """A hidden state on its way into a norm: channels times the norm's scale, and sums of tiles of its channels.

    Attributes:
        scaled: ``[rows, D]`` in the type of the weights; rows are padded to whole tiles.
        sums: sums and sums of squares, float32, ``[2, rows, tiles]`` flat; one layout per number of tiles.
        tiles: how many there are per row.
    """

    scaled: Tensor
    sums: Tensor
    tiles: int

    def view(self) -> tuple[Tensor, Tensor]:
        """Sums and sums of squares, each ``[rows, tiles]``."""
        rows = self.scaled.shape[0]
        both = self.sums[: 2 * rows * self.tiles].view(2, rows, self.tiles)
        return both[0], both[1]


class Folded(NamedTuple):
    """A projection behind an adaptive norm.

    Attributes:
        weight: ``[N, D]``.
        folded: of each Euler step ``s W`` and ``b W`` plus the bias, float32 ``[2, steps, N]``.
        shift: the second of them in the type of the weights, ``[steps, N]``.
    """

    weight: Tensor
    folded: Tensor
    shift: Tensor


class Added(NamedTuple):
    """A projection that is gated and added to the hidden state, and the scale of the norm that follows.

    Attributes:
        weight, bias: ``[D, K]``; float32 ``[D]``.
        gate, scale: of each Euler step, float32 ``[steps, D]``.
    """

    weight: Tensor
    bias: Tensor
    gate: Tensor
    scale: Tensor


class Positions(NamedTuple):
    """A position convolution: ``weight`` ``[kernel, D, width of a group]``, ``bias`` float32 ``[D]``."""

    weight: Tensor
    bias: Tensor


def fold(weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Folded:
    """Prepares ``weight`` ``[N, D]`` for norms of ``scale``, ``shift`` ``[steps, D]``."""
    exact = weight.float()
    folded = torch.stack((scale.float() @ exact.T, shift.float() @ exact.T + bias.float()))
    return Folded(weight, folded, folded[1].to(weight.dtype))


def store_normed(x: Tensor, scale: Tensor, out: Normed) -> None:
    """Writes ``x`` ``[M, D]`` float32 times ``scale`` ``[M, D]``, and its sums."""
    count = x.shape[0]
    out.scaled[:count] = (x * scale).to(out.scaled.dtype)
    sums, squares = out.view()
    parts = x.view(count, out.tiles, -1)
    sums[:count] = parts.sum(-1)
    squares[:count] = (parts * parts).sum(-1)


def project_normed(x: Normed, projection: Folded, steps: Tensor, rows: Tensor | slice) -> Tensor:
    """The projection of normed ``rows``, float32; ``steps`` is one per row."""
    sums, squares = (part[rows].sum(-1, keepdim=True) / x.scaled.shape[1] for part in x.view())
    inverse = (squares - sums * sums).clamp(min=0).add(NORM_EPS).rsqrt()
    total = x.scaled[rows].float() @ projection.weight.float().T
    weighted, shift = projection.folded[:, steps]
    result: Tensor = inverse * (total - sums * weighted) + shift
    return result


def qkv(
    rows: Rows, x: Normed, projection: Folded, rope: Tensor, query: Tensor, heads: int, layer_offset: int
) -> None:
    """Queries, keys and values of all rows; head 0 of queries and keys is turned.

    Args:
        rope: cosines and sines of each position, float32 ``[2, positions, dim_head / 2]``.
        query: gets the queries, ``[rows, heads * dim_head]``.
        layer_offset: elements from the start of a block to the layer's keys ``[heads, C, dim_head]``, which its
            values follow. Only valid frames are written there.
    """
    steps = rows.each_row(rows.steps)
    joined = project_normed(x, projection, steps, slice(rows.num_rows))
    joined = joined.view(rows.groups, rows.chunk, 3, heads, -1)
    width = joined.shape[-1]
    position = rows.starts[: rows.groups, None] + torch.arange(rows.chunk, device=joined.device)
    cosine, sine = rope[:, position.clamp(max=rope.shape[1] - 1)][:, :, :, None]
    even, odd = joined[:, :, :2, 0, 0::2].clone(), joined[:, :, :2, 0, 1::2].clone()
    joined[:, :, :2, 0, 0::2] = even * cosine - odd * sine
    joined[:, :, :2, 0, 1::2] = odd * cosine + even * sine
    query[: rows.num_rows] = joined[:, :, 0].reshape(rows.num_rows, -1).to(query.dtype)
    size = heads * rows.chunk * width
    for group, (here, step, count) in enumerate(_lists(rows.here, rows.steps, rows.counts)):
        block = rows.resolve(here + step * rows.step_stride + layer_offset)
        cache = block[: 2 * size].view(2, heads, rows.chunk, width)
        cache[:, :, :count] = joined[group, :count, 1:].permute(1, 2, 0, 3).to(cache.dtype)


def attention(rows: Rows, query: Tensor, mixed: Tensor, heads: int, layer_offset: int) -> None:
    """Each frame looks at every valid frame of its stream up to the end of its chunk; into ``mixed``."""
    width = query.shape[1] // heads
    size = heads * rows.chunk * width
    for group, (start, count, step) in enumerate(_lists(rows.starts, rows.counts, rows.steps)):
        pages = rows.table[group, : -(-(start + count) // rows.chunk)].tolist()
        offset = step * rows.step_stride + layer_offset
        blocks = [rows.resolve(page + offset)[: 2 * size].view(2, heads, rows.chunk, width) for page in pages]
        keys, values = torch.cat(blocks, dim=2)[:, :, : start + count]
        at = slice(group * rows.chunk, (group + 1) * rows.chunk)
        queries = query[at].view(rows.chunk, heads, width).transpose(0, 1)
        heard = F.scaled_dot_product_attention(queries[None], keys[None], values[None])
        mixed[at] = heard[0].transpose(0, 1).reshape(rows.chunk, -1)


def add_projection(rows: Rows, a: Tensor, projection: Added, hidden: Tensor, out: Normed) -> None:
    """Adds the gated projection of ``a`` ``[rows, K]`` to ``hidden`` float32 ``[rows, D]``; ``out`` is its norm's."""
    count, steps = rows.num_rows, rows.each_row(rows.steps)
    total = a[:count].float() @ projection.weight.float().T + projection.bias
    hidden[:count] += projection.gate[steps] * total
    store_normed(hidden[:count], projection.scale[steps], out)


def ff_in(rows: Rows, x: Normed, projection: Folded, out: Tensor) -> None:
    """First layer of the feed-forward and its tanh GELU, into ``out`` ``[rows, N]``."""
    y = project_normed(x, projection, rows.each_row(rows.steps), slice(rows.num_rows))
    out[: rows.num_rows] = F.gelu(y, approximate="tanh").to(out.dtype)


def embed_input(
    rows: Rows, x: Tensor, weight: Tensor, condition: Tensor, first: Tensor, second: Tensor
) -> None:
    """Input projection, into the joined inputs of the two position convolutions.

    Args:
        x: noisy mel float32 ``[S, C, mel]``; group ``g`` belongs to stream ``g mod S``.
        weight: ``[D, mel]``.
        condition: what the other inputs add, float32 ``[M, D]``.
        first: gets the last ``L`` inputs before the chunk and those of the chunk, ``[G (or more), L + C, D]``.
        second: gets the last ``L`` inputs of the second convolution; the rest comes from ``convolve``, and so do those
            that are made in this launch.
    """
    groups, back = rows.groups, rows.look_back
    hidden = x[torch.arange(groups) % x.shape[0]].to(weight.dtype).float() @ weight.float().T
    hidden = hidden + condition[: rows.num_rows].view(hidden.shape)
    first[:groups, back:] = hidden.to(first.dtype)
    size = back * weight.shape[0]
    for group, (before, here, step, start) in enumerate(
        _lists(rows.before, rows.here, rows.steps, rows.starts)
    ):
        offset = step * rows.step_stride + rows.context_offset
        old = rows.resolve(before + offset)[: 2 * size].view(2, back, -1) if start else None
        for index, joined in enumerate((first, second)):
            joined[group, :back] = 0 if old is None else old[index]
        new = rows.resolve(here + offset)[: 2 * size].view(2, back, -1)
        new[0] = first[group, rows.chunk :]
        new[1, : max(0, back - rows.chunk)] = second[group, rows.chunk : back]


def convolve(rows: Rows, joined: Tensor, positions: Positions, following: Tensor) -> None:
    """First position convolution: ``joined`` ``[G, L + C, D]`` into ``following`` alike, and into the page."""
    y = _convolve(rows, joined, positions).to(following.dtype)
    following[: rows.groups, rows.look_back :] = y
    size = rows.look_back * y.shape[-1]
    for group, (here, step, ahead) in enumerate(_lists(rows.here, rows.steps, rows.ahead)):
        first = max(0, rows.look_back - rows.chunk)  # what lies before was kept by ``embed_input``
        if ahead:
            following[group, : rows.look_back] = following[group - 1, rows.chunk :]
            first = 0
        block = rows.resolve(here + step * rows.step_stride + rows.context_offset)
        block[size : 2 * size].view(rows.look_back, -1)[first:] = following[group, rows.chunk + first :]


def convolve_add(
    rows: Rows,
    joined: Tensor,
    positions: Positions,
    first: Tensor,
    scale: Tensor,
    hidden: Tensor,
    out: Normed,
) -> None:
    """Second position convolution, added to the input of the ``first``: ``hidden`` of the first block.

    Args:
        scale: of the first block's norm, float32 ``[steps, D]``.
    """
    y = _convolve(rows, joined, positions) + first[: rows.groups, rows.look_back :].float()
    hidden[: rows.num_rows] = y.reshape(rows.num_rows, -1)
    store_normed(hidden[: rows.num_rows], scale[rows.each_row(rows.steps)], out)


def _convolve(rows: Rows, joined: Tensor, positions: Positions) -> Tensor:
    kernel, _, width = positions.weight.shape
    weight = positions.weight.permute(1, 2, 0).float()
    groups = weight.shape[0] // width
    y = F.conv1d(joined[: rows.groups].float().transpose(1, 2), weight, positions.bias, groups=groups)
    assert y.shape[2] == rows.chunk == joined.shape[1] - kernel + 1
    return F.mish(y).transpose(1, 2)


class Guidance(NamedTuple):
    """How an Euler step ends.

    Attributes:
        scale: guidance scale.
        dt: of each Euler step, float32 ``[steps]``.
        shared: velocities of the unconditional branch at step 0, which no request changes, by absolute frame,
            float32 ``[frames, mel]``.
        use_shared: read them (there are no rows of the unconditional branch).
        keep_shared: write those of whole chunks.
    """

    scale: float
    dt: Tensor
    shared: Tensor
    use_shared: bool = False
    keep_shared: bool = False


def advance(rows: Rows, h: Normed, projection: Folded, guidance: Guidance, x: Tensor, fault: Tensor) -> None:
    """Output projection, guidance and Euler update of ``x`` float32 ``[S, C, mel]``.

    The first ``S`` groups are the conditional branch, the others the unconditional one. ``fault`` int32 ``[S]`` becomes
    1 where a valid frame is not finite.
    """
    streams = x.shape[0]
    velocity = project_normed(h, projection, rows.each_row(rows.steps), slice(rows.num_rows))
    velocity = velocity.view(rows.groups, rows.chunk, -1)
    for stream, (start, count, step) in enumerate(
        _lists(rows.starts[:streams], rows.counts[:streams], rows.steps[:streams])
    ):
        place = slice(start, start + rows.chunk)
        free = guidance.shared[place] if guidance.use_shared else velocity[streams + stream]
        if guidance.keep_shared and count == rows.chunk:
            guidance.shared[place] = free
        guided = (1 + guidance.scale) * velocity[stream] - guidance.scale * free
        x[stream] += guidance.dt[step] * guided
        if not bool(x[stream, :count].isfinite().all()):
            fault[stream] = 1


def _lists(*parts: Tensor) -> list[tuple[int, ...]]:
    return list(zip(*(part.tolist() for part in parts), strict=True))
