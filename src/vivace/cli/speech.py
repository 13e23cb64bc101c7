"""Commands that write one audio file: ``say`` and ``transform``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vivace.cli.options import (
    AsJson,
    Consent,
    Deterministic,
    Device,
    Dtype,
    Lm,
    Model,
    Out,
    Precision,
    Tokenizer,
    Variant,
    check_consent,
    open_engine,
    print_json,
    print_line,
)
from vivace.errors import InvalidRequestError, InvalidTextError

if TYPE_CHECKING:
    from vivace.datatypes import SynthesisResult
    from vivace.engine import SpeechStream


def say(
    text: Annotated[list[str], typer.Argument(help="What to say; '-' reads standard input as it arrives.")],
    out: Out = Path("speech.wav"),
    model: Model = "mini",
    voice: Annotated[str | None, typer.Option(help="Name of a voice (see `vivace voice list`).")] = None,
    prompt_audio: Annotated[Path | None, typer.Option(help="Clone this recording, 1 to 30 s.")] = None,
    prompt_text: Annotated[str, typer.Option(help="What the recording says.")] = "",
    consent: Consent = False,
    instruction: Annotated[str | None, typer.Option(help="How to say it; never spoken.")] = None,
    cross_lingual: Annotated[bool, typer.Option(help="Text in another language than the voice.")] = False,
    language: Annotated[str | None, typer.Option(help="Language of the text, such as en or zh.")] = None,
    speed: Annotated[float, typer.Option(help="0.25 to 4; above 1 is faster.")] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Same seed, same audio, if text and options come the same way.")
    ] = 0,
    stream: Annotated[bool, typer.Option(help="Chunk by chunk, or each segment in one piece.")] = True,
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
    lm: Variant = Lm.base,
    tokenizer: Tokenizer = None,
    deterministic: Deterministic = False,
    as_json: AsJson = False,
) -> None:
    """Speak: text in, an audio file out, written while it is made."""
    from vivace.audio.formats import check_target
    from vivace.config import Limits
    from vivace.datatypes import SamplingParams
    from vivace.engine import SynthesisRequest
    from vivace.engine.request import check_request

    check_target(out)
    _check_one_voice(voice, prompt_audio, prompt_text)
    check_consent(prompt_audio, consent)
    request = SynthesisRequest(
        text=_standard_input() if text == ["-"] else " ".join(text),
        voice=voice,
        instruction=instruction,
        cross_lingual=cross_lingual,
        language=language,
        speed=speed,
        stream=stream,
        sampling=SamplingParams(seed=seed),
    )
    check_request(request, Limits())  # before the model is loaded
    with open_engine(
        model, device, dtype, lm, warm_up=False, tokenizer=tokenizer, deterministic=deterministic
    ) as engine:
        if prompt_audio is not None:
            made = engine.make_voice(prompt_audio, prompt_text, consent=consent)
            request = replace(request, voice=made)
        engine.warm_up(request.voice)
        result = _to_file(engine.stream(request), out, engine.sample_rate_hz)
    _report(result, out, as_json)


def _check_one_voice(voice: str | None, prompt_audio: Path | None, prompt_text: str = "") -> None:
    """Nothing that was asked for is left out in silence."""
    if voice is not None and prompt_audio is not None:
        raise InvalidRequestError("give --voice or --prompt-audio, not both", code="unsupported_value")
    if prompt_text and prompt_audio is None:
        raise InvalidRequestError(
            "--prompt-text says what --prompt-audio holds; give both", code="unsupported_value"
        )


def _standard_input() -> Iterator[str]:
    try:
        while piece := sys.stdin.readline():
            yield piece
    except UnicodeDecodeError:
        raise InvalidTextError("standard input is not valid UTF-8", code="invalid_utf8") from None


def _to_file(stream: SpeechStream, out: Path, rate_hz: int) -> SynthesisResult:
    """Writes a stream into ``out`` as it comes, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from vivace.audio.formats import open_writer

    columns = (
        TextColumn("speaking"),
        BarColumn(),
        TextColumn("{task.fields[audio]:.1f} s of audio"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None, audio=0.0)
        # Opened with the first audio in hand: a request that fails before leaves an older file alone.
        first = list(islice(stream, 1))
        with open_writer(out, rate_hz) as writer:
            for chunk in chain(first, stream):
                writer.write(chunk.samples)
                progress.update(task, audio=chunk.start_s + len(chunk.samples) / rate_hz)
    return stream.summary()


def _report(result: SynthesisResult, out: Path, as_json: bool) -> None:
    if result.skipped_text:
        named = " | ".join(result.skipped_text)
        sys.stderr.write(f"vivace: Not spoken, since the model cannot read it: {named}\n")
    times = result.times
    print_line(
        f"{out}: {result.audio_seconds:.2f} s of audio, TTFB {result.ttfb_ms:.0f} ms, RTF {result.rtf:.3f}, "
        f"TPS {result.tps:.0f} | text {times.text_ms:.0f} ms, LM {times.lm_ms:.0f} ms, flow {times.flow_ms:.0f} ms, "
        f"vocoder {times.vocoder_ms:.0f} ms, waiting {times.waiting_ms:.0f} ms"
    )
    if as_json:
        document = asdict(result)
        del document["samples"]
        print_json({"out": str(out), **document})


def transform(
    source: Annotated[Path, typer.Argument(help="Recording whose words are kept, 1 to 30 s.")],
    out: Out = Path("speech.wav"),
    model: Model = "mini",
    voice: Annotated[str | None, typer.Option(help="Voice to take.")] = None,
    prompt_audio: Annotated[
        Path | None, typer.Option(help="Take the voice of this recording instead.")
    ] = None,
    consent: Consent = False,
    speed: Annotated[float, typer.Option(help="0.25 to 4; above 1 is faster.")] = 1.0,
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
    as_json: AsJson = False,
) -> None:
    """Voice conversion: the words of one recording in the voice of another."""
    from vivace.audio.formats import check_target
    from vivace.config import Limits
    from vivace.engine.request import check_speed

    check_target(out)
    _check_one_voice(voice, prompt_audio)
    check_consent(prompt_audio, consent)
    check_speed(speed, Limits())
    with open_engine(model, device, dtype) as engine:
        target = engine.make_voice(prompt_audio, "", consent=consent) if prompt_audio is not None else voice
        stream = engine.transform(source, target, speed=speed)
        result = _to_file(stream, out, engine.sample_rate_hz)
    _report(result, out, as_json)
