"""``vivace bench`` and ``vivace limits``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vivace.cli.options import (
    BenchModel,
    Deterministic,
    Device,
    Dtype,
    Model,
    Precision,
    print_json,
    print_line,
)


class ServingLoop(StrEnum):
    """When a listener sends its next request."""

    playback = "playback"
    reply = "reply"


bench_app = typer.Typer(help="Benchmarks; the last line of each is one JSON document.", no_args_is_help=True)


@bench_app.command("streaming")
def bench_streaming(
    model: Model = "mini",
    seconds: Annotated[int, typer.Option(help="Length of the utterance.")] = 22,
    runs: Annotated[int, typer.Option(help="Repetitions; medians are reported.")] = 3,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
) -> None:
    """Cost of the n-th second of audio: flat means that nothing is computed twice."""
    from vivace.bench.progress import progress_bar
    from vivace.bench.streaming import run

    with progress_bar() as progress:
        document = run(
            model, seconds=seconds, runs=runs, device=device, dtype=dtype.on(device), progress=progress
        )
    for row in document["seconds"]:
        print_line(
            f"second {row['second']:3d}: flow {row['flow_ms']:7.1f} ms, vocoder {row['vocoder_ms']:7.1f} ms"
        )
    print_json(document)


@bench_app.command("single")
def bench_single(
    model: BenchModel = "mini",
    seconds: Annotated[float, typer.Option(help="Audio per utterance.")] = 10.0,
    requests: Annotated[int, typer.Option(help="Utterances per run.")] = 10,
    runs: Annotated[int, typer.Option(help="Repetitions.")] = 3,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a picture of one utterance's stages here (SVG).")
    ] = None,
    long_seconds: Annotated[float, typer.Option(help="One more utterance of this length; 0: none.")] = 0.0,
) -> None:
    """First audio, real-time factor and tokens per second of one stream at a time."""
    from vivace.bench.progress import progress_bar
    from vivace.bench.single import run

    with progress_bar() as progress:
        document = run(
            model,
            seconds=seconds,
            requests=requests,
            runs=runs,
            device=device,
            dtype=dtype.on(device),
            timeline=timeline,
            long_seconds=long_seconds,
            progress=progress,
        )
    print_line(
        f"TTFB p50 {document['ttfb_ms_p50']} ms, p99 {document['ttfb_ms_p99']} ms; RTF {document['rtf']}"
        f" (floor {document['rtf_floor']}); TPS {document['tps']}; ready after {document['start_s']} s"
    )
    print_json(document)


@bench_app.command("llm")
def bench_llm(
    model: BenchModel = "random",
    batch: Annotated[str, typer.Option(help="Rows side by side, separated by commas.")] = "1,8,32,128",
    context: Annotated[int, typer.Option(help="Positions in the cache when a run starts.")] = 500,
    runs: Annotated[int, typer.Option(help="Repetitions; medians are reported.")] = 3,
    choices: Annotated[str, typer.Option(help="Ways to compare, separated by commas; empty: all.")] = "",
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
) -> None:
    """Tokens per second of the speech LM, for each way to run it, with the floor beside it."""
    from vivace.bench.llm import parse_batches, run
    from vivace.bench.llm_table import print_table
    from vivace.bench.progress import progress_bar

    with progress_bar() as progress:
        document = run(
            model,
            device=device,
            dtype=dtype.on(device),
            batches=parse_batches(batch),
            context=context,
            runs=runs,
            choices=_names(choices),
            progress=progress,
        )
    print_table(document)
    print_json(document)


@bench_app.command("ladder")
def bench_ladder(
    model: BenchModel = "mini",
    tokens: Annotated[
        str, typer.Option(help="Speech tokens of each phrase; empty: 150,200,230, which is 23.2 s of audio.")
    ] = "",
    runs: Annotated[int, typer.Option(help="Repetitions; medians are reported.")] = 1,
    alone: Annotated[bool, typer.Option(help="Also each change alone.")] = True,
    rungs: Annotated[str, typer.Option(help="Some rungs by name, separated by commas; empty: all.")] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for JSON, CSV and a report; a second run goes on there."),
    ] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="Word error rate by Whisper: needs faster-whisper and a model.")
    ] = False,
    limit_seconds: Annotated[
        float | None,
        typer.Option(help="Begin no further rung after this; the last rungs come first then.", min=0.0),
    ] = None,
    device: Device = "cpu",
) -> None:
    """From the reference's way to the engine, one change at a time, on this machine."""
    from vivace.bench.ladder import parse_tokens, run
    from vivace.bench.ladder_judge import WhisperJudge
    from vivace.bench.ladder_table import print_ladder
    from vivace.bench.progress import progress_bar
    from vivace.bench.report import ladder_page

    with progress_bar() as progress:
        document = run(
            model,
            device=device,
            tokens=parse_tokens(tokens),
            runs=runs,
            alone=alone,
            rungs=_names(rungs),
            out=out,
            judge=WhisperJudge() if judge else None,
            limit_s=limit_seconds,
            progress=progress,
        )
    print_ladder(document)
    if out is not None:
        (out / "ladder.html").write_text(ladder_page(document), encoding="utf-8")
        print_line(f"{out / 'ladder.html'}: open it in a browser")
    print_json(document)


