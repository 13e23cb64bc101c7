"""The sampler: the reference's candidates, resampling as a distribution, rows that cannot harm each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vivace.config import SamplingConfig, SpeechLMConfig
from vivace.datatypes import SamplingParams
from vivace.engine.sampler import (
    OneRow,
    SamplingRows,
    TokenKind,
    allowed_tokens,
    nucleus,
    sample,
    sample_one,
    uniforms,
)

GOLDEN = Path(__file__).parent / "golden" / "cosyvoice3-tiny" / "vectors.npz"
DEFAULTS = SamplingConfig()
CONFIG = SpeechLMConfig(64, 64, 1, 1, 1, 64, 16, speech_token_size=20)


@pytest.fixture(scope="module")
def vectors():
    with np.load(GOLDEN) as archive:
        return {k: archive[k] for k in archive.files if k.startswith(("sampler", "lm.logits"))}


def make_rows(count, **settings):
    return SamplingRows.from_params([SamplingParams(seed=s, **settings) for s in range(count)], DEFAULTS)


def no_history(count):
    return torch.full((count, 10), -1, dtype=torch.int64)


def positions(count, value=0):
    return torch.full((count,), value, dtype=torch.int64)


@pytest.mark.parametrize("group", ["sampler", "sampler_peaked"])
def test_candidates_agree_with_the_reference(vectors, group):
    scales = [float(vectors.get(f"{group}.{i}.scale", 1.0)) for i in range(6)]
    logits = torch.from_numpy(vectors["lm.logits"][:6]) * torch.tensor(scales)[:, None]
    ids, weights = nucleus(logits, torch.full((6,), 0.8), torch.full((6,), 25))
    for i in range(6):
        want_ids = vectors[f"{group}.{i}.nucleus_ids"].tolist()
        assert int((weights[i] > 0).sum()) == len(want_ids)
        assert ids[i, : len(want_ids)].tolist() == want_ids
        got = weights[i, : len(want_ids)] / weights[i].sum()
        # One softmax and one division in float32: a few units in the last place.
        np.testing.assert_allclose(got, vectors[f"{group}.{i}.nucleus_probs"], rtol=1e-5, atol=1e-7)


def test_equal_scores_are_taken_in_the_order_of_their_ids():
    ids, weights = nucleus(torch.zeros(1, 50), torch.tensor([0.8]), torch.tensor([7]))
    assert ids[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert int((weights > 0).sum()) == 7


def reference_distribution(logits, history, top_p, top_k, win_size, tau_r):
    """What ``ras_sampling`` draws, as exact probabilities (float64, one loop per candidate)."""
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept, total = [], 0.0
    for index in order:
        if total < top_p and len(kept) < top_k:
            kept.append(index)
            total += probs[index]
        else:
            break
    out = np.zeros_like(probs)
    for index in kept:
        share = probs[index] / total
        if sum(token == index for token in history[-win_size:]) >= win_size * tau_r:
            rest = probs.copy()
            rest[index] = 0
            out += share * rest / rest.sum()
        else:
            out[index] += share
    return out


@pytest.mark.parametrize(
    ("history", "tau_r"),
    [([], 0.1), ([3, 3, 7], 0.1), ([3, 3, 7], 0.2), ([3] + [9] * 10, 0.1), (list(range(12)), 0.1)],
)
def test_resampling_has_the_reference_distribution(history, tau_r):
    logits = np.random.default_rng(5).normal(0, 1.5, 20)
    logits[3] = logits.max() + 0.7
    count = 40_000
    rows = make_rows(count, tau_r=tau_r, top_k=6)
    recent = no_history(count)
    window = history[-10:]
    if window:
        recent[:, -len(window) :] = torch.tensor(window)
    ids, ok = sample(
        torch.from_numpy(logits).float().expand(count, -1), rows, positions(count, len(history)), recent
    )
    assert bool(ok.all())
    want = reference_distribution(logits, history, 0.8, 6, 10, tau_r)
    got = np.bincount(ids.numpy(), minlength=20)
    assert got[want == 0].sum() == 0
    likely = want > 0
    chi_square = ((got - want * count)[likely] ** 2 / (want * count)[likely]).sum()
    # Seeds are fixed, so this cannot flake: 45 lies beyond the 99.9 % point of 19 degrees of freedom (43.8).
    assert chi_square < 45


def test_uniforms_are_uniform_and_independent():
    count = 20_000
    seeds, zero = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    series = [
        uniforms(seeds, zero, 0),
        uniforms(seeds, zero, 1),
        uniforms(zero, seeds, 0),
        uniforms(zero, seeds, 1),
        uniforms(seeds * 2**40, zero + 1, 0),
    ]
    for values in series:
        assert values.min() >= 0
        assert values.max() < 1
        buckets = torch.histc(values.float(), 64, 0, 1)
        assert float(((buckets - count / 64) ** 2 / (count / 64)).sum()) < 110  # 63 degrees, 99.98 % point
    correlation = torch.corrcoef(torch.stack(series))
    assert float((correlation - torch.eye(len(series))).abs().max()) < 0.03  # 4 standard errors


def split_mix(x):
    """SplitMix64's finaliser in Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_uniforms_are_those_of_the_integer_formula():
    """Stored seeds must give the same speech in every later version, so the formula is written down twice."""
    cases = [(0, 0, 0), (0, 0, 1), (1, 7, 1), (2**63 - 1, 123_456, 0)]
    for seed, position, draw in cases:
        x = split_mix((seed + 0x9E3779B97F4A7C15) % 2**64)
        x = split_mix((x + (position + 1) * 0xD1342543DE82EF95) % 2**64)
        x = split_mix((x + (draw + 1) * 0xAF251AF3B0F025B5) % 2**64)
        assert float(uniforms(torch.tensor([seed]), torch.tensor([position]), draw)) == (x >> 16) / 2**48


