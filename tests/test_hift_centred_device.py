"""The vocoder of CosyVoice 2 and CosyVoice-300M in windows, on the CPU: the samples of the whole, at any split."""

import itertools
import weakref

import numpy as np
import pytest
import torch

from tests.test_hift_centred import golden_vocoder
from vivace.errors import SynthesisError
from vivace.models.hift_centred_device import CentredDeviceVocoder
from vivace.models.hift_window import reach_frames
from vivace.models.source import CounterNoise
from vivace.random_checkpoint import full_config

# Windows overlap, and the F0 of a frame differs between them by float32 rounding, which adds up in the phase.
SPLIT_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[2, 1])
def model(request):
    return golden_vocoder(request.param)


@pytest.fixture
def device(model):
    return CentredDeviceVocoder(model, slots=5, max_rows=4)


def mel_of(frames, seed=0):
    return torch.randn(80, frames, generator=torch.Generator().manual_seed(seed)) * 2 - 4


def whole(model, mel, seed=0):
    with torch.inference_mode():
        return model(mel[None], noise=CounterNoise(seed))[0].numpy()


def run(device, stream, mel, splits):
    edges = [0, *splits, mel.shape[1]]
    pieces = list(itertools.pairwise(edges))
    return np.concatenate(
        [device.step(stream, mel[:, a:b], is_last=i == len(pieces) - 1) for i, (a, b) in enumerate(pieces)]
    )


@pytest.mark.parametrize(
    ("frames", "splits"),
    [
        (1, []),
        (5, [2]),
        (7, []),
        (40, []),
        (60, [1, 2, 9, 30]),
        (130, [50, 100]),
        (130, [50, 100, 130]),
        (300, []),
        (301, [28, 56, 112]),
    ],
)
def test_any_split_gives_the_whole(model, device, frames, splits):
    mel = mel_of(frames, frames)
    stream = device.open(seed=3)
    samples = run(device, stream, mel, splits)
    assert samples.shape == (frames * model.hop_samples,)
    np.testing.assert_allclose(samples, whole(model, mel, 3), atol=SPLIT_TOLERANCE, rtol=0)
    device.close(stream)
    device.close(stream)
    assert device.num_open == 0


def test_streams_of_other_lengths_side_by_side(model, device):
    mels = [mel_of(frames, seed) for seed, frames in enumerate((90, 3, 150, 47, 20))]
    streams = [device.open(seed) for seed in range(5)]
    parts = [[] for _ in mels]
    for start in range(0, 150, 40):
        running = [i for i, mel in enumerate(mels) if start < mel.shape[1]]
        items = [
            (streams[i], mels[i][:, start : start + 40], start + 40 >= mels[i].shape[1]) for i in running
        ]
        for i, pending in zip(running, device.launch_batch(items), strict=True):
            parts[i].append(device.collect(pending))
    for seed, (mel, own) in enumerate(zip(mels, parts, strict=True)):
        np.testing.assert_allclose(np.concatenate(own), whole(model, mel, seed), atol=SPLIT_TOLERANCE, rtol=0)
    with pytest.raises(RuntimeError, match="in use"):
        device.open()


def test_an_utterance_without_frames(device):
    stream = device.open()
    assert device.step(stream, mel_of(0), is_last=False).shape == (0,)
    assert device.step(stream, mel_of(0), is_last=True).shape == (0,)


def test_values_that_are_not_finite_reach_nobody_else(model, device):
    bad, good = device.open(), device.open()
    broken, mel = torch.full((80, 60), torch.nan), mel_of(60)
    first, second = device.launch_batch([(bad, broken, False), (good, mel[:, :50], False)])
    with pytest.raises(SynthesisError, match="not finite"):
        device.collect(first)
    parts = [device.collect(second)]
    device.close(bad)
    again = device.open()  # in the same slot
    first, second = device.launch_batch([(again, mel, True), (good, mel[:, 50:], True)])
    wanted = whole(model, mel)
    np.testing.assert_allclose(device.collect(first), wanted, atol=SPLIT_TOLERANCE, rtol=0)
    parts.append(device.collect(second))
    np.testing.assert_allclose(np.concatenate(parts), wanted, atol=SPLIT_TOLERANCE, rtol=0)


def test_samples_come_as_late_as_they_must(model, device):
    reach = reach_frames(model.config)
    stream = device.open()
    assert device.step(stream, mel_of(reach), is_last=False).shape == (0,)
    assert device.step(stream, mel_of(10), is_last=False).shape == (10 * model.hop_samples,)


@pytest.mark.parametrize(("generation", "frames"), [(2, 21), (1, 19)])
def test_reach_of_the_full_sizes(generation, frames):
    assert reach_frames(full_config(generation).vocoder) == frames


def test_launches_that_do_not_fit_are_halved(model, device, monkeypatch):
    """The samples stay; a stream that does not fit alone has its own error, and the others go on."""
    mels = [mel_of(frames, seed) for seed, frames in enumerate((30, 41, 30))]

    def run():
        streams = [device.open(seed) for seed in range(3)]
        pending = device.launch_batch(
            [(stream, mel, True) for stream, mel in zip(streams, mels, strict=True)]
        )
        for stream in streams:
            device.close(stream)
        return pending

    wanted = [device.collect(own) for own in run()]
    launch, halved = device._launch_rows, device.launches_halved
    taken = []

    def refuse(work):
        assert not any(memory() is not None for memory in taken), "the failed launch still holds its memory"
        memory = torch.empty(1)
        taken.append(weakref.ref(memory))
        if len(work) > 1 or work[0][1].shape[1] == 41:
            raise torch.OutOfMemoryError("no memory")
        launch(work)

    monkeypatch.setattr(device, "_launch_rows", refuse)
    pending = run()
    assert device.launches_halved > halved
    for index in (0, 2):
        np.testing.assert_allclose(device.collect(pending[index]), wanted[index], atol=SPLIT_TOLERANCE)
    with pytest.raises(torch.OutOfMemoryError):
        device.collect(pending[1])
