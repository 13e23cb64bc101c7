"""Compiles every kernel of an engine for some GPUs, without one: processor seconds, shared memory, spilled registers.

python -m benchmarks.kernels.compile [--targets 8.0:108 9.0:132] [--generations 3 2 1] [--dtype bfloat16] [--streams 8]
                                     [--workers 2] [--keep FOLDER]

Fails where a kernel does not compile, or needs more shared memory than a block of its GPU has. All targets and
generations take about eight minutes of processor time. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends import nvidia

from vivace.engine.kernel_plan import EngineKind, plan
from vivace.kernels.compile_pool import CompilePool, Outcome
from vivace.kernels.gpu import Gpu
from vivace.random_checkpoint import full_config

TARGETS = ("7.5:40", "8.0:108", "8.6:82", "8.9:128", "9.0:132", "10.0:148", "12.0:170")
"""Compute capability and multiprocessors: T4, A100, 3090, 4090, H200, B200, 5090."""

DUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
MOST_STACK_BYTES = 64
"""A kernel with more of it spills registers; less is what slow paths of sine and exponential take."""


def describe(kernel: Any, compiled: Any) -> dict[str, int]:
    """What a kernel takes, read from its code. Runs in the child."""
    is_triton = not isinstance(compiled, bytes)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"] if is_triton else compiled)
        file.flush()
        told = subprocess.run(
            [DUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (max(map(int, re.findall(rf"{name}:(\d+)", told))) for name in ("REG", "STACK"))
    shared = compiled.metadata.shared if is_triton else 0  # a source says by itself whether it fits
    return {"registers": registers, "stack": stack, "shared": shared}


def problem(outcome: Outcome, gpu: Gpu) -> str | None:
    """What keeps a kernel from running."""
    if outcome.error is not None:
        return outcome.error.splitlines()[0]
    if outcome.result["shared"] > gpu.block_bytes:
        return f"{outcome.result['shared']} bytes of shared memory, a block has {gpu.block_bytes}"
    return None


def compile_all(generation: int, gpu: Gpu, dtype: torch.dtype, streams: int, workers: int) -> dict[str, Any]:
    """One row."""
    started = time.process_time()
    kernels: list[Any] = []
    plan(EngineKind(full_config(generation), dtype, gpu, streams), kernels.append)
    planned_s = time.process_time() - started
    pool = CompilePool(workers, describe)
    for kernel in kernels:
        pool.add(kernel)
    outcomes = pool.finish()
    good = [o for o in outcomes if o.error is None]
    slowest = max(outcomes, key=lambda o: o.seconds, default=None)
    return {
        "generation": generation,
        "capability": ".".join(map(str, gpu.capability)),
        "precision": str(dtype).removeprefix("torch."),
        "streams": streams,
        "kernels": len(kernels),
        "plan_cpu_s": round(planned_s, 1),
        "compile_cpu_s": round(sum(o.seconds for o in outcomes), 1),
        "slowest": None if slowest is None else [slowest.kernel.name, round(slowest.seconds, 1)],
        "most_shared_bytes": max((o.result["shared"] for o in good), default=0),
        "spilled": sorted(
            {(o.kernel.name, o.result["stack"]) for o in good if o.result["stack"] > MOST_STACK_BYTES}
        ),
        "problems": [[o.kernel.name, text] for o in outcomes if (text := problem(o, gpu)) is not None],
    }


def read_target(text: str) -> Gpu:
    """``9.0:132``."""
    capability, multiprocessors = text.split(":")
    major, minor = capability.split(".")
    return Gpu((int(major), int(minor)), int(multiprocessors))


def main() -> None:
    """Prints a line for each row, and the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="compute capability:multiprocessors")
    parser.add_argument("--generations", nargs="+", type=int, default=(3, 2, 1))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--keep", type=Path, help="folder for Triton's cache; none: thrown away, so that all is compiled"
    )
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = str(options.keep or folder)
        for target in options.targets:
            for generation in options.generations:
                dtype = getattr(torch, options.dtype)
                row = compile_all(generation, read_target(target), dtype, options.streams, options.workers)
                rows.append(row)
                print(json.dumps(row), flush=True)
    print(
        json.dumps(
            {"bench": "compile", "triton": triton.__version__, "torch": torch.__version__, "rows": rows}
        )
    )
    if any(row["problems"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
