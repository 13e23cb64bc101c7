"""The vocoder of fixed addresses gives the samples of the plain one: any split, any order of streams, any slot."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vivace
from tests.test_hift_stream import MODELS, TOLERANCE, cuts_of, random_mel
from vivace.checkpoint import load_config, read_weights
from vivace.errors import SynthesisError
from vivace.kernels.hift_reference import to_tf32
from vivace.models.hift import CausalHiFT
from vivace.models.hift_device import DeviceVocoder
from vivace.models.source import CounterNoise

if TYPE_CHECKING:
    from vivace.datatypes import Samples

MINI = Path(vivace.__file__).parent / "assets" / "mini"


def make_vocoder(name: str, *longer: int) -> DeviceVocoder:
    return DeviceVocoder(
        MODELS[name], slots=3, buckets=(6, 11, *longer), common_frames=11, max_rows=2, use_kernels=False
    )


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
    """Pieces longer than the largest bucket too, and pieces that are computed in another layout of the memory."""
    frames, seed = data.draw(st.integers(1, 34)), data.draw(st.integers(0, 96))
    vocoder = make_vocoder(name, *data.draw(st.sampled_from([(), (14, 30)])))
    parts = in_pieces(vocoder, frames, data.draw(cuts_of(frames)), seed)
    np.testing.assert_allclose(parts, whole(MODELS[name], frames, seed), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("model", ["golden", "mini"])
def test_trained_sizes(model: str, tiny_model_folder: Path) -> None:
    """The recorded weights of the reference's layout, phase per frame; the embedded model, phase per sample."""
    folder = tiny_model_folder if model == "golden" else MINI
    config = load_config(folder)
    vocoder = CausalHiFT(config.vocoder).eval()
    vocoder.load_state_dict(read_weights(folder, config)["vocoder"])
    device = DeviceVocoder(vocoder, slots=1, buckets=(12,), use_kernels=False)
    stream, mel = device.open(5), random_mel(16, seed=5)
    parts = [device.step(stream, mel[:, a:b], b == 16) for a, b in ((0, 7), (7, 8), (8, 16))]
    with torch.inference_mode():
        expected = vocoder(mel[None], noise=CounterNoise(5))[0].numpy()
    assert 0.01 < np.abs(expected).max() < 0.9
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-4, rtol=0)


def test_rounding_to_tf32_keeps_ten_bits() -> None:
    x = torch.randn(1000) * 10.0 ** torch.randint(-6, 7, (1000,))
    rounded = to_tf32(x)
    assert ((rounded - x).abs() <= x.abs() * 2.0**-11).all()
    assert (rounded.view(torch.int32) & 0x1FFF == 0).all()
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    odd = torch.cat((odd, torch.tensor([0x7FFF_FFFF], dtype=torch.int32).view(torch.float32)))
    torch.testing.assert_close(to_tf32(odd), odd, equal_nan=True)


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
