"""How far a rung's arithmetic is from float32: divergence of the speech LM's scores, noise in the flow's mel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.bench.llm import divergence, paged_scores_of
from vivace.engine.flow_runner import FlowRunner
from vivace.models.lm_single import SingleStep

if TYPE_CHECKING:
    from vivace.models.flow import FlowModel
    from vivace.models.speech_lm import SpeechLM
    from vivace.voice import Voice

BEST_SNR_DB = 150.0
"""Reported where nothing differs."""


@torch.inference_mode()
def lm_scores(lm: SpeechLM, prompt: int = 64, tokens: int = 32, seed: int = 0) -> Tensor:
    """Scores behind each of some random speech tokens, float32 ``[tokens, vocab]``, by the plain forward."""
    text, speech = random_tokens(lm, prompt, tokens, seed)
    embeds = torch.cat((lm.embed_text(text), lm.embed_speech(speech)))
    return lm.logits(lm(embeds[None])[0, prompt:]).float().cpu()


@torch.inference_mode()
def single_step_scores(lm: SpeechLM, prompt: int = 64, tokens: int = 32, seed: int = 0) -> Tensor:
    """The same by the lean decoding step of a CPU."""
    text, speech = random_tokens(lm, prompt, tokens, seed)
    cache = lm.new_cache(1, prompt + tokens)
    lm(lm.embed_text(text)[None], cache)
    step = SingleStep(lm)
    return torch.stack([lm.logits(step.hidden(int(token), cache)) for token in speech]).float().cpu()


@torch.inference_mode()
def paged_scores(lm: SpeechLM, prompt: int = 64, tokens: int = 32, seed: int = 0) -> Tensor:
    """The same by the kernels for one row on a device."""
    text, speech = random_tokens(lm, prompt, tokens, seed)
    return paged_scores_of(lm, text, speech, bucket=1).cpu()


def random_tokens(lm: SpeechLM, prompt: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Text and speech tokens on the model's device; the same for every way."""
    generator = torch.Generator().manual_seed(seed)
    device = lm.llm_decoder.weight.device
    text = torch.randint(lm.config.text_vocab_size, (prompt,), generator=generator)
    speech = torch.randint(lm.config.speech_token_size, (tokens,), generator=generator)
    return text.to(device), speech.to(device)


def kl_mean(expected: Tensor, scores: Tensor) -> float:
    """Mean Kullback-Leibler divergence in nats."""
    return max(0.0, divergence(expected, scores)["kl_mean"])


@torch.inference_mode()
def whole_mel(flow: FlowModel, voice: Voice, tokens: Sequence[int]) -> Tensor:
    """Mel of given speech tokens in one pass under the chunk mask, float32 ``[80, frames]`` on the CPU."""
    device = flow.input_embedding.weight.device
    ids = torch.tensor([*voice.speech_tokens.tolist(), *tokens], device=device)
    prompt_mel, embedding = (torch.tensor(part, device=device) for part in (voice.mel, voice.embedding))
    return flow.generate(ids, prompt_mel, embedding, streaming=True).cpu()


@torch.inference_mode()
def streamed_mel(flow: FlowModel, voice: Voice, tokens: Sequence[int]) -> Tensor:
    """The same by the stream that keeps what is finished."""
    runner = FlowRunner(flow)
    stream = runner.open(voice)
    half = len(tokens) // 2
    parts = [
        runner.step(stream, list(tokens[:half]), is_last=False),
        runner.step(stream, list(tokens[half:]), is_last=True),
    ]
    return torch.cat(parts, dim=1).cpu()


def snr_db(expected: Tensor, found: Tensor) -> float:
    """Signal over difference in decibels, at most ``BEST_SNR_DB``."""
    noise = float((expected.double() - found.double()).square().sum())
    signal = float(expected.double().square().sum())
    if noise == 0.0:
        return BEST_SNR_DB
    return min(BEST_SNR_DB, 10 * math.log10(signal / noise)) if signal else -math.inf
