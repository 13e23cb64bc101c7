"""Token encoder of CosyVoice 2: look-ahead, conformer at the token rate, repetition, conformer at the mel rate.

``forward`` on the whole sequence is the definition; ``step`` computes the same frames chunk by chunk. Under the chunk
mask a finished token never changes, so a stream keeps keys and values of every layer, the tokens that the look-ahead's
second convolution looks back on, and the inputs that the convolution behind the repetition still needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.config import UNetFlowConfig
from vivace.layers.attention import KeyValueCache
from vivace.layers.relative import InputEmbedding, RelativeLayer, chunk_mask, new_cache, run_layers
from vivace.models.flow import LookAhead

_EPS = 1e-5


@dataclass(slots=True)
class EncoderState:
    """What a stream keeps.

    Attributes:
        tokens, frames: keys and values of the layers before and behind the repetition.
        context: last inputs of the convolution between them, repeated, ``[1, C, 2 * ratio]``.
    """

    tokens: KeyValueCache
    frames: KeyValueCache
    context: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        parts = (self.tokens.storage, self.frames.storage, self.context)
        return sum(part.numel() * part.element_size() for part in parts)

    def fork(self) -> EncoderState:
        """An independent copy."""
        return EncoderState(self.tokens.fork(), self.frames.fork(), self.context.clone())


class _Upsample(nn.Module):
    """Repeats every token ``ratio`` times, then convolves causally over ``2 * ratio + 1`` frames."""

    def __init__(self, channels: int, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.conv = nn.Conv1d(channels, channels, 2 * ratio + 1)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """``x [B, N, C]`` → ``[B, ratio * N, C]`` and the context for what follows."""
        repeated = x.transpose(1, 2).repeat_interleave(self.ratio, dim=2)
        joined = torch.cat((context, repeated), dim=2)
        return self.conv(joined).transpose(1, 2), joined[..., -2 * self.ratio :].clone()


class UpsampleEncoder(nn.Module):
    """Embedded tokens ``[B, N, input_size]`` to ``[B, ratio * N, output_size]``."""

    def __init__(self, config: UNetFlowConfig) -> None:
        super().__init__()
        sizes, self.ratio = config.encoder, config.token_mel_ratio
        self.config = config
        frames = config.unet.static_chunk_frames
        self.chunk_tokens = None if frames is None else frames // self.ratio
        self.embed = InputEmbedding(sizes.input_size, sizes.output_size)
        self.pre_lookahead_layer = LookAhead(config)
        self.encoders = nn.ModuleList(RelativeLayer(sizes, nn.SiLU()) for _ in range(sizes.num_blocks))
        self.up_layer = _Upsample(sizes.output_size, self.ratio)
        self.up_embed = InputEmbedding(sizes.output_size, sizes.output_size)
        self.up_encoders = nn.ModuleList(RelativeLayer(sizes, nn.SiLU()) for _ in range(config.num_up_blocks))
        self.after_norm = nn.LayerNorm(sizes.output_size, eps=_EPS)

    def forward(self, x: Tensor, context: Tensor | None, streaming: bool) -> Tensor:
        """The whole sequence.

        Args:
            context: the ``lookahead_tokens`` embedded tokens that follow; None at the end (zeros behind it).
            streaming: chunk mask instead of full attention.
        """
        chunk = self.chunk_tokens if streaming else None
        ahead = None if context is None else self.embed(context)
        hidden = self.pre_lookahead_layer(self.embed(x), ahead)
        mask = chunk_mask(x.shape[1], chunk, x.device)
        hidden = run_layers(self.encoders, hidden, mask, None)
        hidden, _ = self.up_layer(hidden, self._no_context(x.shape[0]))
        mask = chunk_mask(hidden.shape[1], None if chunk is None else chunk * self.ratio, x.device)
        result: Tensor = self.after_norm(run_layers(self.up_encoders, self.up_embed(hidden), mask, None))
        return result

    def new_state(self, capacity_frames: int) -> EncoderState:
        """Nothing encoded yet; room for so many frames before the caches grow."""
        sizes, weight, config = self.config.encoder, self.after_norm.weight, self.config
        tokens = new_cache(sizes, weight, capacity_frames // self.ratio, layers=sizes.num_blocks)
        frames = new_cache(sizes, weight, capacity_frames, layers=config.num_up_blocks)
        return EncoderState(tokens, frames, self._no_context(1))

    def step(self, state: EncoderState, x: Tensor, before: int, count: int) -> Tensor:
        """The next chunk; it sees all that is kept and itself. Changes ``state``.

        Args:
            x: embedded tokens ``[1, before + n, C]``: those that the look-ahead looks back on, the chunk's own, and up
                to ``lookahead_tokens`` more (zeros behind the last).
            before, count: how many of them lie before the chunk, and how many are its own.

        Returns:
            ``[1, ratio * count, output_size]``.
        """
        ahead = self.config.lookahead_tokens
        hidden = self.embed(x)
        hidden = F.pad(hidden, (0, 0, 0, before + count + ahead - x.shape[1]))
        hidden = self.pre_lookahead_layer(hidden[:, :-ahead], hidden[:, -ahead:])[:, before:]
        hidden = run_layers(self.encoders, hidden, None, state.tokens)
        hidden, state.context = self.up_layer(hidden, state.context)
        hidden = run_layers(self.up_encoders, self.up_embed(hidden), None, state.frames)
        result: Tensor = self.after_norm(hidden)
        return result

    def _no_context(self, batch: int) -> Tensor:
        return self.after_norm.weight.new_zeros(batch, self.config.encoder.output_size, 2 * self.ratio)
