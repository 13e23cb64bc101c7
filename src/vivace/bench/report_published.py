"""Figures that others reported for their own optimised CosyVoice, on their own machines; shown beside ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reported:
    """One report: what it measured before and after; a dash where it names no figure."""

    title: str
    hardware: str
    model: str
    rows: tuple[tuple[str, str, str], ...]


REPORTS = (
    Reported(
        "First report: a streaming pipeline step by step",
        "NVIDIA RTX 3090",
        "CosyVoice 3, streaming",
        (
            ("TTFB", "2.2 s", "0.8 s"),
            ("RTF", "1.5", "0.42"),
            ("TPS", "16", "65 (speech LM alone about 100)"),
        ),
    ),
    Reported(
        "Second report: int8, TensorRT and dynamic batches",
        "NVIDIA T4",
        "CosyVoice-300M",
        (
            ("one sentence, batch 1", "1890 ms", "520 ms"),
            ("sentences per second", "0.53", "9.8 (dynamic batches of up to 32)"),
            ("memory", "–", "1.2 GB"),
            ("host time to dispatch a step", "0.8 ms", "0.08 ms"),
        ),
    ),
    Reported(
        "The reference implementation, measured on our side",
        "NVIDIA H200",
        "CosyVoice 3 sizes with random weights, streaming, 3 s voice prompt, 23.2 s of audio",
        (
            ("TTFB, float32", "2.39 s", "–"),
            ("RTF, float32", "1.00", "–"),
            ("TPS of the speech LM, float32", "41", "–"),
            ("TTFB, float16 autocast", "2.96 s", "–"),
            ("RTF, float16 autocast", "2.19", "–"),
        ),
    ),
)
