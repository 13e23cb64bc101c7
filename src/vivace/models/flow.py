"""Flow matching of CosyVoice 3: speech tokens to mel (``CausalMaskedDiffWithDiT`` of the reference).

Tokens come at 25 Hz, mel frames at 50 Hz. A look-ahead convolution encodes the tokens, an Euler solver with
classifier-free guidance turns fixed noise into mel. ``generate`` on the whole sequence is the definition;
``step`` computes the same frames chunk by chunk (see ``flow_stream``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vivace.config import FlowConfig, UNetFlowConfig
from vivace.errors import SynthesisError
from vivace.models.dit import DiT
from vivace.models.dit_stream import DiTState, PreparedDiT, Span
from vivace.models.flow_stream import FlowStream, PreparedFlow, check_wanted

LOOKAHEAD_KERNEL = 3
"""Kernel of the look-ahead layer's second, causal convolution; fixed in the reference."""


class LookAhead(nn.Module):
    """Lets each token see ``lookahead_tokens`` later ones and a few earlier ones."""

    def __init__(self, config: FlowConfig | UNetFlowConfig) -> None:
        super().__init__()
        self.lookahead_tokens = config.lookahead_tokens
        self.conv1 = nn.Conv1d(config.input_size, config.lookahead_channels, config.lookahead_tokens + 1)
        self.conv2 = nn.Conv1d(config.lookahead_channels, config.input_size, LOOKAHEAD_KERNEL)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """``x`` ``[B, N, C]`` → the same shape.

        Args:
            context: the ``lookahead_tokens`` embeddings that follow ``x``, ``[B, lookahead_tokens, C]``;
                None at the end of the sequence (zeros).
        """
        if context is None:
            context = x.new_zeros(x.shape[0], self.lookahead_tokens, x.shape[2])
        y = F.leaky_relu(self.conv1(torch.cat((x, context), dim=1).transpose(1, 2)))
        result: Tensor = self.conv2(F.pad(y, (LOOKAHEAD_KERNEL - 1, 0))).transpose(1, 2) + x
        return result


def time_grid(num_steps: int) -> list[tuple[float, float]]:
    """``(t, dt)`` of every Euler step, on a cosine grid.

    As in the reference ``t`` is accumulated by float32 additions, and each ``dt`` is measured from the
    accumulated ``t`` to the grid, so both differ from the grid by rounding.
    """
    grid = 1 - torch.cos(torch.linspace(0, 1, num_steps + 1) * 0.5 * math.pi)
    t, dt = grid[0], grid[1] - grid[0]
    steps = []
    for index in range(1, num_steps + 1):
        steps.append((float(t), float(dt)))
        t = t + dt
        if index < num_steps:
            dt = grid[index + 1] - t
    return steps


