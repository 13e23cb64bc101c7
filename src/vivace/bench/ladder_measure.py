"""Measures one rung of the ladder: its own stages, or the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vivace.bench import ladder_quality as quality
from vivace.bench.ladder_lm import open_decoder
from vivace.bench.ladder_setup import LIMITS, Setup, fix_length
from vivace.bench.ladder_speech import Hops, Phrase, Spoken, Stages, WholeFlow
from vivace.datatypes import SamplingParams
from vivace.engine.compile_ahead import compile_ahead
from vivace.engine.engine import Engine
from vivace.engine.lm_kernels import kernels_run_on
from vivace.engine.lm_runner import PlainSequence
from vivace.engine.loading import Assets, load_assets
from vivace.engine.request import SynthesisRequest
from vivace.models.lm_single import SingleStep
from vivace.models.speech_lm import SpeechLM

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.bench.ladder_judge import Judge
    from vivace.bench.ladder_lm import Decoder
    from vivace.bench.ladder_rungs import Plan, Switches
    from vivace.models.flow import FlowModel

WARM_TOKENS = 30
"""Of the phrase that warms up: the least that goes through all stages."""

QUALITY_TOKENS = 60
DISPATCH_STEPS = 32

PLANLESS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Kinds of fused attention that make no plan for a length that they have not seen."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured, under the names of the benchmark rows; stage times are sums over the phrases."""

    runs: int
    audio_seconds: float
    ttfb_ms_p50: float
    ttfb_ms_each: list[float]
    rtf: float
    tps: float
    lm_ms: float
    flow_ms: float
    vocoder_ms: float
    host_us_per_step: float | None
    peak_memory_bytes: int | None
    lm_kl: float
    mel_snr_db: float
    wer: float | None


