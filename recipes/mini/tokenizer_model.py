"""The networks of the speech tokenizer: the encoder that is shipped and the heads that only train it.

The encoder turns 100 log-mel frames a second into 25 numbers a second: two strided convolutions, a few
transformer blocks that look 1.3 s to either side (so that one second and thirty behave alike), and finite
scalar quantisation with three levels (the index convention of CosyVoice 3: sum of digit · 3^place). What the
numbers mean is decided by the heads: a small decoder that must name the phonemes from the numbers alone, and
a wider one that must give back the mel, told the voice by 24 numbers of the whole utterance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MEL_BINS = 128
LEAST_INT8 = 2048  # weights with fewer numbers are shipped as they are


@dataclass(frozen=True)
class TokenizerSizes:
    """Sizes of the shipped encoder."""

    levels: int = 5
    width: int = 192
    blocks: int = 4
    heads: int = 4
    feed_forward: int = 576
    kernel: int = 7
    window_tokens: int = 32

    @property
    def codes(self) -> int:
        return int(3**self.levels)


def valid(lengths: Tensor, size: int) -> Tensor:
    """``[batch, size, 1]``: 1.0 within the length of a row."""
    return (torch.arange(size, device=lengths.device)[None] < lengths[:, None]).float().unsqueeze(-1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions: the first half of the channels against the second."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Block(nn.Module):
    """Attention within a window, depthwise convolution, feed-forward; each behind a layer norm."""

    def __init__(self, sizes: TokenizerSizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.depthwise = nn.Conv1d(width, width, sizes.kernel, padding=sizes.kernel // 2, groups=width)
        self.pointwise = nn.Linear(width, width)
        self.norm3 = nn.LayerNorm(width)
        self.up = nn.Linear(width, sizes.feed_forward)
        self.down = nn.Linear(sizes.feed_forward, width)

    def forward(
        self, x: Tensor, inside: Tensor, seen: Tensor, turns: tuple[Tensor, Tensor], drop: float
    ) -> Tensor:
        """``[batch, tokens, width]``; ``seen`` is bool ``[batch, 1, tokens, tokens]``."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = rotate(qkv[0], *turns).type_as(qkv), rotate(qkv[1], *turns).type_as(qkv)
        heard = F.scaled_dot_product_attention(query, key, qkv[2], attn_mask=seen)
        x = x + F.dropout(self.out(heard.transpose(1, 2).reshape(batch, tokens, width)), drop, self.training)
        y = (self.norm2(x) * inside).transpose(1, 2)
        x = x + F.dropout(self.pointwise(F.silu(self.depthwise(y).transpose(1, 2))), drop, self.training)
        return x + F.dropout(self.down(F.silu(self.up(self.norm3(x)))), drop, self.training)


