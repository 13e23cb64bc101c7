"""What the commands share: their options, an engine, lines of output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

    from vivace.engine import Engine


class Precision(StrEnum):
    """Number formats of the weights; int8 for CosyVoice 3 on a CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    int8 = "int8"

    def to_torch(self) -> torch.dtype | None:
        """As the engine takes it."""
        from vivace.checkpoint.model import PRECISIONS

        return PRECISIONS[self.value]

    def on(self, device: str) -> torch.dtype:
        """The one that a device gets. Raises ModelFolderError for a device that is not there."""
        from vivace.checkpoint.loading import default_dtype, resolve_device

        return self.to_torch() or default_dtype(resolve_device(device))


class Stored(StrEnum):
    """Number formats that a converted folder may have."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Lm(StrEnum):
    """Language models of an official folder: ``llm.pt`` or ``llm.rl.pt``."""

    base = "base"
    rl = "rl"


Model = Annotated[str, typer.Option("--model", "-m", help="Model folder, or 'mini' for the embedded model.")]
BenchModel = Annotated[
    str, typer.Option("--model", "-m", help="Model folder, 'mini', or 'random' (full size, random weights).")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")]
Dtype = Annotated[
    Precision,
    typer.Option(
        help="Of speech LM and flow. auto: float32 on a CPU; on a GPU bfloat16, float16 on older ones."
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="Text tokenizer if not in the model folder: a folder, or the rank file of CosyVoice-300M.",
    ),
]
Variant = Annotated[Lm, typer.Option("--lm", help="Which language model of an official folder.")]
MaxStreams = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=256,
        help="Streams that run at once on one engine; twice as many wait. By default 64.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="On a GPU: the same request gives the same bytes in any company, at a price. A CPU always does.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]
Consent = Annotated[
    bool, typer.Option("--consent", help="The speaker of the recording has agreed to the use of the voice.")
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="Audio file to write (.wav grows while it is made); '-' is standard output."
    ),
]
StreamedFormat = Annotated[
    str | None,
    typer.Option("--format", help="Of --out -: wav, pcm (16 bit, no header), flac, mp3, opus or aac."),
]


def open_engine(
    model: str,
    device: str,
    dtype: Precision = Precision.auto,
    lm: Lm = Lm.base,
    *,
    warm_up: bool = True,
    tokenizer: Path | None = None,
    max_streams: int | None = None,
    deterministic: bool = False,
) -> Engine:
    """The engine that the options name."""
    from vivace.engine import Engine

    return Engine.open(
        model,
        device=device,
        dtype=dtype.to_torch(),
        lm_variant=lm.value,
        tokenizer=tokenizer,
        warm_up=warm_up,
        max_streams=max_streams,
        deterministic=deterministic,
    )


def print_line(line: str) -> None:
    """Standard output, at once: a pipe's reader sees each line when it is said."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_json(document: dict[str, Any], write_line: Callable[[str], None] = print_line) -> None:
    """One JSON document on one line."""
    write_line(json.dumps(document, ensure_ascii=False))


def check_consent(prompt_audio: Path | None, consent: bool) -> None:
    """A recording is cloned only with ``--consent``."""
    if prompt_audio is not None and not consent:
        raise InvalidRequestError(
            "cloning a voice needs the consent of its speaker: add --consent once you have it",
            code="consent_required",
        )