class Measurer:
    """Runs plans on one setup; keeps what they are compared with."""

    def __init__(self, setup: Setup, runs: int, judge: Judge | None = None) -> None:
        self._setup, self._runs, self._judge = setup, runs, judge
        generator = torch.Generator().manual_seed(0)
        vocab = setup.flow.config.vocab_size
        self._tokens: list[int] = torch.randint(vocab, (QUALITY_TOKENS,), generator=generator).tolist()
        self._scores = quality.lm_scores(setup.lm)
        self._mel = quality.whole_mel(setup.flow, setup.voice, self._tokens)
        self._decoders: dict[tuple[bool, bool, bool], Decoder] = {}

    def measure(self, plan: Plan) -> Figures:
        """Warms up, speaks all phrases ``runs`` times, and compares with float32."""
        if plan.switches.engine:
            return self._measure_engine(plan.switches)
        return self._measure_stages(plan.switches)

    @torch.inference_mode()
    def _measure_stages(self, switches: Switches) -> Figures:
        setup, before = self._setup, allocated(self._setup.device)
        lm, flow = setup.speech_lm(half=switches.half_lm), setup.flow_model(half=switches.half_flow)
        decoder = self._decoder(lm, switches)
        config = setup.assets.model.config
        make_mel = quality.streamed_mel if switches.incremental_flow else quality.whole_mel
        with ExitStack() as stack:
            if switches.attention == "flash":  # process-wide, so it holds for the thread that decodes too
                stack.enter_context(sdpa_kernel(list(PLANLESS)))
            if switches.compiled:
                stack.enter_context(compiled_blocks(flow))
                self._compile(flow)
            stages = Stages(config, setup.voice, switches, decoder, flow, setup.vocoder)
            self._warm_up(stages)
            runs, peak = self._speak_all(stages.speak)
            mel = make_mel(flow, setup.voice, self._tokens)
            kl = quality.kl_mean(self._scores, quality.lm_scores(lm)) if switches.half_lm else 0.0
        if peak is not None and setup.device.type == "cuda":  # other rungs' copies do not count
            peak += sum(weight_bytes(stage) for stage in (lm, flow, setup.vocoder)) - before
        return self._figures(runs, peak, kl, mel)

    def _decoder(self, lm: SpeechLM, switches: Switches) -> Decoder:
        """Compiled and captured ones serve all rungs that want the same."""
        if not switches.compiled and not switches.graphs:
            return open_decoder(lm, switches, self._setup.capacity)
        key = switches.half_lm, switches.compiled, switches.graphs
        if key not in self._decoders:
            self._decoders[key] = open_decoder(lm, switches, self._setup.capacity)
        return self._decoders[key]

    def _compile(self, flow: FlowModel) -> None:
        """Compiles a flow before the speech LM has a thread: while one traces, compiled code fails in another."""
        whole = WholeFlow(flow, self._setup.voice)
        whole.step(self._tokens[: WARM_TOKENS - 1], is_last=False)
        whole.step(self._tokens, is_last=True)

    def _warm_up(self, stages: Stages) -> None:
        """A short phrase; all of them where shapes are compiled or captured."""
        phrases, switches = self._setup.phrases, stages.switches
        if not switches.compiled and not switches.graphs:
            phrases = [Phrase(phrases[0].text, phrases[0].given, min(WARM_TOKENS, phrases[0].num_tokens))]
        for phrase in phrases:
            stages.speak(phrase)
        stages.hops = Hops(switches, stages.hops.prompt_tokens)

    def _measure_engine(self, switches: Switches) -> Figures:
        setup, before = self._setup, allocated(self._setup.device)
        dtype = torch.bfloat16 if setup.device.type == "cuda" else torch.float32
        if switches.int8:
            dtype = torch.int8
        folder, device = Path(setup.folder), str(setup.device)
        with compile_ahead(folder, device, dtype, 1, deterministic=False):
            assets = load_assets(folder, device=device, dtype=dtype, limits=LIMITS)
        with Engine(assets, max_streams=1) as engine:
            engine.warm_up()
            dispatch_s = _launch_s(engine, assets)

            def speak(phrase: Phrase) -> Spoken:
                fix_length(assets, phrase)
                return _spoken(engine, setup, phrase, dispatch_s)

            for phrase in setup.phrases:
                speak(phrase)
            runs, peak = self._speak_all(speak)
            if peak is not None:
                peak -= before
            mel = _engine_mel(engine, setup, self._tokens)
            kl = self._engine_kl(assets, switches)
        return self._figures(runs, peak, kl, mel)

    def _engine_kl(self, assets: Assets, switches: Switches) -> float:
        lm = assets.model.lm
        if SingleStep.fits(lm):
            return quality.kl_mean(self._scores, quality.single_step_scores(lm))
        if switches.int8:
            assert isinstance(lm, SpeechLM)
            return quality.kl_mean(self._scores, quality.lm_scores(lm))
        if self._setup.device.type != "cuda":
            return 0.0
        half = self._setup.speech_lm(half=True)  # the engine has packed its own weights
        scores = quality.paged_scores if kernels_run_on(self._setup.device) else quality.lm_scores
        return quality.kl_mean(self._scores, scores(half))

    def _speak_all(self, speak: Callable[[Phrase], Spoken]) -> tuple[list[list[Spoken]], int | None]:
        forget_peak(self._setup.device)
        runs = [[speak(phrase) for phrase in self._setup.phrases] for _ in range(self._runs)]
        return runs, peak_memory(self._setup.device)

    def _figures(self, runs: list[list[Spoken]], peak: int | None, kl: float, mel: Tensor) -> Figures:
        setup = self._setup
        rate = setup.assets.model.config.sample_rate_hz
        tokens = sum(phrase.num_tokens for phrase in setup.phrases)
        audio_s = sum(len(spoken.samples) for spoken in runs[0]) / rate

        def middle(figure: Callable[[Spoken], float]) -> float:
            return median(sum(figure(spoken) for spoken in run) for run in runs)

        ttfb = [median(run[index].ttfb_s for run in runs) * 1e3 for index in range(len(setup.phrases))]
        dispatch = [spoken.dispatch_s for run in runs for spoken in run if spoken.dispatch_s is not None]
        wer = None
        if self._judge is not None:
            texts, spoken = (phrase.text for phrase in setup.phrases), (each.samples for each in runs[0])
            wer = round(self._judge(list(texts), list(spoken), rate), 4)
        return Figures(
            runs=len(runs),
            audio_seconds=round(audio_s, 3),
            ttfb_ms_p50=round(median(ttfb), 2),
            ttfb_ms_each=[round(each, 2) for each in ttfb],
            rtf=round(middle(lambda spoken: spoken.wall_s) / audio_s, 5),
            tps=round(tokens / middle(lambda spoken: spoken.lm_s), 1),
            lm_ms=round(middle(lambda spoken: spoken.lm_s) * 1e3, 2),
            flow_ms=round(middle(lambda spoken: spoken.flow_s) * 1e3, 2),
            vocoder_ms=round(middle(lambda spoken: spoken.vocoder_s) * 1e3, 2),
            host_us_per_step=round(median(dispatch) * 1e6, 2) if dispatch else None,
            peak_memory_bytes=peak,
            lm_kl=kl,
            mel_snr_db=round(quality.snr_db(self._mel, mel), 2),
            wer=wer,
        )


