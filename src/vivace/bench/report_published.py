"""Figures that others reported for their own optimised CosyVoice, on their own machines; shown beside ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a report; a dash where it names no figure.

    Attributes:
        ours: member of a ladder's row, or of ``per_phrase``, that is the same kind of figure; None: there is none.
    """

    label: str
    before: str
    after: str
    ours: str | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    """One report: what it measured before and after.

    Attributes:
        note: what to know about ours beside it; ``{phrases}`` stands for the lengths of the ladder's phrases.
    """

    title: str
    hardware: str
    model: str
    figures: tuple[Figure, ...]
    note: str = ""


REPORTS = (
    Reported(
        "First report: a streaming pipeline step by step",
        "NVIDIA RTX 3090",
        "CosyVoice 3, streaming",
        (
            Figure("TTFB", "2.2 s", "0.8 s", "ttfb_ms_p50"),
            Figure("RTF", "1.5", "0.42", "rtf"),
            Figure("TPS", "16", "65 (speech LM alone about 100)", "tps"),
        ),
    ),
    Reported(
        "Second report: int8, TensorRT and dynamic batches",
        "NVIDIA T4",
        "CosyVoice-300M",
        (
            Figure("one sentence, batch 1", "1890 ms", "520 ms", "phrase_ms"),
            Figure("sentences per second, one after the other", "0.53", "–", "phrases_per_second"),
            Figure("sentences per second, dynamic batches of up to 32", "–", "9.8"),
            Figure("memory", "–", "1.2 GB", "peak_memory_bytes"),
            Figure("host time to dispatch a step", "0.8 ms", "0.08 ms", "host_us_per_step"),
        ),
        note="“Here” a sentence is a phrase of the ladder: the mean of those of {phrases} of audio, streamed one after"
        " the other. The ladder speaks no batches; “vivace bench throughput --batch 1,32” measures them.",
    ),
    Reported(
        "The reference implementation itself, measured on our side",
        "NVIDIA H200",
        "CosyVoice 3 sizes with random weights, streaming, 3 s voice prompt, 23.2 s of audio",
        (
            Figure("TTFB, float32", "2.39 s", "–", "ttfb_ms_p50"),
            Figure("RTF, float32", "1.00", "–", "rtf"),
            Figure("TPS of the speech LM, float32", "41", "–", "tps"),
            Figure("TTFB, float16 autocast", "2.96 s", "–"),
            Figure("RTF, float16 autocast", "2.19", "–"),
        ),
    ),
)
