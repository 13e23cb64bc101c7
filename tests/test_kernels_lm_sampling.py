"""The sampling rule inside the resident kernel of the speech LM, emulated: it draws what the plain sampler draws."""

import numpy as np
import pytest
import torch

from vivace.engine.sampler import OneRow, TokenKind, allowed_tokens, sample_one
from vivace.kernels.lm_persistent import Shape
from vivace.random_checkpoint import full_config, tiny_config

from . import emulated_lm

TINY, FULL = tiny_config().lm, full_config().lm
SIZES = {
    "tiny": (TINY, Shape(128, 256, 2, 2, 1, TINY.num_speech_rows, TINY.speech_token_size, 1e-6), 32, 480),
    "six warps": (FULL, Shape(384, 1024, 2, 6, 2, 6761, 6561, 1e-6), 132, 32),
    "full": (FULL, Shape(896, 4864, 24, 14, 2, 6761, 6561, 1e-6), 132, 64),
}
assert (FULL.num_speech_rows, FULL.speech_token_size) == (6761, 6561)


def scores(generator, count, style):
    """Logits ``[count]`` of one kind out of several, with many equal ones, clusters, a single high one, few allowed."""
    logits = generator.standard_normal(count) * generator.choice([0.1, 1, 3, 10])
    if style == "equal":
        logits = np.round(logits * generator.choice([1, 4]))
    elif style == "all equal":
        logits[:] = 0.5
    elif style == "few":
        logits[generator.random(count) < 0.98] = -np.inf
    elif style == "run":  # neighbours alone, so that few warps have any
        start = generator.integers(0, count - 600)
        logits[:start] = -np.inf
        logits[start + generator.integers(1, 600) :] = -np.inf
    elif style == "clusters":
        for centre in generator.integers(0, count, 2):
            logits += 12 * np.exp(-np.abs(np.arange(count) - centre) / generator.choice([5, 40, 200]))
    elif style == "one":
        logits[generator.integers(0, count)] += 40
    elif style == "close":
        logits = 5 + logits * 1e-6
    elif style == "high":
        logits += 1e5
    return torch.from_numpy(logits.astype(np.float32))


STYLES = ("plain", "plain", "equal", "all equal", "few", "run", "clusters", "one", "close", "high")


def settings(generator, seed):
    """Of a row, the ends of every range included."""
    return OneRow(
        seed=seed * 7919 - 2**40,
        top_p=float(np.float32(generator.choice([0.8, 0.8, 1.0, 1e-6, 0.31, 0.99]))),
        top_k=int(generator.choice([25, 25, generator.integers(1, 65), 1, 64])),
        win_size=int(generator.choice([10, 10, 0, 30, 64, 1])),
        tau_r=float(generator.choice([0.1, 0.03, 0.5])),
        temperature=float(np.float32(generator.choice([1, 1, 0, 0.5, 2, 0.05, 1.3, 10]))),
    )


def plain(config, logits, row, kind, place, history):
    """``sample_one``, and of equal scores the lower id."""
    allowed = allowed_tokens(config)[kind]
    drawn = sample_one(logits, row, place, history, allowed)
    if drawn is not None and row.temperature <= 0:
        likely = logits.masked_fill(~allowed, -torch.inf)
        drawn = int((likely == likely.max()).nonzero()[0])
    return -1 if drawn is None else drawn


@pytest.mark.parametrize("size", SIZES)
def test_it_draws_what_the_plain_sampler_draws(size):
    if emulated_lm.missing():
        pytest.skip(emulated_lm.missing())
    config, shape, grid, count = SIZES[size]
    generator = np.random.default_rng(len(size))
    logits, rows = [], []
    for index in range(count):
        logits.append(scores(generator, shape.vocab, STYLES[index % len(STYLES)]))
        likely = logits[-1][: shape.speech].topk(4).indices.tolist()
        history = generator.choice([*likely, *range(40)], generator.integers(0, 150)).tolist()
        kind = TokenKind(generator.integers(0, len(TokenKind)))
        rows.append((settings(generator, index), kind, int(generator.integers(0, 5000)), history))
    want = [plain(config, scored, *row) for scored, row in zip(logits, rows, strict=True)]
    assert emulated_lm.draw_rows(shape, grid, torch.stack(logits), rows) == want
    assert len(set(want)) > count / 3


def test_scores_that_are_not_finite_are_told():
    if emulated_lm.missing():
        pytest.skip(emulated_lm.missing())
    config, shape, grid, _ = SIZES["tiny"]
    logits = torch.randn(5, shape.vocab, generator=torch.Generator().manual_seed(0))
    logits[0, 17] = torch.nan
    logits[1, 500] = torch.inf
    logits[2] = -torch.inf
    logits[3, shape.speech] = torch.nan  # not allowed, so it does not matter
    row = OneRow(seed=1, top_p=0.8, top_k=25, win_size=10, tau_r=0.1, temperature=1.0)
    for settled in (row, OneRow(1, 0.8, 25, 10, 0.1, 0.0), OneRow(1, 0.8, 25, 10, 0.1, 0.7)):
        rows = [(settled, TokenKind.SPEECH, 3, [])] * 5
        want = [plain(config, scored, *one) for scored, one in zip(logits, rows, strict=True)]
        assert want[:3] == [-1, -1, -1]
        assert emulated_lm.draw_rows(shape, grid, logits, rows) == want
