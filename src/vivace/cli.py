"""The ``vivace`` command. Exit codes: 0 done, 1 the request failed, 2 a model folder or the usage is at fault."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vivace import __version__
from vivace.config import spin_briefly
from vivace.errors import InvalidRequestError, InvalidTextError, ModelFolderError, ServeError, VivaceError

if TYPE_CHECKING:
    from vivace.datatypes import SynthesisResult
    from vivace.engine import Engine, SpeechStream
    from vivace.voice import Voice

app = typer.Typer(
    name="vivace",
    help="Fast, exact, streaming CosyVoice text-to-speech.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
voice_app = typer.Typer(help="Stored voices.", no_args_is_help=True)
bench_app = typer.Typer(help="Benchmarks; the last line of each is one JSON document.", no_args_is_help=True)
app.add_typer(voice_app, name="voice")
app.add_typer(bench_app, name="bench")


class Precision(StrEnum):
    """Number formats of the weights."""

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
Dtype = Annotated[Precision, typer.Option(help="Of speech LM and flow.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="Text tokenizer if not in the model folder: a folder, or the rank file of CosyVoice-300M.",
    ),
]
Variant = Annotated[Lm, typer.Option("--lm", help="Which language model of an official folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]
Consent = Annotated[
    bool, typer.Option("--consent", help="The speaker of the recording has agreed to the use of the voice.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Audio file to write (.wav grows while it is made).")]


def _engine(
    model: str,
    device: str,
    dtype: Precision = Precision.float32,
    lm: Lm = Lm.base,
    *,
    warm_up: bool = True,
    tokenizer: Path | None = None,
) -> Engine:
    from vivace.checkpoint.model import DTYPES
    from vivace.engine import Engine

    return Engine.open(
        model,
        device=device,
        dtype=DTYPES[dtype.value],
        lm_variant=lm.value,
        tokenizer=tokenizer,
        warm_up=warm_up,
    )


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _print_json(document: dict[str, Any]) -> None:
    _print(json.dumps(document, ensure_ascii=False))


def _print_version(asked: bool) -> None:
    if asked:
        _print(f"vivace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself; its help is the application's."""


@app.command()
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
    as_json: AsJson = False,
) -> None:
    """Speak: text in, an audio file out, written while it is made."""
    from vivace.audio.formats import check_target
    from vivace.datatypes import SamplingParams
    from vivace.engine import SynthesisRequest

    check_target(out)
    _check_one_voice(voice, prompt_audio, prompt_text)
    _check_consent(prompt_audio, consent)
    with _engine(model, device, dtype, lm, warm_up=False, tokenizer=tokenizer) as engine:
        chosen: str | Voice | None = voice
        if prompt_audio is not None:
            chosen = engine.make_voice(prompt_audio, prompt_text, consent=consent)
        engine.warm_up(chosen)
        request = SynthesisRequest(
            text=_standard_input() if text == ["-"] else " ".join(text),
            voice=chosen,
            instruction=instruction,
            cross_lingual=cross_lingual,
            language=language,
            speed=speed,
            stream=stream,
            sampling=SamplingParams(seed=seed),
        )
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


