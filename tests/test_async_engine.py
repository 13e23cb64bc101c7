"""The engine under asyncio: many consumers, text as it arrives, and every way of leaving."""

import asyncio
import gc
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers import noise_voice, quiet_engine, speech_like_wav
from vivace import (
    AsyncEngine,
    CancelledRequestError,
    InvalidRequestError,
    InvalidTextError,
    ModelFolderError,
    OverloadedError,
    SamplingParams,
    SynthesisError,
    SynthesisRequest,
)
from vivace.engine import stages
from vivace.engine.scheduler import Policy, Scheduler
from vivace.engine.text_feed import TextReader

SHORT = "Hello there."
LONG = "Once upon a time, a fox sang in the rain."
DEADLINE_S = 60.0


@pytest.fixture
def make(random_model_folder, tmp_path):
    """Makes synchronous engines, all alike."""

    def build(**options):
        return quiet_engine(
            random_model_folder, voices=tmp_path, num_steps=2, token_text_ratio=(2.0, 2.6), **options
        )

    return build


@pytest.fixture
def ask(make):
    with make() as engine:
        voice = noise_voice(engine._config)

    def request(text=SHORT, seed=0, **options):
        return SynthesisRequest(text, **{"voice": voice, "sampling": SamplingParams(seed=seed)} | options)

    return request


def in_loop(scenario, engine):
    """Runs ``scenario(async_engine)``; afterwards nothing is left, and the engine's thread has ended."""

    async def main():
        async with AsyncEngine(engine) as async_engine:
            result = await asyncio.wait_for(scenario(async_engine), DEADLINE_S)
            assert async_engine.num_running == 0
        return result

    threads = threading.active_count()
    result = asyncio.run(main())
    assert engine.num_running == 0
    assert not any(thread.name == "vivace-engine" for thread in threading.enumerate())
    assert threading.active_count() <= threads
    return result


async def samples_of(stream):
    return np.concatenate([chunk.samples async for chunk in stream])


