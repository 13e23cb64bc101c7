"""What the options of ``vivace serve`` and ``vivace say`` become."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import vivace.server.run
from tests.helpers import noise_voice
from vivace import Engine, InvalidRequestError, OverloadedError, SamplingParams, SynthesisRequest
from vivace.checkpoint.loading import default_dtype
from vivace.cli import app
from vivace.cli.options import Precision
from vivace.engine import async_engine
from vivace.engine import engine as engine_module
from vivace.engine.async_engine import MANY_STREAMS, AsyncEngine
from vivace.engine.device_stages import QUEUE_PER_ROW
from vivace.engine.engine import MOST_STREAMS
from vivace.errors import ServeError
from vivace.kernels.gpu import PLANNED, Gpu, stands_for


@pytest.fixture
def served(monkeypatch):
    """The settings with which the server would have opened its engine, and the devices of several."""
    seen = []

    def open_service(settings, watermark, devices):
        seen.append((settings, devices))

    def run(open_service, *_):
        open_service()

    monkeypatch.setattr(vivace.server.run, "open_service", open_service)
    monkeypatch.setattr(vivace.server.run, "run", run)

    def serve(*options):
        seen.clear()
        result = CliRunner().invoke(app, ["serve", "--port", "0", *options])
        if result.exit_code:
            raise result.exception
        return seen[0]

    return serve


def test_streams_and_determinism_reach_the_engine(served):
    settings, _ = served("--max-streams", "12", "--deterministic")
    assert (settings.max_streams, settings.deterministic) == (12, True)
    settings, devices = served()
    assert (settings.max_streams, settings.deterministic, settings.device) == (None, False, "cpu")
    assert devices == ("cpu",)
    assert served("--no-deterministic")[0].deterministic is False
    assert (settings.host_memory_gb, served("--host-memory", "20")[0].host_memory_gb) == (0, 20)
    assert (settings.tokenizer, served("--tokenizer", "ranks")[0].tokenizer) == (None, Path("ranks"))


def test_devices_reach_the_engines(served, monkeypatch):
    assert served("--devices", "cpu,cuda:1")[1] == ("cpu", "cuda:1")
    assert served("--device", "cuda:1")[1] == ("cuda:1",)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    settings, devices = served("--device", "cuda", "--gpus", "all")
    assert (settings.device, devices) == ("cuda:0", ("cuda:0", "cuda:1", "cuda:2"))
    with pytest.raises(ServeError, match="has 3 GPUs"):
        served("--device", "cuda", "--gpus", "4")


@pytest.mark.parametrize("number", [0, MOST_STREAMS + 1])
def test_more_streams_than_an_engine_has_are_refused_by_the_command_too(number):
    result = CliRunner().invoke(app, ["serve", "--max-streams", str(number)])
    assert result.exit_code == 2
    assert "--max-streams" in result.output


def test_streams_that_run_at_once_on_a_cpu(random_model_folder, tmp_path):
    """As many as asked for, twice as many wait, one more is refused."""
    with Engine.open(random_model_folder, voices_folder=tmp_path, max_streams=2, warm_up=False) as engine:
        voice = noise_voice(engine._config)
        asked = SynthesisRequest("Hi.", voice=voice, sampling=SamplingParams(seed=1))
        for _ in range(2 * (1 + QUEUE_PER_ROW)):
            engine.submit(asked)
        assert engine.gauges()["queue_length"] == 2 * QUEUE_PER_ROW
        with pytest.raises(OverloadedError):
            engine.submit(asked)


@pytest.mark.parametrize(
    ("opened", "device", "given", "streams"),
    [
        (Engine, "cuda", None, engine_module.FEW_STREAMS),
        (Engine, "cuda", 100, 100),
        (AsyncEngine, "cuda", None, MANY_STREAMS),
        (AsyncEngine, "cuda:1", 3, 3),
    ],
)
def test_streams_of_a_device(monkeypatch, random_model_folder, tmp_path, opened, device, given, streams):
    import asyncio

    asked = []

    def open_stages(model, limits, max_streams, *, deterministic):
        asked.append((max_streams, deterministic))

    load = engine_module.load_assets
    monkeypatch.setattr(
        engine_module, "load_assets", lambda model, *, device, **rest: load(model, device="cpu", **rest)
    )
    monkeypatch.setattr(engine_module.DeviceStages, "open", open_stages)
    monkeypatch.setattr(async_engine, "resolve_device", torch.device)  # as a machine with GPUs answers
    options = {"device": device, "dtype": torch.float32, "voices_folder": tmp_path, "warm_up": False}
    if opened is Engine:
        Engine.open(random_model_folder, max_streams=given, deterministic=True, **options).close()
    else:

        async def main():
            async with await AsyncEngine.open(
                random_model_folder, max_streams=given, deterministic=True, **options
            ):
                pass

        asyncio.run(main())
    assert asked == [(streams, True)]


def test_say_can_be_deterministic(monkeypatch, random_model_folder, tmp_path):
    seen = []
    original = Engine.open.__func__

    def open_engine(cls, *arguments, **options):
        seen.append(options["deterministic"])
        return original(cls, *arguments, voices_folder=tmp_path, **options)

    monkeypatch.setattr(Engine, "open", classmethod(open_engine))
    for options in ((), ("--deterministic",)):
        arguments = ["say", "Hi.", "-m", str(random_model_folder), "--voice", "noise", "-o"]
        result = CliRunner().invoke(app, [*arguments, str(tmp_path / "out.wav"), *options])
        assert result.exit_code in (0, 1)  # random weights may stay silent
    assert seen == [False, True]


def test_an_engine_refuses_numbers_out_of_range(random_model_folder):
    with pytest.raises(InvalidRequestError, match="between 1 and"):
        Engine.open(random_model_folder, max_streams=MOST_STREAMS + 1)


def test_bench_serving_measures_the_deterministic_mode(monkeypatch, random_model_folder):
    opened = []

    class Opened(Exception):
        pass

    def bench(*arguments, deterministic, **options):
        opened.append(deterministic)
        raise Opened

    monkeypatch.setattr("vivace.bench.serving.Bench", bench)
    arguments = ["bench", "serving", "-m", str(random_model_folder), "--deterministic"]
    assert isinstance(CliRunner().invoke(app, arguments).exception, Opened)
    assert isinstance(CliRunner().invoke(app, arguments[:-1]).exception, Opened)
    assert opened == [True, False]


@pytest.mark.parametrize(
    ("capability", "dtype"), [((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float16)]
)
def test_number_format_of_a_gpu(capability, dtype):
    with stands_for(Gpu(capability)):
        assert default_dtype(PLANNED) is dtype


def test_number_format_of_a_cpu(random_model_folder, tmp_path):
    """The plain way, whose tokens are the reference's; also where the command names ``auto``."""
    assert Precision.auto.on("cpu") is torch.float32
    assert Precision.bfloat16.on("cpu") is torch.bfloat16
    with Engine.open(random_model_folder, voices_folder=tmp_path, warm_up=False) as engine:
        assert engine._assets.model.dtype is torch.float32
