"""Pages that go to host memory and come back: bit-equal, and nobody hears of it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import noise_voice, quiet_engine
from tests.test_company import OPTIONS, take_all
from tests.test_flow_unet import model  # noqa: F401  (fixture)
from vivace import (
    CancelledRequestError,
    InvalidRequestError,
    SamplingParams,
    SynthesisError,
    SynthesisRequest,
)
from vivace.engine.device_stages import DeviceStages
from vivace.engine.engine import _gb_bytes
from vivace.engine.kv_cache import RowPool
from vivace.engine.scheduler import Place, Policy, Scheduler
from vivace.engine.swapper import CACHE_TOKENS, Swapper, cache_page_bytes
from vivace.errors import OverloadedError
from vivace.models import host_pages
from vivace.models.flow_pages import PagePool
from vivace.models.host_pages import HostFrames, frames_within, slab_frames
from vivace.models.lm_launches import PAGE_TOKENS
from vivace.models.unet_device import DeviceUNetFlow
from vivace.models.unet_pages import UNetPages

ROWS = 6
FLOW_PAGES = 26
LONG = "One fox ran. Two dogs sat. A cat sang a song in the rain, and then all of them went home."
SMALL = Policy(max_pending_chunks=2, swap_after_ms=0, burst_tokens=8)


@pytest.fixture
def open_engine(random_model_folder):
    """An engine on paged stages with host memory for so many pages of its flow."""
    engines = []

    def make(host_pages=40, flow_pages=FLOW_PAGES, policy=SMALL, **capacity):
        engine = quiet_engine(random_model_folder, scheduler=Scheduler(policy), **OPTIONS)
        assets = engine._assets
        stages = DeviceStages.build(assets.model, assets.limits, max_rows=ROWS, deterministic=True)
        stages.capacity = replace(stages.capacity, flow_pages=flow_pages, **capacity)
        per_page = -(-CACHE_TOKENS * stages.capacity.chunk_tokens // PAGE_TOKENS)
        frame_bytes = stages.flow.paged.pool.frame_bytes + per_page * cache_page_bytes(stages.lm)
        engine.use_device(stages, host_pages * frame_bytes)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        requests = engine._scheduler.requests
        assert engine.num_running == 0
        assert (requests.host_used, requests.num_away, requests.kv_used, requests.held) == (0, 0, 0, 0)
        assert requests.host_cache_used == 0
        swapper = engine._stages.swapper
        assert swapper._frames.num_free == swapper.num_frames == engine.gauges()["host_pages_total"]
        assert swapper._cache.num_free == swapper.num_cache_frames > 0
        engine._stages._device.lm.rows.check()
        engine.close()


def ask(engine, seed, text=LONG, tokens=40):
    return SynthesisRequest(
        text, voice=noise_voice(engine._config, tokens, seed=seed), sampling=SamplingParams(seed=seed)
    )


def place(live):
    return live.ticket.place


def where(live):
    """Pages of the flow and of the cache."""
    return list(live.segment.flow.pages), list(live.segment.lm.lease.pages)


def step_until(engine, condition, steps=2000):
    for _ in range(steps):
        if condition():
            return
        engine.step()
    raise AssertionError("it did not come to that")


# -- one request, moved by hand ----------------------------------------------------------------------------------


def contents(engine, live):
    """All that lies in the request's own pages."""
    pool, lm = engine._stages._device.flow.paged.pool, engine._stages._device.lm
    own = live.segment.flow.pages[live.ticket.prompt_pages :]
    flow = [part.clone() for page in own for part in pool.parts(page)]
    used = live.segment.lm.num_positions
    row = lm.paged.pool[:, :, live.segment.lm.lease.pages].transpose(2, 3).flatten(3, 4)[:, :, :, :used]
    return [*flow, row.clone()]


