"""The engine in a process of its own: the same audio, and every way in which that process can fail."""

import asyncio
import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import noise_voice, quiet_engine, speech_like_wav
from tests.server_helpers import LoopbackServer
from tests.talk_helpers import session
from vivace import (
    AsyncEngine,
    CancelledRequestError,
    InvalidAudioError,
    InvalidRequestError,
    InvalidTextError,
    ModelFolderError,
    OverloadedError,
    SamplingParams,
    SynthesisError,
    SynthesisRequest,
    VivaceError,
    VoiceNotFoundError,
)
from vivace.server.child import EngineSettings, Watch
from vivace.server.local import LocalService
from vivace.server.process import ProcessService

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")

FAULTY = (sys.executable, "-P", "-m", "tests.fault_worker")
QUICK = Watch(
    silence_s=3.0, step_s=1.5, probe_s=10.0, wait_s=0.0, backoff_s=0.05, max_backoff_s=0.1, stall_s=10.0
)
DEADLINE_S = 60.0
CHUNK_SAMPLES = 480


def ask(text, seed=0, **options):
    return SynthesisRequest(text, sampling=SamplingParams(seed=seed), **options)


async def samples_of(stream):
    return np.concatenate([chunk.samples async for chunk in stream])


class Host:
    """One event loop and one service for a file of tests."""

    def __init__(self, **options):
        self._runner = asyncio.Runner()
        self.service = self._runner.run(ProcessService.open(**options))

    def run(self, scenario):
        async def limited():
            result = await asyncio.wait_for(scenario(self.service), DEADLINE_S)
            assert self.service.num_running == 0
            return result

        return self._runner.run(limited())

    def close(self):
        pid = self.service.engine_pid
        self._runner.run(self.service.close())
        self._runner.close()
        assert not is_alive(pid)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The service with an engine that does what it is told (see ``fault_worker``)."""
    settings = EngineSettings(voices_folder=tmp_path_factory.mktemp("voices"))
    host = Host(settings=settings, watch=QUICK, command=FAULTY)
    yield host
    host.close()


@pytest.fixture(scope="module")
def real(random_model_folder, tmp_path_factory):
    settings = EngineSettings(random_model_folder, voices_folder=tmp_path_factory.mktemp("voices"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIVACE_THREADS", "1")  # as in this process: sums come in the same order
        host = Host(settings=settings, model="tiny", watch=Watch(wait_s=DEADLINE_S))
    yield host
    host.close()


def test_both_services_convert_alike(real, random_model_folder):
    """And a recording that is none, or too large, is the same error as in one process."""
    engine = quiet_engine(random_model_folder, voices=real.service._supervisor.settings.voices_folder)
    voice = noise_voice(engine._config)
    large = bytes(engine._assets.limits.prompt_file_bytes + 1)

    async def convert(service):
        parts = [
            await samples_of(service.transform(speech_like_wav(), "noise")),
            await samples_of(service.transform(speech_like_wav(), voice, speed=2.0)),
        ]
        codes = []
        for source in (b"no audio", large):
            with pytest.raises(InvalidAudioError) as caught:
                await anext(service.transform(source, "noise"))
            codes.append((caught.value.code, caught.value.param))
        return parts, codes

    async def here():
        service = LocalService(AsyncEngine(engine))
        try:
            return await convert(service)
        finally:
            await service.close()

    (ours, our_codes), (theirs, their_codes) = asyncio.run(here()), real.run(convert)
    assert our_codes == their_codes
    assert our_codes[1] == ("payload_too_large", "source")
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) > 0
        np.testing.assert_array_equal(mine, other)


def test_both_services_make_the_same_bytes(real, random_model_folder):
    engine = quiet_engine(random_model_folder, voices=real.service._supervisor.settings.voices_folder)
    voice = noise_voice(engine._config)
    requests = [
        ask("Hello there.", 1),
        ask("Hello there.", 2, voice=voice, speed=1.5),
        ask("Hi.", 3, voice="noise", stream=False),
        ask("Hi.", 2**63 - 1, voice=voice, instruction="Slowly.", language="en"),
    ]

    async def pieces():
        for piece in ("Hello ", "the", "re."):
            yield piece

    async def speak(service):
        parts = [await samples_of(service.stream(request)) for request in requests]
        stream = service.stream(ask("not this", 4, voice=voice), pieces())
        parts.append(await samples_of(stream))
        result = stream.summary()
        return parts, (
            result.finish_reason,
            result.spoken_text,
            result.num_speech_tokens,
            result.num_text_tokens,
        )

    async def locally():
        service = LocalService(AsyncEngine(engine))
        try:
            return await speak(service)
        finally:
            await service.close()

    expected, figures = asyncio.run(locally())
    parts, other_figures = real.run(speak)
    for part, wanted in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(part, wanted)
    assert other_figures == figures
    assert (real.service.state, real.service.model, real.service.sample_rate_hz) == ("ready", "tiny", 24_000)


def test_voices_belong_to_the_server_and_survive_the_engine(real):
    async def scenario(service):
        voice = await service.make_voice(speech_like_wav(), "Said.", name="mine", consent=True)
        await asyncio.to_thread(service.voices.add, voice)
        before = await samples_of(service.stream(ask("Hi.", voice="mine")))
        os.kill(service.engine_pid, signal.SIGKILL)
        await until(lambda: service.state == "restarting")
        after = await samples_of(service.stream(ask("Hi.", voice="mine")))  # waits for the new engine
        # Another process: on a busy machine the library may share out a product among threads in another way.
        np.testing.assert_allclose(after, before, atol=1e-5)
        assert service.last_recovery_s is not None
        service.voices.remove("mine")
        with pytest.raises(VoiceNotFoundError):
            await samples_of(service.stream(ask("Hi.", voice="mine")))

    restarts = real.service.num_restarts
    real.run(scenario)
    assert real.service.num_restarts == restarts + 1


def test_wrong_input_is_refused_with_the_same_errors(real):
    async def scenario(service):
        async def numbers():
            yield "One. "
            yield 2

        cases = [
            (service.stream(ask(" ")), InvalidTextError, "empty_input"),
            (service.stream(ask("a\ud800b")), InvalidTextError, "invalid_utf8"),
            (service.stream(ask(iter(["a"]))), InvalidTextError, "invalid_type"),
            (service.stream(ask("", voice="noise"), numbers()), InvalidTextError, "invalid_type"),
            (service.stream(ask("Hi.", speed=float("nan"))), InvalidRequestError, "value_out_of_range"),
            (service.stream(ask("Hi.", voice=5)), InvalidRequestError, "invalid_type"),
            (service.stream(ask("Hi.", voice="../x")), VoiceNotFoundError, "voice_not_found"),
        ]
        for stream, kind, code in cases:
            for _ in range(2):
                with pytest.raises(kind) as caught:
                    await samples_of(stream)
                assert caught.value.code == code
        with pytest.raises(InvalidAudioError) as caught:
            await service.make_voice(b"no audio")
        assert caught.value.code == "unsupported_media_type"
        with pytest.raises(InvalidAudioError) as caught:
            await service.make_voice(bytes(20 * 1024 * 1024))
        assert caught.value.code == "payload_too_large"

    real.run(scenario)


def test_an_error_of_the_text_iterator_reaches_the_consumer(faulty):
    async def broken():
        yield "chunks"
        raise KeyError("mine")

    async def scenario(service):
        with pytest.raises(KeyError, match="mine"):
            await samples_of(service.stream(ask(""), broken()))

    faulty.run(scenario)


def test_fifty_streams_at_once(faulty):
    async def scenario(service):
        jobs = [samples_of(service.stream(ask(f"chunks={20 + n}", n))) for n in range(50)]
        for n, samples in enumerate(await asyncio.gather(*jobs)):
            ramp = np.linspace(0, n / 100, CHUNK_SAMPLES, dtype=np.float32)
            np.testing.assert_array_equal(samples, np.tile(ramp, 20 + n))

    faulty.run(scenario)


async def num_running_in_engine(service):
    """The engine's own count, without the request that asks."""
    return len([chunk async for chunk in service.stream(ask("running"))])


