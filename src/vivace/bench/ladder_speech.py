"""One phrase through the three stages in the way that a rung names: two or three threads, chunk by chunk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vivace.bench.ladder_lm import Decoder, DecodeTimes, LMInput
from vivace.engine.flow_runner import FlowRunner
from vivace.engine.vocoder_runner import VocoderSession
from vivace.models.flow import FlowModel

if TYPE_CHECKING:
    from vivace.bench.ladder_rungs import Switches
    from vivace.config import ModelConfig
    from vivace.datatypes import Samples
    from vivace.models.hift import CausalHiFT
    from vivace.voice import Voice

POLL_S = 0.1
"""How long the reference's renderer sleeps between two looks."""

FIRST_HOP, LONGEST_HOP = 25, 100
"""Tokens between two chunks; the reference doubles it from one to the other."""


@dataclass(frozen=True, slots=True)
class Phrase:
    """What one request speaks: text, its token ids behind the prompt's, and how many speech tokens it gets."""

    text: str
    given: LMInput
    num_tokens: int


@dataclass(slots=True)
class Spoken:
    """One phrase as its listener saw it. Stage times may overlap, so that their sum may exceed ``wall_s``."""

    samples: Samples
    ttfb_s: float
    wall_s: float
    lm_s: float
    flow_s: float
    vocoder_s: float
    dispatch_s: float | None
    """Host seconds for one decoding step; None where host and device are one."""


class TokenBox:
    """Speech tokens between the thread that decodes and the one that renders."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_complete = False
        self.error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self, tokens: list[int]) -> None:
        """More of them."""
        with self._changed:
            self.tokens.extend(tokens)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """No more will come."""
        with self._changed:
            self.error, self.is_complete = error, True
            self._changed.notify_all()

    def wait(self, count: int, *, polls: bool) -> None:
        """Until there are ``count`` tokens, or no more will come. Raises what ended the other thread."""
        if polls:
            while True:
                time.sleep(POLL_S)  # noqa: TID251 - the reference polls, and that is what the rung measures
                if len(self.tokens) >= count or self.is_complete:
                    break
        else:
            with self._changed:
                self._changed.wait_for(lambda: len(self.tokens) >= count or self.is_complete)
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class Hops:
    """How many tokens each chunk takes. ``next_hop`` outlives a request in the reference."""

    switches: Switches
    prompt_tokens: int
    next_hop: int = FIRST_HOP
    offset: int = 0

    def begin(self) -> None:
        """A new request."""
        self.offset = 0
        if self.switches.borders != "shared":
            self.next_hop = FIRST_HOP

    def take(self) -> int:
        """Tokens of the next chunk, its look-ahead not counted."""
        if self.switches.borders == "early":
            return FIRST_HOP - (self.prompt_tokens + self.offset) % FIRST_HOP
        pad = -self.prompt_tokens % FIRST_HOP if self.offset == 0 else 0
        return self.next_hop + pad

    def done(self, taken: int) -> None:
        """The chunk has been rendered."""
        self.offset += taken
        if self.switches.borders != "early":
            self.next_hop = min(LONGEST_HOP, 2 * self.next_hop)


class WholeFlow:
    """Every chunk computes all frames from the start of the voice's prompt on."""

    def __init__(self, flow: FlowModel, voice: Voice) -> None:
        device = flow.input_embedding.weight.device
        self._flow = flow
        self._prompt = voice.speech_tokens.tolist()
        self._mel = torch.tensor(voice.mel, device=device)
        self._embedding = torch.tensor(voice.embedding, device=device)
        self._done_frames = 0

    def step(self, tokens: list[int], *, is_last: bool) -> Tensor:
        """New frames of all tokens so far; the last ``lookahead_tokens`` are seen and not rendered before the end."""
        ahead = 0 if is_last else self._flow.config.lookahead_tokens
        ids = torch.tensor([*self._prompt, *tokens], device=self._mel.device)
        context = ids[len(ids) - ahead :] if ahead else None
        mel = self._flow.generate(
            ids[: len(ids) - ahead], self._mel, self._embedding, streaming=not is_last, context=context
        )
        new = mel[:, self._done_frames :]
        self._done_frames = mel.shape[1]
        return new


class KeptFlow:
    """``FlowRunner``: what is finished is kept."""

    def __init__(self, runner: FlowRunner, voice: Voice) -> None:
        self._runner = runner
        self._stream = runner.open(voice)
        self._given = 0

    def step(self, tokens: list[int], *, is_last: bool) -> Tensor:
        """As ``WholeFlow.step``."""
        new, self._given = tokens[self._given :], len(tokens)
        return self._runner.step(self._stream, new, is_last=is_last)


class WholeVocoder:
    """Every chunk computes all samples from the first frame on."""

    def __init__(self, vocoder: CausalHiFT) -> None:
        self._vocoder = vocoder
        self._mel: Tensor | None = None
        self._done_samples = 0

    def step(self, mel: Tensor, *, is_last: bool) -> Samples:
        """The samples that are new."""
        self._mel = mel if self._mel is None else torch.cat((self._mel, mel), dim=1)
        samples = self._vocoder.step(self._vocoder.new_stream(), self._mel, is_last)
        new: Samples = samples[self._done_samples :].float().cpu().numpy()
        self._done_samples = len(samples)
        return new


