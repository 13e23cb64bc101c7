"""The network of the speaker encoder: Kaldi filter bank to 192 numbers of length one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.mini.tokenizer_model import ConvBlock, round_weights, valid

BANKS = 80


@dataclass(frozen=True)
class SpeakerSizes:
    """Sizes of the shipped encoder."""

    width: int = 160
    blocks: int = 4
    kernel: int = 7
    widen: int = 2
    attention: int = 64
    embedding: int = 192


class SpeakerNet(nn.Module):
    """One strided convolution, convolution blocks at 50 Hz, mean and deviation with learned weights."""

    def __init__(self, sizes: SpeakerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.enter = nn.Conv1d(BANKS, sizes.width, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(
            ConvBlock(sizes.width, sizes.kernel, sizes.widen) for _ in range(sizes.blocks)
        )
        self.norm = nn.LayerNorm(sizes.width)
        self.attend1 = nn.Linear(sizes.width, sizes.attention)
        self.attend2 = nn.Linear(sizes.attention, sizes.width)
        self.leave = nn.Linear(2 * sizes.width, sizes.embedding)

    def forward(self, banks: Tensor, lengths: Tensor, drop: float = 0.0) -> Tensor:
        """``[batch, frames, 80]`` (0 behind a row's end) to unit vectors ``[batch, 192]``, float32."""
        x = F.silu(self.enter(banks.transpose(1, 2)).transpose(1, 2))
        inside = valid((lengths + 1) // 2, x.shape[1])
        for block in self.blocks:
            x = block(x, inside, drop)
        x = self.norm(x).float()
        scores = self.attend2(torch.tanh(self.attend1(x))).float()
        weights = scores.masked_fill(inside == 0, -torch.inf).softmax(1)
        mean = (weights * x).sum(1)
        spread = (weights * (x - mean[:, None]).square()).sum(1)
        pooled = torch.cat([mean, (spread + 1e-4).sqrt()], -1)
        return F.normalize(self.leave(pooled).float(), dim=-1)


def save(path: str, net: SpeakerNet, report: dict[str, Any]) -> None:
    """Write the network alone; the classes exist only for training."""
    torch.save({"sizes": asdict(net.sizes), "report": report, "state": net.state_dict()}, path)


def load_speaker(path: str, device: torch.device) -> SpeakerNet:
    """Read what ``save`` wrote, with the weights as they are."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    net = SpeakerNet(SpeakerSizes(**found["sizes"]))
    net.load_state_dict(found["state"])
    return net.to(device)


def load_shipped_speaker(path: str, device: torch.device) -> SpeakerNet:
    """As ``load_speaker``, with the weights rounded as in the exported file, in evaluation mode."""
    net = load_speaker(path, device).eval()
    round_weights(net)
    return net
