"""A CUDA device made of a CPU: streams that run late, graphs, locked memory, and an error for what CUDA forbids.

``with simulated_cuda():`` tensors may lie on ``cuda:0`` and ``cuda:1``. Their operations are queued in the current
stream and run when somebody waits for them, as late as the events allow (or, with ``seed``, at any moment before), so
that a missing wait shows as wrong values. Memory that is freed is overwritten behind what was queued on the stream it
was made for, as the caching allocator would hand it out again. A capture runs nothing and keeps what a graph would, and
whatever a capture cannot hold raises ``CaptureError``. Tensors of two devices in one operation raise
``DeviceMixError``. Triton kernels run in the interpreter. Only the thread that entered is concerned. Fused attention is
the plain one.
"""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import torch

from tests.simulated_cuda.simulator import Simulator
from tests.simulated_cuda.streams import (
    CaptureError,
    CUDAGraph,
    DeviceMixError,
    Event,
    Graph,
    Stream,
    running,
)
from tests.simulated_cuda.tensors import DeviceTensor, Generator, IndexedDevices

__all__ = ["CaptureError", "DeviceMixError", "DeviceTensor", "simulated_cuda"]

NUM_DEVICES = 2


@contextlib.contextmanager
def simulated_cuda(capability=(8, 0), seed=None, computes=True):
    """See the module's docstring; gives the ``Simulator``.

    Args:
        computes: otherwise nothing is run, and values have no meaning.
    """
    from triton.runtime.interpreter import GridExecutor

    assert not running, "one at a time"
    simulator = Simulator(capability, seed, computes)
    properties = types.SimpleNamespace(
        multi_processor_count=8,
        total_memory=1 << 30,
        major=capability[0],
        minor=capability[1],
        name="simulated",
    )
    run = GridExecutor.__call__

    def launch(executor, *args, **kwargs):
        if not any(isinstance(a, DeviceTensor) for a in (*args, *kwargs.values())):
            return run(executor, *args, **kwargs)
        return simulator.launch(
            lambda *a, **k: run(executor, *a, **k),
            getattr(executor.fn, "__name__", executor.fn),
            args,
            kwargs,
        )

    replaced = {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: simulator.device,
        "device": simulator.use_device,
        "stream": simulator.use_stream,
        "current_stream": simulator.current_stream,
        "default_stream": simulator.default_stream,
        "synchronize": simulator.synchronize,
        "get_device_capability": lambda device=None: simulator.capability,
        "get_device_name": lambda device=None: "simulated",
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (1 << 28, 1 << 30),
        "memory_allocated": lambda device=None: 1 << 20,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: simulator.current_stream().capture is not None,
        "graph_pool_handle": object,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": Graph,
    }
    running.append(simulator)
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    lift = torch._C._only_lift_cpu_tensors()
    simulator.default_streams = [Stream(index) for index in range(NUM_DEVICES)]
    simulator.current_streams = list(simulator.default_streams)
    Graph.default_capture_stream = Stream(0)  # somebody has captured before
    try:
        with contextlib.ExitStack() as stack:
            for name, value in replaced.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
            stack.enter_context(mock.patch.object(torch, "Generator", Generator))
            torch._C._set_only_lift_cpu_tensors(True)
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            stack.enter_context(IndexedDevices(simulator))
            stack.enter_context(simulator)
            yield simulator
    finally:
        torch._C._set_only_lift_cpu_tensors(lift)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        running.pop()
