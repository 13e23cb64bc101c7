"""The flow at full size with random weights: milliseconds of a launch that makes a second of audio for each of its
streams, and every kernel of a block.

python -m benchmarks.kernels.dit [--frames 50 250 500 1000 1500] [--streams 1 2 4 8 12 16 24 32]
                                 [--waves 2 4 8 9 12 16] [--general]

Needs a CUDA device. Launches of several streams are measured up to 500 frames. The ceiling (copy) is measured in the
same run; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vivace.config import FlowConfig
from vivace.kernels import dit
from vivace.models.flow import FlowModel
from vivace.models.flow_device import DeviceFlow
from vivace.models.flow_paged import PagedStream
from vivace.models.flow_solver import Solver
from vivace.models.flow_weights import BlockWeights
from vivace.random_checkpoint import full_config

CHUNK_FRAMES, CHUNK_TOKENS, AHEAD_TOKENS = 50, 25, 3
PACKED_FRAMES = 500
"""Frames behind which launches of several streams are measured at most, for want of memory."""

WEIGHTS_OF_A_PASS = 189e6
"""Parameters that an Euler step reads when all that depends on its time alone is known."""


def random_flow() -> FlowModel:
    """Activations keep their size through the layers, as in random checkpoints."""
    config = full_config().flow
    assert isinstance(config, FlowConfig)
    with torch.device("cuda"):
        model = FlowModel(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            gain = 0.2 if name.endswith(("to_out.0.weight", "ff.2.weight")) else 1.0
            deviation = 0.02 if weight.dim() == 1 else gain / math.sqrt(weight[0].numel())
            weight.normal_(0.0, deviation)
    return model


def signal_to_noise_db(mel: Tensor, reference: Tensor) -> float:
    """Of a mel against a better one."""
    mel, reference = mel.double(), reference.double()
    return float(10 * torch.log10(reference.square().sum() / (mel - reference).square().sum()))


def device_us(work: Callable[[], object], runs: int = 15) -> float:
    """Median time on the device."""
    times: list[float] = []
    for index in range(runs + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copy_gb_per_s() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_us(lambda: target.copy_(source), 5) / 1e3


def streams_of(flow: DeviceFlow, count: int) -> list[PagedStream]:
    """Streams without a prompt."""
    return [flow.open(torch.randn(192), torch.zeros(0, 80)) for _ in range(count)]


def grow(flow: DeviceFlow, streams: list[PagedStream], frames: int) -> None:
    """Computes chunks until each stream has so many frames."""
    while streams[0].length < frames:
        left = CHUNK_TOKENS + AHEAD_TOKENS - len(streams[0].waiting)
        flow.launch_batch([(s, torch.randint(0, 6561, (left,)).tolist(), False) for s in streams])


def chunk_rows(flow: DeviceFlow, lengths: list[int], counts: list[int], copy: float) -> list[dict[str, Any]]:
    """One row per number of streams and length of what they hold, the chunk included."""
    rows = []
    for count in counts:
        streams = streams_of(flow, count)
        for frames in (length for length in lengths if count == 1 or length <= PACKED_FRAMES):
            grow(flow, streams, frames)
            solver = flow.solver(count)
            us = device_us(functools.partial(solver.run, True))
            cache = 19 * flow.layout.block * 2 / CHUNK_FRAMES * frames * count
            floor = (10 * 2 * WEIGHTS_OF_A_PASS + cache) / copy / 1e3
            rows.append(
                {
                    "streams": count,
                    "frames": frames,
                    "ms": round(us / 1e3, 3),
                    "ms_a_chunk": round(us / 1e3 / count, 3),
                    "floor_ms": round(floor / 1e3, 3),
                }
            )
            print(f"{count:3d} streams {frames:5d} frames {us / 1e3:8.3f} ms  floor {floor / 1e3:6.3f} ms")
        for stream in streams:
            flow.close(stream)
    return rows


def wave_rows(flow: DeviceFlow, lengths: list[int], counts: list[int]) -> list[dict[str, Any]]:
    """One row per number of successive chunks of one stream in a launch, and frames that lie before them."""
    rows = []
    for count in counts:
        for frames in lengths:
            (stream,) = streams_of(flow, 1)
            grow(flow, [stream], frames)
            tokens = torch.randint(0, 6561, (count * CHUNK_TOKENS,)).tolist()
            flow.launch(stream, tokens, False).check()
            us = device_us(functools.partial(flow.solver(count).run, True))
            rows.append({"chunks": count, "behind_frames": frames, "ms": round(us / 1e3, 3)})
            print(
                f"{count:3d} chunks behind {frames:4d} frames {us / 1e3:8.3f} ms {us / 1e3 / count:7.3f} a chunk"
            )
            flow.close(stream)
    return rows


def wall_ms(flow: DeviceFlow) -> dict[str, float]:
    """Host's view of one chunk: until ``launch`` is back, and until the mel is there."""
    (stream,) = streams_of(flow, 1)
    launched, done = [], []
    for _ in range(15):
        tokens = torch.randint(0, 6561, (CHUNK_TOKENS + AHEAD_TOKENS - len(stream.waiting),)).tolist()
        torch.cuda.synchronize()
        started = time.perf_counter()
        handle = flow.launch(stream, tokens, False)
        launched.append((time.perf_counter() - started) * 1e3)
        handle.check()
        done.append((time.perf_counter() - started) * 1e3)
    flow.close(stream)
    return {"launch_ms": round(statistics.median(launched), 3), "step_ms": round(statistics.median(done), 3)}


