"""Drawing speech tokens: nucleus sampling with repetition-aware resampling, vectorised over rows.

The rule is the reference's ``ras_sampling`` (VALL-E 2): draw from the nucleus; if the token drawn already
fills at least ``win_size * tau_r`` of the last ``win_size`` tokens, mask it and draw once more, now from all
the remaining tokens (no nucleus). Everything happens on the logits' device without a read-back.

Randomness is counter-based: a uniform is a pure function of (seed, position, draw). It does not depend on the
device, on the batch or on what was drawn before, so the same request gives the same tokens in any company.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from vivace.config import LMConfig, SamplingConfig
from vivace.datatypes import SamplingParams

NUCLEUS_DRAW = 0
RESAMPLING_DRAW = 1

_INT64 = 1 << 64


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that holds it."""
    return value - _INT64 if value >= _INT64 // 2 else value


# SplitMix64's increment and multipliers, and two more odd constants of high disorder for the other counters.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
_POSITION = _signed(0xD1342543DE82EF95)
_DRAW = _signed(0xAF251AF3B0F025B5)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every input bit reaches every output bit. int64 products wrap, as wanted."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def uniforms(seeds: Tensor, positions: Tensor, draw: int) -> Tensor:
    """Uniform numbers in [0, 1), float64, one per element.

    Args:
        seeds, positions: int64, same shape; position counts the request's decoded tokens.
        draw: which draw of that position (``NUCLEUS_DRAW``, ``RESAMPLING_DRAW``).
    """
    state = _mix(seeds + _GOLDEN)
    state = _mix(state + (positions + 1) * _POSITION)
    state = _mix(state + _signed((draw + 1) * _DRAW % _INT64))
    return _shift_right(state, 16).to(torch.float64) * 2.0**-48


class TokenKind(IntEnum):
    """Which rows may be drawn; an index into ``allowed_tokens``."""

    ANY = 0
    """All. Every special row ends the sequence, as in the reference (its stop ids are all 200)."""
    SPEECH = 1
    """Speech tokens only: before the minimum length."""
    SPEECH_OR_FILL = 2
    """Inside a group of streamed text: a fill token says that the next text is due."""
    SPEECH_OR_EOS = 3
    """After the last text of a stream. The reference raises on any other special token."""


