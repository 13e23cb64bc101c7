"""Variants of the resident kernel of the speech LM at full size with random weights: microseconds per step, and where
they go.

python -m benchmarks.kernels.lm_resident --variants default FLIGHT=3 FLIGHT=4,chunk_bytes=4096,stages=48 [--profile]

A variant is what the source is compiled with (``NAME=value``, several joined by commas; see lm_persistent.cu) and
what ``Tuning`` has (``stages``, ``chunk_bytes``, …). Each one's scores and tokens are compared with the first one's.
Its time is that of launches of 32 steps, sampling included. With ``--profile`` every variant is compiled once more
with marks: clocks between two marks, mean of the steps of one launch, in three kinds of blocks. Marks take time
themselves, and one that follows a barrier of the block may be taken before it. Needs a CUDA device of compute
capability 9.0. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

MARK_ROLES = ("first warp", "last warp", "helper", "copies")
"""Threads of a block that keep marks."""

MARKS = 32
WORKER_MARKS = (
    *("query-key-value weights", "x of the layer before", "products", "query or tile made ready"),
    *("query waited for", "attention", "output weights", "parts waited for", "parts joined, products"),
    *("own rows put", "gate and up weights", "x waited for", "gate and up products", "down weights"),
    *("their sums", "inner numbers", "down products put", "sums waited for", "sums added, rows put"),
    *("head weights", "last x waited for", "scores put", "rest of sampling", "scores waited for"),
    *("largest told", "threshold and half of the sum", "candidates and sum", "sorted", "drawn"),
)
OTHER_MARKS = {
    "helper": ("query waited for", "query and new position", "warps waited for", "joined and put", "token"),
    "copies": ("room waited for", "earlier copies waited for", "copy asked for"),
}


def read_variant(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Fields of ``Tuning`` and choices of the source. ``default`` is neither.

    Raises:
        ValueError: not of the form ``NAME=value,…``.
    """
    fields: dict[str, int] = {}
    choices: dict[str, int] = {}
    for part in text.split(","):
        if part == "default":
            continue
        name, separator, value = part.partition("=")
        if not (name and separator):
            raise ValueError(f"a variant is NAME=value,… or default, not {text!r}")
        (choices if name.isupper() else fields)[name] = int(value)
    return fields, choices


class Rig:
    """The model, a row at rest, and a kernel for each variant."""

    def __init__(self, context: int, steps: int) -> None:
        from benchmarks.kernels.lm import open_paged
        from vivace.kernels.lm_persistent import Shape, pack_layer

        torch.manual_seed(0)
        self.context, self.steps = context, steps
        self.paged = paged = open_paged(context + 2 * steps)
        paged.pool.normal_()
        self.slots = torch.zeros(1, dtype=torch.int32, device="cuda")
        config: Any = paged.config
        self.shape = Shape.of(config)
        half = config.intermediate_size
        self.layers = [
            pack_layer(
                *(one.before, one.qkv, one.qkv_bias, one.out, one.between),
                *(one.gate_up[:half], one.gate_up[half:], one.down),
            )
            for one in paged.weights.layers
        ]

    def kernel(self, text: str, profile: bool = False) -> Any:
        """The kernel of a variant. Raises as ``PersistentKernel`` does."""
        from vivace.kernels.lm_persistent import PersistentKernel, Tuning

        fields, choices = read_variant(text)
        if profile:
            choices["PROFILE"] = 1
        weights: Any = self.paged.weights
        tuning: Any = Tuning(**fields, choices=tuple(choices.items()))
        kernel = PersistentKernel(
            self.shape,
            self.layers,
            weights.last,
            weights.head[: self.shape.vocab],
            weights.speech,
            torch.stack((self.paged.cos, self.paged.sin), dim=-1),
            tuning,
        )
        if profile:
            more = _grid() * len(MARK_ROLES) * MARKS
            kernel.words = torch.cat((kernel.words, kernel.words.new_zeros(more, 2)))
        return kernel

    def launch(self, kernel: Any) -> float:
        """Microseconds of one launch.

        Raises:
            RuntimeError: it has not made all its tokens.
        """
        state = self.paged.state
        state.length.fill_(self.context)
        for tensor in (state.place, state.decoded, state.stop, state.token, state.out_count):
            tensor.zero_()
        state.remaining.fill_(self.steps)
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        kernel.launch(state, self.slots, self.paged.pool, self.paged.table, self.steps)
        end.record()
        end.synchronize()
        if int(state.out_count[0]) != self.steps:
            raise RuntimeError("the launch has not made all its tokens")
        return float(start.elapsed_time(end)) * 1e3

    def tokens(self) -> list[int]:
        return self.paged.state.out[0, : self.steps].tolist()

    def scores(self, kernel: Any) -> torch.Tensor:
        """Of one step from the rig's own context, ``[vocab]``."""
        steps, self.steps = self.steps, 1
        self.launch(kernel)
        self.steps = steps
        scores: torch.Tensor = kernel.logits.clone()
        return scores