def _check_consent(prompt_audio: Path | None, consent: bool) -> None:
    if prompt_audio is not None and not consent:
        raise InvalidRequestError(
            "cloning a voice needs the consent of its speaker: add --consent once you have it",
            code="consent_required",
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
    times = result.times
    _print(
        f"{out}: {result.audio_seconds:.2f} s of audio, TTFB {result.ttfb_ms:.0f} ms, RTF {result.rtf:.3f}, "
        f"TPS {result.tps:.0f} | text {times.text_ms:.0f} ms, LM {times.lm_ms:.0f} ms, flow {times.flow_ms:.0f} ms, "
        f"vocoder {times.vocoder_ms:.0f} ms, waiting {times.waiting_ms:.0f} ms"
    )
    if as_json:
        document = asdict(result)
        del document["samples"]
        _print_json({"out": str(out), **document})


@app.command()
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

    check_target(out)
    _check_one_voice(voice, prompt_audio)
    _check_consent(prompt_audio, consent)
    with _engine(model, device, dtype) as engine:
        target = engine.make_voice(prompt_audio, "", consent=consent) if prompt_audio is not None else voice
        stream = engine.transform(source, target, speed=speed)
        result = _to_file(stream, out, engine.sample_rate_hz)
    _report(result, out, as_json)


@app.command()
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
    _print(f"{out}: written; use it with --model {out}")
    if as_json:
        _print_json(summary)


@app.command()
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
        _print(line)
    if as_json:
        _print_json(report.to_dict())
    if not report.usable:
        raise typer.Exit(2)


@app.command("random-checkpoint")
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
    _print(f"{out}: {size} {kind} with random weights; it makes noise, at the real speed")


@app.command()
def serve(
    model: Model = "mini",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8000,
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
    lm: Variant = Lm.base,
    api_keys: Annotated[
        Path | None, typer.Option(help="File with API keys, one a line (or VIVACE_API_KEYS).")
    ] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Host name to answer to; repeatable.")] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call; repeatable.")
    ] = None,
    voice_alias: Annotated[
        list[str] | None, typer.Option(help="Name that clients use for a voice: alloy=anna; repeatable.")
    ] = None,
    max_characters: Annotated[
        int, typer.Option(min=1, max=100_000, help="Longest text of one request.")
    ] = 4096,
    watermark: Annotated[
        str | None, typer.Option(help="Installed watermark that all speech carries; none otherwise.")
    ] = None,
    wyoming: Annotated[
        bool, typer.Option(help="Also speak Home Assistant's protocol; it has no keys.")
    ] = False,
    wyoming_host: Annotated[str, typer.Option(help="Address to listen on for it.")] = "127.0.0.1",
    wyoming_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port for it; 0 takes a free one.")
    ] = 10200,
) -> None:
    """Serve the page, OpenAI's speech interface and more over HTTP."""
    from vivace.config import ServerConfig
    from vivace.config import api_keys as keys_in_environment
    from vivace.server.door import bind, check_access, fit_to_open_files, read_aliases, read_keys

    keys = read_keys(api_keys) if api_keys is not None else keys_in_environment()
    config = ServerConfig(
        host=host,
        port=port,
        api_keys=keys,
        allowed_hosts=tuple(allow_host or ()),
        allowed_origins=tuple(allow_origin or ()),
        voice_aliases=read_aliases(voice_alias or ()),
        text_characters=max_characters,
    )
    check_access(config)
    with ExitStack() as doors:
        listener, home = doors.enter_context(bind(config)), None
        if wyoming:
            home = doors.enter_context(bind(config, wyoming_host, wyoming_port, "--wyoming-port"))
        # Only now: what is wrong with the address is said before the engine's libraries are loaded.
        from vivace.server.child import EngineSettings
        from vivace.server.run import open_service, run

        settings = EngineSettings(model, device=device, dtype=dtype.value, lm_variant=lm.value)
        run(lambda: open_service(settings, watermark), fit_to_open_files(config), listener, _print, home)


@voice_app.command("add")
def voice_add(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, - and _.")],
    prompt_audio: Annotated[Path, typer.Argument(help="Recording of the voice, 1 to 30 s.")],
    prompt_text: Annotated[str, typer.Option(help="What the recording says.")] = "",
    consent: Consent = False,
    model: Model = "mini",
) -> None:
    """Store a voice made from a recording."""
    _check_consent(prompt_audio, consent)
    with _engine(model, "cpu", warm_up=False) as engine:
        made = engine.make_voice(prompt_audio, prompt_text, name=name, consent=consent)
        engine.voices.add(made)
    _print(f"{made.name}: stored")


@voice_app.command("list")
def voice_list(model: Model = "mini", as_json: AsJson = False) -> None:
    """List built-in and stored voices."""
    from vivace.engine import open_voices

    entries = open_voices(model).list()
    for entry in entries:
        # Voices come from elsewhere too: no control codes of theirs may reach the terminal.
        said = "".join(c if c.isprintable() else " " for c in entry.problem or entry.prompt_text)
        _print(f"{entry.name:24} {entry.kind:9} {entry.seconds:5.1f} s  {said}")
    if as_json:
        _print_json({"voices": [asdict(entry) for entry in entries]})


@voice_app.command("remove")
def voice_remove(name: str, model: Model = "mini") -> None:
    """Remove a stored voice."""
    from vivace.engine import open_voices

    open_voices(model).remove(name)
    _print(f"{name}: removed")


@voice_app.command("export")
def voice_export(name: str, out: Path, model: Model = "mini") -> None:
    """Write a voice to one portable file, OUT.safetensors."""
    from vivace.engine import open_voices

    _print(f"{name}: exported to {open_voices(model).export(name, out)}")