def block_kernels(
    solver: Solver, streams: int, length: int
) -> list[tuple[str, Callable[[int, BlockWeights], tuple[Any, ...]], int]]:
    """Name, arguments for a block, and elements that must be read, for each kernel of the blocks."""
    dim, width = solver._hidden.shape[1], solver._inner.shape[1]
    heads, layer, rope = solver._config.dit.heads, solver._layout.layer, solver._weights.rope
    query, mixed, inner, hidden = solver._query, solver._mixed, solver._inner, solver._hidden
    attended = solver._normed._replace(tiles=solver._calls.tiles("add_attention", dim))
    fed = solver._normed._replace(tiles=solver._calls.tiles("add_ff", dim))
    return [
        ("qkv", lambda i, b: (fed, b.qkv, rope, query, heads, i * layer), 3 * dim * dim),
        ("attention", lambda i, _: (query, mixed, heads, i * layer), 4 * streams * length * dim),
        ("add_attention", lambda _, b: (mixed, b.out, hidden, attended), dim * dim),
        ("ff_in", lambda _, b: (attended, b.ff_in, inner), dim * width),
        ("add_ff", lambda _, b: (inner, b.ff_out, hidden, fed), dim * width),
    ]


def kernel_rows(flow: DeviceFlow, count: int, frames: int, copy: float) -> list[dict[str, Any]]:
    """One row per kernel of a block, each on the weights of all blocks in turn."""
    streams = streams_of(flow, count)
    grow(flow, streams, frames)
    solver, rows = flow.solver(count), []
    blocks, groups = list(enumerate(flow.weights.blocks)), solver._rows(3, 2 * count)
    for name, arguments, elements in block_kernels(solver, count, streams[0].length):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index, block in blocks:
                solver._calls(name, groups, *arguments(index, block))
        us = device_us(graph.replay) / len(blocks)
        speed = 2 * elements / us / 1e3
        rows.append({"streams": count, "kernel": name, "us": round(us, 2), "gb_per_s": round(speed)})
        print(
            f"{count:3d} streams {name:14s} {us:7.2f} us {speed:7.0f} GB/s {100 * speed / copy:4.0f} % of a copy"
        )
    for stream in streams:
        flow.close(stream)
    return rows


def main() -> None:
    """Prints tables and the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, nargs="+", default=[50, 250, 500, 1000, 1500])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32])
    parser.add_argument(
        "--waves", type=int, nargs="*", default=[2, 4, 8, 9, 12, 16], help="chunks of one stream"
    )
    parser.add_argument("--general", action="store_true", help="the Triton kernels where others are faster")
    options = parser.parse_args()
    model = random_flow()
    tokens = torch.randint(0, 6561, (250,))
    exact = model.generate(tokens.cuda(), torch.zeros(0, 80).cuda(), torch.ones(192).cuda(), True)
    kernels = dit if options.general else None
    costs = dict.fromkeys({1, *options.streams, *options.waves}, 1.0)  # launches of just these sizes
    flow = DeviceFlow(model.bfloat16(), kernels=kernels, max_streams=max(options.streams), costs=costs)
    del model
    started = time.perf_counter()
    flow.warm_up()
    warm_up_s = time.perf_counter() - started
    stream = flow.open(torch.ones(192), torch.zeros(0, 80))
    quality = signal_to_noise_db(flow.step(stream, tokens.tolist(), True), exact)
    flow.close(stream)
    copy = copy_gb_per_s()
    print(f"mel against float32: {quality:.1f} dB; copy {copy:.0f} GB/s; warm-up {warm_up_s:.1f} s")
    document = {
        "bench": "flow",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "random-full",
        "precision": "bfloat16",
        "kernels": "general" if options.general else "chosen",
        "snr_db": round(quality, 1),
        "warm_up_s": round(warm_up_s, 2),
        "copy_gb_per_s": round(copy),
        "bytes_per_second_of_audio": flow.pool.page_bytes,
        "chunks": chunk_rows(flow, options.frames, options.streams, copy),
        "waves": wave_rows(flow, [50, 150, 400], options.waves),
        "kernels_of_a_block": [
            row for count in options.streams for row in kernel_rows(flow, count, PACKED_FRAMES, copy)
        ],
        **wall_ms(flow),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
