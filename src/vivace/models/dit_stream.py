"""The DiT chunk by chunk: what its plain forward pass computes under the chunk mask, each frame once.

Under the chunk-causal mask a finished frame never changes, at no Euler step and in no layer. So a stream
keeps, per Euler step and guidance branch, the keys and values of every layer and what the two causal
position convolutions look back on; a chunk then runs its own frames only. Chunks lie at absolute multiples
of the mask's chunk, prompt included. A chunk sees all that is kept and itself, so no mask is needed.

What depends on ``t`` alone (time embedding, scales, shifts, gates) is computed once, in ``PreparedFlow``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.layers.int8 import Int8Linear
from vivace.models.dit import NORM_EPS, POSITION_GROUPS, POSITION_KERNEL, DiT, DiTBlock, rotate

BRANCHES = 2
"""Classifier-free guidance runs the conditional and the unconditional branch in one batch, in this order."""

POSITION_CONTEXT = POSITION_KERNEL - 1

Linear = Callable[[Tensor], Tensor]
"""``[..., in]`` to ``[..., out]``."""


class Modulation(NamedTuple):
    """What the time of one Euler step does to one block; each ``[dim]``. Scales have their 1 added."""

    shift: Tensor
    scale: Tensor
    gate: Tensor
    ff_shift: Tensor
    ff_scale: Tensor
    ff_gate: Tensor


class PreparedBlock(NamedTuple):
    """Linear layers of one block, with the three input projections of the attention joined."""

    qkv: Linear
    out: Linear
    ff_in: Linear
    ff_out: Linear


class PreparedDiT:
    """A DiT made ready for a fixed grid of times: joined weights, and everything that depends on ``t`` alone.

    Args:
        dit: the model; its weights are used as they are now, later changes are not seen.
        times: ``t`` of each Euler step.
    """

    def __init__(self, dit: DiT, times: Sequence[float]) -> None:
        self.heads, self.dim_head = dit.config.heads, dit.config.dim_head
        weight, bias = _weights(dit.input_embed.proj)
        self.x_weight = weight[:, : dit.config.mel_dim].contiguous()
        self.condition = (weight[:, dit.config.mel_dim :].contiguous(), bias)
        positions = dit.input_embed.conv_pos_embed
        self.convolutions = [_weights(positions.conv1[0]), _weights(positions.conv2[0])]
        blocks = [block for block in dit.transformer_blocks if isinstance(block, DiTBlock)]
        self.blocks = [_prepare_block(block) for block in blocks]
        self.proj_out = _weights(dit.proj_out)
        with torch.no_grad():
            time = dit.time_embed(torch.tensor(times, device=weight.device, dtype=torch.float32))
            by_block = [[vector[:, 0] for vector in block.attn_norm(time)] for block in blocks]
            scale, shift = (vector[:, 0] for vector in dit.norm_out(time))
        self.modulations = [
            [_modulation(vectors, step) for vectors in by_block] for step in range(len(times))
        ]
        self.final = [(1 + scale[step], shift[step]) for step in range(len(times))]

    def embed_condition(self, cond: Tensor, mu: Tensor, spks: Tensor) -> Tensor:
        """The part of the input projection that no Euler step changes, both branches ``[2, T, dim]``.

        Args:
            cond: ``[T, 80]``; ``mu`` alike; ``spks`` ``[80]``. The unconditional branch has zeros instead.
        """
        joined = torch.cat((cond, mu, spks.expand(mu.shape[0], -1)), dim=-1)
        return F.linear(torch.stack((joined, torch.zeros_like(joined))), *self.condition)

    def velocity(self, x: Tensor, condition: Tensor, step: int, state: DiTState, span: Span) -> Tensor:
        """Velocity of the new frames ``x`` ``[T, 80]`` at one Euler step, both branches ``[2, T, 80]``.

        Appends the frames to ``state``.
        """
        hidden = condition + F.linear(x.to(condition.dtype), self.x_weight)
        hidden = hidden + self._positions(hidden, state.contexts[step])
        for block, modulation, cache in zip(
            self.blocks, self.modulations[step], state.caches[step].unbind(0), strict=True
        ):
            self._run_block(hidden, block, modulation, cache, span)
        scale, shift = self.final[step]
        return F.linear(F.layer_norm(hidden, hidden.shape[-1:], scale, shift, NORM_EPS), *self.proj_out)

    def _positions(self, hidden: Tensor, contexts: Tensor) -> Tensor:
        """The causal position convolutions; ``contexts`` ``[2, 2, dim, POSITION_CONTEXT]`` is updated."""
        y = hidden.transpose(1, 2)
        for (weight, bias), context in zip(self.convolutions, contexts.unbind(0), strict=True):
            joined = torch.cat((context, y), dim=2)
            context.copy_(joined[:, :, -POSITION_CONTEXT:])
            y = F.mish(F.conv1d(joined, weight, bias, groups=POSITION_GROUPS))
        return y.transpose(1, 2)

    def _run_block(
        self, hidden: Tensor, block: PreparedBlock, modulation: Modulation, cache: Tensor, span: Span
    ) -> None:
        """One block, in place on ``hidden`` ``[2, T, dim]``; ``cache`` is one layer's keys and values."""
        shape, frames = hidden.shape[-1:], hidden.shape[1]
        normed = F.layer_norm(hidden, shape, modulation.scale, modulation.shift, NORM_EPS)
        qkv = block.qkv(normed).view(BRANCHES, frames, 3, self.heads, self.dim_head)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        first_head = qkv[:2, :, 0]
        first_head.copy_(rotate(first_head, span.rope))
        cache[:, :, :, span.start : span.end] = qkv[1:]
        keys, values = cache[:, :, :, : span.end].unbind(0)
        mixed = F.scaled_dot_product_attention(qkv[0], keys, values)
        mixed = mixed.transpose(1, 2).reshape(BRANCHES, frames, -1)
        hidden.addcmul_(block.out(mixed), modulation.gate)
        normed = F.layer_norm(hidden, shape, modulation.ff_scale, modulation.ff_shift, NORM_EPS)
        inner = F.gelu(block.ff_in(normed), approximate="tanh")
        hidden.addcmul_(block.ff_out(inner), modulation.ff_gate)