@bench_app.command("serving")
def bench_serving(
    model: BenchModel = "mini",
    streams: Annotated[str, typer.Option(help="Listeners side by side, separated by commas.")] = "1,2,4,8",
    rates: Annotated[
        str, typer.Option(help="Requests per second at random times, separated by commas.")
    ] = "",
    offline: Annotated[int, typer.Option(help="So many requests as fast as possible; 0: none.")] = 0,
    whole: Annotated[bool, typer.Option("--whole", help="Offline: each utterance in one piece.")] = False,
    loop: Annotated[
        ServingLoop, typer.Option(help="A listener asks again after playback, or after the last chunk.")
    ] = ServingLoop.playback,
    seconds: Annotated[float, typer.Option(help="Length of each measurement.")] = 20.0,
    ramp: Annotated[
        float | None, typer.Option(help="Seconds of load before it; one utterance's length if not given.")
    ] = None,
    utterance_seconds: Annotated[float, typer.Option(help="Audio per utterance.")] = 10.0,
    max_streams: Annotated[int, typer.Option(help="Of the engine; 0: as many as listeners, up to 64.")] = 0,
    voices: Annotated[int, typer.Option(help="Different stored voices.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the first request.")] = 0,
    deterministic: Deterministic = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture here (SVG).")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="With others' published figures in it.")] = False,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
) -> None:
    """Many listeners at once: first audio, underruns, audio seconds per second, by how many there are."""
    from vivace.bench.serving import Settings, run
    from vivace.bench.serving_chart import serving_svg
    from vivace.bench.serving_published import PUBLISHED
    from vivace.bench.serving_table import line_of, parse_numbers, print_serving

    settings = Settings(
        streams=tuple(int(count) for count in parse_numbers(streams, "streams", is_whole=True)),
        rates=parse_numbers(rates, "rates"),
        offline=offline,
        whole=whole,
        loop=loop.value,
        seconds=seconds,
        ramp_s=ramp,
        utterance_seconds=utterance_seconds,
        max_streams=max_streams,
        voices=voices,
        seed=seed,
        deterministic=deterministic,
    )
    document = run(
        model,
        device=device,
        dtype=dtype.on(device),
        settings=settings,
        progress=lambda point: print_line(line_of(point)),
    )
    print_serving(document)
    if plot is not None:
        plot.write_text(serving_svg(document, PUBLISHED if peers else ()), encoding="utf-8")
    print_json(document)


@bench_app.command("throughput")
def bench_throughput(
    model: BenchModel = "mini",
    batch: Annotated[
        str, typer.Option(help="Sentences side by side, separated by commas.")
    ] = "1,2,4,8,16,32",
    seconds: Annotated[float, typer.Option(help="Audio per sentence.")] = 3.0,
    requests: Annotated[int, typer.Option(help="Sentences of each client.")] = 2,
    whole: Annotated[
        bool, typer.Option("--whole", help="Speak each sentence as a whole instead of streaming it.")
    ] = False,
    start: Annotated[
        bool,
        typer.Option("--start", help="Also from where it started: float32, plain operations, one at a time."),
    ] = False,
    chart: Annotated[
        Path | None, typer.Option(help="Write sentences per second by batch here (SVG).")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
) -> None:
    """Sentences per second, latency and waiting by how many are spoken side by side."""
    from vivace.bench.llm import parse_batches
    from vivace.bench.progress import progress_bar
    from vivace.bench.throughput import run
    from vivace.bench.throughput_table import print_throughput, throughput_svg

    with progress_bar() as progress:
        document = run(
            model,
            device=device,
            dtype=dtype.on(device),
            seconds=seconds,
            batches=parse_batches(batch),
            requests=requests,
            whole=whole,
            with_start=start,
            progress=progress,
        )
    print_throughput(document)
    if chart is not None:
        chart.write_text(throughput_svg(document), encoding="utf-8")
    print_json(document)


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
    dtype: Dtype = Precision.auto,
) -> None:
    """Where a request's time goes, as a picture and a Chrome trace; how busy the machine is under load."""
    from vivace.bench.profile import run
    from vivace.bench.progress import progress_bar

    with progress_bar() as progress:
        document = run(
            model,
            out=out,
            device=device,
            dtype=dtype.on(device),
            seconds=seconds,
            batch=batch,
            requests=requests,
            progress=progress,
        )
    stages, load = document["stages_ms"], document["load"]
    print_line(", ".join(f"{lane} {spent:.1f} ms" for lane, spent in stages.items()))
    print_line(
        f"no stage ran for {document['gap_ms']:.1f} of {document['wall_ms']:.1f} ms in {document['gaps']} gaps"
    )
    print_line(
        f"{load['batch']} side by side: mean {load['latency_ms_mean']:.0f} ms ({load['latency_growth']} times a lone"
        f" request), host busy for {load['host_busy_percent_of_one_core']:.0f} % of a core"
    )
    print_line(load["advice"] or f"device: {load['device_reason']}")
    print_line("; ".join(document["files"]))
    print_json(document)


def limits(
    model: BenchModel = "mini",
    measure: Annotated[
        bool, typer.Option("--measure", help="Also the engine, in percent of the floor.")
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
) -> None:
    """What this machine allows at best with a model: floors of every stage, first audio, throughput."""
    from vivace.bench.limits import run
    from vivace.bench.limits_table import print_limits
    from vivace.bench.progress import progress_bar

    with progress_bar() as progress:
        document = run(model, device=device, dtype=dtype.on(device), measure=measure, progress=progress)
    print_limits(document)
    print_json(document)


def _names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