@dataclass(slots=True)
class Stages:
    """What a rung speaks with; made once, used for all phrases.

    Attributes:
        decoder: the speech LM. flow, runner: the flow and its streams. vocoder: float32.
    """

    config: ModelConfig
    voice: Voice
    switches: Switches
    decoder: Decoder
    flow: FlowModel
    vocoder: CausalHiFT
    runner: FlowRunner = field(init=False)
    hops: Hops = field(init=False)
    device: torch.device = field(init=False)
    lm_stream: Any = None
    vocoder_stream: Any = None

    def __post_init__(self) -> None:
        self.runner = FlowRunner(self.flow)
        self.hops = Hops(self.switches, len(self.voice.speech_tokens))
        self.device = self.flow.input_embedding.weight.device
        if self.device.type == "cuda":
            self.lm_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self.vocoder_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.device)  # copies of the weights are made on another stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work of the body goes to ``stream``, where the device has any."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def wait(self) -> None:
        """Until the current stream has done its work."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def speak(self, phrase: Phrase) -> Spoken:
        """The phrase, start to end."""
        return _Utterance(self, phrase).run()


class _Utterance:
    """One phrase under way."""

    def __init__(self, stages: Stages, phrase: Phrase) -> None:
        self._stages, self._phrase = stages, phrase
        switches = stages.switches
        self._box, self._times = TokenBox(), DecodeTimes()
        self._is_parallel = switches.parallel
        if switches.incremental_vocoder:
            self._vocode: Callable[..., Samples] = VocoderSession(stages.vocoder, 1.0).step
        else:
            self._vocode = WholeVocoder(stages.vocoder).step
        self._flow_s = self._vocoder_s = self._first_s = 0.0
        self._started = time.perf_counter()

    def run(self) -> Spoken:
        thread = threading.Thread(target=self._decode, name="decode")
        thread.start()
        pool = ThreadPoolExecutor(1, "vocoder") if self._is_parallel else None
        try:
            parts = self._render(pool)
        finally:
            thread.join()
            if pool is not None:
                pool.shutdown()
        if self._stages.switches.waiting == "polling" and self._stages.device.type == "cuda":
            torch.cuda.empty_cache()  # the reference gives its memory back behind every request
            self._stages.wait()
        wall_s = time.perf_counter() - self._started
        times = self._times
        on_cuda = self._stages.device.type == "cuda"
        return Spoken(
            samples=np.concatenate(parts),
            ttfb_s=self._first_s,
            wall_s=wall_s,
            lm_s=times.total_s,
            flow_s=self._flow_s,
            vocoder_s=self._vocoder_s,
            dispatch_s=times.dispatch_s / times.steps if on_cuda and times.steps else None,
        )

    def _decode(self) -> None:
        stages, begun = self._stages, time.perf_counter()
        try:
            with stages.on(stages.lm_stream):
                for burst in stages.decoder.decode(self._phrase.given, self._phrase.num_tokens, self._times):
                    self._box.add(burst)
                stages.wait()
            self._times.total_s = time.perf_counter() - begun
            self._box.end()
        except BaseException as error:  # reaches the thread that renders
            self._box.end(error)

    def _render(self, pool: ThreadPoolExecutor | None) -> list[Samples]:
        stages, box, hops = self._stages, self._box, self._stages.hops
        flow = self._open_flow()
        hops.begin()
        ahead = stages.flow.config.lookahead_tokens
        polls = stages.switches.waiting == "polling"
        parts: list[Samples | Future[Samples]] = []
        while True:
            taken = hops.take()
            wanted = hops.offset + taken + ahead
            box.wait(wanted, polls=polls)
            if len(box.tokens) < wanted:
                break
            parts.append(self._chunk(flow, box.tokens[:wanted], pool, is_last=False))
            hops.done(taken)
        parts.append(self._chunk(flow, box.tokens, pool, is_last=True))
        return [part.result() if isinstance(part, Future) else part for part in parts]

    def _open_flow(self) -> WholeFlow | KeptFlow:
        stages = self._stages
        if not stages.switches.incremental_flow:
            return WholeFlow(stages.flow, stages.voice)
        return KeptFlow(stages.runner, stages.voice)

    def _chunk(
        self,
        flow: WholeFlow | KeptFlow,
        tokens: list[int],
        pool: ThreadPoolExecutor | None,
        *,
        is_last: bool,
    ) -> Samples | Future[Samples]:
        begun = time.perf_counter()
        mel = flow.step(tokens, is_last=is_last)
        self._stages.wait()
        self._flow_s += time.perf_counter() - begun
        if pool is None:
            return self._samples(mel, None, is_last=is_last)
        return pool.submit(self._samples, mel, self._stages.vocoder_stream, is_last=is_last)

    @torch.inference_mode()
    def _samples(self, mel: Tensor, stream: Any, *, is_last: bool) -> Samples:
        begun = time.perf_counter()
        with self._stages.on(stream):
            samples = self._vocode(mel, is_last=is_last)
        ended = time.perf_counter()
        self._vocoder_s += ended - begun
        if not self._first_s and len(samples):
            self._first_s = ended - self._started
        return samples
