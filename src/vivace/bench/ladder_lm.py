"""Ways to decode one segment of speech tokens, from the reference's to one CUDA graph a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from vivace.bench.llm_steps import StaticSteps, capture_step
from vivace.datatypes import SamplingParams
from vivace.engine.sampler import SamplingRows, TokenKind, allowed_tokens, sample
from vivace.layers.attention import KeyValueCache, rotary_tables

if TYPE_CHECKING:
    from vivace.bench.ladder_rungs import Switches
    from vivace.config import SamplingConfig
    from vivace.models.speech_lm import SpeechLM

BURST_TOKENS = 5
"""Tokens that are read back together where they are drawn on the device."""

_MASK_MULTIPLE = 16  # rows of a mask begin at such multiples, or PyTorch copies them


@dataclass(frozen=True, slots=True)
class LMInput:
    """Token ids of one segment: text before the speech, and the prompt's speech tokens."""

    text: list[int]
    prompt_speech: list[int]


@dataclass(slots=True)
class DecodeTimes:
    """Seconds of one decoding: all of it, and the host's share of its steps (giving out work, no waiting)."""

    total_s: float = 0.0
    dispatch_s: float = 0.0
    steps: int = 0


class Decoder(Protocol):
    """Makes exactly ``count`` speech tokens, in the bursts in which the host gets to know them."""

    def decode(self, given: LMInput, count: int, times: DecodeTimes) -> Iterator[list[int]]:
        """Generates; ``times`` grows with it."""


def open_decoder(lm: SpeechLM, switches: Switches, capacity: int) -> Decoder:
    """The way that the switches name; compiles and captures where they say so.

    Args:
        capacity: longest segment, prompt included.
    """
    if switches.compiled or switches.graphs:
        return StaticDecoder(lm, capacity, compiled=switches.compiled, graphs=switches.graphs)
    return EagerDecoder(lm, keep_states=switches.keep_states, sampling=switches.sampling)


class JoinedCache(KeyValueCache):
    """Keys and values that are copied into a longer tensor in every step, as the reference's library does."""

    def __init__(self, lm: SpeechLM) -> None:
        config, weight = lm.config, lm.llm_decoder.weight
        super().__init__(
            num_layers=config.num_layers,
            batch=1,
            num_kv_heads=config.num_kv_heads,
            capacity=1,
            head_dim=config.head_dim,
            device=weight.device,
            dtype=weight.dtype,
        )
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, extra: int) -> None:
        """Nothing: each layer's tensors grow when they are appended to."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The old ones and the new ones, joined."""
        if layer in self._parts:
            old_keys, old_values = self._parts[layer]
            keys, values = torch.cat((old_keys, keys), dim=2), torch.cat((old_values, values), dim=2)
        self._parts[layer] = keys, values
        return keys, values


class EagerDecoder:
    """PyTorch's calls one by one on a cache that is joined anew in every step."""

    def __init__(self, lm: SpeechLM, *, keep_states: bool, sampling: str) -> None:
        self._lm, self._keep_states, self._sampling = lm, keep_states, sampling
        self._device = lm.llm_decoder.weight.device

    @torch.inference_mode()
    def decode(self, given: LMInput, count: int, times: DecodeTimes) -> Iterator[list[int]]:
        """See ``Decoder``."""
        lm, draw = self._lm, self._drawer()
        cache, x = JoinedCache(lm), embed_prompt(lm, given)
        waiting: list[Tensor] = []
        for index in range(count):
            begun = time.perf_counter()
            scores = lm.logits(self._last_state(x, cache)).float()
            token = draw(scores)
            x = self._embedded(token)
            if index:  # the first one is the prompt's pass
                times.dispatch_s += time.perf_counter() - begun
                times.steps += 1
            if isinstance(token, int):
                yield [token]
                continue
            waiting.append(token)
            if len(waiting) == BURST_TOKENS or index == count - 1:
                yield torch.stack(waiting).flatten().tolist()
                waiting = []

    def _embedded(self, token: int | Tensor) -> Tensor:
        if isinstance(token, int):
            return self._lm.speech_embedding.weight[token].reshape(1, 1, -1)
        return self._lm.embed_speech(token.reshape(1, 1))

    def _last_state(self, x: Tensor, cache: JoinedCache) -> Tensor:
        if not self._keep_states:
            hidden: Tensor = self._lm(x, cache)[0, -1]
            return hidden
        return states_and_text_scores(self._lm, x, cache)[-1][0, -1]

    def _drawer(self) -> Callable[[Tensor], int | Tensor]:
        config = self._lm.config
        stop = torch.zeros(config.num_speech_rows, device=self._device)
        stop[config.speech_token_size :] = -torch.inf
        if self._sampling == "loop":
            history: list[int] = []
            generator = torch.Generator(self._device).manual_seed(SamplingParams().seed)
            return lambda scores: draw_in_loop(scores + stop, history, config.sampling, generator)
        drawing = _DeviceDrawing(self._lm)
        if self._sampling == "vectorised":
            return lambda scores: int(drawing.draw(scores))
        return drawing.draw


