"""Successive chunks of one stream in a launch, beside those of others: the same mel as one by one.

Plain kernels on the CPU, in float32: the same sums in another order, so the tolerance is that of the streaming tests.
"""

import pytest
import torch

from tests.test_flow_device import tokens_of, whole
from tests.test_flow_stream import AHEAD, CHUNK, EMBEDDING, flow, prompt_mel
from vivace.errors import SynthesisError
from vivace.models.flow_device import DeviceFlow
from vivace.models.flow_solver import Solver

COSTS = {1: 6.2, 2: 8.4, 4: 10.4, 8: 13.4}


@pytest.fixture
def device():
    """Knows the unconditional branch of the first eight chunks."""
    device = DeviceFlow(flow(), most_in_wave=4)
    device.warm_up(8 * 2 * CHUNK)
    return device


def test_how_much_audio_a_chunk_of_a_wave_needs():
    """Less where launches are known to be fast: the first chunk, which has almost a second, is enough for all."""
    assert DeviceFlow(flow(), most_in_wave=2).wave_ms == 800
    measured = DeviceFlow(flow(), max_streams=8, costs=COSTS)
    assert measured.most_in_wave == 16
    assert measured.most_in_wave * measured.wave_ms <= 960


@pytest.fixture
def launched(monkeypatch):
    """Chunks of each launch, padding included."""
    sizes = []
    solve = Solver.solve

    def count(self, use_shared):
        sizes.append(len(self.x))
        solve(self, use_shared)

    monkeypatch.setattr(Solver, "solve", count)
    return sizes


