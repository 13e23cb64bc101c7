"""What the flows of CosyVoice 2 and CosyVoice-300M share: embeddings, noise, the Euler solver with guidance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.config import RegulatedFlowConfig, UNetFlowConfig
from vivace.errors import SynthesisError
from vivace.layers.relative import forget_tables
from vivace.models.flow import time_grid
from vivace.models.solve_graphs import SolveGraphs
from vivace.models.unet import UNet

C = TypeVar("C", UNetFlowConfig, RegulatedFlowConfig)


class TokenFlow(nn.Module, Generic[C]):
    """Token embedding, speaker projection, noise and solver; subclasses encode the tokens.

    Args:
        config: sizes and solver settings. The noise is a function of ``noise_seed`` and the position alone.
    """

    use_graphs: bool | None = None
    """Whole utterances as CUDA graphs; None: on a GPU."""

    def __init__(self, config: C) -> None:
        super().__init__()
        self.config: C = config
        self.input_embedding = nn.Embedding(config.vocab_size, config.input_size)
        self.speaker_projection = nn.Linear(config.spk_embed_dim, config.output_size)
        self.encoder_proj = nn.Linear(config.encoder.output_size, config.output_size)
        self.unet = UNet(config.unet)
        generator = torch.Generator("cpu").manual_seed(config.noise_seed)
        # Not a buffer: the noise keeps float32 whatever the dtype of the weights.
        self.noise = torch.randn(
            1, config.output_size, config.noise_frames, generator=generator, device="cpu"
        )
        self._graphs: SolveGraphs | None = None
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Drops what was computed from the weights; they have changed."""
        forget_tables(self)
        self._graphs = None

    def project_speaker(self, embedding: Tensor) -> Tensor:
        """Speaker embedding ``[B, 192]`` of any length → ``[B, 80]``."""
        weight = self.speaker_projection.weight
        result: Tensor = self.speaker_projection(F.normalize(embedding.to(weight), dim=-1))
        return result

    def solve(
        self,
        noise: Tensor,
        mu: Tensor,
        cond: Tensor,
        spks: Tensor,
        streaming: bool,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Euler integration with classifier-free guidance; the unconditional branch keeps ``x`` alone.

        Args:
            noise: where the path starts, float32 ``[B, 80, T]``; ``mu`` and ``cond`` have its shape, ``spks``
                is ``[B, 80]``.
            lengths: valid frames of each row ``[B]``; None: all.

        Returns:
            mel, float32 ``[B, 80, T]``.
        """
        use = mu.is_cuda if self.use_graphs is None else self.use_graphs
        if use and not streaming and not self.training and SolveGraphs.fits(mu):
            if self._graphs is None:
                self._graphs = SolveGraphs(self._solve_padded)
            return self._graphs.run(noise, mu, cond, spks, lengths)
        return self._solve(noise, mu, cond, spks, streaming, lengths)

    def _solve_padded(self, noise: Tensor, mu: Tensor, cond: Tensor, spks: Tensor, lengths: Tensor) -> Tensor:
        return self._solve(noise, mu, cond, spks, False, lengths)

    def _solve(
        self,
        noise: Tensor,
        mu: Tensor,
        cond: Tensor,
        spks: Tensor,
        streaming: bool,
        lengths: Tensor | None,
    ) -> Tensor:
        batch = noise.shape[0]
        lengths = None if lengths is None else lengths.repeat(2)
        mu, cond, spks = (torch.cat((part, torch.zeros_like(part))) for part in (mu, cond, spks))
        guidance = self.config.guidance_scale
        x = noise
        for t, dt in time_grid(self.config.num_steps):
            times = x.new_full((2 * batch,), t)
            rows = x.to(mu.dtype).repeat(2, 1, 1)
            velocity = self.unet(rows, mu, cond, spks, times, streaming, lengths).float()
            x = x + dt * ((1.0 + guidance) * velocity[:batch] - guidance * velocity[batch:])
        return x

    def train(self, mode: bool = True) -> Self:
        self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def check_length(self, num_frames: int) -> None:
        """Raise ``SynthesisError`` if a sequence of ``num_frames`` frames, prompt included, is too long."""
        config = self.config
        if num_frames > config.noise_frames:
            raise SynthesisError(
                f"The utterance and its prompt are longer than {config.num_tokens(config.noise_frames)} speech "
                "tokens, the most that the model can speak at once. Use a shorter text or prompt.",
                code="utterance_too_long",
            )


def _forget(model: TokenFlow[Any], _: object) -> None:
    """After loading a state dict. Not a closure, so that a copy of a model forgets its own."""
    model.forget()