@voice_app.command("import")
def voice_import(path: Path, name: str | None = None, model: Model = "mini") -> None:
    """Store a voice that was exported elsewhere."""
    from vivace.engine import open_voices

    _print(f"{open_voices(model).import_voice(path, name).name}: stored")


@bench_app.command("streaming")
def bench_streaming(
    model: Model = "mini",
    seconds: Annotated[int, typer.Option(help="Length of the utterance.")] = 22,
    runs: Annotated[int, typer.Option(help="Repetitions; medians are reported.")] = 3,
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
) -> None:
    """Cost of the n-th second of audio: flat means that nothing is computed twice."""
    from vivace.bench.streaming import run
    from vivace.checkpoint.model import DTYPES

    document = run(model, seconds=seconds, runs=runs, device=device, dtype=DTYPES[dtype.value])
    for row in document["seconds"]:
        _print(
            f"second {row['second']:3d}: flow {row['flow_ms']:7.1f} ms, vocoder {row['vocoder_ms']:7.1f} ms"
        )
    _print_json(document)


@bench_app.command("single")
def bench_single(
    model: BenchModel = "mini",
    seconds: Annotated[float, typer.Option(help="Audio per utterance.")] = 10.0,
    requests: Annotated[int, typer.Option(help="Utterances per run.")] = 10,
    runs: Annotated[int, typer.Option(help="Repetitions.")] = 3,
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a picture of one utterance's stages here (SVG).")
    ] = None,
    long_seconds: Annotated[float, typer.Option(help="One more utterance of this length; 0: none.")] = 0.0,
) -> None:
    """First audio, real-time factor and tokens per second of one stream at a time."""
    from vivace.bench.single import run
    from vivace.checkpoint.model import DTYPES

    document = run(
        model,
        seconds=seconds,
        requests=requests,
        runs=runs,
        device=device,
        dtype=DTYPES[dtype.value],
        timeline=timeline,
        long_seconds=long_seconds,
    )
    _print(
        f"TTFB p50 {document['ttfb_ms_p50']} ms, p99 {document['ttfb_ms_p99']} ms; RTF {document['rtf']}"
        f" (floor {document['rtf_floor']}); TPS {document['tps']}; ready after {document['start_s']} s"
    )
    _print_json(document)


@bench_app.command("llm")
def bench_llm(
    model: BenchModel = "random",
    batch: Annotated[str, typer.Option(help="Rows side by side, separated by commas.")] = "1,8,32,128",
    context: Annotated[int, typer.Option(help="Positions in the cache when a run starts.")] = 500,
    runs: Annotated[int, typer.Option(help="Repetitions; medians are reported.")] = 3,
    choices: Annotated[str, typer.Option(help="Ways to compare, separated by commas; empty: all.")] = "",
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
) -> None:
    """Tokens per second of the speech LM, for each way to run it, with the floor beside it."""
    from vivace.bench.llm import parse_batches, run
    from vivace.bench.llm_table import print_table
    from vivace.checkpoint.model import DTYPES

    document = run(
        model,
        device=device,
        dtype=DTYPES[dtype.value],
        batches=parse_batches(batch),
        context=context,
        runs=runs,
        choices=tuple(choice.strip() for choice in choices.split(",") if choice.strip()),
    )
    print_table(document)
    _print_json(document)


@bench_app.command("ladder")
def bench_ladder(
    model: BenchModel = "mini",
    tokens: Annotated[
        str, typer.Option(help="Speech tokens of each phrase; empty: 150,200,230, on a CPU half of that.")
    ] = "",
    runs: Annotated[int, typer.Option(help="Repetitions; medians are reported.")] = 1,
    alone: Annotated[bool, typer.Option(help="Also each change alone.")] = True,
    rungs: Annotated[str, typer.Option(help="Some rungs by name, separated by commas; empty: all.")] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for JSON, CSV and a report; a second run goes on there."),
    ] = None,
    device: Device = "cpu",
) -> None:
    """From the reference's way to the engine, one change at a time, on this machine."""
    from vivace.bench.ladder import parse_tokens, run
    from vivace.bench.ladder_table import ladder_progress, print_ladder
    from vivace.bench.report import ladder_page

    with ladder_progress() as progress:
        document = run(
            model,
            device=device,
            tokens=parse_tokens(tokens),
            runs=runs,
            alone=alone,
            rungs=tuple(rung.strip() for rung in rungs.split(",") if rung.strip()),
            out=out,
            progress=progress,
        )
    print_ladder(document)
    if out is not None:
        (out / "ladder.html").write_text(ladder_page(document), encoding="utf-8")
        _print(f"{out / 'ladder.html'}: open it in a browser")
    _print_json(document)


