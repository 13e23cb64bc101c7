"""Where CUDA graphs are captured: on a stream of the graph's own device, one at a time in a process.

``torch.cuda.graph`` has one stream for all captures that name none; it lies on the device that was current at the first
of them, so that the graphs of a second device would be empty. And PyTorch allows one capture at a time, while several
engines of one process may open in threads of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_one_at_a_time = Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    memory: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> Iterator[None]:
    """What the body queues on ``device`` becomes ``graph``. Other threads may use the device meanwhile.

    Args:
        memory: of other graphs (``CUDAGraph.pool``), none of which runs beside this one; it is used again where what
            lies in it is not needed any more.
        stream: of the capture; graphs that share memory must have the same. None: one of the device.
    """
    with _one_at_a_time, torch.cuda.device(device):
        if stream is None:
            stream = _stream_of(device)
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            yield


@contextmanager
def before_capture(device: torch.device) -> Iterator[None]:
    """The body runs once what is to be captured: what libraries and kernels set up at first use cannot be.

    On the stream of the captures, behind all work of the current one, which waits for it. It is one for all: cuBLAS
    keeps working memory for each stream that it has seen.
    """
    with _one_at_a_time, torch.cuda.device(device):
        stream, current = _stream_of(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:  # what it has freed may be taken by others at once
            current.wait_stream(stream)


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The same at every call for a device, with or without its number."""
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device(device.type, index)
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
