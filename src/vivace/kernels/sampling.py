"""Triton kernels that draw the next speech token of every row and move the row's state on.

The rule is that of ``vivace.engine.sampler.sample``, draw for draw: candidates sorted by falling probability, nucleus,
counter-based uniforms (64-bit integers that wrap), running sums in float64, repetition-aware resampling over all the
remaining tokens. Two kernels: one finds the likeliest ``TOP`` of each part of the vocabulary, the other, one program
per row, joins them, draws and updates. Plain version: ``vivace.kernels.reference.sample_rows``.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vivace.kernels.lm_rows import is_live

_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
_POSITION: tl.constexpr = tl.constexpr(0xD1342543DE82EF95)
_DRAW: tl.constexpr = tl.constexpr(0xAF251AF3B0F025B5)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * _MULTIPLIER_1
    x = (x ^ (x >> 27)) * _MULTIPLIER_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, place, DRAW: tl.constexpr):
    """``sampler.uniforms``: float64 in [0, 1)."""
    # One-element blocks: they wrap without complaint everywhere, the interpreter included.
    one = tl.zeros((1,), tl.int64)
    state = _mix((one + seed).to(tl.uint64) + _GOLDEN)
    state = _mix(state + (one + place + 1).to(tl.uint64) * _POSITION)
    for _ in tl.static_range(DRAW + 1):
        state += _DRAW
    state = _mix(state)
    return tl.sum((state >> 16).to(tl.float64) * (2.0**-48), 0)


@triton.jit
def _allowed(ids, kind, SPEECH, VOCAB, FILL, EOS):
    """Which rows ``sampler.allowed_tokens`` lets through; ``kind`` is a ``TokenKind``."""
    special = (kind == 0) | ((kind == 2) & (ids == FILL)) | ((kind == 3) & (ids == EOS))
    return (ids < SPEECH) | (special & (ids < VOCAB))


@triton.jit
def _kind_now(kind, place, min_place, slot):
    """The slot's kind; speech only before the shortest length."""
    early = tl.load(place + slot) < tl.load(min_place + slot)
    return tl.where(early, 1, tl.load(kind + slot))


