"""The figures of one engine for a server's metrics, by their names there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vivace.engine.scheduler import Scheduler
    from vivace.engine.stages import Stages


def engine_gauges(
    scheduler: Scheduler, stages: Stages, last_plan: tuple[int, int], device: torch.device
) -> dict[str, float]:
    """May be asked from any thread.

    Args:
        last_plan: chunks and rows of the latest step.
    """
    requests, limit = scheduler.requests, scheduler.limit
    chunks, rows = last_plan
    figures: dict[str, float] = {
        "queue_length": len(requests.queue),
        "batch_size": rows,
        "flow_batch_size": chunks,
        "flow_batch_limit": limit.chunks,
        "pages_used": requests.kv_used,
        "flow_pages_used": requests.held,
        "engine_busy_ratio": limit.busy_percent / 100,
        "step_seconds_p99": limit.step_ms_p99 / 1000,
    }
    if stages.is_paged:
        capacity = scheduler.capacity
        figures |= {"pages_total": capacity.kv_pages, "flow_pages_total": capacity.flow_pages}
    if stages.swapper is not None:
        figures |= {
            "host_pages_used": requests.host_used,
            "host_pages_total": stages.swapper.num_frames,
            "streams_on_host": requests.num_away,
            "swaps_out": requests.swaps_out,
            "swaps_in": requests.swaps_in,
        }
    if device.type == "cuda":
        figures["gpu_memory_bytes"] = torch.cuda.memory_allocated(device)
    return {name: float(value) for name, value in figures.items()}
