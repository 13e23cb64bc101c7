"""The rungs of the ladder: what each switches on, cumulative and alone. Plain values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Sampling = Literal["loop", "vectorised", "device"]
Waiting = Literal["polling", "event"]
Borders = Literal["shared", "own", "early"]
Attention = Literal["any", "flash"]


@dataclass(frozen=True, slots=True)
class Switches:
    """One way to speak; the defaults are the reference's way.

    Attributes:
        keep_states: every layer's hidden states and the text head's scores are made in every step and thrown away.
        sampling: "loop": the nucleus in a Python loop over tensors, one token at a time; "vectorised": tensor
            operations, each token read back; "device": the token stays where it was drawn, bursts are read back.
        half_flow, half_lm: weights and activations in bfloat16.
        attention: "any": PyTorch chooses among all its fused ones; "flash": among those that plan nothing for a
            length that they have not seen (cuDNN's does).
        compiled: ``torch.compile`` for the blocks of the DiT that compute whole passes, and for the layers of the
            speech LM, whose steps have static shapes; one piece of code serves all blocks or layers.
        graphs: one step of the speech LM is one CUDA graph.
        waiting: "polling": the thread that renders sleeps 100 ms between two looks; "event": it is woken.
        parallel: the vocoder of a chunk runs beside the flow of the next one.
        borders: "shared": a first hop of 25 tokens that doubles to 100 and is never set back, so that a request
            leaves it to the next; "own": each request begins anew; "early": absolute borders every 25 tokens.
        incremental_flow, incremental_vocoder: nothing is computed twice; otherwise the whole prefix for each chunk.
        engine: Vivace's own engine, with its kernels where the device has any.
        int8: that engine with 8-bit products.
    """

    keep_states: bool = True
    sampling: Sampling = "loop"
    half_flow: bool = False
    half_lm: bool = False
    attention: Attention = "any"
    compiled: bool = False
    graphs: bool = False
    waiting: Waiting = "polling"
    parallel: bool = False
    borders: Borders = "shared"
    incremental_flow: bool = False
    incremental_vocoder: bool = False
    engine: bool = False
    int8: bool = False


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: as options and files spell it.
        title: as tables and pictures say it.
        about: one sentence on what changes.
        change: fields of ``Switches`` and their new values.
        alone: also measured with nothing but this change to the reference's way.
        needs: kind of device without which it cannot run; None: runs anywhere.
        carried_on: kinds of device where later rungs keep the change.
        missing: why it does not exist yet.
    """

    name: str
    title: str
    about: str
    change: tuple[tuple[str, object], ...] = ()
    alone: bool = False
    needs: Literal["cpu", "cuda"] | None = None
    carried_on: tuple[str, ...] = ("cpu", "cuda")
    missing: str | None = None


RUNGS = (
    Rung(
        "reference",
        "as the reference does it",
        "float32, eager; a second thread decodes, another looks every 100 ms and recomputes the prefix",
    ),
    Rung(
        "last-state",
        "last state only",
        "the speech LM makes the last hidden state and no scores of the text head",
        (("keep_states", False),),
        alone=True,
    ),
    Rung(
        "vectorised-sampling",
        "vectorised sampling",
        "nucleus and resampling as tensor operations, one read-back a token",
        (("sampling", "vectorised"),),
        alone=True,
    ),
    Rung(
        "device-sampling",
        "sampling on the device",
        "the drawn token is fed without the host; five tokens are read back at a time",
        (("sampling", "device"),),
        alone=True,
    ),
    Rung(
        "half-flow",
        "half-precision flow",
        "the flow's weights in bfloat16",
        (("half_flow", True),),
        alone=True,
        carried_on=("cuda",),
    ),
    Rung(
        "half-lm",
        "half-precision LM",
        "the speech LM's weights in bfloat16",
        (("half_lm", True),),
        alone=True,
        carried_on=("cuda",),
    ),
    Rung(
        "sdpa",
        "SDPA back end named",
        "flash attention, where PyTorch's own choice may be one that makes a plan for every new length",
        (("attention", "flash"),),
        alone=True,
        needs="cuda",
    ),
    Rung(
        "compile",
        "torch.compile",
        "layers of the speech LM with static shapes, and blocks of the DiT for any length",
        (("compiled", True),),
        alone=True,
        needs="cuda",
    ),
    Rung(
        "event-driven",
        "event-driven instead of polling",
        "the renderer is woken by the token that it waits for",
        (("waiting", "event"),),
        alone=True,
    ),
    Rung(
        "cuda-graphs",
        "CUDA graphs",
        "a step of the speech LM is one graph",
        (("graphs", True),),
        alone=True,
        needs="cuda",
    ),
    Rung(
        "parallel",
        "stages in parallel",
        "the vocoder has a thread (and a CUDA stream) of its own",
        (("parallel", True),),
        alone=True,
    ),
    Rung(
        "own-hop",
        "hop of each request's own",
        "a request does not begin with the hop at which the one before it ended",
        (("borders", "own"),),
        alone=True,
    ),
    Rung(
        "incremental-flow",
        "incremental flow",
        "keys, values and convolution inputs of finished chunks are kept, the voice's prompt too",
        (("incremental_flow", True),),
        alone=True,
    ),
    Rung(
        "incremental-vocoder",
        "incremental vocoder",
        "convolution inputs, phase and overlap are kept",
        (("incremental_vocoder", True),),
        alone=True,
    ),
    Rung(
        "early-border",
        "early border",
        "chunks of 25 tokens from the first absolute border on",
        (("borders", "early"),),
        alone=True,
    ),
    Rung(
        "kernels",
        "our kernels (the engine)",
        "the engine itself: fused kernels and graphs on a GPU, a lean decoding step on a CPU",
        (("engine", True),),
    ),
    Rung("onnx-flow", "ONNX Runtime flow", "the flow through ONNX Runtime", missing="not part of Vivace yet"),
    Rung("tensorrt-flow", "TensorRT flow", "the flow through TensorRT", missing="not part of Vivace yet"),
    Rung(
        "int8",
        "int8 products",
        "the engine with 8-bit weights and products in the DiT, and in a speech LM that is wide enough to gain by them",
        (("engine", True), ("int8", True)),
        needs="cpu",
        carried_on=(),
    ),
    Rung("fp8", "fp8 weights", "8-bit floating-point weights", missing="not part of Vivace yet"),
    Rung("int4", "int4 weights", "4-bit weights of the speech LM", missing="not part of Vivace yet"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One measurement: a rung, and the switches that it runs with.

    Attributes:
        key: name of its file. reason: why it does not run here, or None.
    """

    rung: Rung
    kind: Literal["cumulative", "alone"]
    switches: Switches
    reason: str | None = None

    @property
    def key(self) -> str:
        return self.rung.name if self.kind == "cumulative" else f"{self.rung.name}-alone"


def plan_ladder(device_type: str, *, alone: bool = True, names: tuple[str, ...] = ()) -> list[Plan]:
    """All measurements on a kind of device, bottom rung first, each followed by the same change alone.

    Args:
        device_type: "cpu" or "cuda".
        names: some of the rungs; none: all. What they build on stays switched on.
    """
    plans = []
    current = Switches()
    for rung in RUNGS:
        reason = rung.missing
        if reason is None and rung.needs not in (None, device_type):
            reason = "needs a CUDA device" if rung.needs == "cuda" else "for a CPU"
        switches = replace(current, **dict(rung.change))  # type: ignore[arg-type]
        if not names or rung.name in names:
            plans.append(Plan(rung, "cumulative", switches, reason))
            if alone and rung.alone and reason is None:
                only = replace(Switches(), **dict(rung.change))  # type: ignore[arg-type]
                plans.append(Plan(rung, "alone", only))
        if reason is None and device_type in rung.carried_on:
            current = switches
    return plans
