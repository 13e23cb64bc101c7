"""``vivace voice``: the stored voices of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vivace.cli.options import (
    AsJson,
    Consent,
    Lm,
    Model,
    Tokenizer,
    Variant,
    check_consent,
    open_engine,
    print_json,
    print_line,
)

Stored = Annotated[str, typer.Argument(help="Name of a voice (see `vivace voice list`).")]

voice_app = typer.Typer(help="Stored voices.", no_args_is_help=True)


@voice_app.command("add")
def voice_add(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, - and _.")],
    prompt_audio: Annotated[Path, typer.Argument(help="Recording of the voice, 1 to 30 s.")],
    prompt_text: Annotated[str, typer.Option(help="What the recording says.")] = "",
    consent: Consent = False,
    model: Model = "mini",
    lm: Variant = Lm.base,
    tokenizer: Tokenizer = None,
) -> None:
    """Store a voice made from a recording."""
    check_consent(prompt_audio, consent)
    with open_engine(model, "cpu", lm=lm, warm_up=False, tokenizer=tokenizer) as engine:
        made = engine.make_voice(prompt_audio, prompt_text, name=name, consent=consent)
        engine.voices.add(made)
    print_line(f"{made.name}: stored")


@voice_app.command("list")
def voice_list(model: Model = "mini", as_json: AsJson = False) -> None:
    """List built-in and stored voices."""
    from vivace.engine import open_voices

    entries = open_voices(model).list()
    for entry in entries:
        # Voices come from elsewhere too: no control codes of theirs may reach the terminal.
        said = "".join(c if c.isprintable() else " " for c in entry.problem or entry.prompt_text)
        print_line(f"{entry.name:24} {entry.kind:9} {entry.seconds:5.1f} s  {said}")
    if as_json:
        print_json({"voices": [asdict(entry) for entry in entries]})


@voice_app.command("remove")
def voice_remove(name: Stored, model: Model = "mini") -> None:
    """Remove a stored voice."""
    from vivace.engine import open_voices

    open_voices(model).remove(name)
    print_line(f"{name}: removed")


@voice_app.command("export")
def voice_export(
    name: Stored,
    out: Annotated[Path, typer.Argument(help="File to write; in a folder: NAME.safetensors.")],
    model: Model = "mini",
) -> None:
    """Write a voice to one portable file."""
    from vivace.engine import open_voices

    print_line(f"{name}: exported to {open_voices(model).export(name, out)}")


@voice_app.command("import")
def voice_import(
    path: Annotated[Path, typer.Argument(help="File of `vivace voice export`.")],
    name: Annotated[str | None, typer.Option(help="Another name for it here.")] = None,
    model: Model = "mini",
) -> None:
    """Store a voice that was exported elsewhere."""
    from vivace.engine import open_voices

    print_line(f"{open_voices(model).import_voice(path, name).name}: stored")