class FlowModel(nn.Module):
    """Speech tokens, a voice prompt and a speaker embedding in; mel out.

    Args:
        config: sizes and solver settings. The noise is a function of ``noise_seed`` and the position alone.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = nn.Embedding(config.vocab_size, config.input_size)
        self.speaker_projection = nn.Linear(config.spk_embed_dim, config.output_size)
        self.lookahead = LookAhead(config)
        self.dit = DiT(config.dit)
        generator = torch.Generator("cpu").manual_seed(config.noise_seed)
        # Not a buffer: the noise keeps float32 whatever the dtype of the weights.
        self.noise = torch.randn(
            1, config.output_size, config.noise_frames, generator=generator, device="cpu"
        )
        self._prepared: PreparedFlow | None = None
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]

    def encode(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        """Tokens ``[B, N]`` → ``mu`` ``[B, 80, token_mel_ratio * N]``.

        Args:
            context: the ``lookahead_tokens`` tokens that follow, ``[B, lookahead_tokens]``; None at the end.
        """
        embedded = None if context is None else self.input_embedding(context.clamp(min=0))
        hidden: Tensor = self.lookahead(self.input_embedding(tokens.clamp(min=0)), embedded)
        return hidden.repeat_interleave(self.config.token_mel_ratio, dim=1).transpose(1, 2)

    def project_speaker(self, embedding: Tensor) -> Tensor:
        """Speaker embedding ``[B, 192]`` of any length → ``[B, 80]``."""
        weight = self.speaker_projection.weight
        result: Tensor = self.speaker_projection(F.normalize(embedding.to(weight), dim=-1))
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
            streaming: chunk-causal mask instead of full attention.
            context: tokens that follow ``tokens``, ``[lookahead_tokens]``; None at the end of the sequence.

        Returns:
            mel of the frames after the prompt, float32 ``[80, token_mel_ratio * N - frames]``.

        Raises:
            SynthesisError: the sequence is longer than the noise.
        """
        mu = self.encode(tokens[None], None if context is None else context[None])
        num_frames, prompt_frames = mu.shape[-1], prompt_mel.shape[0]
        self.check_length(num_frames)
        cond = torch.zeros_like(mu)
        cond[0, :, :prompt_frames] = prompt_mel.to(mu).T
        noise = self.noise[..., :num_frames].to(mu.device)
        mel = self.solve(noise, mu, cond, self.project_speaker(embedding[None]), streaming)
        return mel[0, :, prompt_frames:]

    def solve(self, noise: Tensor, mu: Tensor, cond: Tensor, spks: Tensor, streaming: bool) -> Tensor:
        """Euler integration with classifier-free guidance; the unconditional branch keeps ``x`` alone.

        Args:
            noise: where the path starts, float32 ``[1, 80, T]``; ``mu`` and ``cond`` have its shape, ``spks``
                is ``[1, 80]``.

        Returns:
            mel, float32 ``[1, 80, T]``.
        """
        mu, cond, spks = (torch.cat((part, torch.zeros_like(part))) for part in (mu, cond, spks))
        guidance = self.config.guidance_scale
        x = noise
        for t, dt in time_grid(self.config.num_steps):
            times = x.new_full((2,), t)
            velocity = self.dit(x.to(mu.dtype).expand(2, -1, -1), mu, cond, spks, times, streaming).float()
            x = x + dt * ((1.0 + guidance) * velocity[:1] - guidance * velocity[1:])
        return x

    def train(self, mode: bool = True) -> FlowModel:
        self._prepared = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlowModel:
        self._prepared = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def prepare(self) -> PreparedFlow:
        """Make the weights ready for streaming. The result is kept.

        Loading a state dict, moving, converting and ``train``/``eval`` make it anew; weights changed by other
        means are not noticed.
        """
        prepared = self._prepared
        if prepared is None:
            grid = time_grid(self.config.num_steps)
            noise = self.noise[0].T.contiguous().to(self.speaker_projection.weight.device)
            prepared = PreparedFlow(PreparedDiT(self.dit, [t for t, _ in grid]), grid, noise)
            self._prepared = prepared
        return prepared

    @torch.no_grad()
    def new_stream(self, embedding: Tensor, prompt_mel: Tensor, capacity_frames: int = 1024) -> FlowStream:
        """Begin a stream. Its first tokens must be those of the prompt.

        Args:
            embedding: speaker embedding ``[192]``.
            prompt_mel: mel of the prompt ``[frames, 80]``; no frames without a prompt.
            capacity_frames: frames to make room for; the buffers grow beyond when needed.
        """
        prepared = self.prepare()
        spks = self.project_speaker(embedding[None].to(prepared.noise.device))[0]
        state = DiTState.empty(self.dit, self.config.num_steps, max(1, capacity_frames))
        return FlowStream(spks, prompt_mel.to(spks), state)

    @torch.no_grad()
    def step(self, stream: FlowStream, tokens: Sequence[int], is_last: bool) -> Tensor:
        """Take the next tokens and compute every chunk that they complete.

        A chunk is complete when its tokens and ``lookahead_tokens`` more are there; the last call completes
        what is left. The result does not depend on how the tokens are split over the calls.

        Returns:
            mel of the frames that this call finished and that lie after the prompt, float32 ``[80, n]``;
            ``n`` may be 0.

        Raises:
            SynthesisError: the sequence becomes longer than the noise; the stream stays as it was.
            CancelledRequestError: ``stream.should_stop`` said so.
        """
        assert not stream.finished, "the last token of this stream already came"
        ratio, ahead = self.config.token_mel_ratio, self.config.lookahead_tokens
        chunk_tokens = self.config.dit.static_chunk_frames // ratio
        self.check_length(stream.num_frames + ratio * (len(stream.waiting) + len(tokens)))
        stream.waiting.extend(tokens)
        prompt_left = max(0, stream.prompt_mel.shape[0] - stream.num_frames)
        chunks = [stream.spks.new_zeros((0, self.config.output_size), dtype=torch.float32)]
        while len(stream.waiting) >= chunk_tokens + ahead or (is_last and stream.waiting):
            chunks.append(self._run_chunk(stream, min(chunk_tokens, len(stream.waiting))))
        stream.finished = is_last
        return torch.cat(chunks)[prompt_left:].T

    def _run_chunk(self, stream: FlowStream, num_tokens: int) -> Tensor:
        """Compute the next ``num_tokens`` waiting tokens' frames, float32 ``[frames, 80]``."""
        prepared = self.prepare()
        mu = self._encode_waiting(stream, num_tokens)
        start, end = stream.num_frames, stream.num_frames + mu.shape[0]
        cond = torch.zeros_like(mu)
        prompt = stream.prompt_mel[start:end]
        cond[: prompt.shape[0]] = prompt
        condition = prepared.dit.embed_condition(cond, mu, stream.spks)
        stream.dit.reserve(end)
        span = Span(start, end, self.dit.rotary_embed(start, end - start))
        guidance = self.config.guidance_scale
        x = prepared.noise[start:end]
        for index, (_, dt) in enumerate(prepared.grid):
            check_wanted(stream.should_stop)
            with_condition, without = prepared.dit.velocity(x, condition, index, stream.dit, span).float()
            x = x + dt * ((1.0 + guidance) * with_condition - guidance * without)
        stream.dit.length = end
        stream.before = (stream.before + stream.waiting[:num_tokens])[-(LOOKAHEAD_KERNEL - 1) :]
        del stream.waiting[:num_tokens]
        return x

    def _encode_waiting(self, stream: FlowStream, num_tokens: int) -> Tensor:
        """``mu`` of the next ``num_tokens`` waiting tokens, ``[token_mel_ratio * num_tokens, 80]``."""
        ahead, skip = self.config.lookahead_tokens, len(stream.before)
        ids = stream.before + stream.waiting[: num_tokens + ahead]
        embedded = self.input_embedding(torch.tensor([ids], device=stream.spks.device).clamp(min=0))
        # Behind the very last token the look-ahead sees zeros.
        embedded = F.pad(embedded, (0, 0, 0, skip + num_tokens + ahead - len(ids)))
        hidden: Tensor = self.lookahead(embedded[:, :-ahead], embedded[:, -ahead:])
        return hidden[0, skip:].repeat_interleave(self.config.token_mel_ratio, dim=0)

    def check_length(self, num_frames: int) -> None:
        """Raise ``SynthesisError`` if a sequence of ``num_frames`` frames, prompt included, is too long."""
        if num_frames > self.config.noise_frames:
            limit = self.config.noise_frames / self.config.token_mel_ratio
            raise SynthesisError(
                f"The utterance and its prompt are longer than {limit:.0f} speech tokens, the most that the"
                " model can speak at once. Use a shorter text or prompt.",
                code="utterance_too_long",
            )


def _forget(model: FlowModel, _: object) -> None:
    """After loading a state dict. Not a closure, so that a copy of a model forgets its own."""
    model._prepared = None