def test_what_comes_back_is_bit_equal_and_the_samples_are_the_same(open_engine):
    """Out and back before every chunk, into other pages."""
    engine = open_engine(flow_pages=1 << 60)
    expected = engine.synthesize(ask(engine, 1)).samples.tobytes()
    live, heard, moves = engine.submit(ask(engine, 1)), [], 0
    pool, rows = engine._stages._device.flow.paged.pool, engine._stages._device.lm.rows
    taken = pool.take_many(3)
    while not live.is_done:
        with torch.inference_mode():
            while engine._loop._emit_all(engine._stages.collect(), ()):
                pass  # until nothing is under way
            if live.segment is not None:
                before, places = contents(engine, live), where(live)
                cached = live.segment.lm.num_cached_pages
                engine._stages.swapper.leave(live)
                assert engine._stages.swapper.arrived() == [live]
                assert where(live) == (places[0][: live.ticket.prompt_pages], [])
                # The scheduler counts them wherever they are.
                assert live.segment.lm.num_cached_pages == cached > 0
                # Others take what became free, and write into it.
                taken, row = [*taken, *pool.take_many(3)], rows.open(40)
                for page in taken:
                    pool.parts(page)[0].fill_(float("nan"))
                engine._stages._device.lm.paged.pool[:, :, row.pages] = float("nan")
                for page in taken[:3]:
                    pool.drop(page)
                del taken[:3]
                engine._stages.swapper.come_back(live)
                assert engine._stages.swapper.arrived() == [live]
                rows.close(row)
                assert [len(kind) for kind in where(live)] == [len(kind) for kind in places]
                moves += where(live) != places
                for one, other in zip(before, contents(engine, live), strict=True):
                    assert torch.equal(one, other)
        engine.step()
        heard.append(take_all(engine, live))
    assert b"".join([*heard, take_all(engine, live)]) == expected
    assert moves > 5
    for page in taken:
        pool.drop(page)


def test_pages_of_both_flows_on_their_way(random_model_folder):
    frames = HostFrames(3, 256 * 4, is_pinned=False)
    pool = PagePool(200, torch.float32, torch.device("cpu"))
    pages = pool.take_many(2)
    for number, page in enumerate(pages):
        pool.parts(page)[0].copy_(torch.randn(256, generator=torch.Generator().manual_seed(number)))
    saved = [pool.parts(page)[0].clone() for page in pages]
    held = frames.take_many(2)
    for frame, page in zip(held, pages, strict=True):
        frames.store(frame, pool.parts(page))
        pool.parts(page)[0].zero_()
    for frame, page in zip(held, pages, strict=True):
        frames.load(frame, pool.parts(page))
    for page, expected in zip(pages, saved, strict=True):
        assert torch.equal(pool.parts(page)[0], expected)
    with pytest.raises(SynthesisError) as caught:
        frames.take_many(2)
    assert caught.value.code == "out_of_memory"
    frames.give_back(held)
    assert frames.num_free == 3


@given(st.integers(1, 300), st.integers(0, 40_000))
def test_locked_memory_stays_within_what_was_given(frame_bytes, num_bytes):
    """Though it is taken in powers of two: none of it for nothing, and hardly any is left out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(host_pages, "SLAB_BYTES", 1024)
        frames = frames_within(num_bytes, frame_bytes, is_pinned=True)
        slabs = slab_frames(frames, frame_bytes)
    assert sum(slabs) == frames <= frames_within(num_bytes, frame_bytes, is_pinned=False)
    locked = [1 << (count * frame_bytes - 1).bit_length() for count in slabs]
    assert sum(locked) <= num_bytes
    assert max(locked, default=0) <= 1024
    assert num_bytes - sum(locked) < 1 << (frame_bytes - 1).bit_length()


@pytest.mark.parametrize("share", [0.5, 7.3])
def test_all_host_memory_is_taken_at_once_and_no_more_than_given(open_engine, monkeypatch, share):
    """Pages of the flow and of the speech LM's cache; a move takes none."""
    engine = open_engine()
    device = engine._stages._device
    limit = int(share * device.flow.paged.pool.frame_bytes)
    swapper = Swapper.open(device, limit)
    if share < 1:
        assert swapper is None
        return
    kinds = swapper._frames, swapper._cache
    assert 0 < sum(kind.num_frames * kind.frame_bytes for kind in kinds) <= limit
    assert swapper.num_cache_frames >= 2 * swapper.num_frames
    slow, other = crowd(engine)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: 1 // 0)
    step_until(engine, lambda: any(place(live) is Place.HOST for live in slow))
    for live in (*slow, other):
        engine.cancel(live)


def test_without_room_for_the_cache_in_host_memory_they_wait(open_engine):
    """The planner counts it, so that nothing begins to move which has no room."""
    engine = open_engine()
    engine._scheduler.requests.capacity = replace(engine._scheduler.requests.capacity, host_cache=1)
    slow, other = crowd(engine)
    for _ in range(50):
        engine.step()
    assert {place(live) for live in slow} == {Place.DEVICE}
    assert engine._scheduler.capacity.host_pages  # swapping has not been given up
    for live in (*slow, other):
        engine.cancel(live)