class Quantiser(nn.Module):
    """Finite scalar quantisation; a batch norm without weights keeps all three levels in use."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(width, levels)
        self.register_buffer("mean", torch.zeros(levels))
        self.register_buffer("deviation", torch.ones(levels))
        self.mean: Tensor
        self.deviation: Tensor

    def normal(self, x: Tensor, inside: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to ``[batch, tokens, levels]`` of mean 0 and deviation 1, float32."""
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = self.narrow(x.float())
        if not self.training:
            return (y - self.mean) / self.deviation
        count = inside.sum()
        mean = (y * inside).sum((0, 1)) / count
        deviation = (((y - mean).square() * inside).sum((0, 1)) / count + 1e-5).sqrt()
        with torch.no_grad():
            self.mean.lerp_(mean, 0.02)
            self.deviation.lerp_(deviation, 0.02)
        return (y - mean) / deviation

    def forward(self, x: Tensor, inside: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to levels −1, 0, 1 ``[batch, tokens, levels]``."""
        return rounded(self.normal(x, inside))


def rounded(normal: Tensor) -> Tensor:
    """What ``Quantiser.normal`` gives, bounded and rounded to −1, 0, 1; gradients pass straight through."""
    bounded = torch.tanh(normal) * 0.999
    return bounded + (bounded.round() - bounded).detach()


def alikeness(normal: Tensor, inside: Tensor) -> Tensor:
    """Mean squared correlation between two different places of the code: 0 when each says something new."""
    flat = (normal * inside).flatten(0, 1)
    correlation = flat.T @ flat / inside.sum()
    return (correlation.square().sum() - correlation.diagonal().square().sum()) / (
        normal.shape[-1] * (normal.shape[-1] - 1)
    )


def to_index(levels: Tensor) -> Tensor:
    """Levels −1, 0, 1 in the last dimension to int64 numbers: sum of (level + 1) · 3^place."""
    powers = 3 ** torch.arange(levels.shape[-1], device=levels.device)
    return ((levels.round().long() + 1) * powers).sum(-1)


def to_levels(index: Tensor, places: int) -> Tensor:
    """Inverse of ``to_index``, float32."""
    powers = 3 ** torch.arange(places, device=index.device)
    return (torch.div(index.unsqueeze(-1), powers, rounding_mode="floor") % 3 - 1).float()


class Encoder(nn.Module):
    """What is shipped: log-mel ``[batch, 128, frames]`` to levels at 25 Hz."""

    def __init__(self, sizes: TokenizerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.width
        self.conv1 = nn.Conv1d(MEL_BINS, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(width)
        self.quantiser = Quantiser(width, sizes.levels)

    def turns(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary positions, ``[tokens, channels of a head / 2]``."""
        half = self.sizes.width // self.sizes.heads // 2
        rates = 1000.0 ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(tokens, device=device)[:, None] * rates[None]
        return angles.cos(), angles.sin()

    def features(self, mel: Tensor, lengths: Tensor, drop: float = 0.0) -> tuple[Tensor, Tensor]:
        """Before the quantiser: ``[batch, tokens, width]`` and tokens of each row, ``ceil(frames / 4)``."""
        half, quarter = (lengths + 1) // 2, (lengths + 3) // 4
        x = F.silu(self.conv1(mel))
        x = F.silu(self.conv2(x * valid(half, x.shape[2]).transpose(1, 2))).transpose(1, 2)
        tokens = x.shape[1]
        inside = valid(quarter, tokens)
        place = torch.arange(tokens, device=mel.device)
        near = (place[:, None] - place[None]).abs() <= self.sizes.window_tokens
        seen = near[None, None] & (inside.bool()[:, None, None, :, 0] | (place[:, None] == place[None]))
        turns = self.turns(tokens, mel.device)
        for block in self.blocks:
            x = block(x, inside, seen, turns, drop)
        return self.norm(x), quarter

    def forward(self, mel: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Token numbers int64 ``[batch, tokens]`` and their count in each row."""
        x, counts = self.features(mel, lengths)
        return to_index(self.quantiser(x, valid(counts, x.shape[1]))), counts


class ConvBlock(nn.Module):
    """Depthwise convolution, norm, two wide linear layers (ConvNeXt), residual.

    Args:
        ahead: how many places to the right the convolution looks; as many as to the left unless given.
    """

    def __init__(self, width: int, kernel: int, widen: int = 3, ahead: int | None = None) -> None:
        super().__init__()
        self.late = 0 if ahead is None else kernel // 2 - ahead
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, widen * width)
        self.down = nn.Linear(widen * width, width)

    def forward(self, x: Tensor, inside: Tensor, drop: float = 0.0) -> Tensor:
        """``[batch, tokens, width]``."""
        y = (x * inside).transpose(1, 2)
        if self.late:
            y = F.pad(y, (self.late, -self.late))
        y = self.depthwise(y).transpose(1, 2)
        return x + F.dropout(self.down(F.silu(self.up(self.norm(y)))), drop, self.training)


class CodeReader(nn.Module):
    """Levels to features: any function of one number first, then a few blocks of context.

    Args:
        causal: only the first block looks ahead, ``kernel // 2`` tokens.
    """

    def __init__(
        self, levels: int, width: int, kernel: int, blocks: int, extra: int = 0, causal: bool = False
    ) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(levels, width), nn.SiLU(), nn.Linear(width, width))
        self.extra = nn.Linear(extra, width) if extra else None
        self.blocks = nn.ModuleList(
            ConvBlock(width, kernel, ahead=0 if causal and place else None) for place in range(blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(
        self, levels: Tensor, inside: Tensor, extra: Tensor | None = None, drop: float = 0.0
    ) -> Tensor:
        """``[batch, tokens, levels]`` (and ``[batch, extra]``) to ``[batch, tokens, width]``."""
        x = self.enter(levels)
        if self.extra is not None and extra is not None:
            x = x + self.extra(extra)[:, None]
        for block in self.blocks:
            x = block(x, inside, drop)
        return self.norm(x)


class VoiceVector(nn.Module):
    """24 numbers for a whole utterance: all that the mel decoder learns about the speaker."""

    def __init__(self, numbers: int = 24, width: int = 128) -> None:
        super().__init__()
        self.enter = nn.Linear(MEL_BINS, width)
        self.block = ConvBlock(width, 5)
        self.leave = nn.Linear(2 * width, numbers)

    def forward(self, mel: Tensor, inside: Tensor) -> Tensor:
        """Mel ``[batch, frames, 128]`` to ``[batch, numbers]``."""
        x = F.silu(self.block(F.silu(self.enter(mel)), inside))
        count = inside.sum(1).clamp_min(1.0)
        mean = (x * inside).sum(1) / count
        spread = ((x - mean[:, None]).square() * inside).sum(1) / count
        return torch.tanh(self.leave(torch.cat([mean, (spread + 1e-4).sqrt()], -1)))


class TokenizerTrainer(nn.Module):
    """Encoder and heads. ``symbols`` counts CTC's blank."""

    def __init__(self, sizes: TokenizerSizes, symbols: int) -> None:
        super().__init__()
        self.symbols = symbols
        self.encoder = Encoder(sizes)
        self.early = nn.Linear(sizes.width, 2 * symbols)
        self.reader = CodeReader(sizes.levels, 192, kernel=5, blocks=3)
        self.late = nn.Linear(192, 2 * symbols)
        self.voice = VoiceVector()
        # As the flow, it looks three tokens ahead, so that no token comes later than the sound it stands for.
        self.painter = CodeReader(sizes.levels, 256, kernel=7, blocks=4, extra=24, causal=True)
        self.mel = nn.Linear(256, 2 * MEL_BINS)

    def read(self, levels: Tensor, counts: Tensor, drop: float = 0.0) -> Tensor:
        """Levels to CTC logits at 50 Hz, ``[batch, 2 * tokens, symbols]``."""
        x = self.late(self.reader(levels, valid(counts, levels.shape[1]), drop=drop))
        return x.reshape(len(x), -1, self.symbols)

    def forward(self, mel: Tensor, clean: Tensor, lengths: Tensor, drop: float) -> dict[str, Tensor]:
        """All that the losses need.

        Args:
            mel: disturbed log-mel ``[batch, 128, frames]``, the encoder's input.
            clean: what the mel decoder must give back, at 50 Hz, ``[batch, frames / 2, 128]``.
            lengths: frames of each row.
        """
        x, counts = self.encoder.features(mel, lengths, drop)
        inside = valid(counts, x.shape[1])
        normal = self.encoder.quantiser.normal(x, inside)
        levels = rounded(normal)
        voice = self.voice(clean, valid(lengths // 2, clean.shape[1]))
        painted = self.mel(self.painter(levels, inside, voice, drop)).reshape(len(x), -1, MEL_BINS)
        return {
            "early": self.early(x).reshape(len(x), -1, self.symbols),
            "late": self.read(levels, counts, drop),
            "mel": painted,
            "alike": alikeness(normal, inside),
            "index": to_index(levels.detach()),
            "counts": counts,
        }


def rounded_int8(weight: Tensor) -> Tensor:
    """The nearest weights that int8 with one scale for each output channel can hold."""
    scale = weight.abs().flatten(1).amax(1).clamp_min(1e-12) / 127.0
    scale = scale.reshape(-1, *[1] * (weight.ndim - 1))
    return (weight / scale).round() * scale


def round_weights(module: nn.Module) -> None:
    """Round every large weight in place, so that training code and the exported file compute the same."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1 and weight.numel() >= LEAST_INT8:
                weight.copy_(rounded_int8(weight))


def save(path: str, model: TokenizerTrainer, names: list[str], kind: str, report: dict[str, Any]) -> None:
    """Write a checkpoint: the encoder in float32, the heads in half precision."""
    state = {
        name: value.float() if name.startswith("encoder.") else value.half()
        for name, value in model.state_dict().items()
    }
    sizes = asdict(model.encoder.sizes)
    torch.save({"sizes": sizes, "symbols": names, "kind": kind, "report": report, "state": state}, path)


def load(path: str, device: torch.device) -> tuple[TokenizerTrainer, list[str], str]:
    """Read a checkpoint: the networks (not rounded, in training mode), the symbols and their kind."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    model = TokenizerTrainer(TokenizerSizes(**found["sizes"]), len(found["symbols"]))
    model.load_state_dict({name: value.float() for name, value in found["state"].items()})
    return model.to(device), found["symbols"], found["kind"]


def load_shipped(path: str, device: torch.device) -> tuple[TokenizerTrainer, list[str], str]:
    """As ``load``, with the encoder's weights rounded as in the exported file, in evaluation mode."""
    model, names, kind = load(path, device)
    round_weights(model.encoder)
    return model.eval(), names, kind


class TokenRecogniser:
    """Names the phonemes of token sequences: the check of what a language model wrote."""

    def __init__(self, checkpoint: str, device: torch.device) -> None:
        self.model, self.names, self.kind = load_shipped(checkpoint, device)
        self.device = device

    @torch.inference_mode()
    def recognise(self, tokens: list[Tensor]) -> list[list[int]]:
        """Token numbers, one tensor ``[tokens]`` for each utterance, to symbols (places in ``names``)."""
        counts = torch.tensor([len(row) for row in tokens])
        padded = nn.utils.rnn.pad_sequence([row.long().cpu() for row in tokens], batch_first=True)
        levels = to_levels(padded.to(self.device), self.model.encoder.sizes.levels)
        return greedy(self.model.read(levels, counts.to(self.device)), 2 * counts)


def greedy(logits: Tensor, lengths: Tensor) -> list[list[int]]:
    """CTC's likeliest symbols at each place, repeats and blanks (0) taken out."""
    best = logits.argmax(-1).cpu()
    said: list[list[int]] = []
    for row, length in zip(best, lengths.tolist(), strict=True):
        kept = torch.unique_consecutive(row[:length])
        said.append(kept[kept > 0].tolist())
    return said
