"""Flow matching of CosyVoice-300M: speech tokens to mel (``MaskedDiffWithXvec`` of the reference).

Tokens come at 50 or 25 Hz, mel frames at 22,050 / 256 = 86.1 Hz; a length regulator interpolates between the rates.
Encoder and U-Net look both ways over the whole utterance, so a stream cannot equal the whole exactly: ``flow_pieces``
computes pieces with what lies around them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.config import RegulatedFlowConfig
from vivace.layers.relative import RelativeEncoder
from vivace.models.token_flow import TokenFlow

HEAD_TOKENS = 20
"""Tokens at both ends of the new part that are interpolated by themselves, so that pieces which overlap there agree."""


class LengthRegulator(nn.Module):
    """Encoded tokens at the token rate to the mel rate: linear interpolation, then convolutions with group norm."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(num_layers):
            layers += [nn.Conv1d(channels, channels, 3, padding=1), nn.GroupNorm(1, channels), nn.Mish()]
        self.model = nn.Sequential(*layers, nn.Conv1d(channels, channels, 1))

    def forward(
        self, prompt: Tensor, new: Tensor, prompt_frames: int, new_frames: int, end_frames: int
    ) -> Tensor:
        """Prompt and new part are interpolated apart, so that the border between them is clear.

        Args:
            prompt, new: encoded tokens ``[1, C, n]``; ``prompt`` may be empty.
            prompt_frames, new_frames: lengths to reach.
            end_frames: length of ``HEAD_TOKENS`` tokens.

        Returns:
            ``[1, C, prompt_frames + new_frames]``.
        """
        if new.shape[2] <= 2 * HEAD_TOKENS:
            return self.join(prompt, prompt_frames, _stretch(new, new_frames))
        ends = HEAD_TOKENS
        parts = (
            _stretch(new[..., :ends], end_frames),
            _stretch(new[..., ends:-ends], new_frames - 2 * end_frames),
            _stretch(new[..., -ends:], end_frames),
        )
        return self.join(prompt, prompt_frames, torch.cat(parts, dim=2))

    def join(self, prompt: Tensor, prompt_frames: int, new: Tensor) -> Tensor:
        """The convolutions over the prompt, which is stretched first, and the new part, which is so already."""
        parts = [_stretch(prompt, prompt_frames), new] if prompt_frames else [new]
        result: Tensor = self.model(torch.cat(parts, dim=2))
        return result


def _stretch(x: Tensor, num_frames: int) -> Tensor:
    return F.interpolate(x, size=num_frames, mode="linear")


class RegulatedFlow(TokenFlow[RegulatedFlowConfig]):
    """Speech tokens, a voice prompt and a speaker embedding in; mel out."""

    def __init__(self, config: RegulatedFlowConfig) -> None:
        super().__init__(config)
        self.encoder = RelativeEncoder(config.encoder)
        self.length_regulator = LengthRegulator(config.output_size, config.num_regulator_layers)

    def encode(self, tokens: Tensor, num_prompt: int, prompt_frames: int) -> Tensor:
        """Tokens ``[B, N]``, ``num_prompt`` of them the prompt's, → ``mu`` ``[1, 80, frames]``."""
        hidden = self.encoder_proj(self.encoder(self.input_embedding(tokens.clamp(min=0)))).transpose(1, 2)
        new = hidden[..., num_prompt:]
        sizes = (self.config.num_frames(new.shape[2]), self.config.num_frames(HEAD_TOKENS))
        result: Tensor = self.length_regulator(hidden[..., :num_prompt], new, prompt_frames, *sizes)
        return result

    def generate(
        self,
        tokens: Tensor,
        prompt_mel: Tensor,
        embedding: Tensor,
        streaming: bool = False,
        num_prompt: int | None = None,
    ) -> Tensor:
        """The whole sequence at once: the definition of this stage.

        Args:
            tokens: tokens of the prompt, then the new ones, ``[N]``.
            prompt_mel: mel of the prompt ``[frames, 80]``; no frames without a prompt.
            embedding: speaker embedding ``[192]``.
            streaming: must be False; there is no mask under which finished frames stay.
            num_prompt: how many tokens are the prompt's; None: as many as its mel has room for.

        Returns:
            mel of the frames after the prompt, float32 ``[80, num_frames(new tokens)]``.

        Raises:
            SynthesisError: the sequence is longer than the noise.
        """
        assert not streaming, "this flow has no chunk mask"
        config, prompt_frames = self.config, prompt_mel.shape[0]
        if num_prompt is None:
            num_prompt = self.prompt_tokens(prompt_frames)
        self.check_length(prompt_frames + config.num_frames(len(tokens) - num_prompt))
        mu = self.encode(tokens[None], num_prompt, prompt_frames)
        noise = self.noise[..., : mu.shape[-1]].to(mu.device)
        return self.integrate(noise, mu, prompt_mel, self.project_speaker(embedding[None]))[:, prompt_frames:]

    def prompt_tokens(self, num_frames: int) -> int:
        """Tokens of a prompt whose mel has so many frames (``num_frames`` of the configuration rounds down)."""
        return math.ceil(num_frames * 256 * self.config.token_rate_hz / 22_050)

    def integrate(self, noise: Tensor, mu: Tensor, prompt_mel: Tensor, spks: Tensor) -> Tensor:
        """From ``noise`` ``[1, 80, T]`` to mel ``[80, T]``, the prompt's frames included."""
        cond = torch.zeros_like(mu)
        cond[0, :, : prompt_mel.shape[0]] = prompt_mel.to(mu).T
        return self.solve(noise, mu, cond, spks, streaming=False)[0]
