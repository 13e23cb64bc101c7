"""The flow on pages: the same chunks as the plain stream, shared prompts, no page lost.

Everything runs on the CPU with the plain kernels, in float32: the same sums in another order, so the tolerance is that
of the streaming tests.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_flow import inputs, model, vectors  # noqa: F401  (fixtures)
from tests.test_flow_stream import CHUNK, EMBEDDING, LONGEST, VOCAB, flow, pieces, prompt_mel, token_lists
from vivace.errors import SynthesisError
from vivace.models import flow_pages
from vivace.models.flow_device import DeviceFlow
from vivace.models.flow_pages import PagePool, pages_within
from vivace.models.flow_solver import Solver


@functools.cache
def device_flow():
    """One for all tests, as in an engine: each test finds what earlier ones left behind."""
    return DeviceFlow(flow())


def run(stream, parts, finish=True, device=None):
    device = device or device_flow()
    done = [device.step(stream, part, finish and index == len(parts) - 1) for index, part in enumerate(parts)]
    return torch.cat(done, dim=1)


def tokens_of(count, factor=7):
    return [(factor * position) % VOCAB for position in range(count)]


def whole(tokens, prompt=0):
    return flow().generate(torch.tensor(tokens), prompt_mel(prompt), EMBEDDING, streaming=True).detach()


@settings(deadline=None, max_examples=40)
@given(tokens=token_lists, prompt=st.integers(0, 20), cuts=st.sets(st.integers(0, LONGEST), max_size=8))
def test_any_split_equals_whole(tokens, prompt, cuts):
    prompt = min(prompt, len(tokens))
    stream = device_flow().open(EMBEDDING, prompt_mel(prompt))
    streamed = run(stream, pieces(tokens, cuts))
    device_flow().close(stream)
    torch.testing.assert_close(streamed, whole(tokens, prompt), atol=1e-4, rtol=0)
    assert device_flow().pages_in_use == 0


@settings(deadline=None, max_examples=20)
@given(tokens=token_lists, cuts=st.sets(st.integers(0, LONGEST), max_size=8), prompt=st.integers(0, 12))
def test_frames_come_when_the_plain_stream_gives_them(tokens, cuts, prompt):
    stream, plain = (
        device_flow().open(EMBEDDING, prompt_mel(prompt)),
        flow().new_stream(EMBEDDING, prompt_mel(prompt)),
    )
    for part in pieces(tokens, cuts):
        assert device_flow().step(stream, part, False).shape == flow().step(plain, part, False).shape
    device_flow().close(stream)


def test_a_prompt_is_shared_by_reference():
    device = DeviceFlow(flow())
    prompt, first, second = tokens_of(13), tokens_of(20, 3), tokens_of(9, 11)
    trunk = device.open(EMBEDDING, prompt_mel(13))
    assert device.step(trunk, prompt, False).shape[1] == 0
    assert device.pages_in_use == 2
    streams = [device.fork(trunk), device.fork(trunk)]
    assert device.pages_in_use == 2
    device.close(trunk)
    assert device.pages_in_use == 2
    # One after the other, chunk by chunk, so that each could disturb the other.
    mels = [[], []]
    for start in range(0, 20, CHUNK):
        for mel, stream, tokens in zip(mels, streams, (first, second), strict=True):
            if not stream.finished:
                part = tokens[start : start + CHUNK]
                mel.append(device.step(stream, part, start + CHUNK >= len(tokens)))
    for mel, tokens in zip(mels, (first, second), strict=True):
        torch.testing.assert_close(torch.cat(mel, 1), whole(prompt + tokens, 13), atol=1e-4, rtol=0)
    device.close(streams[0])
    assert device.pages_in_use == len(streams[1].pages)
    device.close(streams[1])
    device.close(streams[1])
    assert device.pages_in_use == 0


def test_memory_is_used_again(monkeypatch):
    monkeypatch.setattr(flow_pages, "SLAB_BYTES", 1)
    device = DeviceFlow(flow())
    for _ in range(5):
        stream = device.open(EMBEDDING, prompt_mel(0))
        run(stream, [tokens_of(40)], device=device)
        device.close(stream)
    assert device.pool.num_pages == 40 // CHUNK


def test_start_of_the_unconditional_branch_is_computed_once(monkeypatch):
    device = DeviceFlow(flow())
    calls = []
    solver = device.solver(1)
    solve = solver.solve
    monkeypatch.setattr(solver, "solve", lambda use_shared: (calls.append(use_shared), solve(use_shared)))
    for count in (4 * CHUNK, 5 * CHUNK + 2):
        stream = device.open(EMBEDDING, prompt_mel(0))
        torch.testing.assert_close(
            run(stream, [tokens_of(count)], device=device), whole(tokens_of(count)), atol=1e-4, rtol=0
        )
    # A chunk is known from the second time on; the last one, cut short, never is.
    assert calls == [False] * 4 + [True] * 4 + [False] * 2


def test_streams_of_one_launch_do_not_change_each_other():
    device = DeviceFlow(flow(), max_streams=4)
    lengths, prompts = (20, 9, 33, 26, 7), (7, 0, 13, 2, 0)
    lists = [tokens_of(length, 3 + index) for index, length in enumerate(lengths)]
    streams = [device.open(EMBEDDING, prompt_mel(prompt)) for prompt in prompts]
    mels = [[] for _ in streams]
    for start in range(0, max(lengths), 11):
        items = [
            (index, (stream, tokens[start : start + 11], start + 11 >= len(tokens)))
            for index, (stream, tokens) in enumerate(zip(streams, lists, strict=True))
            if not stream.finished
        ]
        for (index, _), handle in zip(items, device.launch_batch([item for _, item in items]), strict=True):
            mels[index].append(handle.check())
    for stream, mel, tokens, prompt in zip(streams, mels, lists, prompts, strict=True):
        torch.testing.assert_close(torch.cat(mel, 1), whole(tokens, prompt), atol=1e-4, rtol=0)
        device.close(stream)
    assert device.pages_in_use == 0


def test_warm_up_changes_nothing():
    device = DeviceFlow(flow(), max_streams=2)
    device.warm_up(30)
    assert device.pages_in_use == 0
    stream = device.open(EMBEDDING, prompt_mel(4))
    torch.testing.assert_close(
        run(stream, [tokens_of(12)], device=device), whole(tokens_of(12), 4), atol=1e-4, rtol=0
    )


def test_too_long_is_refused_and_leaves_the_stream_alone():
    stream = device_flow().open(EMBEDDING, prompt_mel(0))
    tokens = tokens_of(LONGEST)
    before = run(stream, [tokens[:-2]], finish=False)
    with pytest.raises(SynthesisError, match="45 speech tokens"):
        device_flow().step(stream, [1, 1, 1], False)
    after = run(stream, [tokens[-2:]])
    torch.testing.assert_close(torch.cat((before, after), 1), whole(tokens), atol=1e-4, rtol=0)
    device_flow().close(stream)


def bytes_for(pages, streams=1):
    """Memory for so many pages, and what all streams share beside them: no more chunks than that."""
    free = DeviceFlow(flow())
    page, block = free.pool.page_bytes, free.start.pool.page_bytes
    return pages * (page + block) + streams * block + free._padding_pool.page_bytes


@pytest.mark.parametrize("spare", [-1, 0, 100_000])
@pytest.mark.parametrize(("pages", "streams"), [(2, 1), (9, 4)])
def test_all_that_is_taken_fits_into_the_memory_given(pages, streams, spare):
    """Pages, what all streams share of the unconditional branch, chunks that are not whole, and the padding."""
    limit = bytes_for(pages, streams) + spare
    device = DeviceFlow(flow(), max_bytes=limit, max_streams=streams)
    pools = device.pool, device.start.pool, device._padding_pool
    held, errors = [], []
    while not errors:
        held.append([device.open(EMBEDDING, prompt_mel(0)) for _ in range(streams)])
        # One whole chunk, and one that is not.
        handles = device.launch_batch([(stream, tokens_of(CHUNK + 2), True) for stream in held[-1]])
        errors = [handle.error for handle in handles if handle.error is not None]
    assert {error.code for error in errors} == {"out_of_memory"}
    device._padding()
    taken = sum(pool.num_pages * pool.page_bytes for pool in pools)
    assert taken <= limit
    assert limit - taken < 2 * device.pool.page_bytes + max(0, spare) + streams * pools[1].page_bytes
    assert device.pool.most_pages >= pages - (spare < 0)
    for stream in (stream for streams in held for stream in streams):
        device.close(stream)


def test_a_long_stream_has_its_blocks():
    """No more of them are counted than the longest stream may have chunks."""
    assert pages_within(1000, 90, 10, 4) == 10  # 4 blocks and 10 pages make 940
    assert pages_within(399, 90, 10, 4) == 3
    assert pages_within(0, 90, 10, 4) == 0


def test_full_memory_fails_one_request_only():
    device = DeviceFlow(flow(), max_bytes=bytes_for(3))
    assert device.pool.most_pages == 3
    first, second = (device.open(EMBEDDING, prompt_mel(0)) for _ in range(2))
    tokens = tokens_of(3 * CHUNK)
    mel = run(first, [tokens[: 2 * CHUNK]], finish=False, device=device)
    with pytest.raises(SynthesisError, match="memory") as error:
        device.step(second, tokens, True)
    assert error.value.code == "out_of_memory"
    assert device.pages_in_use == len(first.pages)
    mel = torch.cat((mel, run(first, [tokens[2 * CHUNK :]], device=device)), 1)
    torch.testing.assert_close(mel, whole(tokens), atol=1e-4, rtol=0)
    device.close(first)
    torch.testing.assert_close(run(second, [tokens], device=device), whole(tokens), atol=1e-4, rtol=0)


def test_a_fault_stays_with_its_request():
    broken = device_flow().open(EMBEDDING.clone().fill_(float("nan")), prompt_mel(0))
    handle = device_flow().launch(broken, tokens_of(12), True)
    stream = device_flow().open(EMBEDDING, prompt_mel(0))
    torch.testing.assert_close(run(stream, [tokens_of(12)]), whole(tokens_of(12)), atol=1e-4, rtol=0)
    with pytest.raises(SynthesisError, match="finite"):
        handle.check()
    for each in (broken, stream):
        device_flow().close(each)


def test_nothing_left_is_empty():
    stream = device_flow().open(EMBEDDING, prompt_mel(0))
    assert device_flow().step(stream, [], True).shape == (80, 0)


@pytest.mark.parametrize(("count", "prompt"), [(1, 0), (23, 7)])
def test_whole_sequence_with_full_attention(count, prompt):
    tokens = tokens_of(count)
    expected = flow().generate(torch.tensor(tokens), prompt_mel(prompt), EMBEDDING, streaming=False)
    mel = device_flow().generate(tokens, prompt_mel(prompt), EMBEDDING)
    torch.testing.assert_close(mel, expected.detach(), atol=1e-4, rtol=0)
    with pytest.raises(SynthesisError, match="finite"):
        device_flow().generate(tokens, prompt_mel(prompt) * float("nan"), EMBEDDING * float("nan"))


def test_whole_sequences_side_by_side(monkeypatch):
    """Rows of their own lengths, as alone; those of like length share a launch, and none waits for another's fault."""
    device = DeviceFlow(flow(), max_streams=4)
    counts = [23, 5, 20, 24, 22, 21]
    items = [(tokens_of(count, 3 + count), prompt_mel(count % 4), EMBEDDING) for count in counts]
    items[2] = (items[2][0], items[2][1], EMBEDDING * float("nan"))
    items.append(([1] * 20_000, prompt_mel(0), EMBEDDING))
    launched, rows = [], device._generate_rows
    monkeypatch.setattr(device, "_generate_rows", lambda items: launched.append(len(items)) or rows(items))
    handles = device.generate_batch(items)
    assert launched == [4, 1, 1]
    for number in (2, 6):
        with pytest.raises(SynthesisError, match="finite" if number == 2 else "longer than"):
            handles[number].check()
    for number in (0, 1, 3, 4, 5):
        tokens, mel, embedding = items[number]
        expected = flow().generate(torch.tensor(tokens), mel, embedding, streaming=False)
        torch.testing.assert_close(handles[number].check(), expected.detach(), atol=1e-4, rtol=0)
    assert device.pages_in_use == 0


