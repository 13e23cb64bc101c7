"""Successive chunks of one stream in a launch: each a step behind the one before, the same mel as one by one.

Plain kernels on the CPU, in float32: the same sums in another order, so the tolerance is that of the streaming tests.
"""

import pytest
import torch

from tests.test_flow_device import tokens_of, whole
from tests.test_flow_stream import AHEAD, CHUNK, CONFIG, EMBEDDING, flow, prompt_mel
from vivace.errors import SynthesisError
from vivace.models.flow_device import DeviceFlow
from vivace.models.flow_solver import Solver
from vivace.models.flow_wave import WaveSolver, passes, wave_costs

STEPS = CONFIG.num_steps
COSTS = {1: 6.2, 2: 8.4, 4: 10.4, 8: 13.4}


@pytest.fixture
def device():
    """Knows the unconditional branch of the first eight chunks."""
    device = DeviceFlow(flow(), waves=(2, 4))
    device.warm_up(8 * 2 * CHUNK)
    return device


def test_how_much_audio_a_chunk_of_a_wave_needs():
    """Less where launches are known to be fast."""
    assert DeviceFlow(flow(), waves=(2,)).wave_ms == 800
    measured = DeviceFlow(flow(), max_streams=8, costs=COSTS)
    assert measured.most_in_wave == 8
    assert measured.most_in_wave * measured.wave_ms < 1900  # the first two chunks have a little more


@pytest.fixture
def launched(monkeypatch):
    """Chunks of one stream in each launch."""
    sizes = []
    solve, wave = Solver.solve, WaveSolver.solve

    def plain(self, use_shared):
        sizes.append(1)
        solve(self, use_shared)

    def waves(self, use_shared=False):
        sizes.append(len(self.x))
        wave(self, use_shared)

    monkeypatch.setattr(Solver, "solve", plain)
    monkeypatch.setattr(WaveSolver, "solve", waves)
    return sizes


@pytest.mark.parametrize(("chunks", "steps"), [(1, 10), (2, 10), (4, 10), (4, 3), (5, 2)])
def test_each_chunk_goes_through_all_steps_behind_the_one_before_it(chunks, steps):
    done = [[] for _ in range(chunks)]
    for index, (first, end) in enumerate(passes(chunks, steps)):
        assert first < end
        for chunk in range(first, end):
            step = index - chunk
            if chunk:
                assert step in done[chunk - 1]
        for chunk in range(first, end):
            done[chunk].append(index - chunk)
    assert done == [list(range(steps))] * chunks


def test_costs_of_waves():
    """Ramps are narrower than the rest; three take the launch of four."""
    costs = wave_costs(COSTS, (2, 4, 16), 10)
    assert costs == {
        1: pytest.approx(6.2),
        2: pytest.approx((2 * 6.2 + 9 * 8.4) / 10),
        4: pytest.approx((2 * (6.2 + 8.4 + 10.4) + 7 * 10.4) / 10),
    }


@pytest.mark.parametrize(
    ("count", "prompt", "sizes"),
    [
        (2 * CHUNK, 0, [2]),
        (2 * CHUNK - 1, 3, [2]),
        (3 * CHUNK, 0, [4]),
        (4 * CHUNK, 7, [4]),
        (3 * CHUNK + 1, 13, [4]),
        (4 * CHUNK + 2, 0, [4, 1]),
        (6 * CHUNK - 2, 2, [4, 2]),
        (8 * CHUNK, 17, [4, 4]),
    ],
)
def test_several_chunks_at_once_equal_the_whole(device, launched, count, prompt, sizes):
    check_equals_whole(device, launched, count, prompt, sizes)


@pytest.mark.parametrize(
    ("count", "prompt", "sizes"),
    [(8 * CHUNK, 0, [8]), (8 * CHUNK - 3, 5, [8]), (7 * CHUNK, 17, [8]), (8 * CHUNK + 2, 3, [8, 1])],
)
def test_eight_chunks_at_once_equal_the_whole(launched, count, prompt, sizes):
    device = DeviceFlow(flow(), waves=(2, 4, 8))
    device.warm_up(10 * 2 * CHUNK)
    launched.clear()
    check_equals_whole(device, launched, count, prompt, sizes)


@pytest.mark.parametrize(("pages", "sizes"), [(1, [1]), (3, [4]), (6, [4, 2]), (7, [8]), (8, [8])])
@pytest.mark.parametrize("streams", [1, 8])
def test_with_few_pages_a_wave_takes_them_all_and_no_memory_beyond(launched, pages, sizes, streams):
    """The blocks that its chunks throw away afterwards are counted: eight, however many streams a launch has."""
    free = DeviceFlow(flow())
    page, block = free.pool.page_bytes, free.start.pool.page_bytes
    limit = pages * (page + block) + 8 * block + free._padding_pool.page_bytes
    device = DeviceFlow(flow(), max_bytes=limit, max_streams=streams, waves=(2, 4, 8))
    assert device.pool.most_pages == pages
    device.warm_up(pages * 2 * CHUNK)
    launched.clear()
    check_equals_whole(device, launched, pages * CHUNK, 3, sizes)
    pools = device.pool, device.start.pool, device._padding_pool
    assert sum(pool.num_pages * pool.page_bytes for pool in pools) <= limit
    stream = device.open(EMBEDDING, prompt_mel(3))
    with pytest.raises(SynthesisError, match="no memory left"):
        device.step(stream, tokens_of(pages * CHUNK + 1), True)
    assert (stream.pages, stream.length, stream.waiting, device.pages_in_use) == ([], 0, [], 0)
    device.close(stream)


