"""The service with the engine in a thread."""

import asyncio
import gc

import numpy as np
import pytest

from tests.helpers import noise_voice, quiet_engine, speech_like_wav
from vivace import AsyncEngine, CancelledRequestError, OverloadedError, SamplingParams, SynthesisRequest
from vivace.engine.scheduler import Scheduler
from vivace.server.local import LocalService

LONG = "Once upon a time, a fox sang in the rain."
DEADLINE_S = 60.0


@pytest.fixture
def engine(random_model_folder, tmp_path):
    return quiet_engine(
        random_model_folder,
        voices=tmp_path,
        num_steps=2,
        token_text_ratio=(2.0, 2.6),
        scheduler=Scheduler(max_pending_chunks=1),
    )


def serve(scenario, engine):
    """Runs ``scenario(service)``; afterwards nothing runs."""

    async def main():
        service = LocalService(AsyncEngine(engine), model="tiny")
        try:
            await asyncio.wait_for(scenario(service), DEADLINE_S)
            assert service.num_running == 0
        finally:
            await service.close()
        assert service.state == "draining"

    asyncio.run(main())


def ask(engine, text=LONG, seed=0):
    return SynthesisRequest(text, voice=noise_voice(engine._config), sampling=SamplingParams(seed=seed))


def test_speaks_as_the_engine_does(engine):
    async def scenario(service):
        assert (service.state, service.model, service.sample_rate_hz) == ("ready", "tiny", 24_000)
        alone = await service._engine.synthesize(ask(engine))
        stream = service.stream(ask(engine))
        chunks = [chunk async for chunk in stream]
        np.testing.assert_array_equal(np.concatenate([chunk.samples for chunk in chunks]), alone.samples)
        assert stream.summary().finish_reason == alone.finish_reason

    serve(scenario, engine)


@pytest.mark.parametrize("way", ["aclose", "with", "drop", "task"])
def test_a_stream_that_is_left_no_longer_counts(engine, way):
    async def scenario(service):
        stream = service.stream(ask(engine))
        assert service.num_running == 0
        await anext(stream)
        assert service.num_running == 1
        if way == "aclose":
            await stream.aclose()
            with pytest.raises(CancelledRequestError):
                await anext(stream)
        elif way == "with":
            async with stream:
                pass
        elif way == "task":

            async def wait_for_ever(stream):
                async for _ in stream:
                    await asyncio.Event().wait()

            task = asyncio.create_task(wait_for_ever(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        del stream
        if way == "task":
            del task
        gc.collect()
        await service.drain(DEADLINE_S)
        while service._engine.num_running:
            await asyncio.sleep(0.01)

    serve(scenario, engine)


def test_drain_refuses_new_requests_and_waits_for_running_ones(engine):
    async def scenario(service):
        stream = service.stream(ask(engine))
        await anext(stream)
        await service.drain(0.01)  # it still runs
        assert service.num_running == 1
        refused = service.stream(ask(engine))
        for call in (lambda: anext(refused), lambda: service.make_voice(speech_like_wav())):
            with pytest.raises(OverloadedError) as caught:
                await call()
            assert (caught.value.code, caught.value.http_status) == ("draining", 503)
        draining = asyncio.create_task(service.drain(DEADLINE_S))
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].is_last
        await asyncio.wait_for(draining, 5)

    serve(scenario, engine)


def test_an_engine_whose_loop_has_failed_is_not_ready(engine):
    async def scenario(service):
        await service._engine.close()
        assert service.state == "failed"
        with pytest.raises(OverloadedError, match="failed"):
            await anext(service.stream(ask(engine)))

    serve(scenario, engine)


def test_a_voice_from_a_recording_can_be_stored_and_used(engine):
    async def scenario(service):
        voice = await service.make_voice(speech_like_wav(), "Said.", name="mine", consent=True)
        service.voices.add(voice)
        request = SynthesisRequest("Hello there.", voice="mine")
        assert [chunk async for chunk in service.stream(request)][-1].is_last

    serve(scenario, engine)