def test_whole_sequences_without_memory_for_many(monkeypatch):
    device = DeviceFlow(flow(), max_streams=4)
    items = [(tokens_of(count), prompt_mel(0), EMBEDDING) for count in (20, 21, 22, 23)]
    wanted = [handle.check() for handle in device.generate_batch(items)]
    rows = device._generate_rows

    def fail(items):
        if len(items) > 1 or len(items[0][0]) == 22:
            raise torch.OutOfMemoryError("no memory")
        return rows(items)

    monkeypatch.setattr(device, "_generate_rows", fail)
    handles = device.generate_batch(items)
    with pytest.raises(torch.OutOfMemoryError):
        handles[2].check()
    for number in (0, 1, 3):
        torch.testing.assert_close(handles[number].check(), wanted[number], atol=1e-4, rtol=0)
    assert device.launches_halved == 4


@pytest.mark.parametrize("pieces_of", [19, 300])
def test_golden_stream(model, vectors, pieces_of):  # noqa: F811
    device = DeviceFlow(model)
    tokens, mel, embedding = inputs(vectors)
    ids = tokens.tolist()
    stream = device.open(embedding, mel)
    done = run(
        stream, [ids[start : start + pieces_of] for start in range(0, len(ids), pieces_of)], device=device
    )
    torch.testing.assert_close(done, vectors["flow.mel_streaming_final"][0], atol=2e-4, rtol=0)


