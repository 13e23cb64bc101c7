"""The vocoder at full size with random weights: milliseconds per chunk, of one stream and of many in a launch.

python -m benchmarks.kernels.hift [--precision half] [--packs 1 4 16 32] [--launches]
python -m benchmarks.kernels.hift --long [--frames 50 100 200 450 800]

``--long`` is for streams that bring much at once: with pieces of up to two seconds, and with longer ones; how long they
take, and whether the samples are the same bits.

Needs a CUDA device. The ceilings (matrix product, copy) are measured in the same run; the last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vivace.checkpoint.loading import planned_stage
from vivace.config import VocoderConfig
from vivace.engine.compile_ahead import num_workers
from vivace.kernels import hift
from vivace.kernels.compile_pool import CompilePool
from vivace.kernels.gpu import Gpu
from vivace.kernels.launches import recorded
from vivace.models.hift import CausalHiFT
from vivace.models.hift_device import BUCKETS, COMMON_FRAMES, DeviceVocoder

if TYPE_CHECKING:
    from vivace.datatypes import Samples

GFLOP_PER_SECOND_OF_AUDIO = 33.4
_SIDE = 8192
_FIRST = 48  # frames ahead of a long piece
_MANY = 32  # rows of two seconds, whose memory long pieces share
_AHEAD_CYCLES = 4_000_000  # about two milliseconds in which the host queues what is measured


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
    rows, place = [], vocoder.runner.places[0]
    for op in place.layout.convs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                hift.conv(op, place.arena[:1], vocoder.runner.params[:1], 56, vocoder.precision)
        us = device_us(graph.replay, 5) / 20
        tflops = op.flops_per_row * op.rows.most(50) / us / 1e6
        rows.append({"launch": op.name, "us": round(us, 2), "tflops": round(tflops, 1)})
        print(
            f"{op.name:14s} {us:7.2f} us  {tflops:6.1f} TFLOP/s  {100 * tflops / ceiling:4.0f} % of the ceiling"
        )
    return rows


def compile_all(precision: str) -> float:
    """Compiles the kernels of long pieces on all cores, ahead of anything on the GPU; the seconds that it took."""
    started = time.perf_counter()
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    major, minor = map(int, told.split()[0].split("."))
    kernels: list[Any] = []
    with torch.no_grad(), recorded(Gpu((major, minor), 1), kernels.append):
        model = planned_stage(lambda: CausalHiFT(VocoderConfig()), torch.float32)
        DeviceVocoder(model, precision=precision, max_rows=_MANY).rehearse([1, 2, 4])
    pool = CompilePool(num_workers(), lambda kernel, compiled: None)
    for kernel in kernels:
        pool.add(kernel)
    pool.finish()
    return time.perf_counter() - started


def long_pieces(ways: dict[str, DeviceVocoder], frames: int, count: int) -> dict[str, Any]:
    """One row: streams that bring so many frames each at once, in the middle of their streams.

    ``device_ms`` is all launches and copies of a call, ``host_ms`` the call itself, ``wall_ms`` until all samples lie
    on the host.
    """
    row: dict[str, Any] = {"frames": frames, "streams": count}
    for name, vocoder in ways.items():
        streams = [vocoder.open(seed) for seed in range(count)]
        work = [(stream, random_mel(frames), False) for stream in streams]
        calls = [_timed_call(vocoder, work, index % 2 == 1) for index in range(26)][6:]
        for stream in streams:
            vocoder.close(stream)
        row[name] = {
            "device_ms": round(statistics.median(device for device, _, _ in calls[1::2]), 3),
            "host_ms": round(statistics.median(host for _, host, _ in calls[::2]), 3),
            "wall_ms": round(statistics.median(wall for _, _, wall in calls[::2]), 3),
        }
    print(row)
    return row


def _timed_call(vocoder: DeviceVocoder, work: list[Any], runs_ahead: bool) -> tuple[float, float, float]:
    """Milliseconds of the device, of queueing and of all. The device begins late where the host ``runs_ahead``."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    if runs_ahead:
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    started = time.perf_counter()
    start.record()
    pending = vocoder.launch_batch(work)
    end.record()
    queued = time.perf_counter()
    for own in pending:
        vocoder.collect(own)
    done = time.perf_counter()
    end.synchronize()
    return start.elapsed_time(end), (queued - started) * 1e3, (done - started) * 1e3


def stream_samples(vocoder: DeviceVocoder, mel: Tensor, cuts: list[int]) -> Samples:
    """Of a whole stream in pieces."""
    stream, borders = vocoder.open(7), [0, *cuts, mel.shape[1]]
    parts = [vocoder.step(stream, mel[:, a:b], b == mel.shape[1]) for a, b in pairwise(borders)]
    vocoder.close(stream)
    return np.concatenate(parts)


def same_bits(ways: dict[str, DeviceVocoder], mel: Tensor) -> dict[str, Any]:
    """One row: a stream of a short piece and all the rest in one, against others of the same mel."""
    frames, first = mel.shape[1], [min(_FIRST, mel.shape[1] // 2)]
    one = stream_samples(ways["long"], mel, first)
    others = {
        "again": (ways["long"], first),
        "short pieces": (ways["short"], first),
        "pieces of 50 frames": (ways["long"], [*range(first[0], frames, 50)]),
        "uneven pieces": (ways["long"], sorted({first[0], frames // 3 + 7, frames // 2 + 31})),
    }
    row: dict[str, Any] = {"frames": frames, "peak": round(float(np.abs(one).max()), 3)}
    for name, (vocoder, cuts) in others.items():
        other = stream_samples(vocoder, mel, [cut for cut in cuts if cut < frames])
        row[name] = {
            "differing": int((one.view(np.int32) != other.view(np.int32)).sum()),
            "most": float(np.abs(one - other).max()),
        }
    print(row)
    return row


def long_document(precision: str, frames: list[int]) -> dict[str, Any]:
    """What ``--long`` measures."""
    compile_s = compile_all(precision)
    model = random_vocoder("cuda")
    common = [bucket for bucket in BUCKETS if bucket <= COMMON_FRAMES]
    ways = {
        name: DeviceVocoder(model, precision=precision, buckets=buckets, max_rows=_MANY)
        for name, buckets in (("short", common), ("long", BUCKETS))
    }
    work = [(1, count) for count in frames] + [(2, 450), (4, 450)]
    return {
        "bench": "vocoder_long",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "random-full",
        "precision": precision,
        "compile_s": round(compile_s, 1),
        "rows": ways["long"].rows,
        "times": [long_pieces(ways, count, streams) for streams, count in work],
        "samples": [same_bits(ways, random_mel(_FIRST + count)) for count in frames],
    }


def main() -> None:
    """Prints tables and the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", default="half", choices=["half", "tf32", "tf32x3", "ieee"])
    parser.add_argument("--frames", type=int, nargs="+")
    parser.add_argument("--packs", type=int, nargs="+", default=[1, 2, 4, 8, 15, 16, 32])
    parser.add_argument("--launches", action="store_true", help="time every launch of convolutions too")
    parser.add_argument("--long", action="store_true", help="measure long pieces, and nothing else")
    options = parser.parse_args()
    if options.long:
        print(json.dumps(long_document(options.precision, options.frames or [50, 100, 200, 450, 800])))
        return
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
        "chunks": chunks(vocoder, options.frames or [10, 20, 50, 100]),
        "packs": packs(vocoder, options.packs),
    }
    if options.launches:
        document["launches"] = launches(vocoder, limits[own])
    print(json.dumps(document))


if __name__ == "__main__":
    main()