@pytest.mark.parametrize(
    ("count", "prompt", "sizes"),
    [
        (2 * CHUNK, 0, [2]),
        (2 * CHUNK - 1, 3, [2]),
        (3 * CHUNK, 0, [2, 1]),
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
    [(8 * CHUNK, 0, [8]), (8 * CHUNK - 3, 5, [8]), (7 * CHUNK, 17, [4, 2, 1]), (8 * CHUNK + 2, 3, [8, 1])],
)
def test_eight_chunks_at_once_equal_the_whole(launched, count, prompt, sizes):
    device = DeviceFlow(flow(), most_in_wave=8)
    device.warm_up(10 * 2 * CHUNK)
    launched.clear()
    check_equals_whole(device, launched, count, prompt, sizes)


@pytest.mark.parametrize(("pages", "sizes"), [(1, [1]), (3, [2, 1]), (6, [4, 2]), (8, [8])])
@pytest.mark.parametrize("streams", [1, 8])
def test_with_few_pages_a_wave_takes_them_all_and_no_memory_beyond(launched, pages, sizes, streams):
    """The blocks that its chunks throw away afterwards are counted: eight, however many streams a launch has."""
    free = DeviceFlow(flow())
    page, block = free.pool.page_bytes, free.start.pool.page_bytes
    limit = pages * (page + block) + 8 * block + free._padding_pool.page_bytes
    device = DeviceFlow(flow(), max_bytes=limit, max_streams=streams, most_in_wave=8)
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
    launched.clear()
    check_equals_whole(device, launched, pages * CHUNK - 1, 0, sizes)


def test_a_stream_without_pages_takes_no_memory_from_others(launched):
    """Not that for blocks either: chunks that are cut throw theirs away, and need some for that."""
    free = DeviceFlow(flow())
    page, block = free.pool.page_bytes, free.start.pool.page_bytes
    device = DeviceFlow(flow(), max_bytes=3 * (page + block) + block + free._padding_pool.page_bytes)
    assert (device.pool.most_pages, device.start.pool.most_pages) == (3, 4)
    stream = device.open(EMBEDDING, prompt_mel(0))
    with pytest.raises(SynthesisError, match="no memory left"):
        device.step(stream, tokens_of(4 * CHUNK), True)
    device.close(stream)
    check_equals_whole(device, launched, 3 * CHUNK - 1, 0, [1, 1, 1])


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


@pytest.mark.parametrize("cut", [0, 2])
def test_a_wave_changes_nothing_that_streams_share(device, cut):
    """Also where it computes what is known again, since one of its chunks is not whole: velocities but for rounding."""
    velocities = device.start.velocities.clone()
    blocks = [
        device.start.pool.resolve(block)[: device.layout.block].clone() for block in device.start._blocks
    ]
    stream = device.open(EMBEDDING, prompt_mel(3))
    device.step(stream, tokens_of(8 * CHUNK - cut), True)
    device.close(stream)
    torch.testing.assert_close(device.start.velocities, velocities, atol=1e-5 if cut else 0, rtol=0)
    for block, before in zip(device.start._blocks, blocks, strict=True):
        assert torch.equal(device.start.pool.resolve(block)[: device.layout.block], before)


def test_chunks_that_nobody_computed_yet_go_one_by_one(launched):
    device = DeviceFlow(flow(), most_in_wave=4)
    tokens = tokens_of(4 * CHUNK + 1)
    for sizes in ([1] * 5, [4, 1]):
        stream = device.open(EMBEDDING, prompt_mel(0))
        launched.clear()
        torch.testing.assert_close(device.step(stream, tokens, True), whole(tokens), atol=1e-4, rtol=0)
        assert launched == sizes
        device.close(stream)


@pytest.mark.parametrize(
    ("chunks", "cut", "sizes"), [((2, 2), 0, [4]), ((3, 1), 2, [4]), ((4, 4), 1, [8]), ((6, 1), 0, [8])]
)
def test_chunks_of_several_streams_share_a_launch(launched, chunks, cut, sizes):
    """Those of one stream beside those of others, in launches that there are: padded."""
    device = DeviceFlow(flow(), max_streams=8, costs=COSTS)
    device.warm_up(8 * 2 * CHUNK)
    launched.clear()
    streams = [device.open(EMBEDDING, prompt_mel(prompt)) for prompt in (0, 2)]
    tokens = [tokens_of(count * CHUNK - cut) for count in chunks]
    items = [(stream, own, True) for stream, own in zip(streams, tokens, strict=True)]
    for handle, own, prompt in zip(device.launch_batch(items), tokens, (0, 2), strict=True):
        torch.testing.assert_close(handle.check(), whole(own, prompt), atol=1e-4, rtol=0)
    assert launched == sizes
    for stream in streams:
        device.close(stream)
    assert device.pages_in_use == 0


def test_another_stream_begins_beside_several_chunks(launched):
    """The newcomer's chunk is one that nobody computed yet; what it adds is right for the next one."""
    device = DeviceFlow(flow(), max_streams=4, most_in_wave=4)
    first = device.open(EMBEDDING, prompt_mel(0))
    tokens = tokens_of(3 * CHUNK)
    device.step(first, tokens[: 2 * CHUNK], True)
    streams = [device.open(EMBEDDING, prompt_mel(prompt)) for prompt in (0, 5)]
    device.step(streams[1], tokens[: 2 * CHUNK + AHEAD], False)
    assert device.start.known == 2
    launched.clear()
    handles = device.launch_batch(
        [(streams[0], tokens[: 2 * CHUNK - 1], True), (streams[1], tokens[2 * CHUNK + AHEAD :], True)]
    )
    torch.testing.assert_close(handles[0].check(), whole(tokens[: 2 * CHUNK - 1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(handles[1].check(), whole(tokens, 5)[:, 2 * CHUNK :], atol=1e-4, rtol=0)
    assert launched == [2, 1]
    assert device.start.known == 3
    third = device.open(EMBEDDING, prompt_mel(0))
    torch.testing.assert_close(device.step(third, tokens, True), whole(tokens), atol=1e-4, rtol=0)


def test_what_is_known_is_not_written_again(monkeypatch):
    """Beside a chunk that nobody computed yet a known one is computed again: not where others of the launch look."""
    device = DeviceFlow(flow(), max_streams=4, most_in_wave=4)
    tokens = tokens_of(2 * CHUNK)
    streams = [device.open(EMBEDDING, prompt_mel(prompt)) for prompt in (0, CHUNK, 0, 0)]
    device.step(streams[0], tokens[: CHUNK + AHEAD], False)
    device.step(streams[1], tokens[: CHUNK + AHEAD], False)
    assert device.start.known == 1
    sent = []
    send = Solver.send
    monkeypatch.setattr(Solver, "send", lambda self, chunks: sent.append(chunks) or send(self, chunks))
    ends = [tokens[CHUNK + AHEAD :]] * 2 + [tokens[:CHUNK]] * 2
    handles = device.launch_batch([(stream, end, True) for stream, end in zip(streams, ends, strict=True)])
    wanted = [whole(tokens)[:, 2 * CHUNK :], whole(tokens, CHUNK)] + [whole(tokens[:CHUNK])] * 2
    for handle, mel in zip(handles, wanted, strict=True):
        torch.testing.assert_close(handle.check(), mel, atol=1e-4, rtol=0)
    (chunks,) = sent
    written = [chunk.shared[-1] for chunk in chunks]
    assert len(set(written)) == len(written)
    assert [block in device.start._blocks for block in written] == [True, False, False, False]
    assert device.start.known == 2


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
    monkeypatch.setattr(device.solver(4), "run", fail)
    stream = device.open(EMBEDDING, prompt_mel(0))
    torch.testing.assert_close(device.step(stream, tokens, True), whole(tokens), atol=1e-4, rtol=0)
    assert launched == [2, 2]
    assert device.launches_halved == 1
    device.close(stream)
    for solver in (device.solver(2), device.solver(1)):
        monkeypatch.setattr(solver, "run", fail)
    stream = device.open(EMBEDDING, prompt_mel(0))
    with pytest.raises(torch.OutOfMemoryError):
        device.step(stream, tokens, True)
    assert (stream.pages, stream.length, stream.waiting, device.pages_in_use) == ([], 0, [], 0)


@pytest.mark.parametrize("fails_alone", [False, True])
def test_without_memory_chunks_of_several_streams_are_split_anywhere(launched, monkeypatch, fails_alone):
    """Also between chunks of one stream, which may be the one for which there is no memory at all."""
    device = DeviceFlow(flow(), max_streams=4, most_in_wave=4)
    device.warm_up(4 * 2 * CHUNK)
    launched.clear()
    tokens = tokens_of(3 * CHUNK - 1), tokens_of(CHUNK, 4)
    streams = [device.open(EMBEDDING, prompt_mel(0)) for _ in tokens]
    full = {4: 1, 2: 1, 1: 1} if fails_alone else {4: 1}
    run = Solver.run

    def fail(self, use_shared):
        if full.get(len(self.x)):
            full[len(self.x)] -= 1
            raise torch.OutOfMemoryError("no memory")
        run(self, use_shared)

    monkeypatch.setattr(Solver, "run", fail)
    long, short = device.launch_batch(
        [(stream, own, True) for stream, own in zip(streams, tokens, strict=True)]
    )
    torch.testing.assert_close(short.check(), whole(tokens[1]), atol=1e-4, rtol=0)
    if fails_alone:
        assert (launched, device.launches_halved) == ([1], 3)
        assert isinstance(long.error, torch.OutOfMemoryError)
        assert (streams[0].pages, streams[0].length, streams[0].waiting) == ([], 0, [])
    else:
        assert (launched, device.launches_halved) == ([2, 2], 1)
        torch.testing.assert_close(long.check(), whole(tokens[0]), atol=1e-4, rtol=0)
    for stream in streams:
        device.close(stream)
    assert device.pages_in_use == 0


def test_without_waves_there_are_none(launched):
    device = DeviceFlow(flow())
    device.warm_up(8 * 2 * CHUNK)
    launched.clear()
    stream = device.open(EMBEDDING, prompt_mel(0))
    device.step(stream, tokens_of(4 * CHUNK), True)
    assert launched == [1] * 4
    assert device.most_in_wave == 1