@pytest.mark.parametrize("way", ["aclose", "drop", "task", "before"])
def test_leaving_ends_the_request_in_the_engine_at_once(faulty, way):
    async def scenario(service):
        stream = service.stream(ask("wait"))
        if way == "before":
            await stream.aclose()
        else:
            await anext(stream)
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            while waiting.done():  # that chunk lay there
                waiting = asyncio.create_task(anext(stream))
                await asyncio.sleep(0)
            if way == "aclose":
                await stream.aclose()
            else:
                waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled() or isinstance(waiting.exception(), CancelledRequestError)
            del waiting
        if way == "drop":
            stream = service.stream(ask("wait"))
            await anext(stream)
            del stream
            gc.collect()
            await asyncio.sleep(0)
        else:
            with pytest.raises(CancelledRequestError):
                await anext(stream)
        assert await num_running_in_engine(service) == 1  # the one that asks

    faulty.run(scenario)


def test_leaving_at_every_chunk_disturbs_no_neighbour(faulty):
    async def scenario(service):
        for taken in range(7):
            neighbour = asyncio.create_task(samples_of(service.stream(ask("chunks=12", 50))))
            async with service.stream(ask("chunks=6", 10)) as stream:
                for _ in range(taken):
                    await anext(stream)
            ramp = np.linspace(0, 0.5, CHUNK_SAMPLES, dtype=np.float32)
            np.testing.assert_array_equal(await neighbour, np.tile(ramp, 12))
            assert await num_running_in_engine(service) == 1

    faulty.run(scenario)


