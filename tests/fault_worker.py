"""An engine process whose engine does what the text says: ``python -m tests.fault_worker SOCKET PARENT``.

``chunks=N``  N chunks of ramps (the seed is their height), one every millisecond
``raise``     an internal error            ``poison``  … and from now on every request has one
``hang``      the engine's loop gets stuck ``die``     SIGSEGV            ``fail``  the loop ends
``wait``      chunks for ever, slowly       ``full``   the engine has no room
"""

import asyncio
import gc
import os
import re
import signal

import numpy as np

from vivace.datatypes import AudioChunk, StageTimes, SynthesisResult
from vivace.errors import InvalidAudioError, ModelFolderError, OverloadedError
from vivace.server import worker

CHUNK_SAMPLES = 480
RATE_HZ = 24_000


class FakeStream:
    def __init__(self, engine, request, text):
        self._engine = engine
        self._request = request
        self._text = text
        self._index = 0
        self._num = None

    def __aiter__(self):
        return self

    async def __aenter__(self):
        self._engine.running.add(self)
        return self

    async def __aexit__(self, *_):
        self._engine.running.discard(self)

    async def aclose(self):
        await self.__aexit__()

    async def __anext__(self):
        if self._num is None:
            self._num = await self._begin()
        if self._index == self._num:
            raise StopAsyncIteration
        await asyncio.sleep(0.001 if self._num < 1000 else 0.02)
        height = self._request.sampling.seed % 100 / 100
        samples = np.linspace(0, height, CHUNK_SAMPLES, dtype=np.float32)
        self._index += 1
        times = StageTimes(lm_ms=1.0)
        start_s = (self._index - 1) * CHUNK_SAMPLES / RATE_HZ
        return AudioChunk(samples, RATE_HZ, self._index - 1, 0, start_s, 1.0, times, self._index == self._num)

    async def _begin(self):
        text = self._request.text
        if self._text is not None:
            text = "".join([piece async for piece in self._text])
        if self._engine.is_poisoned:
            raise RuntimeError("CUDA error: device-side assert triggered")
        if text == "raise":
            raise RuntimeError("a fault of ours")
        if text == "poison":
            self._engine.is_poisoned = True
            raise RuntimeError("CUDA error: device-side assert triggered")
        if text == "hang":
            self._engine.hangs = True
            await asyncio.Event().wait()
        if text == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "fail":
            self._engine.is_running = False
            await asyncio.Event().wait()
        if text == "full":
            raise OverloadedError("64 requests are running")
        if text == "wait":
            return 1_000_000
        if text == "running":  # how many others run, as a number of chunks
            return len(self._engine.running)
        found = re.fullmatch(r"chunks=(\d+)", text)
        return int(found[1]) if found else 1

    def summary(self):
        seconds = self._index * CHUNK_SAMPLES / RATE_HZ
        return SynthesisResult(
            np.zeros(0, np.float32), RATE_HZ, seconds, 1.0, 2.0, 0.1, 25.0, 3, 25, 1, "stop", StageTimes()
        )


class FakeEngine:
    sample_rate_hz = RATE_HZ

    def __init__(self):
        self.is_running = True
        self.is_poisoned = self.hangs = False
        self.running = set()

    def stream(self, request, text=None):
        return FakeStream(self, request, text)

    async def make_voice(self, prompt_audio, prompt_text="", *, name="clone", consent=False):
        raise InvalidAudioError("The file holds no audio.", param="prompt_audio")

    def gauges(self):
        return {"batch_size": float(len(self.running)), "frozen_objects": float(gc.get_freeze_count())}

    def ask_for_sign(self, answer):
        if not self.hangs:
            answer()


async def open_engine(settings):
    if settings["device"] == "none":
        raise ModelFolderError("there is no such device")
    if settings["device"] == "stuck":
        await asyncio.Event().wait()
    if settings["device"] == "gone":
        os._exit(3)
    return FakeEngine()


if __name__ == "__main__":
    worker.main(open_engine)
