"""Streaming of CosyVoice-300M's flow, which looks both ways over the whole utterance, in pieces.

``PieceFlow`` computes each piece with the voice's prompt, the tokens before it and the look-ahead behind it; noise and
the place of every frame between the tokens are functions of the absolute position, and pieces are cross-faded over the
look-ahead. The cost of a piece is flat. ``FadingFlow`` is the reference's own scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.config import RegulatedFlowConfig
from vivace.models.flow_regulated import HEAD_TOKENS, RegulatedFlow
from vivace.models.flow_stream import ShouldStop, check_wanted

CONTEXT_SECONDS = 2
"""Speech before a piece that is computed with it."""

FADING_SECONDS = 2
"""Length of the reference's pieces."""


class Window(NamedTuple):
    """What a piece is computed from, beside the voice's prompt.

    Attributes:
        tokens: speech tokens. begin: number of the first one.
        is_whole: these are all tokens of the utterance; is_last: its last ones are among them.
    """

    tokens: list[int]
    begin: int
    is_whole: bool
    is_last: bool


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
        self.take(stream, tokens, is_last)
        pieces = [stream.overlap.new_zeros(self.config.output_size, 0)]
        while (count := self.next_count(stream)) > 0:
            pieces.append(self._run_piece(stream, count, is_last=self.ends_with(stream, count)))
        return torch.cat(pieces, dim=1)

    def take(self, stream: PieceStream, tokens: Sequence[int], is_last: bool) -> None:
        """Adds the next tokens to a stream.

        Raises:
            SynthesisError: the sequence is too long; the stream stays as it was.
        """
        assert not stream.finished, "the last token of this stream already came"
        missing = stream.num_prompt - len(stream.prompt)
        new = list(tokens)[missing:]
        self.check_length(len(stream.prompt_mel) + self.config.num_frames(stream.known + len(new)))
        stream.prompt += list(tokens)[:missing]
        stream.tokens += new
        stream.finished = is_last

    def next_count(self, stream: PieceStream) -> int:
        """Tokens of the next piece that can be computed; 0: there is none."""
        count, left = self._next_piece(stream), stream.known - stream.done
        if left >= count + self.config.lookahead_tokens:
            return count
        return left if stream.finished else 0

    def ends_with(self, stream: PieceStream, count: int) -> bool:
        """Whether the next piece, of ``count`` tokens, is the utterance's last."""
        return stream.finished and stream.done + count == stream.known

    def _next_piece(self, stream: PieceStream) -> int:
        """Tokens up to the next border; borders are absolute, counted from the prompt's first token."""
        return self.piece_tokens - (stream.num_prompt + stream.done) % self.piece_tokens

    def _run_piece(self, stream: PieceStream, count: int, *, is_last: bool) -> Tensor:
        """The frames of the next ``count`` tokens, float32 ``[80, frames]``."""
        check_wanted(stream.should_stop)
        prompt_frames = len(stream.prompt_mel)
        window = self.window(stream, count, is_last=is_last)
        mu = self._encode_window(stream, window)
        noise = self.noise.to(mu.device)
        place = prompt_frames + self.config.num_frames(window.begin)
        noise = torch.cat(
            (noise[..., :prompt_frames], noise[..., place : place + mu.shape[2] - prompt_frames]), dim=2
        )
        mel = self.integrate(noise, mu, stream.prompt_mel, stream.spks)[:, prompt_frames:]
        return self.join(stream, mel, window, count)

    def window(self, stream: PieceStream, count: int, *, is_last: bool) -> Window:
        """What the next ``count`` tokens are computed from."""
        begin = self.window_start(stream.done)
        end = stream.done + count + (0 if is_last else self.config.lookahead_tokens)
        tokens = stream.tokens[begin - stream.first : end - stream.first]
        return Window(tokens, begin, begin == 0 and is_last, is_last)

    def join(self, stream: PieceStream, mel: Tensor, window: Window, count: int) -> Tensor:
        """The frames of the next ``count`` tokens, faded into what the piece before saw of them; moves the stream on.

        Args:
            mel: of the window ``[80, frames]``, which this overwrites.
        """
        config = self.config
        mel = mel[:, config.num_frames(stream.done) - config.num_frames(window.begin) :]
        faded = min(stream.overlap.shape[1], mel.shape[1])
        if faded:
            weight = torch.arange(1, faded + 1, device=mel.device) / (faded + 1)
            mel[:, :faded] = mel[:, :faded] * weight + stream.overlap[:, :faded] * (1 - weight)
        frames = config.num_frames(stream.done + count) - config.num_frames(stream.done)
        stream.overlap = mel[:, frames:].clone()
        stream.done += count
        kept = self.window_start(stream.done)
        del stream.tokens[: kept - stream.first]
        stream.first = kept
        return mel[:, :frames]

    def window_start(self, done: int) -> int:
        """First token that a piece behind ``done`` tokens is computed with.

        Its frame lies on the grid of the U-Net's lowest rate, as in the whole run: shifted by a frame the estimator
        gives other values everywhere.
        """
        grid = 2 ** (len(self.config.unet.channels) - 1)
        start = max(0, done - self.context_tokens)
        while self.config.num_frames(start) % grid:
            start -= 1
        return start

    def _encode_window(self, stream: PieceStream, window: Window) -> Tensor:
        """``mu`` of prompt and window, ``[1, 80, frames]``."""
        prompt_frames, length = len(stream.prompt_mel), len(window.tokens)
        ids = torch.tensor([stream.prompt + window.tokens], device=stream.spks.device)
        if window.is_whole:
            return self.encode(ids, stream.num_prompt, prompt_frames)
        hidden = self.encoder_proj(self.encoder(self.input_embedding(ids.clamp(min=0)))).transpose(1, 2)
        prompt, new = hidden[..., : stream.num_prompt], hidden[..., stream.num_prompt :]
        left = self.places(window).to(new.device)
        floor = left.floor().long()
        weight = (left - floor).to(new.dtype)
        right = (floor + 1).clamp(max=length - 1)
        stretched = new[..., floor] * (1 - weight) + new[..., right] * weight
        return self.length_regulator.join(prompt, prompt_frames, stretched)

    def places(self, window: Window) -> Tensor:
        """Where between the window's tokens each of its frames lies, float64.

        As in the whole run: the first and the last ``HEAD_TOKENS`` tokens are stretched by themselves, which the rest
        makes up for. The end is not known before the last piece, whose middle leads up to it.
        """
        if window.is_whole:
            return whole_places(self.config, len(window.tokens))
        config, begin, end = self.config, window.begin, window.begin + len(window.tokens)
        head = config.num_frames(HEAD_TOKENS)
        frames = torch.arange(config.num_frames(begin), config.num_frames(end), dtype=torch.float64)
        rate = 22_050 / 256 / config.token_rate_hz
        middle = HEAD_TOKENS + (frames - head + 0.5) / rate - 0.5
        if window.is_last:
            last = float(config.num_frames(end) - head)
            tail = end - HEAD_TOKENS + (frames - last + 0.5) * HEAD_TOKENS / head - 0.5
            # The middle of the last piece bends so that it meets the tail.
            drift = end - HEAD_TOKENS - (HEAD_TOKENS + (last - head) / rate)
            share = ((frames - frames[0]) / max(1.0, last - float(frames[0]))).clamp(0, 1)
            middle = torch.where(frames < last, middle + drift * share, tail)
        places = torch.where(frames < head, (frames + 0.5) * HEAD_TOKENS / head - 0.5, middle)
        return (places - begin).clamp(0, end - begin - 1)


def whole_places(config: RegulatedFlowConfig, count: int) -> Tensor:
    """Where between ``count`` tokens, all of an utterance, each frame lies; float64. As ``LengthRegulator``."""
    frames, head = config.num_frames(count), config.num_frames(HEAD_TOKENS)
    if count <= 2 * HEAD_TOKENS:
        return stretched_places(count, frames)
    middle = stretched_places(count - 2 * HEAD_TOKENS, frames - 2 * head)
    ends = stretched_places(HEAD_TOKENS, head)
    return torch.cat((ends, HEAD_TOKENS + middle, count - HEAD_TOKENS + ends))


def stretched_places(count: int, frames: int) -> Tensor:
    """Where between ``count`` neighbours each of ``frames`` equal steps lies, as in linear interpolation; float64."""
    places = (torch.arange(frames, dtype=torch.float64) + 0.5) * count / max(1, frames) - 0.5
    return places.clamp(0, max(0, count - 1))


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