def test_figures_of_the_engine(faulty):
    async def scenario(service):
        async with service.stream(ask("wait")) as stream:
            await anext(stream)
            await until(lambda: service.gauges().get("batch_size") == 1.0)
            assert service.gauges()["heartbeat_age_seconds"] < QUICK.silence_s

    faulty.run(scenario)


def test_the_garbage_collector_leaves_alone_what_was_loaded(faulty):
    """It would hold up all streams when it looks through it."""

    async def scenario(service):
        await until(lambda: service.gauges().get("frozen_objects", 0.0) > 10_000)

    faulty.run(scenario)


def test_a_slow_consumer_pauses_alone_and_is_ended(faulty):
    stall_s = 1.0

    async def scenario(service):
        service._supervisor.watch = replace(QUICK, stall_s=stall_s)
        slow = service.stream(ask("chunks=200", 1))
        first = await anext(slow)
        assert first.index == 0
        assert len(await samples_of(service.stream(ask("chunks=30", 2)))) == 30 * CHUNK_SAMPLES
        assert len(slow._channel.chunks) <= QUICK.credit_chunks
        await until(lambda: not slow._channel.chunks)
        with pytest.raises(CancelledRequestError) as caught:
            await anext(slow)
        assert caught.value.code == "write_stall"
        assert slow.summary().finish_reason == "cancelled"
        assert await num_running_in_engine(service) == 1

        patient = service.stream(ask("chunks=30", 1))  # pauses shorter than the bound end nothing
        num_chunks = 0
        async for _ in patient:
            num_chunks += 1
            if num_chunks % 10 == 0:
                await asyncio.sleep(stall_s / 4)
        assert num_chunks == 30

    try:
        faulty.run(scenario)
    finally:
        faulty.service._supervisor.watch = QUICK