@triton.jit
def candidates_kernel(
    logits,
    logits_stride,
    slots,
    stop,
    remaining,
    kind,
    place,
    min_place,
    temperature,
    keys_out,
    stats_out,
    SPEECH,
    VOCAB,
    FILL,
    EOS,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The ``TOP`` likeliest of ``PART`` neighbouring ids; grid ``(rows, PARTS)``.

    A key is one int64: the score's bits in an order that integers keep, then the id, reversed so that of equal
    scores the lower id comes first. ``stats_out [rows, PARTS, 3]``: largest score, sum of the exponentials below it
    (temperature applied), and 1 where a score is NaN or +inf.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot, _ = is_live(slots, stop, remaining, row)
    ids = part * PART + tl.arange(0, PART)
    ok = _allowed(ids, _kind_now(kind, place, min_place, slot), SPEECH, VOCAB, FILL, EOS)
    score = tl.load(logits + row.to(tl.int64) * logits_stride + ids, ok, other=-float("inf")).to(tl.float32)
    bad = (score != score) | (score == float("inf"))
    any_bad = tl.max(bad.to(tl.int32), 0)
    score = tl.where(bad, -float("inf"), score) + 0.0  # no negative zero: it would sort below zero
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    at = (row.to(tl.int64) * PARTS + part) * TOP + tl.arange(0, TOP)
    tl.store(keys_out + at, tl.topk(key, TOP))
    warmth = tl.load(temperature + slot)
    warmth = tl.where(warmth > 0, warmth, 1.0)
    most = tl.max(score, 0)
    # Where nothing is allowed the largest score is no number to count from.
    base = tl.where(most == -float("inf"), 0.0, most)
    total = tl.sum(tl.exp((score - base) / warmth), 0)
    stats = stats_out + (row * PARTS + part) * 3
    tl.store(stats, most)
    tl.store(stats + 1, total)
    tl.store(stats + 2, any_bad.to(tl.float32))


@triton.jit
def _again(scores_at, first, most, warmth, kind, seed, place, SPEECH, VOCAB, FILL, EOS, BLOCK: tl.constexpr):
    """Draws from all the allowed tokens but ``first``; ``first`` where there is no other."""
    ids = tl.arange(0, BLOCK)
    ok = _allowed(ids, kind, SPEECH, VOCAB, FILL, EOS) & (ids != first)
    score = tl.load(scores_at + ids, ok, other=-float("inf")).to(tl.float32)
    score = tl.where(warmth == 1.0, score, (score - most) / warmth)
    score = tl.where(ok, score, -float("inf"))
    highest = tl.max(score, 0)
    drawn = first
    if highest > -float("inf"):
        weight = tl.exp(score - highest)
        weight = weight / tl.sum(weight, 0)
        running = tl.cumsum(weight.to(tl.float64), 0)
        target = _uniform(seed, place, 1) * tl.max(running, 0)
        drawn = tl.minimum(tl.sum(((running <= target) & (ids < VOCAB)).to(tl.int32), 0), VOCAB - 1)
    return drawn


@triton.jit
def draw_kernel(
    logits,
    logits_stride,
    keys_in,
    stats_in,
    slots,
    token,
    length,
    place,
    min_place,
    kind,
    seed,
    top_p,
    top_k,
    win_size,
    tau_r,
    temperature,
    recent,
    decoded,
    stop,
    remaining,
    out,
    out_count,
    out_capacity,
    SPEECH,
    VOCAB,
    FILL,
    EOS,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TOP: tl.constexpr,
    RING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draws one token per row and updates its state; grid ``(rows,)``. ``PARTS`` here is a power of two."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot, live = is_live(slots, stop, remaining, row)
    if live:
        p = tl.arange(0, PARTS)
        stats = stats_in + (row * PARTS + p) * 3
        part_most = tl.load(stats)
        most = tl.max(part_most, 0)
        is_ok = (tl.max(tl.load(stats + 2), 0) == 0.0) & (most > -float("inf"))
        heat = tl.load(temperature + slot)
        warmth = tl.where(heat > 0, heat, 1.0)
        base = tl.where(is_ok, most, 0.0)
        fade = tl.exp((part_most - base) / warmth)
        total = tl.sum(tl.load(stats + 1) * fade, 0)

        j = tl.arange(0, PARTS * TOP)
        key = tl.topk(tl.load(keys_in + row.to(tl.int64) * PARTS * TOP + j), TOP)
        ids = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
        ordered = (key >> 32).to(tl.int32)
        score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        rank = tl.arange(0, TOP)
        prob = tl.exp((score - base) / warmth) / tl.where(is_ok, total, 1.0)
        before = tl.cumsum(prob, 0) - prob
        kept = (before < tl.load(top_p + slot)) & (rank < tl.load(top_k + slot))
        weight = tl.where(kept | (rank == 0), prob, 0.0).to(tl.float64)
        running = tl.cumsum(weight, 0)
        now = tl.load(place + slot)
        seed_now = tl.load(seed + slot)
        target = _uniform(seed_now, now, 0) * tl.max(running, 0)
        picked = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), TOP - 1)
        picked = tl.where(heat > 0, picked, 0)
        first = tl.sum(tl.where(rank == picked, ids, 0), 0)

        count = tl.load(decoded + slot)
        window = tl.load(win_size + slot)
        age = tl.arange(0, RING) + 1
        looked = (age <= window) & (age <= count)
        last = tl.load(recent + slot * RING + ((count - age + RING) % RING), looked, other=-1)
        repeats = tl.sum((looked & (last == first)).to(tl.int32), 0)
        limit = window.to(tl.float64) * tl.load(tau_r + slot)
        kind_now = _kind_now(kind, place, min_place, slot)
        drawn = first
        if is_ok & (window > 0) & (heat > 0) & (repeats.to(tl.float64) >= limit):
            scores_at = logits + row.to(tl.int64) * logits_stride
            drawn = _again(
                scores_at, first, most, warmth, kind_now, seed_now, now, SPEECH, VOCAB, FILL, EOS, BLOCK
            )

        if is_ok:
            made = tl.load(out_count + slot)
            tl.store(out + slot * out_capacity + made, drawn, made < out_capacity)
            tl.store(out_count + slot, made + 1)
            tl.store(recent + slot * RING + count % RING, drawn)
            tl.store(decoded + slot, count + 1)
            tl.store(place + slot, now + 1)
            tl.store(token + slot, drawn)
            tl.store(length + slot, tl.load(length + slot) + 1)
            tl.store(remaining + slot, tl.load(remaining + slot) - 1)
            tl.store(stop + slot, (drawn >= SPEECH).to(tl.int32))
        else:
            tl.store(stop + slot, 2)
