"""The vocoder at full size with random weights: milliseconds per chunk, of one stream and of many in a launch.

python -m benchmarks.kernels.hift [--precision half] [--packs 1 4 16 32] [--launches]

Needs a CUDA device. The ceilings (matrix product, copy) are measured in the same run; the last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vivace.config import VocoderConfig
from vivace.kernels import hift
from vivace.models.hift import CausalHiFT
from vivace.models.hift_device import DeviceVocoder

GFLOP_PER_SECOND_OF_AUDIO = 33.4
_SIDE = 8192


def random_vocoder(device: str) -> CausalHiFT:
    """Full size; F0 on both sides of the voicing threshold, samples far from the limit."""
    torch.manual_seed(0)
    model = CausalHiFT(VocoderConfig()).eval()
    with torch.no_grad():
        model.f0_predictor.classifier.weight.mul_(2000.0)
        model.f0_predictor.classifier.bias.zero_()
        model.conv_post.weight.mul_(4.0)
    return model.to(device)


def random_mel(frames: int) -> Tensor:
    """``[80, frames]``."""
    return (torch.randn(80, frames) * 2.0 - 3.0).cuda()


def device_us(work: Callable[[], object], runs: int = 20) -> float:
    """Median time on the device."""
    times = []
    for index in range(runs + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """What this device reaches: TFLOP/s of large matrix products, GB/s of a copy."""
    a, b = torch.randn(2, _SIDE, _SIDE, device="cuda")
    result, matmul = {}, torch.backends.cuda.matmul
    before = matmul.fp32_precision
    c, d = a.half(), b.half()
    result["half_tflops"] = 2 * _SIDE**3 / device_us(lambda: c @ d, 5) / 1e6
    for name, value in (("float32_tflops", "ieee"), ("tf32_tflops", "tf32")):
        matmul.fp32_precision = value
        result[name] = 2 * _SIDE**3 / device_us(lambda: a @ b, 5) / 1e6
    matmul.fp32_precision = before
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    result["copy_gb_per_s"] = 2 * source.nbytes / device_us(lambda: target.copy_(source), 5) / 1e3
    return result


def chunks(vocoder: DeviceVocoder, frames: list[int]) -> list[dict[str, float]]:
    """One row per chunk length: wall-clock time of ``step`` in the middle of a stream, samples on the host."""
    rows = []
    for count in frames:
        stream, mel, times = vocoder.open(), random_mel(count), []
        for _ in range(33):
            torch.cuda.synchronize()
            started = time.perf_counter()
            vocoder.step(stream, mel, is_last=False)
            times.append((time.perf_counter() - started) * 1e3)
        vocoder.close(stream)
        ms = statistics.median(times[3:])
        gflop = GFLOP_PER_SECOND_OF_AUDIO * count / 50
        rows.append({"frames": count, "ms": round(ms, 3), "tflops": round(gflop / ms, 1)})
        print(f"{count:4d} frames {ms:7.3f} ms  {gflop / ms:6.1f} TFLOP/s")
    return rows


def packs(vocoder: DeviceVocoder, counts: list[int]) -> list[dict[str, float]]:
    """One row per number of streams that bring 50 frames each, in the middle of their streams.

    ``device_ms`` is the launch alone, ``wall_ms`` until all samples lie on the host; both of the whole launch.
    """
    rows = []
    for count in counts:
        streams, mels = [vocoder.open(seed) for seed in range(count)], [random_mel(50) for _ in range(count)]
        work, times = [(s, m, False) for s, m in zip(streams, mels, strict=True)], []
        for _ in range(13):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for pending in vocoder.launch_batch(work):
                vocoder.collect(pending)
            times.append((time.perf_counter() - started) * 1e3)
        bucket = next(size for size in vocoder.buckets if size >= 50)
        graph_rows = 1 << (count - 1).bit_length()
        device_ms = device_us(partial(vocoder.runner.run, bucket, graph_rows), 10) / 1e3
        for stream in streams:
            vocoder.close(stream)
        wall_ms = statistics.median(times[3:])
        rows.append(
            {
                "streams": count,
                "device_ms": round(device_ms, 3),
                "wall_ms": round(wall_ms, 3),
                "device_ms_per_chunk": round(device_ms / count, 3),
            }
        )
        print(
            f"{count:4d} streams {device_ms:7.3f} ms ({device_ms / count:.3f} a chunk), {wall_ms:7.3f} with the host"
        )
    return rows


def launches(vocoder: DeviceVocoder, ceiling: float) -> list[dict[str, Any]]:
    """One row per launch of convolutions at 50 frames: twenty of the same in a graph."""
    stream, mel = vocoder.open(), random_mel(50)
    for _ in range(2):
        vocoder.step(stream, mel, is_last=False)
    vocoder.close(stream)
    rows = []
    for op in vocoder.runner.layout.convs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                hift.conv(op, vocoder.runner.arena[:1], vocoder.runner.params[:1], 56, vocoder.precision)
        us = device_us(graph.replay, 5) / 20
        tflops = op.flops_per_row * op.rows.most(50) / us / 1e6
        rows.append({"launch": op.name, "us": round(us, 2), "tflops": round(tflops, 1)})
        print(
            f"{op.name:14s} {us:7.2f} us  {tflops:6.1f} TFLOP/s  {100 * tflops / ceiling:4.0f} % of the ceiling"
        )
    return rows


def main() -> None:
    """Prints tables and the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="half", choices=["half", "tf32", "tf32x3", "ieee"])
    parser.add_argument("--frames", type=int, nargs="+", default=[10, 20, 50, 100])
    parser.add_argument("--packs", type=int, nargs="+", default=[1, 2, 4, 8, 15, 16, 32])
    parser.add_argument("--launches", action="store_true", help="time every launch of convolutions too")
    options = parser.parse_args()
    limits = ceilings()
    own = {"ieee": "float32_tflops", "half": "half_tflops"}.get(options.precision, "tf32_tflops")
    floor = GFLOP_PER_SECOND_OF_AUDIO / limits[own]
    print({name: round(value, 1) for name, value in limits.items()}, f"floor of 50 frames {floor:.3f} ms")
    most = max(options.packs)
    vocoder = DeviceVocoder(
        random_vocoder("cuda"), slots=most, precision=options.precision, max_rows=1 << (most - 1).bit_length()
    )
    started = time.perf_counter()
    vocoder.warm_up([1 << power for power in range(vocoder.max_rows.bit_length())])
    document: dict[str, Any] = {
        "bench": "vocoder",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "random-full",
        "precision": options.precision,
        "warm_up_s": round(time.perf_counter() - started, 2),
        "ceilings": {name: round(value, 1) for name, value in limits.items()},
        "floor_ms_50_frames": round(floor, 3),
        "chunks": chunks(vocoder, options.frames),
        "packs": packs(vocoder, options.packs),
    }
    if options.launches:
        document["launches"] = launches(vocoder, limits[own])
    print(json.dumps(document))


if __name__ == "__main__":
    main()
