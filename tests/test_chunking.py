"""Chunk arithmetic and the streaming change of speed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vivace.engine.chunking import ChunkPlan
from vivace.layers.stretch import MelStretch

PLAN = ChunkPlan(chunk_tokens=25, lookahead_tokens=3, frames_per_token=2)


@given(prompt=st.integers(0, 500), new=st.integers(0, 500))
def test_ready_border_is_the_last_one_with_its_lookahead(prompt, new):
    known = prompt + new
    border = PLAN.ready_border(known)
    assert border % 25 == 0
    assert border + 3 <= known or border == 0
    assert border + 25 + 3 > known


def test_first_audio_comes_at_the_first_absolute_border():
    assert PLAN.first_audio_tokens(0) == 28
    assert PLAN.first_audio_tokens(15) == 13
    assert PLAN.first_audio_tokens(24) == 4
    assert PLAN.first_audio_tokens(25) == 28
    assert PLAN.first_audio_tokens(87) == 16


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 17), min_size=1, max_size=8),
    speed=st.floats(0.25, 4.0),
)
def test_any_split_stretches_alike(lengths, speed):
    total = sum(lengths)
    mel = torch.randn(3, total, generator=torch.Generator().manual_seed(total))
    whole = MelStretch(speed).step(mel, is_last=True)
    assert whole.shape[1] == (max(1, int(total / speed)) if total else 0)
    stretch, parts, at = MelStretch(speed), [], 0
    for i, length in enumerate(lengths):
        parts.append(stretch.step(mel[:, at : at + length], is_last=i == len(lengths) - 1))
        at += length
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_stretch_agrees_with_the_reference_interpolation_where_the_ratio_is_whole():
    mel = torch.randn(1, 80, 120, generator=torch.Generator().manual_seed(0))
    for speed in (0.5, 2.0):
        ours = MelStretch(speed).step(mel[0], is_last=True)
        reference = torch.nn.functional.interpolate(mel, size=int(120 / speed), mode="linear")
        assert torch.allclose(ours, reference[0], atol=1e-6)


@pytest.mark.parametrize(
    ("prompt", "new"), [(0, 0), (2, 0), (24, 0), (25, 3), (26, 2), (27, 1), (28, 0), (74, 0), (75, 3)]
)
def test_the_last_chunk_of_a_prompt_may_wait_for_new_tokens(prompt, new):
    assert PLAN.prompt_lookahead(prompt) == new
    if new:
        assert PLAN.ready_border(prompt) < PLAN.ready_border(prompt + new) <= prompt
        assert PLAN.ready_border(prompt + new - 1) == PLAN.ready_border(prompt)
