"""Values that cross a border between stages or reach the caller. No tensor library at run time."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

FinishReason = Literal["stop", "length", "cancelled", "error"]


def plain_number(value: Any) -> Any:
    """A number of another library, such as NumPy's, as Python's own int or float; anything else as it is."""
    if value is None or isinstance(value, str) or type(value) in (bool, int, float):
        return value
    if "bool" in str(getattr(value, "dtype", "")):  # of a tensor even this has __index__
        return value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, Real) else value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How speech tokens are drawn. ``None`` takes the value of the model's own configuration.

    Numbers may be of any kind; they are kept as int or float.

    Attributes:
        seed: every draw of the request is a function of it; 0 … 2**63 - 1.
        top_p, top_k: the nucleus.
        win_size, tau_r: repetition-aware resampling looks back ``win_size`` tokens and resamples when the
            token drawn fills at least ``win_size * tau_r`` of them.
        temperature: divides the logits; 1.0 is the model's own rule, 0 takes the likeliest token.
    """

    seed: int = 0
    top_p: float | None = None
    top_k: int | None = None
    win_size: int | None = None
    tau_r: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, plain_number(getattr(self, each.name)))


@dataclass(slots=True)
class StageTimes:
    """Milliseconds that each part of a request took so far."""

    text_ms: float = 0.0
    prompt_ms: float = 0.0
    lm_ms: float = 0.0
    flow_ms: float = 0.0
    vocoder_ms: float = 0.0
    waiting_ms: float = 0.0

    def copy(self) -> StageTimes:
        return StageTimes(
            self.text_ms, self.prompt_ms, self.lm_ms, self.flow_ms, self.vocoder_ms, self.waiting_ms
        )


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """A piece of finished audio.

    Attributes:
        samples: float32 ``[num_samples]`` in -1 … 1 at ``sample_rate_hz``.
        index: 0, 1, 2 … within the request.
        segment: which segment of a long text the chunk belongs to.
        start_s: where the chunk begins in the request's audio, seconds.
        elapsed_ms: from the request's start to the moment the chunk was ready.
        times: stage times of the request so far.
        is_last: the request ended well with this chunk; a stream that fails never yields one.
    """

    samples: Samples
    sample_rate_hz: int
    index: int
    segment: int
    start_s: float
    elapsed_ms: float
    times: StageTimes
    is_last: bool


@dataclass(slots=True)
class SynthesisResult:
    """What a finished request amounts to. The field names are those of the benchmark rows.

    Attributes:
        ttfb_ms: from the request's start to its first samples.
        rtf: wall time ÷ audio time.
        tps: speech tokens per second of speech-LM time.
        spoken_text: of each segment, as the model read it.
        skipped_text: what the model cannot read and did not speak, such as words of another script in a text for the
            embedded model; at most 50 entries, then ``…``.
    """

    samples: Samples
    sample_rate_hz: int
    audio_seconds: float
    ttfb_ms: float
    wall_ms: float
    rtf: float
    tps: float
    num_text_tokens: int
    num_speech_tokens: int
    num_segments: int
    finish_reason: FinishReason
    times: StageTimes
    spoken_text: list[str] = field(default_factory=list)
    skipped_text: list[str] = field(default_factory=list)