@pytest.mark.parametrize("fault", ["kill", "stop", "hang", "die", "fail", "poison"])
def test_a_lost_engine_is_replaced(faulty, caplog, fault):
    """Whatever happens to it, running requests end at once with the reason, and the next engine serves."""

    async def scenario(service):
        pid = service.engine_pid
        running = [service.stream(ask("wait", seed)) for seed in range(3)]
        for stream in running:
            await anext(stream)
        drains = [asyncio.create_task(samples_of(stream)) for stream in running]
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        cause = None
        if fault in signals:
            os.kill(pid, signals[fault])
        else:
            cause = asyncio.create_task(samples_of(service.stream(ask(fault))))
        await until(lambda: service.state != "ready")
        await asyncio.wait([*drains, *([cause] if cause else [])])
        assert service.state == "restarting"  # they did not wait for the next engine
        for task in drains:
            assert isinstance(task.exception(), OverloadedError)
            assert (task.exception().code, task.exception().http_status) == ("engine_restarting", 503)
        if cause is not None:
            expected = SynthesisError if fault == "poison" else OverloadedError
            assert isinstance(cause.exception(), expected)
        with pytest.raises(OverloadedError) as caught:  # this service makes nobody wait
            await samples_of(service.stream(ask("chunks=2")))
        assert caught.value.code == "engine_restarting"
        assert caught.value.retry_after_s >= 1
        await until(lambda: service.state == "ready")
        assert not is_alive(pid)
        assert len(await samples_of(service.stream(ask("chunks=2")))) == 2 * CHUNK_SAMPLES

    restarts = faulty.service.num_restarts
    faulty.run(scenario)
    assert faulty.service.num_restarts == restarts + 1
    assert faulty.service.gauges()["engine_restarts"] == restarts + 1
    assert "engine process is replaced" in caplog.text


def test_while_the_engine_is_full_it_is_not_asked_again(faulty):
    """Until a request ends; without one that could, it is asked each time."""

    async def refused(service, text):
        with pytest.raises(OverloadedError) as caught:
            await samples_of(service.stream(ask(text)))
        assert (caught.value.code, caught.value.http_status) == ("overloaded", 503)

    async def scenario(service):
        await refused(service, "full")
        assert len(await samples_of(service.stream(ask("chunks=1")))) == CHUNK_SAMPLES
        async with service.stream(ask("wait")) as stream:
            await anext(stream)
            await refused(service, "full")
            await refused(service, "chunks=1")
        assert len(await samples_of(service.stream(ask("chunks=1")))) == CHUNK_SAMPLES

    faulty.run(scenario)


def test_one_failed_request_is_no_reason_to_restart(faulty):
    async def scenario(service):
        pid = service.engine_pid
        with pytest.raises(SynthesisError, match="RuntimeError"):
            await samples_of(service.stream(ask("raise")))
        await until(lambda: not service._is_probing)
        assert (service.state, service.engine_pid) == ("ready", pid)

    faulty.run(scenario)


def test_requests_wait_a_moment_for_the_next_engine_but_not_too_many(faulty):
    async def scenario(service):
        service._supervisor.watch = replace(QUICK, wait_s=DEADLINE_S, max_waiting=2)
        os.kill(service.engine_pid, signal.SIGKILL)
        await until(lambda: service.state == "restarting")
        waiting = [asyncio.create_task(samples_of(service.stream(ask("chunks=2")))) for _ in range(2)]
        await until(lambda: service._supervisor.num_waiting == 2)
        with pytest.raises(OverloadedError):
            await samples_of(service.stream(ask("chunks=2")))
        for samples in await asyncio.gather(*waiting):
            assert len(samples) == 2 * CHUNK_SAMPLES

    try:
        faulty.run(scenario)
    finally:
        faulty.service._supervisor.watch = QUICK


def test_an_engine_that_does_not_start_again(faulty):
    async def scenario(service):
        settings = service._supervisor.settings
        service._supervisor.settings = replace(settings, device="none")
        os.kill(service.engine_pid, signal.SIGKILL)
        await until(lambda: service.state == "failed")
        service._supervisor.settings = settings
        await until(lambda: service.state == "ready")

    faulty.run(scenario)


