"""An engine that speaks tones, for tests of what surrounds it in a batch."""

from __future__ import annotations

import asyncio

import numpy as np

from vivace.datatypes import AudioChunk, StageTimes, SynthesisResult

RATE_HZ = 24_000


class FakeEngine:
    """Speaks each text as one segment per line of half a second: a tone for ``a``, near silence for ``_``, near silence
    behind the end of the segment before for ``~``.

    Attributes:
        script: what a request does instead, by text: an error to raise, or a function of the request that gives text.
        requests: those that were asked for. most: side by side.
    """

    sample_rate_hz = RATE_HZ

    def __init__(self, streams_at_once=4):
        self.streams_at_once = streams_at_once
        self.is_running = True
        self.script = {}
        self.requests = []
        self.recordings = []
        self.running = self.most = 0
        self.gate = None

    def stream(self, request):
        return FakeStream(self, request)

    async def make_voice(self, prompt_audio, prompt_text="", *, name="clone", consent=False):
        assert consent
        self.recordings.append((prompt_audio, prompt_text))
        await asyncio.sleep(0.01)
        return f"voice of {prompt_audio.name}"

    def is_near_silent(self, samples, voice=None):
        return not len(samples) or float(np.abs(samples).max()) < 1e-3


class FakeStream:
    def __init__(self, engine, request):
        self.engine, self.request = engine, request

    async def __aenter__(self):
        engine = self.engine
        engine.requests.append(self.request)
        engine.running += 1
        engine.most = max(engine.most, engine.running)
        return self

    async def __aexit__(self, *_):
        self.engine.running -= 1

    async def __aiter__(self):
        await asyncio.sleep(0)
        if self.engine.gate is not None:
            await self.engine.gate.wait()
        act = self.engine.script.get(self.request.text, self.request.text)
        text = act(self.request) if callable(act) else act
        if isinstance(text, Exception):
            raise text
        for index, line in enumerate(text.splitlines()):
            samples = 0.1 * np.sin(np.arange(RATE_HZ // 2, dtype=np.float32))
            if line in "_~":
                samples[0 if line == "_" else RATE_HZ // 10 :] *= 1e-3
            yield AudioChunk(samples, RATE_HZ, index, index, index / 2, 1.0, StageTimes(), is_last=False)

    def summary(self, samples):
        return SynthesisResult(
            samples, RATE_HZ, len(samples) / RATE_HZ, 12.0, 100.0, 0.2, 50.0, 3, 25, 1, "stop", StageTimes()
        )