def _grid() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def profile_rows(marks: torch.Tensor, attending: int, layers: int, steps: int) -> list[dict[str, Any]]:
    """Mean clocks per layer (marks of the head and sampling: per step) from ``[blocks, roles, marks]`` sums."""
    blocks = {
        "attending": slice(0, attending),
        "others": slice(attending, marks.shape[0] - 1),
        "sampling": slice(-1, None),
    }
    rows = []
    for role, number in zip(MARK_ROLES, range(len(MARK_ROLES)), strict=True):
        for index, name in enumerate(OTHER_MARKS.get(role, WORKER_MARKS)):
            per_step = role == "copies" or index >= 19 or (role == "helper" and index == 4)
            row: dict[str, Any] = {
                "role": role,
                "mark": index,
                "what": name,
                "per": "step" if per_step else "layer",
            }
            for kind, span in blocks.items():
                mean = float(marks[span, number, index].double().mean())
                row[kind] = round(mean / steps / (1 if per_step else layers))
            rows.append(row)
    return rows


def measure(rig: Rig, names: Sequence[str], runs: int, profile: bool) -> list[dict[str, Any]]:
    """A row for each variant; what does not compile has ``problem`` instead of times."""
    rows: list[dict[str, Any]] = []
    expected: tuple[torch.Tensor, list[int]] | None = None
    for name in names:
        try:
            kernel = rig.kernel(name)
            scores = rig.scores(kernel)
            rig.launch(kernel)
            tokens = rig.tokens()
            times = sorted(rig.launch(kernel) / rig.steps for _ in range(runs))
        except (RuntimeError, ValueError, TypeError) as error:
            rows.append({"variant": name, "problem": str(error)[:2000]})
            print(rows[-1], flush=True)
            continue
        expected = expected or (scores, tokens)
        row: dict[str, Any] = {
            "variant": name,
            "us_per_step": round(statistics.median(times), 2),
            "us_per_step_least": round(times[0], 2),
            "scores_differ_by": float((scores - expected[0]).abs().max()),
            "equal_tokens": next(
                (i for i, (a, b) in enumerate(zip(tokens, expected[1], strict=True)) if a != b), len(tokens)
            ),
        }
        print(row, flush=True)
        if profile:
            lines = _profile(rig, name)
            row["profile"] = lines
            for line in lines:
                print("   ", line, flush=True)
        rows.append(row)
        del kernel
    return rows


def _profile(rig: Rig, name: str) -> list[dict[str, Any]]:
    kernel, shape = rig.kernel(name, profile=True), rig.shape
    rig.launch(kernel)
    rig.launch(kernel)
    count = _grid() * len(MARK_ROLES) * MARKS
    marks = kernel.words[-count:, 0].reshape(_grid(), len(MARK_ROLES), MARKS)
    tiles = -(-(rig.context + rig.steps // 2) // 16)
    splits = min(8, max(1, -(-tiles // (shape.hidden // 64))))
    return profile_rows(marks.cpu(), splits * shape.heads, shape.layers, rig.steps)


@torch.inference_mode()
def main() -> None:
    """Prints a line for each variant, and the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda"], default="cuda")
    parser.add_argument("--variants", nargs="+", default=["default"])
    parser.add_argument("--context", type=int, default=500, help="positions before the launch")
    parser.add_argument("--steps", type=int, default=32, help="tokens of a launch")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    rows = measure(Rig(options.context, options.steps), options.variants, options.runs, options.profile)
    document = {
        "bench": "lm_resident",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "context": options.context,
        "tokens_per_launch": options.steps,
        "variants": rows,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
