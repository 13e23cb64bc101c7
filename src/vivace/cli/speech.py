"""Commands that write one audio file: ``say`` and ``transform``."""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import replace
from io import IncrementalNewlineDecoder, TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from vivace.cli.estimate import Estimate
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
    StreamedFormat,
    Tokenizer,
    Variant,
    check_consent,
    open_engine,
)
from vivace.cli.output import check_target, report, write_stream
from vivace.errors import InvalidRequestError, InvalidTextError


def say(
    text: Annotated[list[str], typer.Argument(help="What to say; '-' reads standard input as it arrives.")],
    out: Out = Path("speech.wav"),
    audio_format: StreamedFormat = None,
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
    temperature: Annotated[
        float, typer.Option(help="0 to 10: how freely speech tokens are drawn; 1 is the model's own rule.")
    ] = 1.0,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest with so much probability, up to 1.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest.")] = None,
    stream: Annotated[bool, typer.Option(help="Chunk by chunk, or each segment in one piece.")] = True,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
    lm: Variant = Lm.base,
    tokenizer: Tokenizer = None,
    deterministic: Deterministic = False,
    as_json: AsJson = False,
) -> None:
    """Speak: text in, an audio file out, written while it is made. Ctrl-C keeps what is there (docs/cli.md)."""
    from vivace.config import Limits
    from vivace.datatypes import SamplingParams
    from vivace.engine import SynthesisRequest
    from vivace.engine.request import check_request

    target = check_target(out, audio_format)
    _check_one_voice(voice, prompt_audio, prompt_text)
    check_consent(prompt_audio, consent)
    if "-" in text and len(text) > 1:
        raise InvalidRequestError("'-' stands for standard input: give it alone, or the text", param="text")
    request = SynthesisRequest(
        text=standard_input() if text == ["-"] else " ".join(text),
        voice=voice,
        instruction=instruction,
        cross_lingual=cross_lingual,
        language=language,
        speed=speed,
        stream=stream,
        sampling=SamplingParams(seed=seed, temperature=temperature, top_p=top_p, top_k=top_k),
    )
    check_request(request, Limits())  # before the model is loaded
    with open_engine(
        model, device, dtype, lm, warm_up=False, tokenizer=tokenizer, deterministic=deterministic
    ) as engine:
        if prompt_audio is not None:
            made = engine.make_voice(prompt_audio, prompt_text, consent=consent)
            request = replace(request, voice=made)
        engine.warm_up(request.voice)
        estimate = Estimate(request.text if isinstance(request.text, str) else None, speed)
        result = write_stream(engine.stream(request), target, engine.sample_rate_hz, estimate)
    report(result, target, as_json)


def _check_one_voice(voice: str | None, prompt_audio: Path | None, prompt_text: str = "") -> None:
    """Nothing that was asked for is left out in silence."""
    if voice is not None and prompt_audio is not None:
        raise InvalidRequestError("give --voice or --prompt-audio, not both", code="unsupported_value")
    if prompt_text and prompt_audio is None:
        raise InvalidRequestError(
            "--prompt-text says what --prompt-audio holds; give both", code="unsupported_value"
        )


def standard_input() -> Iterator[str]:
    """What has come so far, as soon as there is any: a language model ends no line for a long while."""
    stdin = sys.stdin
    if not isinstance(stdin, TextIOWrapper):
        yield from stdin or ()  # None where it was closed
        return
    decoder = IncrementalNewlineDecoder(getincrementaldecoder("utf-8")(), translate=True)
    try:
        while piece := stdin.buffer.read1():
            yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise InvalidTextError("standard input is not valid UTF-8", code="invalid_utf8") from None


def transform(
    source: Annotated[Path, typer.Argument(help="Recording whose words are kept, 1 to 30 s.")],
    out: Out = Path("speech.wav"),
    audio_format: StreamedFormat = None,
    model: Model = "mini",
    voice: Annotated[str | None, typer.Option(help="Voice to take.")] = None,
    prompt_audio: Annotated[
        Path | None, typer.Option(help="Take the voice of this recording instead.")
    ] = None,
    consent: Consent = False,
    speed: Annotated[float, typer.Option(help="0.25 to 4; above 1 is faster.")] = 1.0,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
    lm: Variant = Lm.base,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Voice conversion: the words of one recording in the voice of another."""
    from vivace.config import Limits
    from vivace.engine.request import check_speed

    target = check_target(out, audio_format)
    _check_one_voice(voice, prompt_audio)
    check_consent(prompt_audio, consent)
    check_speed(speed, Limits())
    with open_engine(model, device, dtype, lm, tokenizer=tokenizer) as engine:
        taken = engine.make_voice(prompt_audio, "", consent=consent) if prompt_audio is not None else voice
        stream = engine.transform(source, taken, speed=speed)
        result = write_stream(stream, target, engine.sample_rate_hz, Estimate(None))
    report(result, target, as_json)