def states_and_text_scores(lm: SpeechLM, x: Tensor, cache: KeyValueCache) -> list[Tensor]:
    """The hidden states before, between and behind the layers, each ``[1, T, hidden]``.

    The text head's scores are made and thrown away, which the reference's causal language model does too.
    """
    past, length = cache.length, x.shape[1]
    cos, sin = rotary_tables(past, length, lm.config.head_dim, lm.config.rope_theta, x.device)
    rotary = cos.to(x.dtype), sin.to(x.dtype)
    cache.reserve(length)
    states = [x]
    for index, layer in enumerate(lm.layers):
        states.append(layer(states[-1], rotary, None, cache, index))
    cache.advance(length)
    states[-1] = lm.norm(states[-1])
    linear(states[-1], lm.embed_tokens.weight)
    return states


def draw_in_loop(scores: Tensor, history: list[int], rule: SamplingConfig, generator: torch.Generator) -> int:
    """Repetition-aware nucleus sampling, candidate by candidate; appends what it draws to ``history``.

    Args:
        scores: ``[vocab]``, -inf = forbidden. Each comparison of a running sum waits for the device.
        generator: on the device of the scores.
    """
    probs, ids = scores.softmax(dim=0).sort(descending=True, stable=True)
    kept_probs: list[Tensor] = []
    kept_ids: list[Tensor] = []
    total: Tensor | float = 0.0
    for index in range(
        len(ids)
    ):  # over the tensor itself it would cut all of the vocabulary into pieces first
        if not (total < rule.top_p and len(kept_ids) < rule.top_k):
            break
        total = total + probs[index]
        kept_probs.append(probs[index])
        kept_ids.append(ids[index])
    weights, candidates = torch.tensor(kept_probs).to(scores), torch.tensor(kept_ids).to(ids.device)
    drawn = int(candidates[weights.multinomial(1, replacement=True, generator=generator)])
    recent = torch.tensor(history[-rule.win_size :], dtype=torch.int64).to(scores.device)
    if int((recent == drawn).sum()) >= rule.win_size * rule.tau_r:
        scores[drawn] = -torch.inf
        drawn = int(scores.softmax(dim=0).multinomial(1, replacement=True, generator=generator))
    history.append(drawn)
    return drawn


class _DeviceDrawing:
    """One row's sampling state; the history moves along in a tensor."""

    def __init__(self, lm: SpeechLM) -> None:
        device, sampling = lm.llm_decoder.weight.device, lm.config.sampling
        self._rows = SamplingRows.from_params([SamplingParams()], sampling, device)
        self._allowed = allowed_tokens(lm.config, device)[int(TokenKind.SPEECH)][None]
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._recent = torch.full((1, max(1, sampling.win_size)), -1, device=device)

    def draw(self, scores: Tensor) -> Tensor:
        """``[vocab]`` to the token ``[1]``; nothing is read back."""
        token, _ = sample(scores[None], self._rows, self._place, self._recent, self._allowed)
        self._recent = torch.cat((self._recent[:, 1:], token[:, None]), dim=1)
        self._place = self._place + 1
        return token


class StaticDecoder:
    """Steps of static shape, their layers compiled, or all in one CUDA graph, or both; the prompt runs eagerly."""

    @torch.inference_mode()
    def __init__(self, lm: SpeechLM, capacity: int, *, compiled: bool, graphs: bool) -> None:
        self._lm, self._capacity = lm, -(-capacity // _MASK_MULTIPLE) * _MASK_MULTIPLE
        self._steps = steps = StaticSteps(lm, 1, 0, self._capacity, is_compiled=compiled)
        for _ in range(3):
            steps.reset()
            steps.step()
        self._advance: Callable[[], object] = capture_step(steps).replay if graphs else steps.step
        if steps._cache.is_cuda:
            torch.cuda.synchronize()  # others use another stream

    @torch.inference_mode()
    def decode(self, given: LMInput, count: int, times: DecodeTimes) -> Iterator[list[int]]:
        """See ``Decoder``."""
        lm, steps = self._lm, self._steps
        x = embed_prompt(lm, given)
        length = x.shape[1]
        assert length + count <= self._capacity, "longer than planned"
        cache = lm.new_cache(1, length)
        hidden = lm(x, cache)
        steps._cache[:, :, :, :, :length].copy_(cache.storage[:, :, :, :, :length])
        steps.reset()
        steps._at.fill_(length)
        steps._drawing.draw(lm.logits(hidden[:, -1]))
        waiting = [steps._drawing.tokens.clone()]
        for index in range(1, count + 1):
            if len(waiting) == BURST_TOKENS or index == count:
                yield torch.stack(waiting).flatten().tolist()
                waiting = []
            if index == count:
                return
            begun = time.perf_counter()
            self._advance()
            times.dispatch_s += time.perf_counter() - begun
            times.steps += 1
            waiting.append(steps._drawing.tokens.clone())


def embed_prompt(lm: SpeechLM, given: LMInput) -> Tensor:
    """Start, text, task, prompt speech: ``[1, T, hidden]``."""
    device, config = lm.llm_decoder.weight.device, lm.config
    start, text, speech = (
        torch.tensor([ids], device=device)
        for ids in ([config.sos_id], given.text, [config.task_id, *given.prompt_speech])
    )
    return torch.cat((lm.embed_speech(start), lm.embed_text(text), lm.embed_speech(speech)), dim=1)