def test_a_row_is_the_same_in_any_company():
    torch.manual_seed(3)
    logits = torch.randn(9, 40) * 2
    recent = torch.randint(0, 40, (9, 10))
    rows = make_rows(9)
    together, _ = sample(logits, rows, positions(9, 4), recent)
    for i in range(9):
        alone = SamplingRows.from_params([SamplingParams(seed=i)], DEFAULTS)
        assert sample(logits[i : i + 1], alone, positions(1, 4), recent[i : i + 1])[0][0] == together[i]
    assert sample(logits, rows, positions(9, 5), recent)[0].tolist() != together.tolist()


def test_bad_rows_are_reported_and_leave_the_others_alone():
    torch.manual_seed(4)
    logits = torch.randn(5, 20)
    rows = make_rows(5)
    clean, _ = sample(logits, rows, positions(5), no_history(5))
    broken = logits.clone()
    broken[0, 3] = torch.nan
    broken[1] = -torch.inf
    broken[2, 5] = torch.inf
    ids, ok = sample(broken, rows, positions(5), no_history(5))
    assert ok.tolist() == [False, False, False, True, True]
    assert ids.tolist() == [0, 0, 0, *clean[3:].tolist()]
    nothing_allowed = torch.zeros(5, 20, dtype=torch.bool)
    assert not sample(logits, rows, positions(5), no_history(5), nothing_allowed)[1].any()


def test_nan_in_a_forbidden_place_does_no_harm():
    logits = torch.zeros(1, 20)
    logits[0, 19] = torch.nan
    allowed = torch.ones(1, 20, dtype=torch.bool)
    allowed[0, 19] = False
    assert bool(sample(logits, make_rows(1), positions(1), no_history(1), allowed)[1][0])


@pytest.mark.parametrize("kind", list(TokenKind))
def test_masks_hold_even_where_the_forbidden_is_likeliest(kind):
    count = 400
    logits = torch.zeros(count, CONFIG.num_speech_rows)
    logits[:, CONFIG.speech_token_size :] += 3
    logits[:, 2] += 8
    recent = torch.full(
        (count, 10), 2
    )  # token 2 is drawn at first and then resampled over everything allowed
    mask = allowed_tokens(CONFIG)[kind].expand(count, -1)
    ids, ok = sample(logits, make_rows(count), positions(count), recent, mask)
    assert bool(ok.all())
    assert bool(mask[torch.arange(count), ids].all())
    specials = {int(i) for i in ids if i >= CONFIG.speech_token_size}
    if kind == TokenKind.SPEECH:
        assert specials == set()
    elif kind == TokenKind.ANY:
        assert len(specials) > 50
    else:
        assert specials == {CONFIG.fill_id if kind == TokenKind.SPEECH_OR_FILL else CONFIG.eos_id}