def allowed_tokens(config: LMConfig, device: torch.device | str = "cpu") -> Tensor:
    """Bool ``[kinds, num_speech_rows]``; index it with ``TokenKind`` values, one per row of the batch.

    The reference's Python path means to forbid the end of sequence before the minimum length but masks the
    start row instead (CosyVoice 2's numbering); its vLLM path forbids all stop ids. We do the latter.
    """
    table = torch.zeros(len(TokenKind), config.num_speech_rows, dtype=torch.bool)
    table[:, : config.speech_token_size] = True
    table[TokenKind.ANY] = True
    if config.fill_id is not None:
        table[TokenKind.SPEECH_OR_FILL, config.fill_id] = True
    table[TokenKind.SPEECH_OR_EOS, config.eos_id] = True
    return table.to(device)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Settings of each row of a batch, as tensors ``[rows]`` on the device of the logits.

    ``temperature`` 0 takes the likeliest token and never resamples. ``win_size`` 0 turns resampling off.
    """

    seeds: Tensor
    top_p: Tensor
    top_k: Tensor
    win_size: Tensor
    tau_r: Tensor
    temperature: Tensor

    @classmethod
    def from_params(
        cls,
        params: list[SamplingParams],
        defaults: SamplingConfig,
        device: torch.device | str = "cpu",
    ) -> SamplingRows:
        """One row per request; what a request leaves open comes from the model's configuration."""

        def row(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def pick(given: float | None, default: float) -> float:
            return default if given is None else given

        return cls(
            seeds=torch.tensor([p.seed for p in params], dtype=torch.int64, device=device),
            top_p=row([pick(p.top_p, defaults.top_p) for p in params], torch.float32),
            top_k=row([pick(p.top_k, defaults.top_k) for p in params], torch.int64),
            win_size=row([pick(p.win_size, defaults.win_size) for p in params], torch.int64),
            # float64 as in the reference's Python: float32's 10 * 0.1 is above 1 and asks for two repeats.
            tau_r=row([pick(p.tau_r, defaults.tau_r) for p in params], torch.float64),
            temperature=row([p.temperature for p in params], torch.float32),
        )


def nucleus(logits: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates: from the likeliest down, while sum is below ``top_p`` and count below ``top_k``.

    Args:
        logits: float32 ``[rows, vocab]``; -inf = forbidden. top_p, top_k: ``[rows]``.

    Returns:
        ids ``[rows, vocab]``, sorted by falling probability (equal ones by rising id), and their
        probabilities ``[rows, vocab]``, zero for those outside the nucleus, not normalised.
    """
    probs, ids = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(dim=-1) - probs
    ranks = torch.arange(probs.shape[-1], device=logits.device)
    kept = (before < top_p[:, None]) & (ranks < top_k[:, None])
    kept[:, 0] = True  # rounding or an extreme top_p must not leave a row without candidates
    return ids, probs * kept


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: the first index whose running sum of ``weights [rows, n]`` exceeds its share.

    The sum is taken in float64, so that its order (which differs between devices) does not move a draw. Zero
    weights are never drawn. Returns ``[rows]``; a row without weight gives 0.
    """
    running = weights.to(torch.float64).cumsum(dim=-1)
    target = uniform * running[:, -1]
    below = (running <= target[:, None]).sum(dim=-1)
    return below.clamp(max=weights.shape[-1] - 1)


def sample(
    logits: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    recent: Tensor,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the next token of every row.

    Args:
        logits: ``[rows, vocab]``, any float dtype; not changed.
        rows: settings per row.
        positions: int64 ``[rows]``, how many tokens the request has decoded.
        recent: int64 ``[rows, window]``, the last decoded tokens, newest last (right-aligned), -1 where
            there are none yet; ``window`` at least the largest ``win_size``, which may look back less far.
        allowed: bool ``[rows, vocab]``, False = must not be drawn; None allows all.

    Returns:
        ids int64 ``[rows]`` and ok bool ``[rows]``. A row with NaN or +inf among its allowed logits, or with
        nothing allowed, is not ok; its id is 0, and the other rows are unharmed.
    """
    scores = logits.float()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    ok = ~(scores.isnan() | scores.isposinf()).any(dim=-1) & ~scores.isneginf().all(dim=-1)
    scores = torch.where(ok[:, None], scores, 0.0)
    greedy = rows.temperature <= 0
    likeliest = scores.argmax(dim=-1)
    # Below the largest score, so that no temperature makes infinities of it.
    warmed = (scores - scores.amax(dim=-1, keepdim=True)) / torch.where(greedy, 1.0, rows.temperature)[
        :, None
    ]
    scores = torch.where((greedy | (rows.temperature == 1.0))[:, None], scores, warmed)

    ids, weights = nucleus(scores, rows.top_p, rows.top_k)
    picked = _draw(weights, uniforms(rows.seeds, positions, NUCLEUS_DRAW))
    first = ids.gather(1, picked[:, None]).squeeze(1)

    age = torch.arange(recent.shape[1], 0, -1, device=recent.device)
    repeats = ((recent == first[:, None]) & (age <= rows.win_size[:, None])).sum(dim=-1)
    again = (repeats >= rows.win_size * rows.tau_r) & (rows.win_size > 0)
    rest = scores.scatter(1, first[:, None], -torch.inf)
    again &= ~rest.isneginf().all(dim=-1)  # the only allowed token is kept, however often it came
    # Where the row is not resampled its probabilities are unused; 0 in place of -inf keeps NaN out of them.
    rest_probs = torch.where(again[:, None], rest, 0.0).softmax(dim=-1)
    second = _draw(rest_probs, uniforms(rows.seeds, positions, RESAMPLING_DRAW))

    drawn = torch.where(again, second, first)
    drawn = torch.where(greedy, likeliest, drawn)
    return torch.where(ok, drawn, 0), ok


@dataclass(frozen=True, slots=True)
class OneRow:
    """Settings of a single row as plain numbers, for ``sample_one``."""

    seed: int
    top_p: float
    top_k: int
    win_size: int
    tau_r: float
    temperature: float

    @classmethod
    def of(cls, rows: SamplingRows) -> OneRow:
        """The first row."""
        return cls(
            int(rows.seeds[0]),
            float(rows.top_p[0]),
            int(rows.top_k[0]),
            int(rows.win_size[0]),
            float(rows.tau_r[0]),
            float(rows.temperature[0]),
        )


def _mix_one(x: int) -> int:
    x = (x ^ (x >> 30)) * _MULTIPLIER_1 % _INT64
    x = (x ^ (x >> 27)) * _MULTIPLIER_2 % _INT64
    return x ^ (x >> 31)


def _uniform(seed: int, position: int, draw: int) -> float:
    """One of ``uniforms``."""
    state = _mix_one((seed + _GOLDEN) % _INT64)
    state = _mix_one((state + (position + 1) * _POSITION) % _INT64)
    state = _mix_one((state + (draw + 1) * _DRAW) % _INT64)
    return float(state >> 16) * 2.0**-48


def sample_one(
    logits: Tensor, row: OneRow, position: int, history: Sequence[int], allowed: Tensor | None = None
) -> int | None:
    """What ``sample`` draws for one row, to the last bit, with a tenth of the work on a CPU.

    Args:
        logits: ``[vocab]`` on the CPU. allowed: bool ``[vocab]``.
        history: decoded tokens, newest last; all, or at least ``win_size`` of them.

    Returns:
        The token; None where ``sample`` is not ok.
    """
    scores = logits.float()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    # NaN and infinities come through the maximum.
    if not math.isfinite(float(scores.max())):
        return None
    if row.temperature <= 0:
        return int(scores.argmax())
    if row.temperature != 1.0:
        scores = (scores - scores.max()) / torch.tensor(row.temperature)
    probs, ids = scores.softmax(dim=-1).sort(descending=True, stable=True)
    probs, ids = probs[: max(1, row.top_k)], ids[: max(1, row.top_k)]
    before = (probs.cumsum(dim=-1) - probs).tolist()
    running: list[float] = []
    total = 0.0
    for weight, sum_before in zip(probs.tolist(), before, strict=True):
        if not running or sum_before < row.top_p:
            total += weight
        running.append(total)
    target = _uniform(row.seed, position, NUCLEUS_DRAW) * total
    first = int(ids[bisect_right(running, target, hi=len(running) - 1)])
    repeats = history[-row.win_size :].count(first) if row.win_size > 0 else 0
    if row.win_size <= 0 or repeats < row.win_size * row.tau_r:
        return first
    rest = scores.clone()
    rest[first] = -torch.inf
    if not math.isfinite(float(rest.max())):
        return first
    uniform = torch.tensor([_uniform(row.seed, position, RESAMPLING_DRAW)], dtype=torch.float64)
    return int(_draw(rest.softmax(dim=-1)[None], uniform))
