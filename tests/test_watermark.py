"""The place for a watermark, with one that adds a known tiny sequence."""

import asyncio
from inspect import signature

import httpx
import numpy as np
import pytest

from tests.server_helpers import RATE, FakeService, LoopbackServer
from vivace.audio.pcm import pcm16
from vivace.audio.watermark import GROUP, find_watermark, marked
from vivace.engine import SynthesisRequest
from vivace.errors import ServeError, SynthesisError
from vivace.server.child import EngineSettings
from vivace.server.marked import MarkedService
from vivace.server.run import open_service

SEQUENCE = np.where(np.random.default_rng(0).random(4 * RATE) < 0.5, -1, 1).astype(np.float32) / 1_000


class Added:
    """Adds ``SEQUENCE``, going on where the last piece ended."""

    def __init__(self, rate_hz):
        assert rate_hz == RATE
        self._position = 0

    def mark(self, samples):
        start, self._position = self._position, self._position + len(samples)
        return samples + SEQUENCE[start : self._position]


def spoken(service):
    async def speak():
        async with service.stream(SynthesisRequest("Hi.")) as stream:
            return [chunk async for chunk in stream]

    return asyncio.run(speak())


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package with an entry point."""

    def install(value):
        info = tmp_path / "marks-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: marks\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nadded = {value}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_speech_is_marked_across_chunks(tmp_path):
    inner = FakeService(tmp_path)
    inner.script = [0.2, 0.1, 0.3]
    plain = spoken(inner)
    chunks = spoken(MarkedService(inner, "added", Added))
    assert [len(chunk.samples) for chunk in chunks] == [len(chunk.samples) for chunk in plain]
    added = np.concatenate([chunk.samples for chunk in chunks])
    added -= np.concatenate([chunk.samples for chunk in plain])
    np.testing.assert_allclose(added, SEQUENCE[: len(added)], atol=1e-6)
    assert [chunk.start_s for chunk in chunks] == [chunk.start_s for chunk in plain]
    assert inner.ended == ["done", "done"]


def test_each_utterance_begins_a_mark_of_its_own(tmp_path):
    service = MarkedService(FakeService(tmp_path), "added", Added)
    first, second = spoken(service), spoken(service)
    assert all(np.array_equal(a.samples, b.samples) for a, b in zip(first, second, strict=True))


def test_over_http_and_said_in_the_header(tmp_path):
    plain = FakeService(tmp_path)
    unmarked, expected = (
        pcm16(np.concatenate([chunk.samples for chunk in spoken(service)]))
        for service in (plain, MarkedService(plain, "added", Added))
    )
    with LoopbackServer(lambda: MarkedService(plain, "added", Added)) as server:
        body = {"input": "Hi.", "response_format": "pcm"}
        response = httpx.post(f"{server.url}/v1/audio/speech", json=body)
        assert response.headers["x-content-provenance"] == "synthetic-speech; watermark=added"
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        plain.figures = {"heartbeat_age_seconds": 60.0}
        assert httpx.get(f"{server.url}/health/ready").status_code == 503
    assert response.content == expected
    assert response.content != unmarked


@pytest.mark.parametrize(
    "result",
    [
        lambda samples: samples[:-1],
        lambda samples: samples * np.float32("nan"),
        lambda samples: samples.reshape(1, -1),
        lambda samples: 1 / 0,
    ],
)
def test_a_mark_that_fails_lets_no_speech_out(tmp_path, result):
    class Broken:
        mark = staticmethod(result)

    with pytest.raises(SynthesisError):
        marked(Broken(), np.ones(8, np.float32))
    inner = FakeService(tmp_path)
    with LoopbackServer(lambda: MarkedService(inner, "broken", lambda rate_hz: Broken())) as server:
        response = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "Hi."})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert inner.ended == ["cancelled"]


def test_an_installed_package_is_found(package):
    package("tests.test_watermark:Added")
    assert find_watermark("added").__name__ == "Added"
    with pytest.raises(ServeError, match="there are: added"):
        find_watermark("other")


@pytest.mark.parametrize("value", ["tests.no_such_module:x", "tests.test_watermark:nothing"])
def test_a_package_that_cannot_be_loaded_is_said_before_the_model_is(package, value):
    package(value)
    with pytest.raises(ServeError, match="cannot be loaded"):
        asyncio.run(open_service(EngineSettings("/nowhere"), "added"))


def test_there_is_none_by_default():
    with pytest.raises(ServeError, match="there are: none"):
        find_watermark("added")
    assert signature(open_service).parameters["watermark"].default is None