class Span(NamedTuple):
    """The frames of one chunk, by absolute position, and the rotary angles there."""

    start: int
    end: int
    rope: tuple[Tensor, Tensor]


@dataclass(slots=True)
class DiTState:
    """What a stream keeps of its finished frames. The shapes, with the Euler steps as lists:

    Attributes:
        caches: keys and values, ``[depth, 2 (key, value), 2 (branch), heads, capacity, dim_head]`` each. One
            tensor per step, so that growing never needs more than one of them twice.
        contexts: last inputs of the position convolutions, ``[2 (convolution), 2 (branch), dim, 30]`` each.
        length: frames kept.
    """

    caches: list[Tensor]
    contexts: list[Tensor]
    length: int

    @classmethod
    def empty(cls, dit: DiT, num_steps: int, capacity: int) -> DiTState:
        """No frames yet; room for ``capacity`` before the buffers must grow."""
        config, weight = dit.config, dit.proj_out.weight
        shape = (config.depth, 2, BRANCHES, config.heads, capacity, config.dim_head)
        context = (2, BRANCHES, config.dim, POSITION_CONTEXT)
        return cls(
            caches=[weight.new_empty(shape) for _ in range(num_steps)],
            contexts=[weight.new_zeros(context) for _ in range(num_steps)],
            length=0,
        )

    def reserve(self, length: int) -> None:
        """Make room for ``length`` frames.

        A buffer grows by at least half, so that copying stays rare; and the buffers of the Euler steps grow in
        different chunks (that of step ``i`` when ``i`` more chunks would fit), so that no chunk pays for all of them.
        """
        chunk = max(1, length - self.length)
        for index, cache in enumerate(self.caches):
            capacity = cache.shape[4]
            if length + index * chunk > capacity:
                self._resize(index, max(length, capacity + capacity // 2))

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.caches, *self.contexts))

    def fork(self, capacity: int | None = None) -> DiTState:
        """An independent copy with room for ``capacity`` frames (None: as here); only kept frames are copied."""
        copy = DiTState(list(self.caches), [context.clone() for context in self.contexts], self.length)
        for index, cache in enumerate(self.caches):
            copy._resize(index, max(self.length, cache.shape[4] if capacity is None else capacity))
        return copy

    def _resize(self, index: int, capacity: int) -> None:
        old = self.caches[index]
        new = old.new_empty((*old.shape[:4], capacity, old.shape[5]))
        new[..., : self.length, :] = old[..., : self.length, :]
        self.caches[index] = new


def _weights(layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return weight.detach(), bias.detach()


def _prepare_block(block: DiTBlock) -> PreparedBlock:
    attention, feed_forward = block.attn, block.ff.ff
    first = feed_forward[0]
    assert isinstance(first, torch.nn.Sequential)
    return PreparedBlock(
        qkv=_joined(attention.to_q, attention.to_k, attention.to_v),
        out=_joined(attention.to_out[0]),
        ff_in=_joined(first[0]),
        ff_out=_joined(feed_forward[2]),
    )


def _joined(*layers: torch.nn.Module) -> Linear:
    """One layer whose outputs are those of ``layers``, one after the other."""
    small = [layer for layer in layers if isinstance(layer, Int8Linear)]
    if small:
        assert len(small) == len(layers), "either all of the layers have 8-bit products or none"
        return Int8Linear.joined(small)
    weights, biases = zip(*(_weights(layer) for layer in layers), strict=True)
    return partial(F.linear, weight=torch.cat(weights), bias=torch.cat(biases))


def _modulation(vectors: list[Tensor], step: int) -> Modulation:
    shift, scale, gate, ff_shift, ff_scale, ff_gate = (vector[step] for vector in vectors)
    return Modulation(shift, 1 + scale, gate, ff_shift, 1 + ff_scale, ff_gate)