def _spoken(engine: Engine, setup: Setup, phrase: Phrase, dispatch_s: float | None) -> Spoken:
    result = engine.synthesize(SynthesisRequest(phrase.text, voice=setup.voice))
    times = asdict(result.times)
    return Spoken(
        samples=result.samples,
        ttfb_s=result.ttfb_ms / 1e3,
        wall_s=result.wall_ms / 1e3,
        lm_s=times["lm_ms"] / 1e3,
        flow_s=(times["flow_ms"] + times["prompt_ms"]) / 1e3,
        vocoder_s=times["vocoder_ms"] / 1e3,
        dispatch_s=dispatch_s,
    )


@torch.inference_mode()
def _engine_mel(engine: Engine, setup: Setup, tokens: list[int]) -> Tensor:
    """What the engine's own flow makes of the tokens."""
    runner = engine._stages._flow
    with engine._stages.on_device():
        stream = runner.open(setup.voice)
        try:
            mel = runner.step(stream, list(tokens), is_last=True)  # type: ignore[arg-type]
            runner.check()
            return mel.float().cpu().clone()
        finally:
            runner.close(stream)  # type: ignore[arg-type]


@torch.inference_mode()
def _launch_s(engine: Engine, assets: Assets) -> float | None:
    """Host seconds to queue one decoding step on a device; None where host and device are one."""
    device = engine._stages._device
    if device is None:
        return None
    lm = device.lm
    sequence = PlainSequence(lm.lm, [], list(range(8)), [])
    with engine._stages.on_device():
        session = lm.open(
            sequence, SamplingParams(), segment=0, token_text_ratio=(1e3, 1e3), max_tokens=4 * DISPATCH_STEPS
        )
        try:
            session.decode(2)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            session.launch(DISPATCH_STEPS)
            spent = time.perf_counter() - begun
            session.collect()
        finally:
            session.close()
    return spent / DISPATCH_STEPS


_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@contextmanager
def compiled_blocks(flow: FlowModel) -> Iterator[None]:
    """Inside, the blocks of the DiT run compiled: one piece of code for all of them, any length."""
    blocks = list(flow.dit.transformer_blocks)
    for block in blocks:
        block.compile(dynamic=True)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def weight_bytes(stage: torch.nn.Module) -> int:
    """Memory of a stage's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in stage.parameters())


def allocated(device: torch.device) -> int:
    """Bytes in use on a CUDA device; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def forget_peak(device: torch.device) -> None:
    """Peak memory counts from here, where the system can do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR.write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """On CUDA the allocator's peak; elsewhere the process's resident peak, None where the system has no such figure."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