def test_pool_counts_users():
    pool = PagePool(100, torch.float32, torch.device("cpu"), max_bytes=2 * 1024)
    page, other = pool.take(), pool.take()
    assert page != other
    with pytest.raises(SynthesisError):
        pool.take()
    pool.share(page)
    pool.drop(page)
    assert pool.pages_in_use == 2
    pool.drop(page)
    assert (pool.pages_in_use, pool.num_pages) == (1, 2)
    assert pool.take() == page


def test_a_launch_that_fails_is_not_relied_on(monkeypatch):
    """Neither its pages nor what all streams share of its chunks."""
    device = DeviceFlow(flow())
    run_solver, calls = Solver.run, []

    def fail(self, is_known):
        calls.append(is_known)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        run_solver(self, is_known)

    tokens = tokens_of(30)
    stream = device.open(EMBEDDING, prompt_mel(0))
    with monkeypatch.context() as patched:
        patched.setattr(Solver, "run", fail)
        with pytest.raises(torch.OutOfMemoryError):
            device.step(stream, tokens, True)
    device.close(stream)
    assert device.pages_in_use == 0
    again = device.open(EMBEDDING, prompt_mel(0))
    torch.testing.assert_close(device.step(again, tokens, True), whole(tokens), atol=1e-4, rtol=0)
    device.close(again)
