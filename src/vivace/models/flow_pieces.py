"""Streaming of CosyVoice-300M's flow, which looks both ways over the whole utterance, in pieces.

``PieceFlow`` computes each piece with the voice's prompt, the tokens before it and the look-ahead behind it; noise and
the place of every frame between the tokens are functions of the absolute position, and pieces are cross-faded over the
look-ahead. The cost of a piece is flat. ``FadingFlow`` is the reference's own scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vivace.config import RegulatedFlowConfig
from vivace.models.flow_regulated import HEAD_TOKENS, RegulatedFlow
from vivace.models.flow_stream import ShouldStop, check_wanted

CONTEXT_SECONDS = 2
"""Speech before a piece that is computed with it."""

FADING_SECONDS = 2
"""Length of the reference's pieces."""


@dataclass(slots=True)
class PieceStream:
    """Everything that one stream keeps between two calls of ``step``.

    Attributes:
        spks: projected speaker embedding ``[1, 80]``.
        prompt_mel: ``[frames, 80]``; prompt: its tokens.
        tokens: all new tokens that may still be needed; first: absolute number of the first of them.
        done: new tokens whose frames are out.
        overlap: frames behind the last piece as it saw them ``[80, n]``.
        cache: noise and encoded tokens that the reference's scheme repeats, ``[2, 80, n]``.
        finished: the last token came and its frames were returned.
        should_stop: as in ``FlowStream``, but asked once a piece.
    """

    spks: Tensor
    prompt_mel: Tensor
    num_prompt: int
    overlap: Tensor
    cache: Tensor
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    first: int = 0
    done: int = 0
    finished: bool = False
    should_stop: ShouldStop | None = None

    @property
    def num_frames(self) -> int:
        """Frames of the prompt that came so far."""
        return len(self.prompt_mel) if len(self.prompt) == self.num_prompt else 0

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        parts = (self.spks, self.prompt_mel, self.overlap, self.cache)
        return sum(part.numel() * part.element_size() for part in parts)

    @property
    def known(self) -> int:
        """New tokens that came so far."""
        return self.first + len(self.tokens)

    def fork(self, capacity_frames: int | None = None) -> PieceStream:
        """A stream that goes on from here independently."""
        return replace(self, prompt=list(self.prompt), tokens=list(self.tokens))


