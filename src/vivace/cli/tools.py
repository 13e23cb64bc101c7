"""Commands about models and this machine: ``convert``, ``compile``, ``doctor``, ``random-checkpoint``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli.options import (
    AsJson,
    Deterministic,
    Dtype,
    Lm,
    MaxStreams,
    Precision,
    Stored,
    Tokenizer,
    Variant,
    print_json,
    print_line,
)
from vivace.errors import InvalidRequestError

if TYPE_CHECKING:
    from vivace.kernels.gpu import Gpu


def convert(
    folder: Annotated[str, typer.Argument(help="Official model folder, or 'mini' for the embedded model.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Annotated[Stored, typer.Option(help="Of speech LM and flow.")] = Stored.float32,
    lm: Variant = Lm.base,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Write a model in Vivace's own format: one safetensors file and one JSON, loaded by memory map."""
    from vivace.checkpoint import convert_folder, model_folder

    summary = convert_folder(
        model_folder(folder), out, dtype=dtype.value, lm_variant=lm.value, tokenizer=tokenizer
    )
    print_line(f"{out}: written; use it with --model {out}")
    for lack in summary["missing"].values():
        print_line(f"{out}: {lack}")
    if summary["missing"].keys() - {"voices"}:
        print_line(f"copy what is missing into {out}; 'vivace doctor {out}' says what it can do")
    if as_json:
        print_json(summary)


def compile_kernels(
    folder: Annotated[str, typer.Argument(help="Model folder, or 'mini' for the embedded model.")],
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Compute capability and multiprocessors, such as 9.0:132 (H200); by default this machine's."
        ),
    ] = None,
    dtype: Dtype = Precision.auto,
    max_streams: MaxStreams = None,
    deterministic: Deterministic = False,
    as_json: AsJson = False,
) -> None:
    """Compile a model's kernels ahead, for images: an engine with the same options then finds them. Needs no GPU."""
    from vivace.checkpoint import load_config, model_folder
    from vivace.checkpoint.loading import default_dtype
    from vivace.engine.compile_ahead import compile_now, engine_kind
    from vivace.engine.routing import MANY_STREAMS
    from vivace.kernels.gpu import PLANNED, stands_for

    config, streams = load_config(model_folder(folder)), max_streams or MANY_STREAMS
    with stands_for(_gpu(gpu)):
        own = dtype.to_torch() or default_dtype(PLANNED)
        kind = engine_kind(config, PLANNED, own, streams, deterministic=deterministic)
    if kind is None:
        print_line("such an engine takes the plain way: there is nothing to compile")
        return
    try:
        report = compile_now(kind)
    except ImportError as error:
        raise InvalidRequestError("kernels are compiled with Triton, which is not installed here") from error
    for name, reason in report.failed:
        print_line(f"{name}: {' '.join(reason.split())[:200]}")
    print_line(
        f"{report.kernels - len(report.failed)} kernels compiled ({report.cpu_seconds:.0f} s of processor time); "
        f"they lie in {report.folder}"
    )
    if as_json:
        print_json(report.to_dict())
    if report.failed or not report.is_complete:
        raise typer.Exit(1)


def _gpu(text: str | None) -> Gpu:
    """Raises InvalidRequestError for what is no GPU, or where this machine has none."""
    import torch

    from vivace.kernels.gpu import Gpu, gpu_of, num_multiprocessors

    if text is None:
        if not torch.cuda.is_available():
            raise InvalidRequestError(
                "this machine has no GPU: say which one with --gpu 9.0:132", param="gpu"
            )
        device = torch.device("cuda")
        own = gpu_of(device)
        assert own is not None
        return Gpu(own.capability, num_multiprocessors(device))
    found = re.fullmatch(r"(\d{1,2})\.(\d):(\d{1,4})", text)
    if found is None:
        raise InvalidRequestError(
            "--gpu takes compute capability and multiprocessors, such as 9.0:132", param="gpu"
        )
    major, minor, multiprocessors = map(int, found.groups())
    return Gpu((major, minor), multiprocessors)


def doctor(
    folder: Annotated[
        str | None, typer.Argument(help="Model folder to look at, or 'mini' for the embedded model.")
    ] = None,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine and a model folder can do."""
    from vivace.checkpoint import model_folder
    from vivace.doctor import examine

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
