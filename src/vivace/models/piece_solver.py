"""One launch of CosyVoice-300M's flow: windows of ``S`` utterances, encoder and all Euler steps, as two CUDA graphs.

The host sends one packet (token ids, lengths, where between the tokens each frame lies, which noise it begins with);
the rest happens on the device. One graph encodes, the other takes one Euler step and counts it, so that it is captured
once and replayed for every step. Rows are padded to one length, and end where they would alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.layers.precision import full_float32
from vivace.layers.relative import RelativeLayer
from vivace.models.capture import before_capture, capturing
from vivace.models.flow import time_grid
from vivace.models.flow_regulated import RegulatedFlow
from vivace.models.unet_packed import PackedUNet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vivace.kernels.unet_reference import PlainUNetOps

HEADER = 2
"""Numbers of a row in the packet before the rest: tokens, frames."""


class WindowRow(NamedTuple):
    """What the host knows of one row.

    Attributes:
        ids: tokens of prompt and window.
        places: where between them each frame lies, float64 ``[frames]``.
        noise: column of the noise that each frame begins with, ``[frames]``.
        speaker: projected speaker embedding ``[80]``. prompt_mel: ``[n, 80]``; both on the device.
    """

    ids: Sequence[int]
    places: NDArray[np.float64]
    noise: NDArray[np.int64]
    speaker: Tensor
    prompt_mel: Tensor


@dataclass(slots=True)
class SolverParts:
    """What the solvers of one model share.

    Attributes:
        noise: ``[noise_frames, 80]``, float32. steps: length of each Euler step, float32.
        memory: of the graphs, which never run side by side.
    """

    model: RegulatedFlow
    unet: PackedUNet
    ops: PlainUNetOps
    noise: Tensor
    steps: Tensor
    memory: Any = None

    @classmethod
    @torch.no_grad()
    def of(cls, model: RegulatedFlow, ops: PlainUNetOps, max_frames: int) -> SolverParts:
        """Packs the weights, for rows of up to ``max_frames``."""
        device = model.speaker_projection.weight.device
        grid = time_grid(model.config.num_steps)
        longest = most_tokens(model, max_frames)
        for layer in model.encoder.encoders:
            assert isinstance(layer, RelativeLayer)
            layer.self_attn.positions(longest, longest)
        return cls(
            model,
            PackedUNet(model.unet, [t for t, _ in grid], ops),
            ops,
            model.noise[0].T.contiguous().to(device),
            torch.tensor([dt for _, dt in grid], device=device),
        )

    def tables(self) -> list[Tensor]:
        """Projected distances of the encoder's layers as they are now; a longer row makes larger ones."""
        return [cast(RelativeLayer, layer).self_attn.table()[0] for layer in self.model.encoder.encoders]


def most_tokens(model: RegulatedFlow, frames: int) -> int:
    """Tokens of prompt and window that so many frames may have; both are rounded."""
    return int((frames + 1) * 256 * model.config.token_rate_hz / 22_050) + 3


