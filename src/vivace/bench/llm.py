"""Tokens per second of the speech LM, for each way to run it: ``vivace bench llm``.

Every way feeds the token it drew last, draws the next one by the model's own rule, and starts at the same context. The
floor is the time in which the measured copy bandwidth moves the weights and the keys and values once.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from vivace.bench.common import clock_of, heading
from vivace.bench.llm_steps import CHOICES, Steps, open_steps
from vivace.bench.progress import Count, Progress
from vivace.config import SpeechLMConfig
from vivace.engine.device_stages import on_device
from vivace.engine.lm_kernels import draw_rows, kernels_run_on, single_kernel
from vivace.errors import InvalidRequestError
from vivace.models.lm_launches import BUCKETS, PAGE_TOKENS, RowCommand, RowPrompt
from vivace.models.lm_paged import PagedLM
from vivace.models.speech_lm import SpeechLM
from vivace.random_checkpoint import full_config

RANDOM = "random"
"""In place of a model: full-size random weights, made on the device."""

_STEPS = 32  # of one run
_LIMIT_S = 60.0
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one batch size; figures are None where it is not available, and ``reason`` says why."""

    choice: str
    batch: int
    tps: float | None = None
    us_per_step: float | None = None
    host_us_per_step: float | None = None
    floor_us: float | None = None
    floor_share: float | None = None
    reason: str | None = None


def run(
    model: str = RANDOM,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    batches: tuple[int, ...] = (1, 8, 32, 128),
    context: int = 500,
    runs: int = 3,
    choices: tuple[str, ...] = (),
    seed: int = 0,
    limit_s: float = _LIMIT_S,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measures every choice at every batch size.

    Args:
        model: folder, "mini" or "random".
        context: positions in the cache when a run starts.
        runs: repetitions after two that warm up; medians count.
        choices: some of ``CHOICES``; none: all.
        limit_s: of one choice at one batch size, compiling included; what takes longer is not tried again.
        progress: told of every choice at every batch size.

    Returns:
        One document with the field names of the benchmark rows.

    Raises:
        ModelFolderError: the model cannot be used.
        InvalidRequestError: an argument is out of range.
    """
    choices = choices or CHOICES
    _check(batches, context, runs, choices)
    place = torch.device(device)
    count = Count(progress, len(choices) * len(batches))
    count.begin("loading")
    with on_device(place):  # launches, events and captures go to the device that is the current one
        lm = load_lm(model, device, dtype, seed)
        bandwidth = copy_bandwidth(place)
        rows = _rows(lm, choices, batches, context, runs, bandwidth, limit_s, count)
        return {
            **heading("llm", device, model, dtype),
            "context": context,
            "runs": runs,
            "copy_bytes_per_second": round(bandwidth),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(place) if place.type == "cuda" else None,
            "rows": [asdict(row) for row in rows],
            "exactness": exactness(lm),
        }


def _rows(
    lm: SpeechLM,
    choices: tuple[str, ...],
    batches: tuple[int, ...],
    context: int,
    runs: int,
    bandwidth: float,
    limit_s: float,
    count: Count,
) -> list[Row]:
    """Every choice at every batch size; one that was too slow is not tried at a larger one."""
    rows: list[Row] = []
    too_slow: set[str] = set()
    for batch in batches:
        width = lm.llm_decoder.weight.dtype.itemsize
        floor_us = floor_bytes(lm.config, batch, context, width) / bandwidth * 1e6
        for choice in choices:
            count.begin(f"{choice}, batch {batch}")
            reason = None
            if choice in too_slow:
                reason = f"took more than {limit_s:g} s at a smaller batch"
            else:
                try:
                    rows.append(_measured(lm, choice, batch, context, runs, floor_us, limit_s))
                except TimeoutError:
                    too_slow.add(choice)
                    reason = f"took more than {limit_s:g} s"
            if reason is not None:
                rows.append(Row(choice, batch, reason=reason))
            count.advance()
    return rows


def parse_batches(text: str) -> tuple[int, ...]:
    """Batch sizes of a command line, such as "1,8,32". Raises InvalidRequestError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise InvalidRequestError(f"{text!r} is no list of batch sizes such as 1,8,32", param="batch")
    return tuple(int(part) for part in parts)


def _check(batches: tuple[int, ...], context: int, runs: int, choices: tuple[str, ...]) -> None:
    if not batches or not all(1 <= batch <= BUCKETS[-1] for batch in batches):
        raise InvalidRequestError(f"batch sizes must lie between 1 and {BUCKETS[-1]}", param="batch")
    if not 1 <= context <= 8000:
        raise InvalidRequestError("context must lie between 1 and 8000", param="context")
    if not 1 <= runs <= 1000:
        raise InvalidRequestError("runs must lie between 1 and 1000", param="runs")
    unknown = [choice for choice in choices if choice not in CHOICES]
    if unknown:
        raise InvalidRequestError(
            f"unknown choice {unknown[0]!r}; there are {', '.join(CHOICES)}", param="choices"
        )


def load_lm(model: str, device: str, dtype: torch.dtype, seed: int = 0) -> SpeechLM:
    """The speech LM of a folder, or a full-size one with random weights that is made on the device."""
    if dtype == torch.int8:
        raise InvalidRequestError(
            "bench llm compares ways to run float weights; bench single takes int8", param="dtype"
        )
    if model != RANDOM:
        from vivace.engine.loading import load_assets

        lm = load_assets(model, device=device, dtype=dtype).model.lm
        if not isinstance(lm, SpeechLM):
            raise InvalidRequestError(
                "this model's speech LM is not of the kind measured here", param="model"
            )
        return lm
    config = full_config().lm
    assert isinstance(config, SpeechLMConfig)
    return random_lm(config, device, dtype, seed)


def random_lm(config: SpeechLMConfig, device: str, dtype: torch.dtype, seed: int = 0) -> SpeechLM:
    """Random weights that keep activations at their size through the layers."""
    with torch.device("meta"):
        lm = SpeechLM(config)
    lm = lm.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                spread = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0, spread, generator=generator)
    return lm


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, read plus written."""
    size = _COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = clock_of(device)
    seconds = []
    for _ in range(6):
        begun = clock()
        target.copy_(source)
        seconds.append(clock() - begun)
    return 2 * size / median(seconds[1:])


def floor_bytes(config: SpeechLMConfig, batch: int, context: int, width: int) -> int:
    """Bytes that a step must read: every weight once, and each row's keys and values."""
    hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    layer = 2 * hidden * config.num_heads * config.head_dim + 2 * hidden * kv
    layer += 3 * hidden * config.intermediate_size
    weights = config.num_layers * layer + hidden * config.num_speech_rows
    return width * (weights + batch * context * config.num_layers * 2 * kv)