def test_a_frame_holds_parts_of_several_kinds():
    """As a page of CosyVoice 2's flow has them."""
    parts = [torch.randn(3, 2), torch.arange(5, dtype=torch.int64), torch.randn(7).bfloat16()]
    frames = HostFrames(2, sum(part.numel() * part.element_size() for part in parts), is_pinned=False)
    frames.store(1, parts)
    back = [torch.zeros_like(part) for part in parts]
    frames.load(1, back)
    assert all(torch.equal(part, other) for part, other in zip(parts, back, strict=True))
    with pytest.raises(AssertionError, match="too small"):
        frames.store(0, [*parts, torch.zeros(1)])


def test_a_row_gives_its_pages_but_not_its_slot():
    rows = RowPool(2, 9, 4)
    one = rows.open(20)
    rows.lend(one)
    rows.check()
    assert (rows.num_free_pages, rows.num_open_rows) == (8, 1)
    other = rows.open(16)
    assert other.slot != one.slot
    with pytest.raises(OverloadedError):
        rows.return_to(one)
    rows.close(other)
    rows.return_to(one)
    assert len(one.pages) == 5
    rows.lend(one)
    rows.close(one)
    rows.check()
    assert (rows.num_free_pages, rows.num_open_rows) == (8, 0)


# -- the engine ----------------------------------------------------------------------------------------------------


def test_a_stream_that_nobody_hears_makes_room_for_others(open_engine):
    """Its pages leave when others wait for memory, and come back when it is heard again: with the same bytes."""
    engine = open_engine()
    expected = [engine.synthesize(ask(engine, seed)).samples.tobytes() for seed in range(4)]
    slow = engine.submit(ask(engine, 0))
    step_until(engine, lambda: slow.ticket.pending_chunks == 2)
    others = [engine.submit(ask(engine, seed)) for seed in (1, 2, 3)]
    assert engine.gauges()["queue_length"] > 0
    heard = dict.fromkeys((1, 2, 3), b"")

    def others_end():
        for number, live in enumerate(others, 1):
            heard[number] += take_all(engine, live)
        return all(live.is_done for live in others)

    step_until(engine, lambda: place(slow) is Place.HOST)
    figures = engine.gauges()
    assert (figures["streams_on_host"], figures["swaps_out"], figures["swaps_in"]) == (1, 1, 0)
    assert 0 < figures["host_pages_used"] <= figures["host_pages_total"] == 40
    step_until(engine, others_end)
    assert [heard[number] for number in (1, 2, 3)] == expected[1:]
    assert place(slow) is Place.HOST  # nobody takes its chunks, so it stays away
    assert not engine.step()
    parts = [take_all(engine, slow)]
    while not slow.is_done:
        engine.step()
        parts.append(take_all(engine, slow))
    parts.append(take_all(engine, slow))
    assert b"".join(parts) == expected[0]
    assert engine.gauges()["swaps_in"] == 1


def crowd(engine):
    """Streams that nobody listens to, until one more has to wait; and that one."""
    lives = []
    while not engine.gauges()["queue_length"]:
        lives.append(engine.submit(ask(engine, len(lives))))
        step_until(engine, lambda: lives[-1].ticket.pending_chunks == 2 or engine.gauges()["queue_length"])
    return lives[:-1], lives[-1]


def hear(engine, *lives):
    """Listens to all until they end."""
    parts = [b""] * len(lives)
    while not all(live.is_done for live in lives):
        for number, live in enumerate(lives):
            parts[number] += one(engine, live)
        engine.step()
    return [part + take_all(engine, live) for part, live in zip(parts, lives, strict=True)]


def test_without_room_in_host_memory_they_wait(open_engine):
    engine = open_engine(host_pages=1)  # too little for any of them
    slow, other = crowd(engine)
    for _ in range(50):
        engine.step()
    assert other.ticket.first_ms < 0
    assert {place(live) for live in slow} == {Place.DEVICE}
    engine.cancel(slow[0])
    step_until(engine, lambda: other.ticket.first_ms >= 0)
    for live in (*slow, other):
        engine.cancel(live)