@bench_app.command("throughput")
def bench_throughput(
    model: BenchModel = "mini",
    batch: Annotated[
        str, typer.Option(help="Sentences side by side, separated by commas.")
    ] = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(help="Audio per sentence.")] = 3.0,
    requests: Annotated[int, typer.Option(help="Sentences of each client.")] = 2,
    chart: Annotated[
        Path | None, typer.Option(help="Write sentences per second by batch here (SVG).")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
) -> None:
    """Sentences per second, latency and waiting by how many are spoken side by side."""
    from vivace.bench.llm import parse_batches
    from vivace.bench.throughput import run
    from vivace.bench.throughput_table import print_throughput, throughput_svg
    from vivace.checkpoint.model import DTYPES

    document = run(
        model,
        device=device,
        dtype=DTYPES[dtype.value],
        seconds=seconds,
        batches=parse_batches(batch),
        requests=requests,
    )
    print_throughput(document)
    if chart is not None:
        chart.write_text(throughput_svg(document), encoding="utf-8")
    _print_json(document)


@bench_app.command("profile")
def bench_profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for timeline.svg and trace.json.")] = Path(
        "profile"
    ),
    model: BenchModel = "mini",
    seconds: Annotated[float, typer.Option(help="Audio per request.")] = 5.0,
    batch: Annotated[int, typer.Option(help="Requests side by side under load.")] = 4,
    requests: Annotated[int, typer.Option(help="Requests of each client under load.")] = 2,
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
) -> None:
    """Where a request's time goes, as a picture and a Chrome trace; how busy the machine is under load."""
    from vivace.bench.profile import run
    from vivace.checkpoint.model import DTYPES

    document = run(
        model,
        out=out,
        device=device,
        dtype=DTYPES[dtype.value],
        seconds=seconds,
        batch=batch,
        requests=requests,
    )
    stages, load = document["stages_ms"], document["load"]
    _print(", ".join(f"{lane} {spent:.1f} ms" for lane, spent in stages.items()))
    _print(
        f"no stage ran for {document['gap_ms']:.1f} of {document['wall_ms']:.1f} ms in {document['gaps']} gaps"
    )
    _print(
        f"{load['batch']} side by side: mean {load['latency_ms_mean']:.0f} ms ({load['latency_growth']} times a lone"
        f" request), host busy for {load['host_busy_percent_of_one_core']:.0f} % of a core"
    )
    _print(load["advice"] or f"device: {load['device_reason']}")
    _print("; ".join(document["files"]))
    _print_json(document)


@app.command()
def limits(
    model: BenchModel = "mini",
    measure: Annotated[
        bool, typer.Option("--measure", help="Also the engine, in percent of the floor.")
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = Precision.float32,
) -> None:
    """What this machine allows at best with a model: floors of every stage, first audio, throughput."""
    from vivace.bench.limits import run
    from vivace.bench.limits_table import print_limits
    from vivace.checkpoint.model import DTYPES

    document = run(model, device=device, dtype=DTYPES[dtype.value], measure=measure)
    print_limits(document)
    _print_json(document)


def _one_line(error: VivaceError) -> str:
    return " ".join(error.message.split())


def _end_on_signals() -> None:
    """A closed terminal and ``kill`` end the command as Ctrl-C does: no half-written file stays behind."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP; under nohup it is ignored
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _take_any_text() -> None:
    """Text comes in as UTF-8 whatever the locale says, and none that goes out is an error."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point: errors of ours become one line and an exit code."""
    spin_briefly()
    _end_on_signals()
    _take_any_text()
    try:
        app()
    except (ModelFolderError, ServeError) as error:
        sys.stderr.write(f"vivace: {_one_line(error)}\n")
        sys.exit(2)
    except VivaceError as error:
        sys.stderr.write(f"vivace: {_one_line(error)} ({error.code})\n")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"vivace: {where}{error.strerror or type(error).__name__}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
