"""Flow matching of CosyVoice 2: speech tokens to mel (``CausalMaskedDiffWithXvec`` of the reference).

Tokens come at 25 Hz, mel frames at 50 Hz. ``generate`` on the whole sequence is the definition; ``step`` computes the
same frames chunk by chunk, with the state of the encoder and, per Euler step and guidance branch, of the estimator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.config import UNetFlowConfig
from vivace.models.dit_stream import DiTState
from vivace.models.flow import LOOKAHEAD_KERNEL, time_grid
from vivace.models.flow_encoder import EncoderState, UpsampleEncoder
from vivace.models.flow_stream import ShouldStop, check_wanted
from vivace.models.token_flow import TokenFlow
from vivace.models.unet_stream import PreparedUNet, new_unet_state


class PreparedUNetFlow(NamedTuple):
    """Computed once from the weights.

    Attributes:
        unet: the velocity estimator for the solver's fixed times.
        grid: ``(t, dt)`` of every Euler step.
        noise: float32 ``[80, noise_frames]`` on the weights' device.
    """

    unet: PreparedUNet
    grid: list[tuple[float, float]]
    noise: Tensor


@dataclass(slots=True)
class UNetFlowStream:
    """Everything that one stream keeps between two calls of ``UNetFlow.step``.

    Attributes:
        spks: projected speaker embedding ``[80]``.
        prompt_mel: ``[frames, 80]``.
        unet: keys, values and convolution contexts of the finished frames.
        encoder: the encoder's state.
        waiting: tokens that came and whose frames are not finished.
        before: the last tokens before ``waiting``, as many as the look-ahead layer looks back on.
        finished: the last token came and its frames were returned.
        should_stop: as in ``FlowStream``.
    """

    spks: Tensor
    prompt_mel: Tensor
    unet: DiTState
    encoder: EncoderState
    waiting: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    finished: bool = False
    should_stop: ShouldStop | None = None

    @property
    def num_frames(self) -> int:
        """Frames finished so far, those of the prompt included."""
        return self.unet.length

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        return self.unet.num_bytes + self.encoder.num_bytes

    def fork(self, capacity_frames: int | None = None) -> UNetFlowStream:
        """A stream that goes on from here independently; see ``FlowStream.fork``."""
        return UNetFlowStream(
            self.spks,
            self.prompt_mel,
            self.unet.fork(capacity_frames),
            self.encoder.fork(),
            list(self.waiting),
            list(self.before),
            self.finished,
        )


class UNetFlow(TokenFlow[UNetFlowConfig]):
    """Speech tokens, a voice prompt and a speaker embedding in; mel out."""

    def __init__(self, config: UNetFlowConfig) -> None:
        super().__init__(config)
        self.encoder = UpsampleEncoder(config)
        self._prepared: PreparedUNetFlow | None = None

    def forget(self) -> None:
        super().forget()
        self._prepared = None

    def encode(self, tokens: Tensor, context: Tensor | None, streaming: bool) -> Tensor:
        """Tokens ``[B, N]`` → ``mu`` ``[B, 80, token_mel_ratio * N]``; arguments as in ``generate``."""
        ahead = None if context is None else self.input_embedding(context.clamp(min=0))
        hidden = self.encoder(self.input_embedding(tokens.clamp(min=0)), ahead, streaming)
        result: Tensor = self.encoder_proj(hidden).transpose(1, 2)
        return result

    def generate(
        self,
        tokens: Tensor,
        prompt_mel: Tensor,
        embedding: Tensor,
        streaming: bool,
        context: Tensor | None = None,
    ) -> Tensor:
        """The whole sequence at once: the definition of this stage.

        Args:
            tokens: tokens of the prompt, then the new ones, ``[N]``.
            prompt_mel: mel of the prompt ``[frames, 80]``; no frames without a prompt.
            embedding: speaker embedding ``[192]``.
            streaming: chunk masks instead of full attention.
            context: tokens that follow ``tokens``, ``[lookahead_tokens]``; None at the end of the sequence.

        Returns:
            mel of the frames after the prompt, float32 ``[80, token_mel_ratio * N - frames]``.

        Raises:
            SynthesisError: the sequence is longer than the noise.
        """
        self.check_length(self.config.num_frames(len(tokens)))
        mu = self.encode(tokens[None], None if context is None else context[None], streaming)
        prompt_frames = prompt_mel.shape[0]
        cond = torch.zeros_like(mu)
        cond[0, :, :prompt_frames] = prompt_mel.to(mu).T
        noise = self.noise[..., : mu.shape[-1]].to(mu.device)
        mel = self.solve(noise, mu, cond, self.project_speaker(embedding[None]), streaming)
        return mel[0, :, prompt_frames:]

    def prepare(self) -> PreparedUNetFlow:
        """Make the weights ready for streaming; see ``FlowModel.prepare``."""
        prepared = self._prepared
        if prepared is None:
            grid = time_grid(self.config.num_steps)
            noise = self.noise[0].to(self.speaker_projection.weight.device)
            prepared = PreparedUNetFlow(PreparedUNet(self.unet, [t for t, _ in grid]), grid, noise)
            self._prepared = prepared
        return prepared

    @torch.no_grad()
    def new_stream(
        self, embedding: Tensor, prompt_mel: Tensor, capacity_frames: int = 1024
    ) -> UNetFlowStream:
        """Begin a stream; see ``FlowModel.new_stream``."""
        prepared = self.prepare()
        spks = self.project_speaker(embedding[None].to(prepared.noise.device))[0]
        capacity = max(1, capacity_frames)
        return UNetFlowStream(
            spks=spks,
            prompt_mel=prompt_mel.to(spks),
            unet=new_unet_state(prepared.unet, self.config.num_steps, capacity),
            encoder=self.encoder.new_state(capacity),
        )

    @torch.no_grad()
    def step(self, stream: UNetFlowStream, tokens: Sequence[int], is_last: bool) -> Tensor:
        """Take the next tokens and compute every chunk that they complete; see ``FlowModel.step``."""
        assert not stream.finished, "the last token of this stream already came"
        assert self.encoder.chunk_tokens is not None, "only a causal estimator streams"
        chunk, ahead = self.encoder.chunk_tokens, self.config.lookahead_tokens
        self.check_length(stream.num_frames + self.config.num_frames(len(stream.waiting) + len(tokens)))
        stream.waiting.extend(tokens)
        prompt_left = max(0, stream.prompt_mel.shape[0] - stream.num_frames)
        chunks = [stream.spks.new_zeros((self.config.output_size, 0), dtype=torch.float32)]
        while len(stream.waiting) >= chunk + ahead or (is_last and stream.waiting):
            chunks.append(self._run_chunk(stream, min(chunk, len(stream.waiting))))
        stream.finished = is_last
        return torch.cat(chunks, dim=1)[:, prompt_left:]

    def _run_chunk(self, stream: UNetFlowStream, num_tokens: int) -> Tensor:
        """Compute the next ``num_tokens`` waiting tokens' frames, float32 ``[80, frames]``."""
        prepared = self.prepare()
        mu = self._encode_waiting(stream, num_tokens)
        start, end = stream.num_frames, stream.num_frames + mu.shape[1]
        cond = torch.zeros_like(mu)
        prompt = stream.prompt_mel[start:end]
        cond[:, : prompt.shape[0]] = prompt.T
        condition = prepared.unet.join_condition(mu, stream.spks, cond)
        stream.unet.reserve(end)
        guidance = self.config.guidance_scale
        x = prepared.noise[:, start:end]
        for index, (_, dt) in enumerate(prepared.grid):
            check_wanted(stream.should_stop)
            with_condition, without = prepared.unet.velocity(x, condition, index, stream.unet, end).float()
            x = x + dt * ((1.0 + guidance) * with_condition - guidance * without)
        stream.unet.length = end
        stream.before = (stream.before + stream.waiting[:num_tokens])[-(LOOKAHEAD_KERNEL - 1) :]
        del stream.waiting[:num_tokens]
        return x

    def _encode_waiting(self, stream: UNetFlowStream, num_tokens: int) -> Tensor:
        """``mu`` of the next ``num_tokens`` waiting tokens, ``[80, token_mel_ratio * num_tokens]``."""
        ids = stream.before + stream.waiting[: num_tokens + self.config.lookahead_tokens]
        embedded = self.input_embedding(torch.tensor([ids], device=stream.spks.device).clamp(min=0))
        hidden = self.encoder.step(stream.encoder, embedded, len(stream.before), num_tokens)
        result: Tensor = self.encoder_proj(hidden)[0].T
        return result
