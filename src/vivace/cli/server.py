"""``vivace serve``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from vivace.cli.options import (
    Deterministic,
    Device,
    Dtype,
    Lm,
    MaxStreams,
    Model,
    Precision,
    Tokenizer,
    Variant,
    print_line,
)


def serve(
    model: Model = "mini",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8000,
    device: Device = "cpu",
    dtype: Dtype = Precision.auto,
    lm: Variant = Lm.base,
    tokenizer: Tokenizer = None,
    devices: Annotated[
        str | None, typer.Option(help="An engine on each: cuda:0,cuda:1 (instead of --device).")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="An engine on each of so many GPUs, or 'all'.")] = None,
    max_streams: MaxStreams = None,
    deterministic: Deterministic = False,
    host_memory: Annotated[
        float,
        typer.Option(
            min=0, max=4096, help="GB of this machine's memory for each GPU's streams when that is full."
        ),
    ] = 0.0,
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
    from vivace.environment import api_keys as keys_in_environment
    from vivace.server.door import bind, check_access, fit_to_open_files, listen, read_aliases, read_keys

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
        listen(listener)  # who connects while the libraries load waits for an answer, and is not refused
        # Only now: what is wrong with the address is said before the engine's libraries are loaded.
        from vivace.server.child import EngineSettings
        from vivace.server.devices import engine_devices
        from vivace.server.run import open_service, run

        places = engine_devices(device, devices, gpus, _count_gpus)
        settings = EngineSettings(
            model,
            device=places[0],
            dtype=dtype.value,
            lm_variant=lm.value,
            tokenizer=tokenizer,
            max_streams=max_streams,
            deterministic=deterministic,
            host_memory_gb=host_memory,
        )
        run(
            lambda: open_service(settings, watermark, places),
            fit_to_open_files(config),
            listener,
            print_line,
            home,
        )


def _count_gpus() -> int:
    from torch.cuda import device_count

    return device_count()
