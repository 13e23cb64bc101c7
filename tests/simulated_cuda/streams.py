"""Streams, events and graphs of the simulated device."""

from __future__ import annotations

from collections import deque

import torch
from torch.utils._python_dispatch import _disable_current_modes

running = []
"""The simulator that is at work, if any."""


class CaptureError(RuntimeError):
    """What the capture of a CUDA graph cannot hold, or would keep as it is for ever."""


class DeviceMixError(RuntimeError):
    """Tensors of several devices in one operation, or a launch on another device than the current one."""


class Stream:
    """One after the other what is queued."""

    def __init__(self, device=None, priority=0, **_):
        simulator = running[-1]
        self.device = simulator.device_of(device)
        self.queue, self.done, self.number = deque(), 0, 0
        self.capture = None
        self.simulator = simulator
        simulator.streams.append(self)

    def add(self, work):
        if self.capture is not None:
            self.capture.record(self, work)
            return
        self.queue.append(work)
        self.number += 1
        self.simulator.play()

    def run(self, until):
        """What was queued up to a number."""
        while self.done < until:
            work = self.queue.popleft()
            self.done += 1
            if self.simulator.computes:
                with _disable_current_modes(), torch.inference_mode():
                    work()

    def wait_event(self, event):
        if event.graph is not None and event.graph.is_open:
            if self.capture is None:
                assert not self.is_busy_outside(), "a stream with work of its own joins a capture"
                self.capture = event.graph
                event.graph.streams.add(self)
            event.graph.joined(event.stream, self)
            return
        if event.stream is None:
            return
        if self.capture is not None:
            raise CaptureError("a captured stream waits for work that is not captured")
        if event.stream is not self:
            stream, number = event.stream, event.number
            self.add(lambda: stream.run(number))

    def is_busy_outside(self):
        return False

    def wait_stream(self, stream):
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        self.simulator.forbid("the host waits for a stream")
        self.run(self.number)

    def query(self):
        return not self.queue


class Event:
    def __init__(self, enable_timing=False, **_):
        self.stream = self.graph = None
        self.number, self.timed, self.asked = 0, enable_timing, False

    def record(self, stream=None):
        stream = stream or running[-1].current_stream()
        self.stream, self.number, self.graph, self.asked = stream, stream.number, stream.capture, False
        if self.graph is not None:
            self.graph.mark(stream)

    def wait(self, stream=None):
        (stream or running[-1].current_stream()).wait_event(self)

    def synchronize(self):
        if self.stream is None:
            return
        if self.graph is not None:
            raise CaptureError("the host waits for an event of a capture")
        self.stream.run(self.number)

    def query(self):
        """The first answer is no."""
        if self.stream is None or self.stream.done >= self.number:
            return True
        if self.asked:
            self.stream.run(self.number)
        self.asked = True
        return False

    def elapsed_time(self, other):
        assert self.timed, "the event was made without timing"
        assert other.timed, "the event was made without timing"
        assert other.stream is None or other.stream.done >= other.number, "the event has not ended"
        return 0.01


class CUDAGraph:
    def __init__(self):
        self.works, self.streams, self.open_work, self.is_open = [], set(), {}, False
        self.device = None

    def record(self, stream, work):
        assert self.is_open
        self.works.append(work)
        self.open_work[stream] = True

    def mark(self, stream):
        pass

    def joined(self, source, target):
        self.open_work[source] = False
        self.open_work[target] = True

    def replay(self):
        simulator = running[-1]
        assert self.works, "the graph is empty"
        simulator.forbid("a graph is replayed")
        works = list(self.works)
        simulator.current_stream(self.device).add(lambda: [work() for work in works])

    def pool(self):
        return self.memory

    def reset(self):
        self.works = []


class Graph:
    """``torch.cuda.graph``: like there, one stream for all captures that name none."""

    default_capture_stream = None

    def __init__(self, graph, pool=None, stream=None, capture_error_mode="global", **_):
        stream = stream or Graph.default_capture_stream
        self.graph, self.stream, self.pool = graph, stream, pool

    def __enter__(self):
        simulator = running[-1]
        if simulator.capture is not None:
            raise CaptureError("two captures at once")
        simulator.synchronize()
        self.graph.memory = self.pool or object()
        self.graph.is_open, self.graph.device = True, self.stream.device
        self.context = simulator.use_stream(self.stream)
        self.context.__enter__()
        self.stream.capture = simulator.capture = self.graph
        self.graph.streams.add(self.stream)

    def __exit__(self, *error):
        simulator, graph = running[-1], self.graph
        simulator.capture, graph.is_open = None, False
        for stream in graph.streams:
            stream.capture = None
        self.context.__exit__(*error)
        if error[0] is None:
            loose = [s for s in graph.streams if s is not self.stream and graph.open_work.get(s)]
            if loose:
                raise CaptureError("a stream that took part in the capture was not joined")
            if not graph.works:
                raise CaptureError("the graph is empty: its work went to another stream or device")
