"""Train the embedded model's flow: speech tokens, a prompt and a speaker embedding to mel.

    python -m recipes.mini.train_flow --data CORPUS --tokens tokens.npz --speakers speakers.npz --out WORK/flow \
        --minutes 5 [--resume WORK/flow/resume.pt]

Conditional flow matching as CosyVoice 3 has it: straight paths from noise to mel, times on a cosine grid, the
conditions dropped in a fifth of the rows, chunk mask and full attention in turn. Rows are stretches of one
voice whose first part is the prompt (``flow_rows``); what is drawn, the step and the optimizer are one CUDA
graph per mask. Writes ``flow.pt`` (mean weights, half precision, official shapes), ``resume.pt`` (the same: the
optimizer starts anew) and ``flow.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.mini.config import mini_flow_config
from recipes.mini.corpus import Corpus
from recipes.mini.flow_rows import LOOKAHEAD, FlowSpeech, Rows
from recipes.mini.schedule import Ema, Progress
from vivace.models.flow import FlowModel

TOKEN_NOISE = 0.04
"""Share of tokens replaced by random ones, so that a mistake of the LM does not spoil what is around it."""

SPEAKER_NOISE = 0.015
"""Deviation added to every number of a speaker embedding of length one (192 numbers: 0.2 in all)."""

EMA_EVERY = 10


def initialize(model: FlowModel, mel: Tensor) -> None:
    """Begin as the mean: no block acts yet, and the velocity is the mean frame.

    The official layout takes raw log-mel (mean about -6, deviation about 2.5 where noise has 1). Its scale is
    put into the first weights of the projections instead of the data.
    """
    spread = float(mel.std())
    with torch.no_grad():
        for block in model.dit.transformer_blocks:
            block.attn_norm.linear.weight.zero_()
            block.attn_norm.linear.bias.zero_()
        model.dit.norm_out.linear.weight.zero_()
        model.dit.norm_out.linear.bias.zero_()
        model.dit.proj_out.weight.mul_(0.5)
        model.dit.proj_out.bias.copy_(mel.mean(0).cpu())
        model.dit.input_embed.proj.weight[:, :160].div_(spread)
        model.input_embedding.weight.mul_(0.5)


def spoiled(rows: Rows, codes: int) -> Rows:
    """Some tokens replaced and every speaker embedding moved a little, as inference will have them."""
    wrong = torch.rand(rows.tokens.shape, device=rows.tokens.device) < TOKEN_NOISE
    tokens = torch.where(wrong, torch.randint_like(rows.tokens, codes), rows.tokens)
    speaker = rows.speaker + SPEAKER_NOISE * torch.randn_like(rows.speaker)
    return rows._replace(tokens=tokens, speaker=speaker)


def flow_loss(
    model: FlowModel, rows: Rows, streaming: bool, drop: float, generator: torch.Generator | None = None
) -> Tensor:
    """Mean squared error of the velocity over valid frames behind the prompt.

    Args:
        drop: share of rows that lose all conditions but ``x``, for classifier-free guidance.
        generator: where noise and times come from; None: the device's default generator.
    """
    batch, size = rows.mel.shape[0], rows.mel.shape[2] // 2
    device, config = rows.mel.device, model.config
    places = torch.arange(size + LOOKAHEAD, device=device)
    embedded = model.input_embedding(rows.tokens) * (places < rows.visible[:, None])[:, :, None]
    hidden = model.lookahead(embedded[:, :size], embedded[:, size:])
    mu = hidden.repeat_interleave(2, dim=1).transpose(1, 2)
    frames = torch.arange(2 * size, device=device)
    is_prompt = (frames < 2 * rows.prompt[:, None])[:, None]
    counted = (frames < 2 * rows.valid[:, None])[:, None] & ~is_prompt
    keep = (torch.rand(batch, 1, 1, device=device, generator=generator) >= drop).to(rows.mel)
    noise = torch.randn(rows.mel.shape, device=device, generator=generator)
    times = 1 - torch.cos(torch.rand(batch, 1, 1, device=device, generator=generator) * 0.5 * torch.pi)
    x = (1 - (1 - config.sigma_min) * times) * noise + times * rows.mel
    target = rows.mel - (1 - config.sigma_min) * noise
    velocity = model.dit(
        x,
        mu * keep,
        rows.mel * is_prompt * keep,
        model.project_speaker(rows.speaker) * keep[:, :, 0],
        times[:, 0, 0],
        streaming,
        None if streaming else 2 * rows.valid,
    )
    error = (velocity.float() - target).square() * counted
    return error.sum() / (counted.sum() * config.output_size)


class Trainer:
    """One training step, captured as a CUDA graph for each of the two masks where there is a GPU."""

    def __init__(self, model: FlowModel, speech: FlowSpeech, args: argparse.Namespace) -> None:
        self.model, self.speech, self.args = model, speech, args
        self.on_gpu = speech.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=torch.tensor(args.rate, device=speech.device) if self.on_gpu else args.rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=self.on_gpu,
            capturable=self.on_gpu,
        )
        self.graphs: dict[bool, Callable[[], Tensor]] = {}

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if self.on_gpu:  # the graphs read it from where it is
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def eager_step(self, streaming: bool) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        rows = self.speech.draw(self.args.rows, self.args.tokens_per_row)
        rows = spoiled(rows if streaming else shortened(rows), self.model.config.vocab_size)
        with torch.autocast(
            self.speech.device.type, torch.bfloat16, enabled=self.on_gpu, cache_enabled=False
        ):
            loss = flow_loss(self.model, rows, streaming, self.model.config.training_guidance_drop)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def capture(self) -> None:
        """Warm up beside the main stream, then record both steps; their memory is shared."""
        torch.backends.cudnn.benchmark = True  # for these shapes; later ones vary
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.eager_step(True)
                self.eager_step(False)
        torch.cuda.current_stream().wait_stream(side)
        pool = torch.cuda.graph_pool_handle()
        for streaming in (True, False):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                loss = self.eager_step(streaming)
            self.graphs[streaming] = _replay(graph, loss)
        torch.backends.cudnn.benchmark = False

    def step(self, streaming: bool) -> Tensor:
        replay = self.graphs.get(streaming)
        return replay() if replay else self.eager_step(streaming)


def _replay(graph: torch.cuda.CUDAGraph, loss: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        graph.replay()
        return loss.clone()

    return run


def shortened(rows: Rows) -> Rows:
    """Half of the rows end early, because full attention would otherwise know one length only."""
    size = rows.mel.shape[2] // 2
    chance = torch.rand(rows.valid.shape[0], 2, device=rows.valid.device)
    shorter = (rows.prompt + 20 + chance[:, 0] * (size - rows.prompt - 20)).long()
    valid = torch.where(chance[:, 1] < 0.5, shorter, rows.valid)
    return rows._replace(valid=valid, visible=torch.minimum(rows.visible, valid + LOOKAHEAD))


@torch.inference_mode()
def held_out(model: FlowModel, speech: FlowSpeech, size: int, most: int = 192) -> dict[str, float]:
    """Losses on held-out utterances behind a prompt, always with the same noise and times."""
    found: dict[str, float] = {}
    parts = [speech.pairs[start : start + 64] for start in range(0, min(most, len(speech.pairs)), 64)]
    for name, streaming in (("streaming", True), ("full", False)):
        generator = torch.Generator(speech.device).manual_seed(5)
        losses = [
            flow_loss(model, speech.check_rows(part, size), streaming, 0.0, generator)
            for part in parts
            for _ in range(4)
        ]
        found[name] = round(float(torch.stack(losses).mean()), 4) if losses else float("nan")
    return found


@torch.inference_mode()
def mel_distance(model: FlowModel, speech: FlowSpeech, most: int = 12) -> dict[str, float]:
    """Mean absolute error of generated mel, guided and streaming, on held-out utterances; and the mean energy's."""
    errors, levels = [], []
    for prompt, item in speech.pairs[:: max(1, len(speech.pairs) // most)][:most]:
        both = int(speech.counts[prompt] + speech.counts[item])
        rows = speech.check_rows([(prompt, item)], both)
        border = 2 * int(rows.prompt[0])
        mel = model.generate(
            rows.tokens[0, :both], rows.mel[0, :, :border].T, rows.speaker[0], streaming=True
        )
        difference = mel - rows.mel[0, :, border:]
        errors.append(float(difference.abs().mean()))
        levels.append(float(difference.mean()))
    return {"mel_error": round(float(np.mean(errors)), 4), "mel_bias": round(float(np.mean(levels)), 4)}


def save(model: FlowModel, out: Path, report: dict[str, float]) -> None:
    """Half-precision weights in the module's names; refuses what half precision cannot hold."""
    state = {
        name: value.detach().cpu() if "inv_freq" in name else value.detach().cpu().half()
        for name, value in model.state_dict().items()
    }
    bad = [name for name, value in state.items() if not torch.isfinite(value).all()]
    if bad:
        raise FloatingPointError(f"not finite in half precision: {bad}")
    out.mkdir(parents=True, exist_ok=True)
    torch.save({"state": state, "codes": model.config.vocab_size, "report": report}, out / "flow.pt")
    shutil.copyfile(out / "flow.pt", out / "resume.pt")
    (out / "flow.json").write_text(json.dumps(report) + "\n")


def load(path: Path, device: torch.device) -> FlowModel:
    """The model of a ``flow.pt`` or ``resume.pt``, float32."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    model = FlowModel(mini_flow_config(found["codes"]))
    model.load_state_dict(found["state"])
    return model.to(device)


def train(args: argparse.Namespace) -> None:
    """Train until the time is used up; report and save on the way."""
    begun = time.monotonic()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    speech = FlowSpeech(Corpus(args.data), args.tokens, args.speakers, device)
    if args.resume:
        model = load(args.resume, device)
    else:
        model = FlowModel(mini_flow_config(speech.codes))
        initialize(model, speech.mel)
        model = model.to(device)
    model.train()
    highest = args.rate * (0.6 if args.resume else 1.0)
    trainer = Trainer(model, speech, args)
    shuffler = np.random.default_rng(args.seed)
    print(
        f"flow: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(speech.order)} utterances, "
        f"{len(speech.pairs)} held out, {int(speech.counts.sum()) / 25 / 3600:.2f} h",
        flush=True,
    )
    progress = Progress(args.minutes, args.steps, begun)
    trainer.set_rate(progress.rate(highest))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        try:
            trainer.capture()
        except RuntimeError as error:  # slower, but the time box is spent on training all the same
            print(f"no CUDA graph, steps run one by one: {error}", flush=True)
            trainer.graphs.clear()
    ema = Ema(model, span=args.ema_span / EMA_EVERY)
    next_check, best = args.check_minutes, float("inf")
    while not progress.over():
        trainer.set_rate(progress.rate(highest))
        if progress.steps % 50 == 0:
            speech.shuffle(shuffler)
        streaming = progress.steps % 2 == 0
        loss = trainer.step(streaming)
        if progress.steps % EMA_EVERY == 0:
            ema.update(model)
        progress.step({"loss": loss})
        if progress.fraction() * args.minutes >= next_check and not progress.over():
            next_check += args.check_minutes
            report = held_out(ema.model, speech, args.tokens_per_row)
            print("check", json.dumps(report), flush=True)
            if sum(report.values()) > 1.5 * best:
                print("the training has run away; the file holds the best weights", flush=True)
                return
            if sum(report.values()) < best:
                best = sum(report.values())
                save(ema.model, args.out, report | {"steps": progress.steps})
    ema.model.eval()
    report = held_out(ema.model, speech, args.tokens_per_row) | {"steps": progress.steps}
    save(ema.model, args.out, report)
    if speech.pairs:
        save(ema.model, args.out, report | mel_distance(load(args.out / "flow.pt", device).eval(), speech))
    print("flow done", (args.out / "flow.json").read_text().strip(), flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.train_flow", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="corpus folder")
    parser.add_argument("--tokens", type=Path, required=True, help="tokens.npz of the corpus")
    parser.add_argument("--speakers", type=Path, required=True, help="speakers.npz of the corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for flow.pt")
    parser.add_argument("--minutes", type=float, default=5.0, help="from start to end")
    parser.add_argument("--steps", type=int, default=10**9, help="stop earlier, after so many steps")
    parser.add_argument("--resume", type=Path, help="resume.pt to go on from")
    parser.add_argument("--rate", type=float, default=8e-4, help="highest learning rate")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--tokens-per-row", type=int, default=300, help="length of a row, 25 a second")
    parser.add_argument("--ema-span", type=float, default=600.0, help="steps that the mean weights look back")
    parser.add_argument("--check-minutes", type=float, default=1.0, help="time between checks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train."""
    train(parse_arguments(argv))


if __name__ == "__main__":
    main()