def test_many_consumers_get_what_each_gets_alone(make, ask):
    requests = [ask(LONG, 1), ask(SHORT, 2, speed=1.5), ask(SHORT, 3, stream=False), ask(SHORT, 4)]
    with make() as engine:
        alone = [engine.synthesize(request).samples for request in requests]

    async def scenario(engine):
        return await asyncio.gather(*(samples_of(engine.stream(request)) for request in requests))

    for one, other in zip(alone, in_loop(scenario, make()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_text_that_arrives(make, ask):
    pieces = ["Hello ", "the", "re. Hi."]
    with make() as engine:
        expected = engine.synthesize(ask(iter(pieces))).samples

    async def arriving():
        for piece in pieces:
            await asyncio.sleep(0)
            yield piece

    async def scenario(engine):
        pushed = await samples_of(engine.stream(ask("ignored"), arriving()))
        pulled = await engine.synthesize(ask(iter(pieces)))
        return pushed, pulled.samples

    for samples in in_loop(scenario, make()):
        np.testing.assert_array_equal(samples, expected)


def test_summary_and_voice_conversion(make, ask):
    async def scenario(engine):
        result = await engine.transform(speech_like_wav(), ask().voice).collect()
        voice = await engine.make_voice(speech_like_wav(), "Said.", name="made")
        spoken = await engine.synthesize(ask(voice=voice))
        return result, spoken

    converted, spoken = in_loop(scenario, make())
    assert converted.audio_seconds == pytest.approx(2.0)
    assert converted.finish_reason == "stop"
    assert spoken.spoken_text == [SHORT]
    assert 0 < spoken.ttfb_ms <= spoken.wall_ms


class Gate:
    """Stops the engine's thread in front of its first rendering until ``open`` is called."""

    def __init__(self, monkeypatch):
        self.reached, self._opened = threading.Event(), threading.Event()
        self.rendered = 0
        original = stages.Stages.render

        def render(stages_, live):
            self.reached.set()
            assert self._opened.wait(DEADLINE_S)
            self.rendered += 1
            return original(stages_, live)

        monkeypatch.setattr(stages.Stages, "render", render)

    def open(self):
        self._opened.set()


@pytest.mark.parametrize("way", ["aclose", "drop", "task"])
def test_leaving_in_the_middle_of_a_step_waits_for_nothing_and_ends_with_that_step(
    make, ask, monkeypatch, way
):
    gate = Gate(monkeypatch)

    async def scenario(engine):
        stream = engine.stream(ask(LONG))
        waiting = asyncio.create_task(anext(stream))
        await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
        assert engine.num_running == 1
        # The step cannot end before the gate opens: if leaving waited for it, this would hang.
        if way == "aclose":
            await stream.aclose()
        elif way == "task":
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            waiting.cancel()
            await asyncio.wait([waiting])
            del stream, waiting
            gc.collect()
        gate.open()
        while engine.num_running:
            await asyncio.sleep(0.01)
        assert gate.rendered == 1
        if way == "aclose":
            with pytest.raises(CancelledRequestError):
                await waiting
            with pytest.raises(CancelledRequestError):
                await anext(stream)

    in_loop(scenario, make())


def test_leaving_the_loop_early_cancels(make, ask):
    async def scenario(engine):
        async for chunk in engine.stream(ask(LONG)):
            assert not chunk.is_last
            break
        async with engine.stream(ask(LONG)) as stream:
            await anext(stream)
        never_begun = engine.stream(ask(LONG))
        await never_begun.aclose()
        with pytest.raises(CancelledRequestError):
            await anext(never_begun)
        while engine.num_running:
            await asyncio.sleep(0.01)

    # A request whose chunks nobody takes does not come to its end by itself.
    in_loop(scenario, make(scheduler=Scheduler(max_pending_chunks=1)))


def test_a_slow_consumer_pauses_only_itself(make, ask):
    with make() as engine:
        expected = engine.synthesize(ask(LONG, 1)).samples

    async def scenario(engine):
        slow = engine.stream(ask(LONG, 1))
        parts = [(await anext(slow)).samples]
        await engine.synthesize(ask(SHORT, 2))
        assert engine.num_running == 1
        assert len(slow._live.chunks) == 1
        parts.extend([chunk.samples async for chunk in slow])
        return np.concatenate(parts)

    samples = in_loop(scenario, make(scheduler=Scheduler(max_pending_chunks=1)))
    np.testing.assert_array_equal(samples, expected)


def test_a_consumer_that_takes_nothing_is_ended_though_nothing_else_happens(make, ask):
    async def scenario(engine):
        engine._engine.end_stalled_after(0.2)
        stream = engine.stream(ask(LONG, 1))
        await anext(stream)
        while engine.num_running:
            await asyncio.sleep(0.01)
        with pytest.raises(CancelledRequestError) as caught:
            await anext(stream)
        assert caught.value.code == "consumer_stalled"
        assert (await engine.synthesize(ask(SHORT))).audio_seconds > 0

    in_loop(scenario, make(scheduler=Scheduler(max_pending_chunks=1)))


def test_who_waits_too_long_for_his_turn_is_told(make, ask):
    async def scenario(engine):
        scheduler = engine._engine._scheduler
        scheduler.use(replace(scheduler.capacity, running=1, queue=5))
        first = engine.stream(ask(LONG, 1))
        await anext(first)
        with pytest.raises(OverloadedError, match="too long") as caught:
            await engine.synthesize(ask(SHORT, 2))
        assert caught.value.retry_after_s >= 1
        assert len(await samples_of(first))

    in_loop(scenario, make(scheduler=Scheduler(Policy(max_pending_chunks=1, max_queue_ms=200))))


def test_an_error_of_the_text_iterator_reaches_the_consumer(make, ask):
    async def broken():
        yield "Once. "
        raise KeyError("mine")

    def broken_too():
        yield "Once. "
        raise KeyError("mine")

    async def scenario(engine):
        for stream in (engine.stream(ask(), broken()), engine.stream(ask(broken_too()))):
            with pytest.raises(KeyError, match="mine"):
                await samples_of(stream)
            with pytest.raises(KeyError):
                await anext(stream)
        assert engine.num_running == 0
        assert (await engine.synthesize(ask())).audio_seconds > 0  # the engine goes on

    in_loop(scenario, make())


def test_wrong_requests(make, ask):
    async def scenario(engine):
        stream = engine.stream(ask(" "))
        for _ in range(2):
            with pytest.raises(InvalidTextError):
                await anext(stream)

        async def nothing():
            return
            yield

        with pytest.raises(InvalidTextError):
            await samples_of(engine.stream(ask(), nothing()))

    in_loop(scenario, make())


def test_a_text_iterator_that_never_gives_holds_nobody_up(make, ask):
    released = threading.Event()

    def stuck():
        yield "Once. "
        released.wait(DEADLINE_S)

    async def never():
        yield "Once. "
        await asyncio.Event().wait()

    async def scenario(engine):
        async with engine.stream(ask(stuck())) as one, engine.stream(ask(), never()) as other:
            begun = [asyncio.create_task(anext(stream)) for stream in (one, other)]
            assert (await engine.synthesize(ask())).audio_seconds > 0
        await asyncio.wait(begun)
        while engine.num_running:
            await asyncio.sleep(0.01)
        released.set()
        while any(thread.name == "vivace-text" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        for task in begun:
            task.exception()

    in_loop(scenario, make())


def test_closing_ends_the_thread_and_every_stream(make, ask):
    async def main():
        engine = AsyncEngine(make())
        stream = engine.stream(ask(LONG))
        await anext(stream)
        await engine.close()
        with pytest.raises(CancelledRequestError, match="closed"):
            await anext(stream)
        with pytest.raises(InvalidRequestError) as caught:
            await engine.synthesize(ask())
        assert caught.value.code == "engine_closed"

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert not any(thread.name == "vivace-engine" for thread in threading.enumerate())


def test_a_fault_of_the_loop_itself_leaves_nobody_waiting(make, ask, caplog):
    class BrokenScheduler(Scheduler):
        def plan(self, now_ms=0):
            if len(self):
                raise ZeroDivisionError
            return super().plan(now_ms)

    async def scenario(engine):
        with pytest.raises(CancelledRequestError, match="closed"):
            await engine.synthesize(ask())
        with pytest.raises(InvalidRequestError):
            await engine.synthesize(ask())

    in_loop(scenario, make(scheduler=BrokenScheduler()))
    assert "loop failed" in caplog.text


def test_open_loads_without_holding_up_the_loop(random_model_folder, tmp_path, ask):
    async def main():
        engine = await AsyncEngine.open(random_model_folder, voices_folder=tmp_path, warm_up=False)
        async with engine:
            assert engine.sample_rate_hz == 24_000
            assert engine.voices.builtin_names == ("noise",)

    asyncio.run(main())


def test_closing_while_the_request_is_checked_ends_it(make, ask, monkeypatch):
    engine = make()
    checking, go_on = threading.Event(), threading.Event()
    submit = engine.submit

    def slow_submit(request):
        checking.set()
        assert go_on.wait(DEADLINE_S)
        return submit(request)

    monkeypatch.setattr(engine, "submit", slow_submit)

    async def scenario(async_engine):
        stream = async_engine.stream(ask(LONG))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(checking.wait, DEADLINE_S)
        await stream.aclose()
        go_on.set()
        with pytest.raises(CancelledRequestError):
            await first
        with pytest.raises(CancelledRequestError):
            await anext(stream)
        while async_engine.num_running:  # its end waits for the step that runs
            await asyncio.sleep(0)

    in_loop(scenario, engine)


def test_a_fault_in_the_text_front_end_ends_the_request(make, ask, monkeypatch):
    """It happens in the thread that reads the text; the consumer must hear of it."""

    def broken(self, text):
        raise IndexError("a fault of ours")

    engine = make()
    monkeypatch.setattr(TextReader, "read", broken)

    async def scenario(running):
        with pytest.raises(SynthesisError):
            await asyncio.wait_for(anext(running.stream(ask(iter(["Hello there. ", "More."])))), 30)
        assert engine.num_running == 0

    in_loop(scenario, engine)


@pytest.mark.parametrize("device", ["bogus", "meta", "cuda:99"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ModelFolderError, match="--device") as caught:
        asyncio.run(AsyncEngine.open("mini", device=device))
    assert caught.value.code == "invalid_device"
