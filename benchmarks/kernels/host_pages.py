"""Pages of one stream to host memory and back, at full size: milliseconds, GB/s, and what other work loses meanwhile.

python -m benchmarks.kernels.host_pages [--seconds 10] [--runs 10]

Needs a CUDA device. The ceiling (one large copy) is measured in the same run; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vivace.config import FlowConfig
from vivace.models.flow_pages import PageLayout, PagePool
from vivace.models.host_pages import HostFrames
from vivace.models.lm_launches import PAGE_TOKENS
from vivace.random_checkpoint import full_config

BUSY_PRODUCTS, BUSY_SIZE = 200, 2048
LM_POSITIONS_PER_SECOND = 25
LM_PROMPT_POSITIONS = 200


def median_ms(work: Callable[[], object], runs: int, stream: torch.cuda.Stream) -> float:
    """On the device, from the first copy to the last."""
    times: list[float] = []
    for _ in range(runs + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            start.record()
            work()
            end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


class Stream:
    """The pages of one stream of so many seconds, and host memory for them."""

    def __init__(self, seconds: int) -> None:
        config = full_config()
        assert isinstance(config.flow, FlowConfig)
        layout = PageLayout.of(config.flow)
        self.pool = PagePool(layout.page, torch.bfloat16, torch.device("cuda"))
        self.pages = self.pool.take_many(seconds)
        for page in self.pages:
            self.pool.parts(page)[0].normal_()
        started = time.perf_counter()
        self.frames = HostFrames(seconds, self.pool.frame_bytes, is_pinned=True)
        self.pin_s = time.perf_counter() - started
        self.held = self.frames.take_many(seconds)
        lm = config.lm
        positions = LM_PROMPT_POSITIONS + LM_POSITIONS_PER_SECOND * seconds
        count = -(-positions // PAGE_TOKENS)
        shape = (lm.num_layers, 2, 4 * count, lm.num_kv_heads, PAGE_TOKENS, lm.head_dim)
        self.cache = torch.randn(shape, device="cuda").bfloat16()
        self.rows = torch.arange(0, 2 * count, 2, device="cuda")
        self.host_cache = torch.empty(*shape[:2], count, *shape[3:], dtype=torch.bfloat16, pin_memory=True)

    @property
    def num_bytes(self) -> int:
        return self.pool.frame_bytes * len(self.pages)

    def leave(self) -> None:
        for frame, page in zip(self.held, self.pages, strict=True):
            self.frames.store(frame, self.pool.parts(page))

    def come_back(self) -> None:
        for frame, page in zip(self.held, self.pages, strict=True):
            self.frames.load(frame, self.pool.parts(page))

    def row_leaves(self) -> None:
        self.host_cache.copy_(self.cache.index_select(2, self.rows), non_blocking=True)

    def row_comes_back(self) -> None:
        self.cache.index_copy_(2, self.rows, self.host_cache.to("cuda", non_blocking=True))


def is_bit_equal(stream: Stream) -> bool:
    """What was written over while it was away is as before."""
    before = [stream.pool.parts(page)[0].clone() for page in stream.pages]
    row = stream.cache.index_select(2, stream.rows).clone()
    stream.leave()
    stream.row_leaves()
    for page in stream.pages:
        stream.pool.parts(page)[0].fill_(float("nan"))
    stream.cache.fill_(float("nan"))
    stream.come_back()
    stream.row_comes_back()
    same = [
        torch.equal(stream.pool.parts(page)[0], old) for page, old in zip(stream.pages, before, strict=True)
    ]
    return all(same) and torch.equal(stream.cache.index_select(2, stream.rows), row)


def busy_ms(copies: Callable[[], object] | None, side: torch.cuda.Stream) -> float:
    """Matrix products on the default stream, alone or while ``copies`` run on another."""
    a = torch.randn(BUSY_SIZE, BUSY_SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    times: list[float] = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        if copies is not None:
            with torch.cuda.stream(side):
                copies()
        start.record()
        for _ in range(BUSY_PRODUCTS):
            torch.mm(a, a, out=out)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceiling_gb_per_s(runs: int, side: torch.cuda.Stream) -> dict[str, int]:
    """One large copy each way."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    out_ms = median_ms(lambda: host.copy_(device, non_blocking=True), runs, side)
    back_ms = median_ms(lambda: device.copy_(host, non_blocking=True), runs, side)
    return {"out": round(host.numel() / out_ms / 1e6), "back": round(host.numel() / back_ms / 1e6)}


def measure(seconds: int, runs: int) -> dict[str, Any]:
    """The document."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream = Stream(seconds)
    assert is_bit_equal(stream), "what came back is not what left"
    out_ms, back_ms = median_ms(stream.leave, runs, side), median_ms(stream.come_back, runs, side)
    alone = busy_ms(None, side)
    return {
        "bench": "host_pages",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "random-full",
        "precision": "bfloat16",
        "audio_seconds": seconds,
        "bytes": stream.num_bytes,
        "bit_equal": True,
        "out_ms": round(out_ms, 2),
        "back_ms": round(back_ms, 2),
        "out_gb_per_s": round(stream.num_bytes / out_ms / 1e6, 1),
        "back_gb_per_s": round(stream.num_bytes / back_ms / 1e6, 1),
        "ceiling_gb_per_s": ceiling_gb_per_s(runs, side),
        "row_bytes": stream.host_cache.numel() * stream.host_cache.element_size(),
        "row_out_ms": round(median_ms(stream.row_leaves, runs, side), 3),
        "row_back_ms": round(median_ms(stream.row_comes_back, runs, side), 3),
        "pin_s_per_gb": round(stream.pin_s / stream.num_bytes * 1e9, 3),
        "products_alone_ms": round(alone, 2),
        "products_beside_out_percent": round(100 * busy_ms(stream.leave, side) / alone),
        "products_beside_back_percent": round(100 * busy_ms(stream.come_back, side) / alone),
    }


def main() -> None:
    """Prints a line and the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=10, help="of audio whose pages move")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    with torch.inference_mode():
        document = measure(options.seconds, options.runs)
    print(
        f"{document['bytes'] / 1e9:.2f} GB: out {document['out_ms']} ms, back {document['back_ms']} ms;"
        f" bit-equal; matrix products meanwhile take {document['products_beside_out_percent']} and"
        f" {document['products_beside_back_percent']} % of their time"
    )
    print(json.dumps(document))


if __name__ == "__main__":
    main()
