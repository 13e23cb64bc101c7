"""Nobody disturbs anybody: on paged stages a request's samples are the same bytes alone and in any company.

A tiny random model with plain kernels; ``deterministic`` unless said otherwise.
"""

import asyncio
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import noise_voice, quiet_engine
from vivace import (
    AsyncEngine,
    CancelledRequestError,
    OverloadedError,
    SamplingParams,
    SynthesisError,
    SynthesisRequest,
)
from vivace.engine import device_stages
from vivace.engine.batch import BatchRunner
from vivace.engine.device_stages import DeviceStages
from vivace.engine.scheduler import Policy, Scheduler
from vivace.models import flow_device
from vivace.models.device_kinds import make_device_flow
from vivace.models.flow_solver import Solver

OPTIONS = {"num_steps": 2, "token_text_ratio": (2.0, 2.6)}
ROWS = 8
TEXTS = (
    "Hello there.",
    "Once upon a time, a fox sang in the rain.",
    "One fox ran. Two dogs sat. A cat sang a song.",
)


def open_engine(folder, policy=None, **options):
    engine = quiet_engine(folder, scheduler=Scheduler(policy), **OPTIONS)
    assets = engine._assets
    stages = DeviceStages.build(
        assets.model, assets.limits, max_rows=ROWS, **{"deterministic": True} | options
    )
    engine.use_device(stages)
    return engine


