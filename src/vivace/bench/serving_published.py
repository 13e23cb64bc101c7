"""What others publish about serving CosyVoice 3 on one GPU; shown beside ours, marked as theirs.

Their texts, prompts, utterance lengths and GPUs differ, and a client of theirs asks again with the last chunk, not
behind the playback. Nothing here was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

_NARI = "yuekaizhang/faster-cosyvoice docs/cosyvoice3-h100-nari-benchmark-results-2026-08-28.md"
_REVIEW = "docs/nari-acceleration-review.md"


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """One load: requests side by side, or per second.

    Attributes:
        ttfb_ms_p50: median of the first audio. audio_seconds_per_second: of the whole server; None: not told.
        broken_percent: requests with an underrun, of all; None: not told.
    """

    load: float
    ttfb_ms_p50: float
    audio_seconds_per_second: float | None = None
    broken_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """One system's figures, and the files in which they stand."""

    system: str
    hardware: str
    sources: tuple[str, ...]
    streams: tuple[PublishedPoint, ...] = ()
    rates: tuple[PublishedPoint, ...] = ()


PUBLISHED = (
    Published(
        "faster-cosyvoice",
        "H100",
        (_NARI, _REVIEW),
        streams=(
            PublishedPoint(1, 85.9, 18.6),
            PublishedPoint(4, 186, 39.9, 0.0),
            PublishedPoint(8, 341, 45.5, 0.0),
            PublishedPoint(14, 433, 47.9, 0.0),
            PublishedPoint(16, 447, 47.8),
        ),
        rates=(PublishedPoint(6, 218, 28.8), PublishedPoint(8, 335, None, 0.0)),
    ),
    Published(
        "Triton + TensorRT-LLM",
        "H100",
        (_NARI,),
        streams=(
            PublishedPoint(1, 110, 11.5),
            PublishedPoint(4, 219, 27.1),
            PublishedPoint(10, 503, 27.1, round(100 * 129 / 355, 1)),
        ),
    ),
    Published(
        "vLLM-Omni + TensorRT",
        "H100",
        (_NARI,),
        streams=(
            PublishedPoint(1, 168, 8.8),
            PublishedPoint(4, 353, 20.0),
            PublishedPoint(10, 920, 21.6),
        ),
    ),
)
