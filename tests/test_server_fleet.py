"""Several engines behind one server: where requests go, and that a lost engine takes only its own with it."""

import asyncio
import os
import re
import signal
import sys
from dataclasses import replace

import httpx
import numpy as np
import pytest

from tests.helpers import noise_voice
from tests.server_helpers import LoopbackServer
from tests.test_server_process import (
    CHUNK_SAMPLES,
    DEADLINE_S,
    FAULTY,
    QUICK,
    ask,
    children,
    is_alive,
    samples_of,
    until,
)
from tests.test_server_run import _start
from vivace import ModelFolderError, OverloadedError, SynthesisRequest
from vivace.engine.routing import choose_engine, merge_gauges
from vivace.errors import ServeError
from vivace.random_checkpoint import tiny_config
from vivace.server.child import EngineSettings
from vivace.server.devices import engine_devices
from vivace.server.fleet import Fleet
from vivace.server.marked import MarkedService
from vivace.server.metrics import Metrics

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")


class Host:
    """One event loop and one fleet for a file of tests."""

    def __init__(self, settings, **options):
        self._runner = asyncio.Runner()
        self.fleet = self._runner.run(Fleet.open(settings, **options))

    def run(self, scenario):
        async def limited():
            result = await asyncio.wait_for(scenario(self.fleet), DEADLINE_S)
            assert self.fleet.num_running == 0
            await until(lambda: {engine.state for engine in self.fleet.engines} == {"ready"})
            return result

        return self._runner.run(limited())

    def close(self):
        pids = [engine.engine_pid for engine in self.fleet.engines]
        self._runner.run(self.fleet.close())
        self._runner.close()
        assert not any(is_alive(pid) for pid in pids)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Two engines that do what they are told."""
    settings = EngineSettings(voices_folder=tmp_path_factory.mktemp("voices"), max_streams=6)
    host = Host([settings, replace(settings, device="cpu:1")], watch=QUICK, command=FAULTY)
    yield host
    host.close()


def voice_of(index, count=2):
    """A voice whose own engine is the one with this number."""
    for seed in range(1, 100):
        voice = noise_voice(tiny_config(), seed=seed)
        if choose_engine(voice, dict.fromkeys(range(count), 0)) == index:
            return voice
    raise AssertionError("one engine gets all voices")


def loads(fleet):
    return [engine.num_running for engine in fleet.engines]


def test_a_voice_has_its_own_engine_until_that_has_clearly_more_to_do(faulty):
    async def scenario(fleet):
        streams = []
        for index in (0, 1):
            for _ in range(2):
                streams.append(fleet.stream(ask("wait", voice=voice_of(index))))
                await anext(streams[-1])
        assert loads(fleet) == [2, 2]
        for _ in range(4):
            streams.append(fleet.stream(ask("wait", voice=voice_of(0))))
            await anext(streams[-1])
        # Two more than the other one are too many, and so is one more than an engine runs at once.
        assert loads(fleet) == [5, 3]
        for stream in streams:
            await stream.aclose()

    faulty.run(scenario)


def test_a_request_goes_where_it_suits_when_it_begins(faulty):
    """Not when the stream is made: many may be made before the first is asked for a chunk."""

    async def scenario(fleet):
        streams = [fleet.stream(ask("wait", voice=voice_of(0))) for _ in range(6)]
        assert loads(fleet) == [0, 0]
        await asyncio.gather(*(anext(stream) for stream in streams))
        assert loads(fleet) == [4, 2]
        for stream in streams:
            await stream.aclose()

    faulty.run(scenario)


@pytest.mark.parametrize("fault", ["kill", "stop", "hang", "die", "fail"])
def test_a_lost_engine_ends_its_own_streams_and_the_other_serves(faulty, fault):
    async def scenario(fleet):
        lost, other = fleet.engines
        restarts = [engine.num_restarts for engine in fleet.engines]
        doomed = [fleet.stream(ask("wait", voice=voice_of(0))) for _ in range(2)]
        spared = [fleet.stream(ask("chunks=300", 7, voice=voice_of(1))) for _ in range(2)]
        for stream in (*doomed, *spared):
            await anext(stream)
        assert loads(fleet) == [2, 2]
        whole = [asyncio.create_task(samples_of(stream)) for stream in spared]
        ends = [asyncio.create_task(samples_of(stream)) for stream in doomed]
        cause = None
        if fault in ("kill", "stop"):
            os.kill(lost.engine_pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])
        else:
            cause = asyncio.create_task(samples_of(fleet.stream(ask(fault, voice=voice_of(0)))))
        await until(lambda: lost.state != "ready")
        assert (fleet.state, other.state) == ("ready", "ready")
        await asyncio.wait([*ends, *([cause] if cause else [])])
        for task in ends:
            assert isinstance(task.exception(), OverloadedError)
            assert task.exception().code == "engine_restarting"
        assert cause is None or isinstance(cause.exception(), OverloadedError)
        # Nobody is refused meanwhile, whatever engine the voice had.
        for index in (0, 1):
            heard = await samples_of(fleet.stream(ask("chunks=2", voice=voice_of(index))))
            assert len(heard) == 2 * CHUNK_SAMPLES
        ramp = np.linspace(0, 0.07, CHUNK_SAMPLES, dtype=np.float32)
        for task in whole:
            np.testing.assert_array_equal(await task, np.tile(ramp, 299))
        await until(lambda: lost.state == "ready")
        async with fleet.stream(ask("wait", voice=voice_of(0))) as stream:
            await anext(stream)
            assert loads(fleet) == [1, 0]  # the voice is back at its own
        assert [engine.num_restarts for engine in fleet.engines] == [restarts[0] + 1, restarts[1]]
        assert fleet.gauges()["engine_restarts"] == sum(restarts) + 1

    faulty.run(scenario)


def test_all_engines_lost(faulty):
    async def scenario(fleet):
        for engine in fleet.engines:
            os.kill(engine.engine_pid, signal.SIGKILL)
        await until(lambda: fleet.state == "restarting")
        with pytest.raises(OverloadedError) as caught:
            await samples_of(fleet.stream(ask("chunks=2")))
        assert caught.value.code == "engine_restarting"
        await until(lambda: fleet.state == "ready")

    faulty.run(scenario)


def test_an_engine_that_does_not_start_again(faulty, monkeypatch):
    async def scenario(fleet):
        engine, other = fleet.engines
        supervisor = engine._supervisor
        supervisor.settings = replace(supervisor.settings, device="none")
        os.kill(engine.engine_pid, signal.SIGKILL)
        await until(lambda: engine.state == "failed")
        assert fleet.state == "ready"
        with monkeypatch.context() as patch:
            patch.setattr(other._supervisor, "child", None)
            assert fleet.state == "restarting"
            patch.setattr(other._supervisor, "_num_failed_starts", 3)
            assert fleet.state == "failed"
        supervisor.settings = replace(supervisor.settings, device="cpu")

    faulty.run(scenario)


def test_an_engine_that_is_full_is_passed_over(faulty):
    async def scenario(fleet):
        async with fleet.stream(ask("wait", voice=voice_of(0))) as running:
            await anext(running)
            with pytest.raises(OverloadedError):
                await samples_of(fleet.stream(ask("full", voice=voice_of(0))))
            assert [engine.is_full for engine in fleet.engines] == [True, False]
            async with fleet.stream(ask("wait", voice=voice_of(0))) as stream:
                await anext(stream)
                assert loads(fleet) == [1, 1]
                # Both are: what is refused says so.
                with pytest.raises(OverloadedError):
                    await samples_of(fleet.stream(ask("full", voice=voice_of(0))))
                with pytest.raises(OverloadedError) as caught:
                    await samples_of(fleet.stream(ask("chunks=1", voice=voice_of(0))))
                assert caught.value.code == "overloaded"

    faulty.run(scenario)


def test_figures_of_each_engine(faulty):
    async def scenario(fleet):
        async with fleet.stream(ask("wait", voice=voice_of(1))) as stream:
            await anext(stream)
            await until(lambda: fleet.engines[1].gauges().get("batch_size") == 1.0)
            for service in (fleet, MarkedService(fleet, "name", lambda rate: None)):
                text = Metrics(service).render().decode()
                assert 'vivace_batch_size{device="cpu",engine="0"} 0.0' in text
                assert 'vivace_batch_size{device="cpu:1",engine="1"} 1.0' in text
                assert 'vivace_engine_streams{device="cpu:1",engine="1"} 1.0' in text
                assert 'vivace_engine_ready{device="cpu",engine="0"} 1.0' in text
                assert "vivace_running 1.0" in text
            assert fleet.gauges()["batch_size"] == 1.0
            assert fleet.gauges()["heartbeat_age_seconds"] < QUICK.silence_s

    faulty.run(scenario)


def test_readiness_and_drain_over_http(tmp_path):
    """Ready while one engine is; on the way down none takes requests."""

    async def open_service():
        settings = EngineSettings(voices_folder=tmp_path)
        slow = replace(QUICK, backoff_s=30.0, max_backoff_s=30.0)
        return await Fleet.open([settings, settings], watch=slow, command=FAULTY)

    with LoopbackServer(open_service) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        first, second = server.service.engines
        # A second failure soon after the first: the next start waits, so that the engine is away for long.
        for _ in range(2):
            os.kill(first.engine_pid, signal.SIGKILL)
            restarts = first.num_restarts
            while first.num_restarts == restarts or (restarts == 0 and first.state != "ready"):
                client.get("/health/live")
        assert first.state == "restarting"
        assert client.get("/health/ready").json() == {"status": "ready"}
        body = {"input": "chunks=3", "voice": "noise", "response_format": "pcm"}
        assert client.post("/v1/audio/speech", json={**body, "voice": "daniel"}).status_code == 200
        assert 'vivace_engine_ready{device="cpu",engine="0"} 0.0' in client.get("/metrics").text
        server.call(lambda: os.kill(second.engine_pid, signal.SIGKILL))
        while client.get("/health/ready").status_code == 200:
            pass
        assert client.get("/health/ready").json()["status"] in ("restarting", "stalled")


def test_drain_lets_all_engines_finish(tmp_path):
    async def main():
        settings = EngineSettings(voices_folder=tmp_path)
        fleet = await Fleet.open([settings, settings], watch=QUICK, command=FAULTY)
        streams = [fleet.stream(ask("chunks=20", voice=voice_of(index))) for index in (0, 1)]
        for stream in streams:
            await anext(stream)
        draining = asyncio.create_task(fleet.drain(DEADLINE_S))
        await asyncio.sleep(0)
        assert fleet.state == "draining"
        with pytest.raises(OverloadedError) as caught:
            await samples_of(fleet.stream(ask("chunks=1")))
        assert caught.value.code == "draining"
        for stream in streams:
            assert len([chunk async for chunk in stream]) == 19
        await draining
        await fleet.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_if_one_engine_cannot_start_none_stays(tmp_path):
    async def main():
        before = len(children())
        settings = EngineSettings(voices_folder=tmp_path)
        with pytest.raises(ModelFolderError, match="no such device"):
            await Fleet.open([settings, replace(settings, device="none")], watch=QUICK, command=FAULTY)
        assert len(children()) == before

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_real_engines_make_the_same_bytes(random_model_folder, tmp_path):
    """Each engine, whichever it is; voices are shared."""

    async def main():
        settings = EngineSettings(random_model_folder, voices_folder=tmp_path)
        fleet = await Fleet.open([settings, settings], model="tiny")
        try:
            voice = replace(voice_of(0), name="mine")
            await asyncio.to_thread(fleet.voices.add, voice)
            request = SynthesisRequest("Hello there.", voice="mine")
            alone = [await samples_of(engine.stream(request)) for engine in fleet.engines]
            np.testing.assert_array_equal(*alone)
            together = [samples_of(fleet.stream(request)) for _ in range(6)]
            waiting = asyncio.gather(*together)
            await until(lambda: min(loads(fleet)) > 0)
            for samples in await waiting:
                np.testing.assert_array_equal(samples, alone[0])
        finally:
            await fleet.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIVACE_THREADS", "1")
        asyncio.run(asyncio.wait_for(main(), 2 * DEADLINE_S))


def test_the_command_starts_two_engines_and_ends_well(tmp_path):
    process = _start("--devices", "cpu,cpu", voices=tmp_path)
    try:
        greeting = process.stdout.readline()
        assert ", 2 engines" in greeting, greeting + process.stderr.read()
        address = re.search(r"http://127\.0\.0\.1:\d+/", greeting).group()
        with httpx.Client(base_url=address, timeout=60) as client:
            body = {"input": "Hi.", "response_format": "pcm"}
            one, other = (client.post("/v1/audio/speech", json=body).content for _ in range(2))
            assert one == other
            figures = client.get("/metrics").text
            assert all(
                f'vivace_engine_ready{{device="cpu",engine="{index}"}} 1.0' in figures for index in (0, 1)
            )
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=30)
        assert (process.returncode, error) == (0, "")
    finally:
        process.kill()
        process.communicate()


# -- choices, figures, options ----------------------------------------------------------------------------------


def test_an_engine_with_a_free_place_comes_before_one_that_would_make_it_wait():
    home = choose_engine("anna", {0: 0, 1: 0})
    other = 1 - home
    assert choose_engine("anna", {home: 60, other: 58}) == home
    assert choose_engine("anna", {home: 60, other: 58}, places=60) == other
    assert choose_engine("anna", {home: 70, other: 60}, places=60) == home  # both wait
    assert choose_engine("anna", {home: 80, other: 60}, places=60) == other


def test_figures_of_all_engines_are_those_of_one():
    one = {
        "queue_length": 1.0,
        "engine_busy_ratio": 0.2,
        "step_seconds_p99": 0.1,
        "heartbeat_age_seconds": 0.5,
    }
    other = {
        "queue_length": 2.0,
        "engine_busy_ratio": 0.6,
        "step_seconds_p99": 0.3,
        "heartbeat_age_seconds": 2,
    }
    assert merge_gauges([one, other, {}]) == {
        "queue_length": 3.0,
        "engine_busy_ratio": pytest.approx(0.4),
        "step_seconds_p99": 0.3,
        "heartbeat_age_seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("device", "devices", "gpus", "expected"),
    [
        ("cpu", None, None, ("cpu",)),
        ("cuda:1", None, None, ("cuda:1",)),
        ("cpu", "cuda:0, cuda:2", None, ("cuda:0", "cuda:2")),
        ("cpu", "cpu,cpu", None, ("cpu", "cpu")),
        ("cpu", "cuda,cuda:1", None, ("cuda:0", "cuda:1")),
        ("cuda", None, "2", ("cuda:0", "cuda:1")),
        ("cuda", None, "all", ("cuda:0", "cuda:1", "cuda:2")),
        ("cpu", None, "1", ("cuda:0",)),
    ],
)
def test_devices(device, devices, gpus, expected):
    assert engine_devices(device, devices, gpus, lambda: 3) == expected


@pytest.mark.parametrize(
    ("device", "devices", "gpus", "words"),
    [
        ("cpu", "cuda:0", "1", "--devices or --gpus"),
        ("cuda", "cuda:0,cuda:1", None, "--device or --devices"),
        ("cuda:1", None, "2", "from the first on"),
        ("cuda", None, "4", "has 3 GPUs"),
        ("cuda", None, "0", "has 3 GPUs"),
        ("cuda", None, "many", "a number or 'all'"),
        ("cuda", None, "-1", "a number or 'all'"),
        ("cpu", "cuda:0,,cuda:1", None, "separated by commas"),
        ("cpu", "cuda,cuda:0", None, "named twice"),
    ],
)
def test_devices_that_cannot_be(device, devices, gpus, words):
    with pytest.raises(ServeError, match=words):
        engine_devices(device, devices, gpus, lambda: 3)


def test_all_gpus_of_a_machine_without():
    with pytest.raises(ServeError, match="has 0 GPUs"):
        engine_devices("cuda", None, "all", lambda: 0)
