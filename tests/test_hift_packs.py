"""Many streams in a launch of the vocoder: how they are shared out, one copy to the host, buffers used again; tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from tests.test_hift_stream import MODELS, TOLERANCE, random_mel
from vivace.config import VocoderConfig
from vivace.kernels.hift_plan import Param
from vivace.kernels.hift_tiles import default_tile
from vivace.models.hift import CausalHiFT
from vivace.models.hift_device import DeviceVocoder
from vivace.models.hift_layout import LayoutBuilder
from vivace.models.host_samples import HostBuffers, HostCopy, PendingSamples, SamplePart

if TYPE_CHECKING:
    from vivace.datatypes import Samples

ROWS = 8


class Recorder:
    """What the runner was asked for: the rows of each launch and which of them have frames."""

    def __init__(self, vocoder: DeviceVocoder) -> None:
        self._vocoder, self._run = vocoder, vocoder.runner.run
        self.frames: list[int] = []
        self.rows: list[int] = []
        self.used: list[int] = []

    def __call__(self, frames: int, rows: int) -> None:
        params = self._vocoder.runner.params[:rows]
        self.frames.append(frames)
        self.rows.append(rows)
        self.used.append(int((params[:, Param.NEW_FRAMES] > 0).sum()))
        spare = params[:, Param.SLOT] == self._vocoder.runner.spare_slot
        assert torch.equal(spare, params[:, Param.NEW_FRAMES] == 0)
        self._run(frames, rows)


@pytest.fixture
def vocoder() -> DeviceVocoder:
    return DeviceVocoder(MODELS["frame"], slots=20, buckets=(6, 11), max_rows=ROWS, use_kernels=False)


def launch(vocoder: DeviceVocoder, count: int) -> list[Samples]:
    """Whole streams of different lengths, in one call."""
    streams = [vocoder.open(seed) for seed in range(count)]
    mels = [random_mel(1 + seed % 7, seed) for seed in range(count)]
    pending = vocoder.launch_batch([(stream, mel, True) for stream, mel in zip(streams, mels, strict=True)])
    samples = [vocoder.collect(own) for own in pending]
    for stream in streams:
        vocoder.close(stream)
    return samples


@pytest.mark.parametrize(
    ("count", "rows", "used"),
    [
        (1, [1], [1]),
        (3, [4], [3]),
        (7, [8], [7]),
        (8, [8], [8]),
        (9, [4, 8], [4, 5]),
        (20, [8, 8, 8], [6, 7, 7]),
    ],
)
def test_streams_share_as_few_launches_as_there_can_be(
    vocoder: DeviceVocoder, monkeypatch: pytest.MonkeyPatch, count: int, rows: list[int], used: list[int]
) -> None:
    """Each launch of a power of two of rows, of which those that are left over have no frames."""
    alone = [launch(vocoder, seed + 1)[seed] for seed in range(count)]
    recorder = Recorder(vocoder)
    monkeypatch.setattr(vocoder.runner, "run", recorder)
    together = launch(vocoder, count)
    assert (recorder.rows, recorder.used) == (rows, used)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_are_as_many_as_memory_is_for() -> None:
    def rows(max_bytes: int | None) -> int:
        model = MODELS["frame"]
        return DeviceVocoder(
            model, 1, buckets=(6,), max_rows=8, max_bytes=max_bytes, use_kernels=False
        ).max_rows

    row_bytes = 4 * LayoutBuilder(MODELS["frame"], 6).build().size
    assert [rows(count * row_bytes) for count in (0, 1, 3, 5, 100)] == [1, 1, 2, 4, 8]
    assert rows(None) == 8


def test_long_pieces_lie_in_the_memory_of_many_short_ones() -> None:
    def rows(max_rows: int, max_bytes: int | None) -> dict[int, int]:
        made = DeviceVocoder(
            MODELS["frame"],
            1,
            buckets=(6, 24, 48),
            common_frames=6,
            max_rows=max_rows,
            max_bytes=max_bytes,
            use_kernels=False,
        )
        first, *others = (place.arena for place in made.runner.places)
        assert {arena.data_ptr() for arena in others} <= {first.data_ptr()}
        weights = [[op.weight.data_ptr() for op in place.layout.convs] for place in made.runner.places]
        assert all(own == weights[0] for own in weights)
        return made.rows

    short, middle, long = (4 * LayoutBuilder(MODELS["frame"], frames).build().size for frames in (6, 24, 48))
    assert 3 * short < middle < long < 8 * short
    assert rows(8, 8 * short) == {6: 8, 24: 8 * short // middle, 48: 1}
    assert rows(32, None) == {6: 32, 24: 4, 48: 4}
    assert rows(1, 8 * short) == {6: 1}
    assert rows(1, 4 * middle) == {6: 1, 24: 1}
    assert rows(1, 4 * long) == rows(1, None) == {6: 1, 24: 1, 48: 1}


@pytest.mark.parametrize(
    ("lengths", "frames", "used"),
    [
        ([30], [36], [1]),
        ([32, 3], [6, 36], [1, 1]),  # those that bring little do not wait for the others
        ([18, 20], [24], [2]),
        ([37], [36, 11], [1, 1]),
        ([9, 9, 9, 9, 9], [6, 6], [5, 5]),  # of many, pieces as short as ever
    ],
)
def test_few_streams_with_much_take_long_pieces(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], frames: list[int], used: list[int]
) -> None:
    buckets = (6, 11, 24, 36)
    vocoder = DeviceVocoder(
        MODELS["frame"], slots=5, buckets=buckets, common_frames=11, max_rows=ROWS, use_kernels=False
    )
    vocoder.rows |= {24: 2, 36: 1}
    recorder = Recorder(vocoder)
    monkeypatch.setattr(vocoder.runner, "run", recorder)
    streams = [vocoder.open(seed) for seed in range(len(lengths))]
    mels = [random_mel(length, seed) for seed, length in enumerate(lengths)]
    pending = vocoder.launch_batch([(stream, mel, True) for stream, mel in zip(streams, mels, strict=True)])
    samples = [vocoder.collect(own) for own in pending]
    assert (recorder.frames, recorder.used) == (frames, used)
    plain = DeviceVocoder(MODELS["frame"], slots=1, buckets=(6, 11), use_kernels=False)
    for seed, (mel, own) in enumerate(zip(mels, samples, strict=True)):
        stream = plain.open(seed)
        np.testing.assert_allclose(own, plain.step(stream, mel, is_last=True), atol=TOLERANCE, rtol=0)
        plain.close(stream)


def test_buffers_of_the_host_come_back_with_the_last_part(vocoder: DeviceVocoder) -> None:
    streams = [vocoder.open(seed) for seed in range(3)]
    pending = vocoder.launch_batch([(stream, random_mel(6, seed=1), False) for stream in streams])
    copies = {id(own.parts[0].copy) for own in pending}
    assert len(copies) == 1
    memory = pending[0].parts[0].copy.memory
    first = [vocoder.collect(own) for own in pending]
    kept = [samples.copy() for samples in first]
    again = vocoder.launch_batch([(stream, random_mel(6, seed=2), False) for stream in streams])
    assert again[0].parts[0].copy.memory is memory
    for own in again[:2]:
        vocoder.collect(own)
    third = vocoder.launch_batch([(stream, random_mel(6, seed=3), True) for stream in streams])
    assert third[0].parts[0].copy.memory is not memory  # one part of it was not taken
    for samples, before in zip(first, kept, strict=True):
        np.testing.assert_array_equal(samples, before)


class Event:
    """Counts how often it is waited for."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_parts_of_one_copy_wait_once_and_have_their_own_flags() -> None:
    buffers, event = HostBuffers(row_values=8, header=2, pinned=False), Event()
    copy: HostCopy = buffers.take(rows=2, width=5, readers=2)
    copy.event = cast("Any", event)
    copy.values.copy_(torch.arange(10.0).view(2, 5))
    copy.values.view(torch.int32)[:, 0] = torch.tensor([0, 1], dtype=torch.int32)
    results = [
        buffers.collect(PendingSamples([SamplePart(copy, row, 2, end)])) for row, end in ((0, 5), (1, 4))
    ]
    assert event.waits == 1
    assert [flag for _, flag in results] == [False, True]
    assert [samples.tolist() for samples, _ in results] == [[2.0, 3.0, 4.0], [7.0, 8.0]]


def test_the_order_of_sums_does_not_depend_on_the_company() -> None:
    """Full size: the step along the channels is the same for any number of rows and frames; blocks fit the shared
    memory."""
    layout = LayoutBuilder(CausalHiFT(VocoderConfig()), 56, half=True).build()
    layout.halve_weights()
    for op in layout.convs:
        for precision in ("half", "tf32", "tf32x3"):
            own = op.precision or precision
            tiles = [default_tile(op, own, rows) for rows in (1, 2, 4, 8, 16, 32)]
            for rows, frames, same in ((1, 56, 1), (2, 108, 4), (4, 216, 16), (1, 808, 16), (32, 108, 32)):
                assert default_tile(op, own, rows, frames) == default_tile(op, own, same)
            assert len({tile.k for tile in tiles}) == 1
            sizes = [tile.m * tile.n for tile in tiles]
            assert sizes == sorted(sizes)
            size = 2 if precision == "half" and op.precision is None else 4
            assert max((t.m + t.n) * t.k * t.stages * size for t in tiles) <= 99 * 1024
    block = layout.stages[0].blocks[0]
    assert default_tile(block, "half", 1) != default_tile(block, "half", 16)