@pytest.mark.parametrize("moment", ["leaving", "away", "returning"])
def test_a_request_ends_while_its_pages_are_away(open_engine, monkeypatch, moment):
    engine = open_engine()
    swapper = engine._stages.swapper
    slow, other = crowd(engine)
    with monkeypatch.context() as patch:
        if moment == "leaving":  # the copy takes for ever
            patch.setattr(swapper, "arrived", list)
        step_until(engine, lambda: any(place(live) is not Place.DEVICE for live in slow))
        gone = next(live for live in slow if place(live) is not Place.DEVICE)
        if moment != "leaving":
            step_until(engine, lambda: place(gone) is Place.HOST)
        if moment == "returning":
            patch.setattr(swapper, "arrived", list)
            take_all(engine, gone)
            for live in (other, *(live for live in slow if live is not gone)):
                engine.cancel(live)
            step_until(engine, lambda: place(gone) is Place.RETURNING)
        engine.cancel(gone)
    with pytest.raises(CancelledRequestError):
        take_all(engine, gone)
    rest = [live for live in (*slow, other) if not live.is_done]
    assert len(rest) == (0 if moment == "returning" else len(slow))
    hear(engine, *rest)


def test_copies_that_fail_change_nothing(open_engine, monkeypatch, caplog):
    """Such as memory that cannot be locked: the streams stay where they are, and nothing more is tried."""
    engine = open_engine()
    tries = []

    def fail(frame, parts):
        tries.append(frame)
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(engine._stages.swapper._frames, "store", fail)
    slow, other = crowd(engine)
    for _ in range(50):
        engine.step()
    assert len(tries) == 1
    assert "stay on the device" in caplog.text
    assert {place(live) for live in slow} == {Place.DEVICE}
    heard = hear(engine, *slow, other)
    for number, part in enumerate(heard):
        assert part == engine.synthesize(ask(engine, number)).samples.tobytes()


def test_pages_that_cannot_come_back_end_their_request_alone(open_engine, monkeypatch):
    engine = open_engine()
    slow, other = crowd(engine)
    step_until(engine, lambda: any(place(live) is Place.HOST for live in slow))
    gone = next(live for live in slow if place(live) is Place.HOST)

    def fail(frame, parts):
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as patch:
        patch.setattr(engine._stages.swapper._frames, "load", fail)
        heard = hear(engine, *(live for live in slow if live is not gone), other)
        with pytest.raises(SynthesisError, match="RuntimeError"):
            hear(engine, gone)
    numbers = [number for number in range(len(slow) + 1) if number != slow.index(gone)]
    for number, part in zip(numbers, heard, strict=True):
        assert part == engine.synthesize(ask(engine, number)).samples.tobytes()


def test_many_streams_with_little_memory_all_sound_as_alone(open_engine):
    """Readers at all speeds: every request ends, with its own bytes, whatever was moved."""
    engine = open_engine()
    numbers = range(7)
    expected = [engine.synthesize(ask(engine, number)).samples.tobytes() for number in numbers]
    lives = [engine.submit(ask(engine, number)) for number in numbers]
    heard = [b""] * len(lives)
    rng = np.random.default_rng(5)
    for _ in itertools.count():
        for number, live in enumerate(lives):
            if rng.random() < (0.02 if number % 2 else 0.5):
                heard[number] += take_all(engine, live) if live.is_done else one(engine, live)
        engine.step()
        if all(live.is_done for live in lives):
            break
    for number, live in enumerate(lives):
        assert heard[number] + take_all(engine, live) == expected[number], number
    assert engine.gauges()["swaps_in"] > 2


def one(engine, live):
    chunk = engine.take(live)
    return b"" if chunk is None else chunk.samples.tobytes()


def test_how_much_memory():
    assert _gb_bytes(1.5) == 1_500_000_000
    for wrong in (-1.0, float("nan"), 1e9):
        with pytest.raises(InvalidRequestError, match="host_memory_gb"):
            _gb_bytes(wrong)


def test_a_page_of_cosyvoice_2s_flow(model):  # noqa: F811
    """Out of its five pieces of memory and back into another page."""
    size = 3 * UNetPages.bytes_of(model.config, torch.float32)
    pool = DeviceUNetFlow(model, max_bytes=size, max_streams=1).pool
    one, other = pool.take(2)
    for part in pool.parts(one):
        part.normal_()
    frames = HostFrames(1, pool.frame_bytes, is_pinned=False)
    frames.store(0, pool.parts(one))
    frames.load(0, pool.parts(other))
    parts = list(zip(pool.parts(one), pool.parts(other), strict=True))
    assert len(parts) == 5
    assert all(torch.equal(part, back) for part, back in parts)
