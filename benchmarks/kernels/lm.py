"""The resident kernel of the speech LM at full size with random weights: microseconds per token, by context.

python -m benchmarks.kernels.lm [--contexts 30 240 500 1000 1900]

Needs a CUDA device of compute capability 9.0. The ceiling (copy) is measured in the same run; the last line is one JSON
document. Sampling is part of every step, as in the engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vivace.bench.llm import copy_bandwidth, floor_bytes, random_lm
from vivace.config import SpeechLMConfig
from vivace.engine.lm_kernels import draw_rows, single_kernel
from vivace.engine.sampler import TokenKind
from vivace.models.lm_launches import OUT_TOKENS, PAGE_TOKENS, RowCommand
from vivace.models.lm_paged import PagedLM
from vivace.random_checkpoint import full_config

_BURST = 4
"""Launches that are queued behind each other."""


def open_paged(longest: int) -> PagedLM:
    """One row with room for ``longest`` positions, at rest; sampling as the model's configuration says."""
    config = full_config().lm
    assert isinstance(config, SpeechLMConfig)
    pages = -(-longest // PAGE_TOKENS)
    paged = PagedLM(
        random_lm(config, "cuda", torch.bfloat16),
        draw_rows(config),
        num_pages=pages + 1,
        num_slots=1,
        max_positions=pages * PAGE_TOKENS,
        use_kernels=True,
        pdl=True,
    )
    paged.table[0] = 1 + torch.randperm(pages, device="cuda")
    paged.pool.normal_()
    for name in ("top_p", "top_k", "win_size", "tau_r"):
        getattr(paged.state, name).fill_(getattr(config.sampling, name))
    paged.state.temperature.fill_(1.0)
    paged.state.kind.fill_(int(TokenKind.SPEECH))
    return paged


def reset(paged: PagedLM, context: int) -> None:
    """Back to ``context`` positions, with tokens to make."""
    state = paged.state
    state.length.fill_(context)
    for tensor in (state.place, state.decoded, state.stop, state.token, state.out_count):
        tensor.zero_()
    state.remaining.fill_(OUT_TOKENS)
    torch.cuda.synchronize()


def launch_us(paged: PagedLM, context: int, launch: Callable[[], object], runs: int) -> list[float]:
    """Times on the device of ``launch`` at ``context``, sorted."""
    times = []
    for index in range(runs + 2):
        reset(paged, context)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        launch()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) * 1e3)
        if int(paged.state.out_count[0]) != OUT_TOKENS:
            raise RuntimeError("the launch has not made all its tokens")
    return sorted(times)


def paged_us(paged: PagedLM, context: int, launches: int, runs: int) -> float:
    """Median wall-clock time of launches through ``PagedLM``, until their tokens are on the host."""
    times = []
    command = RowCommand(0, OUT_TOKENS, int(TokenKind.SPEECH), 0)
    for index in range(runs + 2):
        reset(paged, context)
        begun = time.perf_counter()
        under_way = [paged.launch([command], OUT_TOKENS) for _ in range(launches)]
        results = [paged.collect(launch) for launch in under_way]
        if index >= 2:
            times.append((time.perf_counter() - begun) * 1e6)
        if any(len(result[0].ids) != OUT_TOKENS for result in results):
            raise RuntimeError("a launch has not made all its tokens")
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    """Prints a table and the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[30, 240, 500, 1000, 1900])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    paged = open_paged(max(options.contexts) + _BURST * OUT_TOKENS)
    kernel = single_kernel(paged)
    if kernel is None:
        raise SystemExit("the resident kernel does not fit this device")
    paged.use_single(kernel)
    copy = copy_bandwidth(torch.device("cuda"))
    slots = torch.zeros(1, dtype=torch.int32, device="cuda")
    config = paged.config
    assert isinstance(config, SpeechLMConfig)

    def launch() -> None:
        kernel.launch(paged.state, slots, paged.pool, paged.table, OUT_TOKENS)

    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        times = [us / OUT_TOKENS for us in launch_us(paged, context, launch, options.runs)]
        us, moved = statistics.median(times), floor_bytes(config, 1, context + OUT_TOKENS // 2, 2)
        one, burst = (paged_us(paged, context, count, options.runs) for count in (1, _BURST))
        rows.append(
            {
                "context": context,
                "us_per_step": round(us, 1),
                "us_per_step_least": round(times[0], 1),
                "tps": round(1e6 / us),
                "gb_per_s": round(moved / us / 1e3),
                "floor_us": round(moved / copy * 1e6, 1),
                "floor_share": round(moved / copy * 1e6 / us, 3),
                "us_per_token_one_launch": round(one / OUT_TOKENS, 1),
                "us_per_token_behind_each_other": round((burst - one) / (_BURST - 1) / OUT_TOKENS, 1),
            }
        )
        print(rows[-1])
    document = {
        "bench": "lm",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "random-full",
        "precision": "bfloat16",
        "tokens_per_launch": OUT_TOKENS,
        "copy_gb_per_s": round(copy / 1e9),
        "contexts": rows,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
