"""Several engines behind one interface: where requests go, and that they sound the same wherever that is."""

import asyncio

import numpy as np
import pytest

from tests.helpers import noise_voice, quiet_engine
from vivace import AsyncEngine, CancelledRequestError, InvalidRequestError, SamplingParams, SynthesisRequest
from vivace.engine.engine import Engine
from vivace.engine.router import EngineRouter
from vivace.engine.scheduler import Scheduler

OPTIONS = {"num_steps": 2, "token_text_ratio": (2.0, 2.6)}
DEADLINE_S = 60.0
LONG = "Once upon a time, a fox sang in the rain."


@pytest.fixture
def make(random_model_folder, tmp_path):
    def make(count=2, **options):
        engines = []
        for _ in range(count):
            scheduler = Scheduler(max_pending_chunks=options.get("max_pending_chunks"))
            engine = quiet_engine(random_model_folder, voices=tmp_path, scheduler=scheduler, **OPTIONS)
            engines.append(AsyncEngine(engine, stall_s=options.get("stall_s", 60.0)))
        return EngineRouter(engines)

    return make


@pytest.fixture(scope="module")
def voices(random_model_folder):
    with quiet_engine(random_model_folder) as engine:
        return [noise_voice(engine._config, 40, seed=seed) for seed in range(6)]


def ask(voice, seed=0, text="Hello there."):
    return SynthesisRequest(text, voice=voice, sampling=SamplingParams(seed=seed))


def in_loop(scenario, router):
    async def main():
        async with router:
            return await asyncio.wait_for(scenario(router), DEADLINE_S)

    return asyncio.run(main())


def where(router, stream):
    return next(index for index, streams in enumerate(router._streams) if stream in streams)


def test_a_voice_stays_with_its_engine_and_voices_are_spread(make, voices):
    async def scenario(router):
        for _ in range(2):
            places = []
            for voice in voices:
                stream = router.stream(ask(voice))
                places.append(where(router, stream))
                await stream.collect()
            visits.append(places)

    visits = []
    in_loop(scenario, make(3))
    assert visits[0] == visits[1]
    assert len(set(visits[0])) > 1


def test_an_engine_that_has_clearly_more_to_do_gets_no_more(make, voices):
    async def scenario(router):
        streams = [router.stream(ask(voices[0], seed)) for seed in range(6)]
        loads = [sum(where(router, stream) == index for stream in streams) for index in range(2)]
        for stream in streams:
            await stream.aclose()
        assert [router._load(index) for index in range(2)] == [0, 0]
        return loads

    loads = in_loop(scenario, make())
    assert sorted(loads) in ([2, 4], [3, 3])


def test_the_same_request_sounds_the_same_wherever_it_goes(make, voices):
    async def scenario(router):
        alone = [await router.synthesize(ask(voice, 3)) for voice in voices[:3]]
        streams = [router.stream(ask(voice, 3)) for voice in voices[:3] * 2]
        together = await asyncio.gather(*(stream.collect() for stream in streams))
        assert len({where(router, stream) for stream in streams}) == 2
        assert router.num_running == 0
        return alone, together

    alone, together = in_loop(scenario, make())
    for one, other in zip(alone * 2, together, strict=True):
        np.testing.assert_array_equal(one.samples, other.samples)


def test_an_engine_that_has_ended_gets_nothing(make, voices):
    async def scenario(router):
        await router._engines[0].close()
        assert router.is_running
        for voice in voices:
            assert router.choose(voice) == 1
        assert (await router.synthesize(ask(voices[0]))).audio_seconds > 0
        await router._engines[1].close()
        assert not router.is_running
        with pytest.raises(InvalidRequestError) as caught:
            await router.synthesize(ask(voices[0]))
        assert caught.value.code == "engine_closed"

    in_loop(scenario, make())


def test_voices_gauges_and_signs_of_life_of_all(make, voices):
    async def scenario(router):
        router.voices.add(voices[1])
        for engine in router._engines:  # one folder
            assert engine.voices.get(voices[1].name).name == voices[1].name
        named = await router.synthesize(ask(voices[1].name))
        given = await router.synthesize(ask(voices[1]))
        np.testing.assert_array_equal(named.samples, given.samples)
        gauges = router.gauges()
        assert gauges["queue_length"] == 0
        assert 0 <= gauges["engine_busy_ratio"] <= 1
        answered = asyncio.Event()
        loop = asyncio.get_running_loop()
        router.ask_for_sign(lambda: loop.call_soon_threadsafe(answered.set))
        await answered.wait()
        assert router.sample_rate_hz == 24_000

    in_loop(scenario, make())


def test_if_one_engine_cannot_open_none_stays_open(monkeypatch, random_model_folder, tmp_path):
    opened = []
    original = Engine.open.__func__

    def open_engine(cls, model, *, device, **options):
        if device == "cpu:1":
            raise OSError("no such device")
        engine = original(cls, model, device="cpu", **options)
        opened.append(engine)
        return engine

    monkeypatch.setattr(Engine, "open", classmethod(open_engine))

    async def main():
        await EngineRouter.open(
            random_model_folder, devices=["cpu", "cpu:1"], voices_folder=tmp_path, warm_up=False
        )

    with pytest.raises(OSError, match="no such device"):
        asyncio.run(main())
    assert [engine._loop.is_closed for engine in opened] == [True]


def test_open(random_model_folder, tmp_path, voices):
    async def main():
        router = await EngineRouter.open(
            random_model_folder, devices=["cpu", "cpu"], voices_folder=tmp_path, warm_up=False
        )
        async with router:
            assert len(router._engines) == 2

    asyncio.run(main())


def test_no_engines_at_all():
    with pytest.raises(ValueError, match="at least one"):
        EngineRouter([])


def test_a_consumer_that_stalls_for_too_long_is_ended_and_the_others_are_not(make, voices):
    async def scenario(router):
        stalled = router.stream(ask(voices[0], 1, LONG))
        await anext(stalled)
        lives = [stalled._live]
        while not lives[0].is_done:
            # The others go on, chunk by chunk, for longer than the stall.
            assert (await router.synthesize(ask(voices[0], 2))).finish_reason in ("stop", "length")
            await asyncio.sleep(0.02)
        with pytest.raises(CancelledRequestError) as caught:
            await stalled.collect()
        assert caught.value.code == "consumer_stalled"
        assert router.num_running == 0

    in_loop(scenario, make(1, stall_s=0.3, max_pending_chunks=1))


def test_given_tokens_and_warm_voices(make, voices, random_model_folder):
    """As ``Engine`` does it, by any of the engines."""
    tokens = list(range(30))
    with quiet_engine(random_model_folder, **OPTIONS) as engine:
        alone = engine.render_tokens(tokens, voices[0]).collect()

    async def main():
        async with make() as router:
            await router.warm_up(voices[0])
            for rendered in (router.render_tokens, router._engines[0].render_tokens):
                result = await rendered(tokens, voices[0]).collect()
                np.testing.assert_array_equal(result.samples, alone.samples)
            with pytest.raises(InvalidRequestError):
                await router.render_tokens([], voices[0]).collect()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