class PieceSolver:
    """Buffers and graphs for ``rows`` windows of up to ``frames`` frames.

    Attributes:
        x: the mel after ``run``, float32 ``[rows, frames, 80]``, zero behind each row's end.
        faults: true where a row's values are not finite, ``[rows]``; after ``run`` as well.
    """

    def __init__(self, parts: SolverParts, rows: int, frames: int, use_graphs: bool) -> None:
        config, weight = parts.model.config, parts.model.speaker_projection.weight
        self._parts, self.rows, self.frames, self._use_graphs = parts, rows, frames, use_graphs
        self._tokens, mel = most_tokens(parts.model, frames), config.output_size
        device, on_gpu = weight.device, weight.is_cuda
        width = HEADER + self._tokens + 2 * frames
        self._host = [torch.zeros(rows, width, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self._host_shares = [torch.zeros(rows, frames, pin_memory=on_gpu) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._packet = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._shares = torch.zeros(rows, frames, device=device)
        self._speakers = weight.new_zeros(rows, mel)
        self._conditions = weight.new_zeros(rows, frames, mel)
        self._voices: list[Tensor | None] = [None] * rows
        # Both branches behind each other: with and without condition.
        self._joined = weight.new_zeros(2 * rows, frames, 4 * mel)
        self._scales = parts.unet.new_scales(2 * rows, frames, weight)
        self._counts = self._scales[0].counts[:rows]  # kernels read them as lying behind each other
        self._valid = torch.zeros(rows, frames, 1, dtype=torch.bool, device=device)
        self._tables = parts.tables()  # which the graphs read, though others may have taken their place
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self.x = torch.zeros(rows, frames, mel, device=device)
        self.faults = torch.zeros(rows, dtype=torch.bool, device=device)
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None

    def send(self, rows: Sequence[WindowRow]) -> None:
        """Puts the rows on their way to the device; those that are left over are empty."""
        self._turn ^= 1
        event = self._sent[self._turn]
        if event is not None:  # the copy from two launches ago has read these buffers long since
            event.synchronize()
        packet, shares = self._host[self._turn], self._host_shares[self._turn]
        numbers, weights = packet.numpy(), shares.numpy()
        numbers[:], weights[:] = 0, 0.0
        behind = HEADER + self._tokens
        for number, row in enumerate(rows):
            left = np.floor(row.places)
            count = len(left)
            numbers[number, :HEADER] = len(row.ids), count
            numbers[number, HEADER : HEADER + len(row.ids)] = np.maximum(row.ids, 0)
            numbers[number, behind : behind + count] = left
            numbers[number, behind + self.frames : behind + self.frames + count] = row.noise
            weights[number, :count] = row.places - left
            self._set_voice(number, row)
        self._packet.copy_(packet, non_blocking=True)
        self._shares.copy_(shares, non_blocking=True)
        if self._packet.is_cuda:
            event = self._sent[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

    def _set_voice(self, number: int, row: WindowRow) -> None:
        self._speakers[number].copy_(row.speaker, non_blocking=True)
        if self._voices[number] is not row.prompt_mel:
            length = len(row.prompt_mel)
            self._conditions[number, :length].copy_(row.prompt_mel, non_blocking=True)
            self._conditions[number, length:].zero_()
            self._voices[number] = row.prompt_mel

    @torch.no_grad()
    def run(self) -> None:
        """Solves what was sent; the mel is in ``x``."""
        if self._use_graphs and self._graphs is None:
            self.capture()
        encode, step = (
            (self._encode, self._euler) if self._graphs is None else (g.replay for g in self._graphs)
        )
        with full_float32(self._packet.device):
            encode()
            for _ in range(len(self._parts.steps)):
                step()
        # What is not finite stays so from one step to the next.
        self.faults.copy_(~self.x.isfinite().flatten(1).all(dim=1))

    @torch.no_grad()
    def rehearse(self) -> None:
        """Runs once, without memory, what graphs hold."""
        self._encode()
        self._euler()

    @torch.no_grad()
    def capture(self) -> None:
        """Makes the graphs."""
        device = self._packet.device
        with before_capture(device), full_float32(device):
            self._encode()
            self._euler()
        torch.cuda.synchronize(device)
        graphs = []
        for work in (self._encode, self._euler):
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, device, self._parts.memory), full_float32(device):
                work()
            self._parts.memory = self._parts.memory or graph.pool()
            graphs.append(graph)
        self._graphs = graphs[0], graphs[1]

    # -- on the device -------------------------------------------------------------------------------------------

    def _encode(self) -> None:
        """What the Euler steps begin with; the number of the step becomes 0."""
        packet, behind = self._packet, HEADER + self._tokens
        self._parts.unet.set_scales(self._scales, packet[:, 1].repeat(2))
        places = torch.arange(self.frames, device=packet.device)
        valid = self._valid.copy_((places < self._counts[:, None])[..., None])
        mu = self._mu(packet)
        noise = packet[:, behind + self.frames :]
        self.x.copy_(torch.where(valid, self._parts.noise[noise], 0.0))
        mel = self.x.shape[2]
        speakers = self._speakers[:, None].expand(-1, self.frames, -1)
        condition = torch.cat((mu, speakers, self._conditions), dim=2)
        self._joined.zero_()
        self._joined[: self.rows, :, mel:] = torch.where(valid, condition, 0.0)
        self._step.zero_()

    def _mu(self, packet: Tensor) -> Tensor:
        """Encoded tokens at the mel rate, ``[rows, frames, 80]``."""
        model, behind = self._parts.model, HEADER + self._tokens
        ids, left = packet[:, HEADER:behind], packet[:, behind : behind + self.frames]
        last = (packet[:, :1] - 1).clamp(min=0)
        # An empty row sees its first place, so that its values stay finite.
        keys = torch.arange(self._tokens, device=packet.device) <= last
        encoded = model.encoder(model.input_embedding(ids), keys[:, None, None])
        hidden = model.encoder_proj(encoded)
        right = torch.minimum(left + 1, last)
        share = self._shares[..., None].to(hidden.dtype)
        x = _rows_at(hidden, left) * (1 - share) + _rows_at(hidden, right) * share
        return self._regulate(torch.where(self._valid, x, 0.0))

    def _regulate(self, x: Tensor) -> Tensor:
        """The convolutions of the length regulator, channels last."""
        layers = list(self._parts.model.length_regulator.model)
        for conv, norm in zip(layers[:-1:3], layers[1:-1:3], strict=True):
            assert isinstance(conv, nn.Conv1d)
            assert isinstance(norm, nn.GroupNorm)
            y = F.conv1d(x.transpose(1, 2), conv.weight, None, padding=1).transpose(1, 2).contiguous()
            affine = norm.weight, norm.bias, norm.eps
            x = self._parts.ops.group_norm_mish(y, cast(Tensor, conv.bias), affine, 1, self._counts)
        last = cast(nn.Conv1d, layers[-1])
        return F.linear(x, last.weight.squeeze(2), last.bias)

    def _euler(self) -> None:
        """One step of the solver with guidance."""
        parts, rows, mel = self._parts, self.rows, self.x.shape[2]
        guidance = parts.model.config.guidance_scale
        self._joined.view(2, rows, self.frames, -1)[..., :mel] = self.x
        velocity = parts.unet.velocity(self._joined, self._step, self._scales).float()
        guided = (1.0 + guidance) * velocity[:rows] - guidance * velocity[rows:]
        self.x.copy_(torch.where(self._valid, self.x + parts.steps[self._step] * guided, 0.0))
        self._step.add_(1)


def _rows_at(x: Tensor, places: Tensor) -> Tensor:
    """``x [B, T, C]`` at ``places [B, n]``: ``[B, n, C]``."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