@pytest.fixture(scope="module")
def engine(random_model_folder):
    with open_engine(random_model_folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def packed(random_model_folder):
    """Streams of one launch packed together."""
    with open_engine(random_model_folder, deterministic=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def voices(engine):
    return [noise_voice(engine._config, count, seed=count) for count in (40, 3, 60)]


@pytest.fixture(scope="module")
def ask(voices):
    def make(number, **options):
        text, voice = TEXTS[number % len(TEXTS)], voices[number % len(voices)]
        return SynthesisRequest(text, voice=voice, sampling=SamplingParams(seed=number), **options)

    return make


@pytest.fixture(scope="module")
def alone(engine, ask):
    """The samples of a request that has the engine to itself."""
    known = {}

    def samples(number):
        if number not in known:
            known[number] = engine.synthesize(ask(number)).samples.tobytes()
        return known[number]

    return samples


def held(engine):
    """Rows, pages and slots that requests hold, the kept prompts of voices left out."""
    stages = engine._stages._device
    prompts = sum(len(prompt.pages) for prompt in stages.flow._prompts.values())
    pages = stages.flow._flow.pages_in_use - prompts
    return stages.lm.rows.num_open_rows, pages, ROWS - len(stages.vocoder._free)


@pytest.fixture(autouse=True)
def _nothing_left(request):
    yield
    for name in ("engine", "packed"):
        if name in request.fixturenames:
            engine = request.getfixturevalue(name)
            assert engine.num_running == 0
            assert held(engine) == (0, 0, 0)
            engine._scheduler.requests.check()
            engine._stages._device.lm.rows.check()


def take_all(engine, live):
    """What lies there, as bytes; a request that failed raises its error."""
    parts = []
    while (chunk := engine.take(live)) is not None:
        parts.append(chunk.samples)
    return np.concatenate(parts).tobytes() if parts else b""


def run_to_the_end(engine):
    while engine.step():
        pass


@pytest.mark.parametrize("size", [2, 5, 12])
def test_any_number_of_others(engine, ask, alone, size):
    """More than there are rows, too: they wait for their turn."""
    lives = [engine.submit(ask(number)) for number in range(size)]
    run_to_the_end(engine)
    for number, live in enumerate(lives):
        assert take_all(engine, live) == alone(number), number


def test_others_come_and_go_at_any_step(engine, ask, alone):
    rng = np.random.default_rng(7)
    lives, numbers, left = {}, itertools.count(), 0
    for step in itertools.count():
        if step < 40 and rng.random() < 0.5:
            number = next(numbers)
            lives[number] = engine.submit(ask(number))
        running = [live for live in lives.values() if not live.is_done]
        if running and rng.random() < 0.15:
            engine.cancel(running[int(rng.integers(len(running)))])
            left += 1
        if not engine.step() and step >= 40:
            break
    whole = {number: live for number, live in lives.items() if live.finish_reason != "cancelled"}
    assert left
    assert len(whole) > 3
    for number, live in whole.items():
        assert take_all(engine, live) == alone(number), number


def test_someone_leaves_in_the_middle_of_a_step(engine, ask, alone, monkeypatch):
    lives = [engine.submit(ask(number)) for number in range(4)]
    launch, calls = BatchRunner._launch_vocoder, []

    def leave(self, parts):
        calls.append(len(parts))
        if len(calls) == 3:
            engine.cancel(lives[1])
            engine.cancel(lives[2])
        launch(self, parts)

    monkeypatch.setattr(BatchRunner, "_launch_vocoder", leave)
    run_to_the_end(engine)
    for number in (1, 2):
        with pytest.raises(CancelledRequestError):
            engine.take(lives[number])
    for number in (0, 3):
        assert take_all(engine, lives[number]) == alone(number)


def plant_nan(engine, live, stage):
    stages, nan = engine._stages._device, float("nan")
    with torch.inference_mode():
        if stage == "lm":
            stages.lm.paged.pool[:, :, live.segment.lm._lease.pages] = nan
        elif stage == "flow":
            pool = stages.flow._flow.pool
            for page in live.segment.flow.pages[live.ticket.prompt_pages :]:
                pool.resolve(page)[: pool._size] = nan
        else:
            stages.vocoder.runner.states.pool[live.vocoder._stream.slot] = nan


@pytest.mark.parametrize("stage", ["lm", "flow", "vocoder"])
def test_values_that_are_not_finite_end_their_request_alone(engine, ask, alone, stage):
    lives = [engine.submit(ask(number)) for number in (1, 4, 2, 7)]
    broken = lives[1]
    while not (broken.num_chunks and broken.segment is not None and not broken.segment.is_complete):
        engine.step()
    plant_nan(engine, broken, stage)
    run_to_the_end(engine)
    with pytest.raises(SynthesisError, match="not finite"):
        take_all(engine, broken)
    for number, live in zip((1, 2, 7), (lives[0], lives[2], lives[3]), strict=True):
        assert take_all(engine, live) == alone(number)
    # What lay in its pages does nothing to those who get them next.
    later = [engine.submit(ask(number)) for number in range(ROWS)]
    run_to_the_end(engine)
    for number, live in enumerate(later):
        assert take_all(engine, live) == alone(number), number


def test_an_error_in_one_row_ends_that_request_alone(engine, ask, alone, monkeypatch):
    lives = [engine.submit(ask(number)) for number in range(3)]
    begin = engine._stages.next_segment

    def broken(live):
        if live is lives[1]:
            raise ZeroDivisionError("secret words")
        return begin(live)

    monkeypatch.setattr(engine._stages, "next_segment", broken)
    run_to_the_end(engine)
    with pytest.raises(SynthesisError, match="ZeroDivisionError") as caught:
        engine.take(lives[1])
    assert "secret" not in str(caught.value)
    for number in (0, 2):
        assert take_all(engine, lives[number]) == alone(number)


def test_a_fault_of_a_whole_launch_ends_its_requests_and_not_the_engine(engine, ask, alone, monkeypatch):
    flow = engine._stages._device.flow
    waiting = engine.submit(ask(0))
    with monkeypatch.context() as patched:
        patched.setattr(flow, "launch_batch", lambda items: 1 // 0)
        run_to_the_end(engine)
    with pytest.raises(SynthesisError, match="internal"):
        engine.take(waiting)
    assert engine.synthesize(ask(0)).samples.tobytes() == alone(0)


@pytest.mark.parametrize("stage", ["flow", "vocoder", "lm", "prompt"])
def test_memory_that_is_missing_at_any_launch_ends_its_requests_and_loses_nothing(
    engine, ask, alone, monkeypatch, stage
):
    """The n-th launch of a stage fails, and its halves down to one row, for every n until none does."""
    stages = engine._stages._device
    owner, name = {
        "flow": (stages.flow._flow, "_run"),
        "vocoder": (stages.vocoder, "_launch_rows"),
        "lm": (stages.lm.paged, "launch"),
        "prompt": (stages.lm.paged, "prompt"),
    }[stage]
    original = getattr(owner, name)
    numbers = (0, 4)
    for number in numbers:
        alone(number)
    for failing in itertools.count(1, 3):
        calls = []

        def launch(*arguments, failing=failing, calls=calls):
            calls.append(1 if stage == "prompt" else len(arguments[0]))
            if failing <= len(calls) < failing + calls[failing - 1].bit_length():
                raise torch.OutOfMemoryError("no memory")
            return original(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, launch)
            lives = [engine.submit(ask(number)) for number in numbers]
            run_to_the_end(engine)
        failed = [live for live in lives if live.error is not None]
        assert len(failed) == (len(calls) >= failing)
        assert all(isinstance(live.error, OverloadedError) for live in failed)
        assert held(engine) == (0, 0, 0)
        for number, live in zip(numbers, lives, strict=True):
            if live not in failed:
                assert take_all(engine, live) == alone(number)
        if not failed:
            break
    assert engine.synthesize(ask(4)).samples.tobytes() == alone(4)


def test_a_consumer_that_stalls_pauses_alone(random_model_folder, ask, alone):
    with open_engine(random_model_folder, Policy(max_pending_chunks=1, max_hop_chunks=1)) as engine:
        slow = engine.submit(ask(1))
        others = [engine.stream(ask(number)) for number in (2, 4)]
        run_to_the_end(engine)
        assert len(slow.chunks) == 1
        assert not slow.is_done
        for number, stream in zip((2, 4), others, strict=True):
            assert stream.collect().samples.tobytes() == alone(number)
        parts = []
        while (chunk := engine.next_chunk(slow)) is not None:
            parts.append(chunk.samples)
        assert np.concatenate(parts).tobytes() == alone(1)
        assert held(engine) == (0, 0, 0)


def test_larger_hops_give_the_same_bytes(random_model_folder, ask, alone):
    chunks = []
    for hop in (1, 4):
        with open_engine(random_model_folder, Policy(max_hop_chunks=hop, safe_ms=1, quiet_rows=0)) as engine:
            stream = engine.stream(ask(1))
            parts = [chunk.samples for chunk in stream]
            assert np.concatenate(parts).tobytes() == alone(1)
            chunks.append(len(parts))
    assert chunks[1] < chunks[0]


@pytest.mark.parametrize("size", [2, 7])
def test_packed_flow_and_vocoder_give_the_bytes_of_a_stream_alone(packed, voices, size):
    """On a CPU: the kernels of a GPU are measured there."""
    rng = np.random.default_rng(3)
    jobs = [(rng.integers(0, 729, int(rng.integers(20, 90))).tolist(), voices[i % 3]) for i in range(size)]
    alone = [packed.render_tokens(*job).collect().samples.tobytes() for job in jobs]
    lives = [packed.submit_tokens(*job) for job in jobs]
    run_to_the_end(packed)
    for live, samples in zip(lives, alone, strict=True):
        assert take_all(packed, live) == samples


def test_one_step_serves_all(packed, ask):
    lives = [packed.submit(ask(number)) for number in range(4)]
    packed.step()
    assert packed.gauges()["batch_size"] == 4
    seen = 0
    while packed.step():
        seen = max(seen, packed.gauges()["flow_batch_size"])
    assert seen >= 3
    for live in lives:
        assert live.finish_reason in ("stop", "length")
        take_all(packed, live)


def test_long_texts_and_streamed_texts_in_company(engine, ask, voices):
    pieces = ["One fox ", "ran. Two dogs", " sat. A cat sang."]
    requests = [
        lambda: SynthesisRequest(iter(pieces), voice=voices[0], sampling=SamplingParams(seed=3)),
        lambda: ask(5, stream=False),
        lambda: ask(2, speed=1.3),
    ]
    alone = [engine.synthesize(make()).samples.tobytes() for make in requests]
    streams = [engine.stream(make()) for make in requests]
    together = [stream.collect().samples.tobytes() for stream in streams]
    assert together == alone


def test_no_request_takes_more_than_it_was_admitted_for(engine, ask, voices, monkeypatch):
    rows = engine._stages._device.lm.rows
    opened, open_row = [], rows.open
    monkeypatch.setattr(rows, "open", lambda positions: opened.append(positions) or open_row(positions))
    pieces = ["One fox ran. ", "Two dogs sat. "]
    requests = [ask(0), ask(1), ask(2, speed=0.7), ask(5, cross_lingual=True), ask(8, stream=False)]
    requests.append(SynthesisRequest(iter(pieces), voice=voices[2]))
    for request in requests:
        opened.clear()
        stream = engine.stream(request)
        ticket = stream._live.ticket
        stream.collect()
        assert 0 < -(-max(opened) // rows.page_tokens) <= ticket.kv_pages
        assert ticket.most_held <= ticket.flow_pages
        assert (ticket.most_held > 0) == request.stream


def test_little_memory_makes_streams_wait_and_none_fail(random_model_folder, ask, alone):
    """Pages of the flow for one and a half of the longest streams, and a queue."""
    with open_engine(random_model_folder) as engine:
        engine._scheduler.use(replace(engine._stages.capacity, flow_pages=9, running=8, queue=20))
        pool = engine._stages._device.flow._flow.pool
        lives, most = [engine.submit(ask(number)) for number in range(6)], 0
        while engine.step():
            most = max(most, engine._scheduler.requests.held)
            assert pool.pages_in_use <= 9 + sum(
                len(prompt.pages) for prompt in engine._stages._device.flow._prompts.values()
            )
        assert most > 4
        for number, live in enumerate(lives):
            assert take_all(engine, live) == alone(number), number
        assert held(engine) == (0, 0, 0)


def test_many_coroutines_that_come_and_go(random_model_folder, ask, alone):
    """The engine in its own thread; who stays hears what he would hear alone."""

    async def visit(engine, number):
        rng = random.Random(number)
        patience = rng.choice((1, 2, 1000, 1000))
        await asyncio.sleep(0.05 * rng.random())
        parts = []
        async with engine.stream(ask(number % 6)) as stream:
            async for chunk in stream:
                parts.append(chunk.samples)
                if len(parts) >= patience and not chunk.is_last:
                    return None
        return np.concatenate(parts).tobytes()

    async def main():
        async with AsyncEngine(open_engine(random_model_folder)) as engine:
            heard = await asyncio.gather(*(visit(engine, number) for number in range(18)))
            while engine.num_running:
                await asyncio.sleep(0.01)
            assert held(engine._engine) == (0, 0, 0)
            return heard

    heard = asyncio.run(asyncio.wait_for(main(), 120))
    assert sum(samples is not None for samples in heard) >= 6
    for number, samples in enumerate(heard):
        assert samples in (None, alone(number % 6)), number


@pytest.fixture(scope="module")
def long_ones(engine, voices):
    """Requests of different lengths, and the samples that each has alone."""
    requests = [
        SynthesisRequest(
            "the fox sang in the rain and " * count, voice=voice, sampling=SamplingParams(seed=3)
        )
        for count, voice in zip((8, 2, 4), voices, strict=True)
    ]
    return requests, [engine.synthesize(request).samples.tobytes() for request in requests]


@pytest.mark.parametrize("in_turn", [True, False])
def test_chunks_of_one_stream_in_a_launch(random_model_folder, monkeypatch, long_ones, in_turn):
    """Their number grows while a stream has the engine to itself; the samples stay, also when others come."""
    monkeypatch.setattr(flow_device, "launch_costs", lambda *_: {1: 6.2, 2: 8.4, 4: 10.4, 8: 13.4})
    waves = []
    run = Solver.run
    monkeypatch.setattr(Solver, "run", lambda self, known: waves.append(len(self.x)) or run(self, known))
    requests, alone = long_ones
    monkeypatch.setattr(
        device_stages, "make_device_flow", lambda flow, *_, **__: make_device_flow(flow, None, 8)
    )
    with open_engine(random_model_folder, Policy(wave_ms=400)) as other:
        stages = other._stages._device
        stages.flow.warm_up()
        stages.lm.paged.in_turn = in_turn
        other._scheduler.use(replace(stages.capacity, wave=stages.flow.paged.most_in_wave))
        waves.clear()
        for request, samples in zip(requests, alone, strict=True):
            assert other.synthesize(request).samples.tobytes() == samples
        assert 8 in waves
        lives = []
        for request in requests:
            lives.append(other.submit(request))
            assert not lives[0].is_done or len(lives) > 2  # somebody comes while the first is heard
            for _ in range(2):
                other.step()
        parts = [take_all(other, live) for live in lives]  # on a slow machine they have all ended by now
        while not all(live.is_done for live in lives):
            other.step()
            parts = [part + take_all(other, live) for part, live in zip(parts, lives, strict=True)]
        assert parts == alone
        assert held(other) == (0, 0, 0)


def test_where_rows_are_computed_as_alone_so_are_chunks(random_model_folder, monkeypatch):
    monkeypatch.setattr(flow_device, "launch_costs", lambda *_: {1: 6.2, 2: 8.4, 4: 10.4})
    with open_engine(random_model_folder) as engine:
        assert engine._stages._device.flow.paged.most_in_wave == 1