class PieceFlow(RegulatedFlow):
    """``RegulatedFlow`` with streams."""

    def __init__(self, config: RegulatedFlowConfig) -> None:
        super().__init__(config)
        self.piece_tokens = config.token_rate_hz
        self.context_tokens = CONTEXT_SECONDS * config.token_rate_hz

    def prepare(self) -> None:
        """Nothing is prepared."""

    @torch.no_grad()
    def new_stream(self, embedding: Tensor, prompt_mel: Tensor, capacity_frames: int = 1024) -> PieceStream:
        """Begin a stream. Its first tokens must be those of the prompt; see ``FlowModel.new_stream``."""
        spks = self.project_speaker(embedding[None].to(self.speaker_projection.weight.device))
        empty = spks.new_zeros(spks.shape[1], 0, dtype=torch.float32)
        return PieceStream(
            spks, prompt_mel.to(spks), self.prompt_tokens(len(prompt_mel)), empty, empty.expand(2, -1, -1)
        )

    @torch.no_grad()
    def step(self, stream: PieceStream, tokens: Sequence[int], is_last: bool) -> Tensor:
        """Take the next tokens and compute every piece that they complete; see ``FlowModel.step``."""
        assert not stream.finished, "the last token of this stream already came"
        given = list(tokens)
        missing = stream.num_prompt - len(stream.prompt)
        stream.prompt += given[:missing]
        config = self.config
        self.check_length(len(stream.prompt_mel) + config.num_frames(stream.known + len(given[missing:])))
        stream.tokens += given[missing:]
        pieces = [stream.overlap.new_zeros(config.output_size, 0)]
        while stream.known - stream.done >= self._next_piece(stream) + config.lookahead_tokens:
            pieces.append(self._run_piece(stream, self._next_piece(stream), is_last=False))
        if is_last and stream.known > stream.done:
            pieces.append(self._run_piece(stream, stream.known - stream.done, is_last=True))
        stream.finished = is_last
        return torch.cat(pieces, dim=1)

    def _next_piece(self, stream: PieceStream) -> int:
        """Tokens up to the next border; borders are absolute, counted from the prompt's first token."""
        return self.piece_tokens - (stream.num_prompt + stream.done) % self.piece_tokens

    def _run_piece(self, stream: PieceStream, count: int, *, is_last: bool) -> Tensor:
        """The frames of the next ``count`` tokens, float32 ``[80, frames]``."""
        check_wanted(stream.should_stop)
        config, prompt_frames = self.config, len(stream.prompt_mel)
        begin = self._window_start(stream.done)
        end = stream.done + count + (0 if is_last else config.lookahead_tokens)
        window = stream.tokens[begin - stream.first : end - stream.first]
        mu = self._encode_window(stream, window, begin, is_last=is_last)
        start = config.num_frames(begin)
        noise = self.noise.to(mu.device)
        place = prompt_frames + start
        noise = torch.cat(
            (noise[..., :prompt_frames], noise[..., place : place + mu.shape[2] - prompt_frames]), dim=2
        )
        mel = self.integrate(noise, mu, stream.prompt_mel, stream.spks)[:, prompt_frames:]
        mel = mel[:, config.num_frames(stream.done) - start :]
        faded = min(stream.overlap.shape[1], mel.shape[1])
        if faded:
            weight = torch.arange(1, faded + 1, device=mel.device) / (faded + 1)
            mel[:, :faded] = mel[:, :faded] * weight + stream.overlap[:, :faded] * (1 - weight)
        frames = config.num_frames(stream.done + count) - config.num_frames(stream.done)
        stream.overlap = mel[:, frames:].clone()
        stream.done += count
        kept = self._window_start(stream.done)
        del stream.tokens[: kept - stream.first]
        stream.first = kept
        return mel[:, :frames]

    def _window_start(self, done: int) -> int:
        """First token that a piece behind ``done`` tokens is computed with.

        Its frame lies on the grid of the U-Net's lowest rate, as in the whole run: shifted by a frame the estimator
        gives other values everywhere.
        """
        grid = 2 ** (len(self.config.unet.channels) - 1)
        start = max(0, done - self.context_tokens)
        while self.config.num_frames(start) % grid:
            start -= 1
        return start

    def _encode_window(self, stream: PieceStream, window: list[int], begin: int, *, is_last: bool) -> Tensor:
        """``mu`` of prompt and window, ``[1, 80, frames]``."""
        prompt_frames = len(stream.prompt_mel)
        ids = torch.tensor([stream.prompt + window], device=stream.spks.device)
        if begin == 0 and is_last:  # the whole utterance
            return self.encode(ids, stream.num_prompt, prompt_frames)
        hidden = self.encoder_proj(self.encoder(self.input_embedding(ids.clamp(min=0)))).transpose(1, 2)
        prompt, new = hidden[..., : stream.num_prompt], hidden[..., stream.num_prompt :]
        places = self._places(begin, begin + len(window), is_last=is_last).to(new.device)
        left = (places - begin).clamp(0, len(window) - 1)
        floor = left.floor().long()
        weight = (left - floor).to(new.dtype)
        right = (floor + 1).clamp(max=len(window) - 1)
        stretched = new[..., floor] * (1 - weight) + new[..., right] * weight
        return self.length_regulator.join(prompt, prompt_frames, stretched)

    def _places(self, begin: int, end: int, *, is_last: bool) -> Tensor:
        """Where between the tokens each frame of the window lies, absolute, float64.

        As in the whole run: the first and the last ``HEAD_TOKENS`` tokens are stretched by themselves, which the rest
        makes up for. The end is not known before the last piece, whose middle leads up to it.
        """
        config = self.config
        head = config.num_frames(HEAD_TOKENS)
        frames = torch.arange(config.num_frames(begin), config.num_frames(end), dtype=torch.float64)
        rate = 22_050 / 256 / config.token_rate_hz
        middle = HEAD_TOKENS + (frames - head + 0.5) / rate - 0.5
        if is_last:
            last = float(config.num_frames(end) - head)
            tail = end - HEAD_TOKENS + (frames - last + 0.5) * HEAD_TOKENS / head - 0.5
            # The middle of the last piece bends so that it meets the tail.
            drift = end - HEAD_TOKENS - (HEAD_TOKENS + (last - head) / rate)
            share = ((frames - frames[0]) / max(1.0, last - float(frames[0]))).clamp(0, 1)
            middle = torch.where(frames < last, middle + drift * share, tail)
        return torch.where(frames < head, (frames + 0.5) * HEAD_TOKENS / head - 0.5, middle)


class FadingFlow(PieceFlow):
    """The reference's scheme: pieces of two seconds, computed as utterances of their own behind the prompt, with the
    noise and the encoded tokens of the overlap taken from the piece before, and cross-faded."""

    def __init__(self, config: RegulatedFlowConfig) -> None:
        super().__init__(config)
        self.piece_tokens = FADING_SECONDS * config.token_rate_hz
        self.overlap_frames = config.num_frames(HEAD_TOKENS)
        self._window = torch.hamming_window(2 * self.overlap_frames, periodic=False, dtype=torch.float64)

    def _next_piece(self, stream: PieceStream) -> int:
        """Pieces are counted from the first new token."""
        return self.piece_tokens

    def _run_piece(self, stream: PieceStream, count: int, *, is_last: bool) -> Tensor:
        config, prompt_frames, overlap = self.config, len(stream.prompt_mel), self.overlap_frames
        end = count + (0 if is_last else config.lookahead_tokens)
        ids = torch.tensor([stream.prompt + stream.tokens[:end]], device=stream.spks.device)
        mu = self.encode(ids, stream.num_prompt, prompt_frames)
        noise = self.noise[..., : mu.shape[2]].to(mu.device).clone()
        known = min(stream.cache.shape[2], mu.shape[2])
        noise[0, :, :known], mu[0, :, :known] = stream.cache[:, :, :known].to(noise)
        kept = torch.stack((noise[0], mu[0].float()))
        stream.cache = torch.cat((kept[..., :prompt_frames], kept[..., -overlap:]), dim=2)
        mel = self.integrate(noise, mu, stream.prompt_mel, stream.spks)[:, prompt_frames:]
        if stream.overlap.shape[1]:
            window, count_frames = self._window.to(mel.device), min(overlap, mel.shape[1])
            rising, falling = window[:count_frames], window[overlap : overlap + count_frames]
            faded = mel[:, :count_frames] * rising + stream.overlap[:, :count_frames] * falling
            mel[:, :count_frames] = faded.to(mel.dtype)
        del stream.tokens[:count]
        stream.done += count
        stream.first = stream.done
        if is_last:
            return mel
        stream.overlap = mel[:, -overlap:].clone()
        return mel[:, :-overlap]