def check_equals_whole(device, launched, count, prompt, sizes):
    stream = device.open(EMBEDDING, prompt_mel(prompt))
    tokens = tokens_of(count)
    mel = device.step(stream, tokens, True)
    torch.testing.assert_close(mel, whole(tokens, prompt), atol=1e-4, rtol=0)
    assert launched == sizes
    device.close(stream)
    assert device.pages_in_use == 0


def test_the_stream_goes_on_behind_a_wave_and_before_one(device, launched):
    tokens, parts = tokens_of(8 * CHUNK + 1), (CHUNK + AHEAD, 2 * CHUNK, 1, 4 * CHUNK, 2)
    stream, mels, start = device.open(EMBEDDING, prompt_mel(4)), [], 0
    for part in parts:
        end = min(len(tokens), start + part)
        mels.append(device.step(stream, tokens[start:end], end == len(tokens)))
        start = end
    torch.testing.assert_close(torch.cat(mels, 1), whole(tokens, 4), atol=1e-4, rtol=0)
    assert launched == [1, 2, 4, 2]
    device.close(stream)


def test_a_wave_changes_nothing_that_streams_share(device):
    velocities = device.start.velocities.clone()
    blocks = [
        device.start.pool.resolve(block)[: device.layout.block].clone() for block in device.start._blocks
    ]
    stream = device.open(EMBEDDING, prompt_mel(3))
    device.step(stream, tokens_of(8 * CHUNK), True)
    device.close(stream)
    assert torch.equal(device.start.velocities, velocities)
    for block, before in zip(device.start._blocks, blocks, strict=True):
        assert torch.equal(device.start.pool.resolve(block)[: device.layout.block], before)


def test_chunks_that_nobody_computed_yet_go_one_by_one(launched):
    device = DeviceFlow(flow(), waves=(2, 4))
    tokens = tokens_of(4 * CHUNK + 1)
    for sizes in ([1] * 5, [4, 1]):
        stream = device.open(EMBEDDING, prompt_mel(0))
        launched.clear()
        torch.testing.assert_close(device.step(stream, tokens, True), whole(tokens), atol=1e-4, rtol=0)
        assert launched == sizes
        device.close(stream)


def test_other_streams_take_part_where_that_is_cheaper(launched):
    """Two streams of two chunks each pack; of four chunks each, a launch of one stream's costs less a chunk."""
    device = DeviceFlow(flow(), max_streams=8, costs=COSTS, waves=(2, 4))
    device.warm_up(8 * 2 * CHUNK)
    for chunks, sizes in ((2, [1, 1]), (4, [4, 4])):
        streams = [device.open(EMBEDDING, prompt_mel(prompt)) for prompt in (0, 5)]
        tokens = tokens_of(chunks * CHUNK)
        launched.clear()
        handles = device.launch_batch([(stream, tokens, True) for stream in streams])
        for handle, prompt in zip(handles, (0, 5), strict=True):
            torch.testing.assert_close(handle.check(), whole(tokens, prompt), atol=1e-4, rtol=0)
        assert launched == sizes
        for stream in streams:
            device.close(stream)


def test_a_fault_stays_with_its_request(device, launched):
    tokens = tokens_of(4 * CHUNK)
    broken = device.open(EMBEDDING, prompt_mel(0))
    broken.speaker = broken.speaker * float("nan")
    handle = device.launch(broken, tokens, True)
    with pytest.raises(SynthesisError, match="finite"):
        handle.check()
    assert [int(fault) for fault in handle.faults] == [1, 1, 1, 1]
    stream = device.open(EMBEDDING, prompt_mel(0))
    torch.testing.assert_close(device.step(stream, tokens, True), whole(tokens), atol=1e-4, rtol=0)
    assert launched == [4, 4]
    for each in (broken, stream):
        device.close(each)


def test_a_fault_in_one_chunk_is_seen(device):
    """A prompt's bad frame: the chunk that it lies in has the fault, and those behind it, which attend to it."""
    mel = prompt_mel(2 * CHUNK)
    mel[3 * CHUNK] = float("nan")
    stream = device.open(EMBEDDING, mel)
    handle = device.launch(stream, tokens_of(4 * CHUNK), True)
    assert [int(fault) for fault in handle.faults] == [0, 1, 1, 1]
    device.close(stream)


def test_without_memory_for_many_fewer_chunks_are_tried(device, launched, monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError("no memory")

    tokens = tokens_of(4 * CHUNK)
    monkeypatch.setattr(device.wave(4), "run", fail)
    stream = device.open(EMBEDDING, prompt_mel(0))
    torch.testing.assert_close(device.step(stream, tokens, True), whole(tokens), atol=1e-4, rtol=0)
    assert launched == [2, 2]
    assert device.launches_halved == 1
    device.close(stream)
    for solver in (device.wave(2), device.solver(1)):
        monkeypatch.setattr(solver, "run", fail)
    stream = device.open(EMBEDDING, prompt_mel(0))
    with pytest.raises(torch.OutOfMemoryError):
        device.step(stream, tokens, True)
    assert (stream.pages, stream.length, stream.waiting, device.pages_in_use) == ([], 0, [], 0)


def test_without_waves_there_are_none(launched):
    device = DeviceFlow(flow())
    device.warm_up(8 * 2 * CHUNK)
    launched.clear()
    stream = device.open(EMBEDDING, prompt_mel(0))
    device.step(stream, tokens_of(4 * CHUNK), True)
    assert launched == [1] * 4
    assert device.most_in_wave == 1
