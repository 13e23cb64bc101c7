"""Commands about models and this machine: ``convert``, ``doctor``, ``random-checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vivace.cli.options import AsJson, Dtype, Lm, Precision, Tokenizer, Variant, print_json, print_line


def convert(
    folder: Annotated[str, typer.Argument(help="Official model folder, or 'mini' for the embedded model.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Dtype = Precision.float32,
    lm: Variant = Lm.base,
    as_json: AsJson = False,
) -> None:
    """Write a model in Vivace's own format: one safetensors file and one JSON, loaded by memory map."""
    from vivace.checkpoint import convert_folder
    from vivace.engine.loading import model_folder

    summary = convert_folder(model_folder(folder), out, dtype=dtype.value, lm_variant=lm.value)
    print_line(f"{out}: written; use it with --model {out}")
    if as_json:
        print_json(summary)


def doctor(
    folder: Annotated[
        str | None, typer.Argument(help="Model folder to look at, or 'mini' for the embedded model.")
    ] = None,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine and a model folder can do."""
    from vivace.doctor import examine
    from vivace.engine.loading import model_folder

    report = examine(None if folder is None else model_folder(folder), tokenizer)
    for line in report.lines():
        print_line(line)
    if as_json:
        print_json(report.to_dict())
    if not report.usable:
        raise typer.Exit(2)


def random_checkpoint(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    size: Annotated[str, typer.Option(help="full (real sizes) or tiny.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Same seed, same weights.")] = 0,
    generation: Annotated[int, typer.Option(help="3, 2 or 1 (CosyVoice-300M).")] = 3,
) -> None:
    """Make a complete official-layout folder with random weights, for speed measurements."""
    from vivace.checkpoint.files import GENERATIONS
    from vivace.random_checkpoint import write_random_checkpoint

    write_random_checkpoint(out, size=size, seed=seed, generation=generation)
    kind = GENERATIONS[generation]
    print_line(f"{out}: {size} {kind} with random weights; it makes noise, at the real speed")