def num_open_files():
    return len(os.listdir("/proc/self/fd"))


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_left_behind(faulty):
    async def scenario(service):
        open_files, num_children = num_open_files(), len(children())
        for _ in range(2):
            os.kill(service.engine_pid, signal.SIGKILL)
            await until(lambda: service.state == "restarting")
            await until(lambda: service.state == "ready")
        for _ in range(20):
            async with service.stream(ask("wait")) as stream:
                await anext(stream)
        assert num_open_files() == open_files
        assert not service._channels
        assert not service._answers
        assert await num_running_in_engine(service) == 1
        assert len(children()) == num_children
        assert str(service.engine_pid) in children()

    faulty.run(scenario)


@pytest.mark.parametrize(
    ("device", "kind"), [("none", ModelFolderError), ("gone", VivaceError), ("stuck", VivaceError)]
)
def test_an_engine_that_never_starts(tmp_path, device, kind):
    settings = EngineSettings(device=device, voices_folder=tmp_path)
    watch = replace(QUICK, start_s=3.0 if device == "stuck" else DEADLINE_S)
    with pytest.raises(kind):
        asyncio.run(ProcessService.open(settings, watch=watch, command=FAULTY))


def test_drain_lets_running_requests_finish_and_close_ends_them(tmp_path):
    async def main():
        settings = EngineSettings(voices_folder=tmp_path)
        service = await ProcessService.open(settings, watch=QUICK, command=FAULTY)
        long, endless = service.stream(ask("chunks=20")), service.stream(ask("wait"))
        await anext(long)
        await anext(endless)
        await service.drain(0.0)
        assert service.state == "draining"
        with pytest.raises(OverloadedError) as caught:
            await samples_of(service.stream(ask("chunks=1")))
        assert caught.value.code == "draining"
        assert len([chunk async for chunk in long]) == 19
        pid = service.engine_pid
        rest = asyncio.create_task(samples_of(endless))
        await asyncio.sleep(0)
        await service.close()
        with pytest.raises(CancelledRequestError):
            await rest
        assert not is_alive(pid)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_the_engine_ends_with_its_parent(tmp_path):
    """Also where its own loop is stuck: the kernel sees to it."""
    program = (
        "import asyncio, os, pathlib, sys\n"
        "from tests.test_server_process import *\n"
        "async def main():\n"
        f"    settings = EngineSettings(voices_folder=pathlib.Path({str(tmp_path)!r}))\n"
        "    service = await ProcessService.open(settings, command=FAULTY)\n"
        "    print(service.engine_pid, flush=True)\n"
        "    os.kill(service.engine_pid, signal.SIGSTOP)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )

    async def main():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, cwd=Path(__file__).parent.parent, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        await until(lambda: not is_alive(int(output)) or state_of(int(output)) == "Z")

    asyncio.run(main())


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_websocket_session_survives_the_engine(tmp_path):
    """The whole way: the utterance that ran ends with the reason, the next one is spoken by the next engine."""

    async def open_service():
        watch = replace(QUICK, wait_s=DEADLINE_S)
        return await ProcessService.open(EngineSettings(voices_folder=tmp_path), watch=watch, command=FAULTY)

    async def talk(server):
        async with session(server) as client:
            for text in ("wait", "chunks=3"):
                await client.say("input.text", text=text)
                await client.say("input.done")
                if text == "wait":
                    await client.until("audio.start")
                    os.kill(server.service.engine_pid, signal.SIGKILL)
                    error = await client.until("error")
                    assert (error["code"], error["utterance"]) == ("engine_restarting", 1)
            done = await client.until("audio.done")
            assert (done["utterance"], len(done["audio"])) == (2, 3 * CHUNK_SAMPLES * 2)

    with LoopbackServer(open_service) as server:
        asyncio.run(asyncio.wait_for(talk(server), DEADLINE_S))
        pid = server.service.engine_pid
    assert not is_alive(pid)