@torch.inference_mode()
def _measured(
    lm: SpeechLM, choice: str, batch: int, context: int, runs: int, floor_us: float, limit_s: float
) -> Row:
    """One choice at one batch size. What cannot run here is a row with a reason, never an end of the benchmark.

    Raises:
        TimeoutError: it took longer than ``limit_s``.
    """
    device = lm.llm_decoder.weight.device
    try:
        with warnings.catch_warnings(), limited(limit_s) as alarm:
            warnings.simplefilter("ignore", UserWarning)  # why a way cannot run is in its row
            steps = open_steps(choice, lm, batch, context, _STEPS)
            if isinstance(steps, str):
                return Row(choice, batch, reason=steps)
            timed = [_once(steps, clock_of(device)) for _ in range(runs + 2)][2:]
    except Exception as error:  # compilers raise what they like, and dress up what is raised inside them
        if alarm.is_set():
            raise TimeoutError from error
        return Row(choice, batch, reason=(str(error).strip() or type(error).__name__).splitlines()[0])
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    per_step = median(total for total, _ in timed) / _STEPS * 1e6
    return Row(
        choice,
        batch,
        tps=round(batch / per_step * 1e6, 1),
        us_per_step=round(per_step, 2),
        host_us_per_step=round(median(host for _, host in timed) / _STEPS * 1e6, 2),
        floor_us=round(floor_us, 2),
        floor_share=round(floor_us / per_step, 3),
    )


