"""The steps of ``benchmarks.publish``: which figures of a machine are published, and in which order.

Usual times are those of an H200 for ``cuda_steps``, of two cores for ``cpu_steps``.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence

from benchmarks.steps import ROOT, Step

JOBS = 200
"""Sentences of the step ``batch``."""
COMPARE_S = 110
"""For both sides; what was measured until then counts."""
HALF = "--device cuda --dtype bfloat16"
SERVING = f"vivace bench serving -m full {HALF} --max-streams 256 --seconds 6"
SINGLE = "--requests 10 --runs 3"
FOLDERS = {3: "full", 2: "full2", 1: "full1"}
"""Random weights at full size, by generation."""
THROUGHPUT_S = {(1, "bfloat16"): 48, (1, "float32"): 100, (3, "bfloat16"): 60}
CHECKPOINTS = {3: "checkpoint", 2: "checkpoint2", 1: "checkpoint1"}


def checkpoint(generation: int, usual_s: float) -> Step:
    """The folder that other steps read; made once."""
    name, folder = CHECKPOINTS[generation], FOLDERS[generation]
    command = f"vivace random-checkpoint {folder} --size full --generation {generation}"
    clears = (folder, f"{folder}.part")
    return Step(name, usual_s, 180, command, makes=folder, clears=clears, has_document=False)


def throughput(generation: int, dtype: str) -> Step:
    """In halves also from where it started, which is the same work in float32 by plain operations.

    As a whole for generation 1 alone: what the others stream is exact, and is what serves.
    """
    folder, needs = FOLDERS[generation], (CHECKPOINTS[generation],)
    whole = "--whole " if generation == 1 else ""
    how = "--start" if dtype == "bfloat16" else "--batch 1,8,32"
    command = f"vivace bench throughput -m {folder} --device cuda --dtype {dtype} {whole}{how}"
    usual_s = THROUGHPUT_S.get((generation, dtype), 60)
    return Step(f"throughput-{generation}-{dtype}", usual_s, 200, command, needs)


def compare(generation: int, reference: Sequence[str]) -> Step:
    """Beside the reference implementation."""
    command = (
        f"python -m benchmarks.compare_reference --model {FOLDERS[generation]} --seconds 10 --runs 2 {HALF}"
        f" --limit-seconds {COMPARE_S} {shlex.join(reference)}"
    )
    return Step(f"compare-{generation}", 80, COMPARE_S + 20, command, needs=(CHECKPOINTS[generation],))


def tests(name: str, pattern: str, beside: int) -> Step:
    """Tests that run on a GPU where there is one; side by side where pytest can, as far as engines leave memory."""
    files = shlex.join(str(path) for path in sorted((ROOT / "tests").glob(pattern)))
    workers = f"-n {beside} " if importlib.util.find_spec("xdist") else ""
    command = (
        f"python -m pytest -p no:cacheprovider -p no:benchmark -q --durations=5 --maxfail=40 {workers}{files}"
    )
    return Step(name, 60, 170, command, has_document=False)


def cuda_steps(reference: Sequence[str] = ()) -> list[Step]:
    """Those that nothing else says first, then those that were measured before.

    Args:
        reference: options of ``benchmarks.compare_reference``; none: nothing is compared.
    """
    full = ("checkpoint",)
    single = f"vivace bench single {HALF}"
    start = f"{single} -m full --requests 1 --runs 1"
    ladder = "vivace bench ladder -m full --device cuda --out ladder --limit-seconds {seconds}"
    ways = "persistent,kernels,deterministic,graph,eager,eager-flash,eager-efficient,eager-math"
    return [
        checkpoint(3, 13),
        # Time to ready with no compiled code at hand, then with all of it: start_s of the two.
        Step("single-cold", 35, 180, start, full, makes="cache", clears=("cache",)),
        Step("single", 16, 120, f"{single} -m full {SINGLE} --timeline timeline.svg --long-seconds 32", full),
        Step("single-warm", 12, 60, start, ("checkpoint", "single-cold")),
        Step("serving-streams", 155, 220, f"{SERVING} --streams 1,32,128,300,400", full),
        Step("serving-more", 124, 220, f"{SERVING} --streams 8,64,200 --offline 400", full),
        Step("serving-rates", 79, 220, f"{SERVING} --streams '' --rates 10,20,30,40", full),
        # One stream in an engine that is opened for many, as vivace bench single measures it in one opened for it.
        Step("serving-reply", 23, 90, f"{SERVING} --streams 1 --loop reply --ramp 1", full),
        Step("serving-deterministic", 49, 120, f"{SERVING} --streams 32,128 --deterministic", full),
        Step(
            "server",
            100,
            200,
            f"python -m benchmarks.server_speech --model full {HALF} --streams 1,32,128,300",
            full,
        ),
        Step("host-pages", 7, 60, "python -m benchmarks.kernels.host_pages"),
        Step("llm", 80, 180, f"vivace bench llm {HALF} --choices {ways}"),
        tests("tests-cuda", "test_cuda_*.py", beside=2),
        tests("tests-kernels", "test_kernels_*.py", beside=6),
        checkpoint(2, 8),
        checkpoint(1, 9),
        *(
            Step(
                f"single-{generation}",
                usual_s,
                120,
                f"{single} -m {FOLDERS[generation]} {SINGLE}",
                needs=(CHECKPOINTS[generation],),
            )
            for generation, usual_s in ((2, 30), (1, 41))
        ),
        throughput(2, "bfloat16"),
        throughput(1, "bfloat16"),
        *(compare(generation, reference) for generation in (2, 1) if reference),
        Step("limits", 35, 90, f"vivace limits -m full {HALF} --measure", full),
        throughput(3, "bfloat16"),
        Step("profile", 20, 90, f"vivace bench profile -m full {HALF} --out profile", full),
        Step(
            "batch",
            60,
            180,
            f"vivace batch jobs.jsonl -m full {HALF} --out batch --json",
            full,
            clears=("batch",),
        ),
        throughput(1, "float32"),
        throughput(2, "float32"),
        Step("ladder", 120, 300, ladder, full, goes_on=True),
        Step("kernels-dit", 60, 180, "python -m benchmarks.kernels.dit"),
        Step("kernels-hift", 30, 90, "python -m benchmarks.kernels.hift"),
        Step("kernels-hift-long", 18, 60, "python -m benchmarks.kernels.hift --long"),
        Step("kernels-lm-resident", 15, 60, "python -m benchmarks.kernels.lm_resident --profile"),
        Step("kernels-lm", 20, 60, "python -m benchmarks.kernels.lm"),
        Step("llm-compile", 90, 180, f"vivace bench llm {HALF} --batch 1,32 --choices compile"),
        *(compare(generation, reference) for generation in (3,) if reference),
        throughput(3, "float32"),
    ]


def cpu_steps(*, judge: bool) -> list[Step]:
    """The same for a CPU; usual times are those of two cores.

    Args:
        judge: whether word error rates can be measured.
    """
    heard = "--judge " if judge else ""
    slow = "--requests 3 --runs 3 --seconds 2"
    full = ("checkpoint",)
    return [
        Step("single-mini", 75, 600, f"vivace bench single {SINGLE}"),
        Step("limits", 40, 180, "vivace limits --measure"),
        Step("profile", 30, 180, "vivace bench profile --out profile"),
        Step("throughput", 90, 600, "vivace bench throughput"),
        Step(
            "ladder",
            120,
            1800,
            f"vivace bench ladder {heard}--out ladder --limit-seconds {{seconds}}",
            goes_on=True,
        ),
        checkpoint(3, 25),
        Step("single-int8", 180, 900, f"vivace bench single -m full --dtype int8 {slow}", full),
        Step("single-bfloat16", 240, 900, f"vivace bench single -m full --dtype bfloat16 {slow}", full),
    ]
