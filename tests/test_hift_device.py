"""The vocoder of fixed addresses gives the samples of the plain one: any split, any order of streams, any slot."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_hift_stream import MODELS, TOLERANCE, cuts_of, random_mel
from vivace.errors import SynthesisError
from vivace.models.hift import CausalHiFT
from vivace.models.hift_device import DeviceVocoder
from vivace.models.source import CounterNoise

if TYPE_CHECKING:
    from vivace.datatypes import Samples


def make_vocoder(name: str) -> DeviceVocoder:
    return DeviceVocoder(MODELS[name], slots=3, buckets=(6, 11), max_rows=2, use_kernels=False)


@torch.inference_mode()
def whole(model: CausalHiFT, frames: int, seed: int) -> Samples:
    return model(random_mel(frames, seed)[None], noise=CounterNoise(seed))[0].numpy()


def in_pieces(vocoder: DeviceVocoder, frames: int, cuts: list[int], seed: int) -> Samples:
    """The last piece may be empty."""
    stream, mel = vocoder.open(seed), random_mel(frames, seed)
    borders = [0, *sorted(cuts), frames]
    parts = [
        vocoder.step(stream, mel[:, a:b], i == len(borders) - 2) for i, (a, b) in enumerate(pairwise(borders))
    ]
    vocoder.close(stream)
    return np.concatenate(parts)


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_split_equals_the_whole(name: str, data: st.DataObject) -> None:
    """Pieces longer than the largest bucket too."""
    frames, seed = data.draw(st.integers(1, 24)), data.draw(st.integers(0, 96))
    parts = in_pieces(make_vocoder(name), frames, data.draw(cuts_of(frames)), seed)
    np.testing.assert_allclose(parts, whole(MODELS[name], frames, seed), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_single_frames(name: str) -> None:
    parts = in_pieces(make_vocoder(name), 14, list(range(1, 14)), seed=7)
    np.testing.assert_allclose(parts, whole(MODELS[name], 14, 7), atol=TOLERANCE, rtol=0)


def test_samples_come_out_as_soon_as_the_look_ahead_allows() -> None:
    vocoder = make_vocoder("frame")
    stream = vocoder.open()
    lengths = [len(vocoder.step(stream, random_mel(frames), is_last=False)) for frames in (3, 1, 1, 20)]
    vocoder.close(stream)
    assert lengths == [0, 0, 480 - 4, 20 * 480]


@pytest.mark.parametrize("together", [False, True])
def test_streams_in_turn_do_not_touch_each_other(together: bool) -> None:
    """One after the other, or side by side in one launch, with pieces of different lengths and different ends."""
    vocoder, model = make_vocoder("sample"), MODELS["sample"]
    frames, cuts = (17, 9, 13), ((0, 4, 9, 17), (0, 1, 9, 9), (0, 8, 11, 13))
    streams = [vocoder.open(seed) for seed in range(3)]
    parts: list[list[Samples]] = [[], [], []]
    for step in range(3):
        items = []
        for seed, stream in enumerate(streams):
            a, b = cuts[seed][step : step + 2]
            items.append((stream, random_mel(frames[seed], seed)[:, a:b], step == 2))
        if together:
            pending = vocoder.launch_batch(items)
        else:
            pending = [vocoder.launch(*item) for item in items]
        for own, handle in zip(parts, pending, strict=True):
            own.append(vocoder.collect(handle))
    for seed, (stream, own) in enumerate(zip(streams, parts, strict=True)):
        vocoder.close(stream)
        expected = whole(model, frames[seed], seed)
        np.testing.assert_allclose(np.concatenate(own), expected, atol=TOLERANCE, rtol=0)


def test_a_slot_remembers_nothing_of_a_stream_that_broke_off() -> None:
    vocoder = make_vocoder("sample")
    streams = [vocoder.open(seed) for seed in range(3)]
    for stream in streams:
        vocoder.step(stream, random_mel(9, seed=50) + 4.0, is_last=False)
        vocoder.close(stream)
        vocoder.close(stream)  # harmless
    parts = in_pieces(vocoder, 12, [5], seed=3)
    np.testing.assert_allclose(parts, whole(MODELS["sample"], 12, 3), atol=TOLERANCE, rtol=0)


def test_more_streams_than_slots_are_refused() -> None:
    vocoder = make_vocoder("frame")
    streams = [vocoder.open() for _ in range(3)]
    with pytest.raises(RuntimeError, match="in use"):
        vocoder.open()
    for stream in streams:
        vocoder.close(stream)


def test_values_that_are_no_numbers_are_told_and_stay_in_their_stream() -> None:
    vocoder = make_vocoder("frame")
    bad, good = vocoder.open(), vocoder.open(4)
    mel = random_mel(9, seed=4)
    pending = vocoder.launch_batch([(bad, torch.full_like(mel, torch.nan), True), (good, mel, True)])
    with pytest.raises(SynthesisError, match="finite"):
        vocoder.collect(pending[0])
    samples = vocoder.collect(pending[1])
    np.testing.assert_allclose(samples, whole(MODELS["frame"], 9, 4), atol=TOLERANCE, rtol=0)
    vocoder.close(bad)
    vocoder.close(good)
    np.testing.assert_allclose(in_pieces(vocoder, 9, [], 4), samples, atol=TOLERANCE, rtol=0)


def test_an_empty_utterance_has_no_samples() -> None:
    vocoder = make_vocoder("frame")
    stream = vocoder.open()
    assert len(vocoder.step(stream, random_mel(0), is_last=False)) == 0
    assert len(vocoder.step(stream, random_mel(0), is_last=True)) == 0
    vocoder.close(stream)


def test_a_bucket_must_exceed_the_look_ahead() -> None:
    with pytest.raises(ValueError, match="bucket"):
        DeviceVocoder(MODELS["frame"], buckets=(4,))