def test_the_only_allowed_token_is_kept_however_often_it_came():
    allowed = torch.zeros(1, 20, dtype=torch.bool)
    allowed[0, 6] = True
    ids, ok = sample(torch.zeros(1, 20), make_rows(1), positions(1), torch.full((1, 10), 6), allowed)
    assert (ids.tolist(), ok.tolist()) == ([6], [True])


def test_temperature():
    logits = torch.linspace(0, 4, 20).expand(2000, -1)
    zero = sample(logits, make_rows(2000, temperature=0.0), positions(2000), torch.full((2000, 10), 19))[0]
    assert set(zero.tolist()) == {19}
    spread = [
        len(
            set(sample(logits, make_rows(2000, temperature=t), positions(2000), no_history(2000))[0].tolist())
        )
        for t in (0.2, 1.0, 3.0)
    ]
    assert spread[0] < spread[1] < spread[2]


def test_window_lengths_differ_per_row():
    params = [SamplingParams(seed=1, win_size=w, top_k=1) for w in (0, 1, 3)]
    rows = SamplingRows.from_params(params, SamplingConfig(tau_r=0.3))
    logits = torch.zeros(3, 20)
    logits[:, 8] = 9
    recent = no_history(3)
    recent[:, -2] = 8  # two steps ago
    ids, _ = sample(logits, rows, positions(3), recent)
    assert ids[:2].tolist() == [8, 8]
    assert ids[2] != 8


@pytest.mark.parametrize("group", ["plain", "streamed", "wide"])
def test_one_row_draws_what_the_rows_together_draw(group):
    """Equal in every draw: resampled, masked, greedy, with and without a window."""
    generator = torch.Generator().manual_seed(1)
    count, vocab = 600, CONFIG.num_speech_rows
    logits = torch.randn(count, vocab, generator=generator) * 3
    logits[::7] = logits[::7].round()  # ties
    recent = torch.randint(0, 6, (count, 10), generator=generator)
    recent[:, 0] = logits[:, :20].argmax(-1)
    settings = {"plain": (0.8, 25, 10, 0.1), "streamed": (0.5, 4, 5, 0.3), "wide": (1.0, 300, 0, 0.1)}[group]
    params = [
        SamplingParams(
            seed=s * 7919,
            top_p=settings[0],
            top_k=settings[1],
            win_size=settings[2],
            tau_r=settings[3],
            temperature=(1.0, 0.7, 0.0)[s % 3],
        )
        for s in range(count)
    ]
    rows = SamplingRows.from_params(params, DEFAULTS)
    kinds = torch.arange(count) % len(TokenKind)
    allowed = allowed_tokens(CONFIG)[kinds]
    places = torch.arange(count) * (1 << 41)
    want, ok = sample(logits, rows, places, recent, allowed)
    assert ok.all()
    for row in range(count):
        one = OneRow.of(SamplingRows.from_params([params[row]], DEFAULTS))
        before = logits[row].clone()
        got = sample_one(logits[row], one, int(places[row]), recent[row].tolist(), allowed[row])
        assert got == want[row]
        assert torch.equal(before, logits[row])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_row_refuses_what_the_rows_together_refuse(bad):
    one = OneRow.of(make_rows(1))
    logits = torch.zeros(CONFIG.num_speech_rows)
    logits[3] = bad
    assert sample_one(logits, one, 0, []) is None
    assert sample_one(torch.full_like(logits, -torch.inf), one, 0, []) is None
    hidden = torch.ones_like(logits, dtype=torch.bool)
    hidden[3] = False
    assert sample_one(logits, one, 0, [], hidden) is not None
    only = torch.full_like(logits, -torch.inf)
    only[5] = 0.0
    assert sample_one(only, one, 0, [5] * 10) == 5  # nothing else could be drawn


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38, 1e-6])
def test_the_smallest_temperatures_take_the_likeliest(temperature):
    logits = torch.tensor([10.0, 50.0, 30.0, 49.0])
    rows = SamplingRows.from_params([SamplingParams(temperature=temperature)], SamplingConfig())
    none = torch.full((1, 10), -1)
    for place in range(5):
        token, ok = sample(logits[None], rows, torch.tensor([place]), none)
        assert bool(ok)
        assert int(token) == sample_one(logits, OneRow.of(rows), place, []) == 1