@contextmanager
def limited(seconds: float) -> Iterator[threading.Event]:
    """Raises TimeoutError inside after so many seconds, and sets what it yields.

    That takes a main thread and a system with interval timers; elsewhere there is no limit.
    """
    fired = threading.Event()
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield fired
        return

    def fire(*_: object) -> None:
        fired.set()
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, fire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield fired
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _once(steps: Steps, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of one run, and those until the host had given it all out."""
    steps.reset()
    begun = clock()
    steps.run()
    given = time.perf_counter()
    steps.finish()
    return clock() - begun, given - begun


# -- exactness -----------------------------------------------------------------------------------------------


@torch.inference_mode()
def exactness(lm: SpeechLM, prompt: int = 64, tokens: int = 32, seed: int = 0) -> list[dict[str, Any]]:
    """How far each way's scores are from the float32 plain version's, on the same random tokens.

    Returns:
        One entry a way: mean and largest KL divergence, and the share of positions with the same likeliest token.
    """
    import copy

    device, config = lm.llm_decoder.weight.device, lm.config
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(config.text_vocab_size, (prompt,), generator=generator)
    speech = torch.randint(config.speech_token_size, (tokens,), generator=generator)
    with _full_products():
        expected = _plain_scores(copy.deepcopy(lm).float(), text, speech)
    found = {"plain": _plain_scores(lm, text, speech)}
    if kernels_run_on(device):
        for bucket in (1, 32):
            found[f"kernels, {bucket} rows"] = paged_scores_of(lm, text, speech, bucket)
        resident = resident_scores_of(lm, text, speech)
        if resident is not None:
            found["persistent"] = resident
    return [{"choice": name, **divergence(expected, scores)} for name, scores in found.items()]


def divergence(expected: torch.Tensor, scores: torch.Tensor) -> dict[str, float]:
    """KL divergence of ``scores`` from ``expected``, both ``[positions, vocab]``, and agreement of the likeliest."""
    first, second = expected.double().log_softmax(-1), scores.double().log_softmax(-1)
    each = (first.exp() * (first - second)).sum(-1)
    agree = (expected.argmax(-1) == scores.argmax(-1)).double().mean()
    return {"kl_mean": float(each.mean()), "kl_max": float(each.max()), "argmax_agreement": float(agree)}


@contextmanager
def _full_products() -> Iterator[None]:
    """No TF32 inside: the definition is float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _plain_scores(lm: SpeechLM, text: torch.Tensor, speech: torch.Tensor) -> torch.Tensor:
    device = lm.llm_decoder.weight.device
    embeds = torch.cat((lm.embed_text(text.to(device)), lm.embed_speech(speech.to(device))))
    return lm.logits(lm(embeds[None])[0, len(text) :]).float()


def paged_scores_of(lm: SpeechLM, text: torch.Tensor, speech: torch.Tensor, bucket: int) -> torch.Tensor:
    """Scores behind each speech token by ``PagedLM``'s kernels for ``bucket`` rows, float32 ``[tokens, vocab]``."""
    return _prompted(lm, text, len(speech), bucket).forced_scores(0, speech.tolist(), bucket)


def resident_scores_of(lm: SpeechLM, text: torch.Tensor, speech: torch.Tensor) -> torch.Tensor | None:
    """The same by the resident kernel, whose draws are overruled; None where it does not fit."""
    paged = _prompted(lm, text, len(speech), 1)
    kernel = single_kernel(paged)
    if kernel is None:
        return None
    state, slots, scores = paged.state, torch.zeros(1, dtype=torch.int32, device=paged.device), []
    for token in speech.tolist():
        state.token[0], state.stop[0], state.remaining[0] = token, 0, 1
        kernel.launch(state, slots, paged.pool, paged.table, 1)
        scores.append(kernel.logits)
    return torch.stack(scores)


def _prompted(lm: SpeechLM, text: torch.Tensor, more: int, num_slots: int) -> PagedLM:
    """``PagedLM`` with the text in row 0 and room for ``more`` positions behind it."""
    pages = 1 + -(-(len(text) + more) // PAGE_TOKENS)
    paged = PagedLM(
        lm,
        draw_rows(lm.config),
        num_pages=pages + 1,
        num_slots=num_slots,
        max_positions=pages * PAGE_TOKENS,
        use_kernels=True,
    )
    paged.set_pages(0, range(1, pages))
    prompt = RowPrompt(
        RowCommand(0, 1, 1, 0),
        text.tolist(),
        past=0,
        place=0,
        history=[],
        decoded=0,
        seed=0,
        top_p=0.8,
        top_k=25,
        win_size=10,
        tau_r=0.1,
        temperature=1.0,
    )
    paged.collect(paged.prompt(prompt))
    return paged
