"""One training step of the speech LM as one CUDA graph for each length of rows.

The model is so small that a step launched kernel by kernel waits for the host most of the time. Here everything
from drawing the rows out of the epoch's plan to the optimizer is recorded once for each row length (a few fixed
ones) and replayed. The layers go through ``torch.compile`` first where that works, which fuses their element-wise
parts. Whatever fails falls back: compiled graph → plain graph → eager; eager is also what runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.mini.lm_data import IGNORE, DeviceRows, LMData, Plan, assemble, disturb
from vivace.config import SpeechLMConfig
from vivace.layers.attention import rotary_tables
from vivace.models.speech_lm import DecoderLayer, SpeechLM

WIDTHS = (128, 160, 192, 224, 256, 288, 320, 384, 448, 544, 768, 1024)
"""Row lengths, padding included. Rows are between 90 and about 900 positions long, half of them below 340."""

HINT_LAYER = -2
"""Behind which layer the phoneme being said is asked for; the last ones are left to the speech tokens alone."""

Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def run_layer(layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One layer over whole sequences."""
    out: Tensor = layer(x, (cos, sin), None, None, 0)
    return out


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, real: int) -> Tensor:
    """Mean cross-entropy over the positions that have a target, in nats.

    Smoothing spreads over the ``real`` first rows, the speech tokens, only. Over all rows it would teach the 197
    special rows that never occur, and resampling (which knows no nucleus) would then end sentences at random.
    """
    scores = F.linear(hidden, weight).float().log_softmax(-1)
    wanted = targets != IGNORE
    plain = -scores.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    if smoothing:
        plain = (1 - smoothing) * plain - smoothing * scores[..., :real].mean(-1)
    return (plain * wanted).sum() / wanted.sum().clamp_min(1)


def hint_loss(hidden: Tensor, weight: Tensor, hints: Tensor) -> Tensor:
    """Mean cross-entropy of naming the phonemes ``hints [B, L, n]``; ``weight [n * classes, hidden]``."""
    normed = F.rms_norm(hidden, hidden.shape[-1:])
    scores = F.linear(normed, weight).float().unflatten(-1, (hints.shape[-1], -1)).log_softmax(-1)
    wanted = hints != IGNORE
    each = -scores.gather(-1, hints.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (each * wanted).sum() / wanted.sum().clamp_min(1)


def loss_function(
    lm: SpeechLM,
    smoothing: float = 0.0,
    *,
    compiled: bool = False,
    hint_weight: Tensor | None = None,
    hint_share: float = 0.3,
) -> Loss:
    """A function from inputs, targets ``[B, L]`` and hints ``[B, L, n]`` (see ``lm_data``) to the loss."""
    layer_, head_, hint_ = run_layer, head_loss, hint_loss
    if compiled:
        torch._dynamo.config.recompile_limit = 32
        layer_ = torch.compile(run_layer, dynamic=True)
        head_ = torch.compile(head_loss, dynamic=True)
        hint_ = torch.compile(hint_loss, dynamic=True)
    config = lm.config

    def loss(ids: Tensor, targets: Tensor, hints: Tensor | None = None) -> Tensor:
        table = torch.cat([lm.embed_tokens.weight, lm.speech_embedding.weight])
        x = lm.dropout(F.embedding(ids, table))
        cos, sin = rotary_tables(0, ids.shape[1], config.head_dim, config.rope_theta, ids.device)
        extra: Tensor | None = None
        for index, layer in enumerate(lm.layers):
            x = layer_(layer, x, cos, sin)
            if index - len(lm.layers) == HINT_LAYER and hints is not None and hint_weight is not None:
                extra = hint_(x, hint_weight, hints)
        total = head_(lm.norm(x), lm.llm_decoder.weight, targets, smoothing, config.speech_token_size)
        return total if extra is None else total + hint_share * extra

    return loss


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; plain float32 on the CPU. Nothing is cached, so that graphs record the casts."""
    enabled = device.type == "cuda"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


def optimizer_for(
    lm: SpeechLM, rate: Tensor, decay: float, hint_weight: Tensor | None = None
) -> torch.optim.AdamW:
    """AdamW whose learning rate is a tensor; norms, biases and embeddings do not decay."""
    decayed, free = [], []
    for name, weight in lm.named_parameters():
        (decayed if weight.ndim == 2 and "embed" not in name else free).append(weight)
    if hint_weight is not None:
        free.append(hint_weight)
    fused = next(lm.parameters()).is_cuda
    groups = [{"params": decayed, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=rate if fused else float(rate), betas=(0.9, 0.98), fused=fused, capturable=fused
    )


class Trainer:
    """Holds model, optimizer and graphs.

    Args:
        mode: ``compiled`` (graphs of compiled layers), ``graph`` or ``eager``.
        most_noise: see ``disturb``.

    Attributes:
        mode: what is really in use.
        loss_sum: of all steps since the last ``mean_loss``, on the device.
    """

    def __init__(
        self,
        lm: SpeechLM,
        data: LMData,
        *,
        mode: str,
        decay: float,
        smoothing: float,
        most_noise: float,
        hint_share: float = 0.3,
    ) -> None:
        device = data.device
        self.lm, self.data, self.mode = lm, data, mode if device.type == "cuda" else "eager"
        self._smoothing, self._noise, self._share = smoothing, most_noise, hint_share
        self.rate = torch.zeros((), device=device)
        self._hint_weight: Tensor | None = None
        if data.hints is not None:
            size = (data.hints.shape[1] * data.num_hint_classes, lm.config.hidden_size)
            self._hint_weight = nn.Parameter(0.02 * torch.randn(size, device=device))
        self.optimizer = optimizer_for(lm, self.rate, decay, self._hint_weight)
        self.loss_sum = torch.zeros((), device=device)
        self._count = 0
        self._rows: DeviceRows | None = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._seen: set[int] = set()
        self._pool: tuple[int, int] | None = None
        self._loss = self._make_loss()

    def _make_loss(self) -> Loss:
        return loss_function(
            self.lm,
            self._smoothing,
            compiled=self.mode == "compiled",
            hint_weight=self._hint_weight,
            hint_share=self._share,
        )

    @property
    def steps_summed(self) -> int:
        """Steps since the last ``mean_loss``."""
        return self._count

    def new_plan(self, plan: Plan) -> None:
        """Take the rows of the next epoch, as many as in every epoch before."""
        rows = DeviceRows.of(self.data, plan)
        if self._rows is None:
            self._rows = rows
        else:
            self._rows.copy_(rows)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps to come."""
        self.rate.fill_(rate)
        if not isinstance(self.optimizer.param_groups[0]["lr"], Tensor):
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def step(self, which: Tensor, width: int) -> None:
        """Train on rows ``which`` (int64, on the device) of the plan, each at most ``width`` long."""
        self._count += 1
        if self.mode == "eager":
            self._work(which, width)
            return
        try:
            self._replay(which, width)
        except Exception as error:
            print(f"lm: no {self.mode} steps ({type(error).__name__}: {str(error)[:300]})", flush=True)
            self.mode = "graph" if self.mode == "compiled" else "eager"
            self._graphs.clear()
            self._seen.clear()
            self._pool = None
            self._loss = self._make_loss()
            self._count -= 1
            self.step(which, width)

    def mean_loss(self) -> float:
        """Mean since the last call; waits for the device. FloatingPointError if it is not finite."""
        mean = float(self.loss_sum) / max(1, self._count)
        self.loss_sum.zero_()
        self._count = 0
        if not np.isfinite(mean):
            raise FloatingPointError(f"the loss is not finite: {mean}")
        return mean

    def _work(self, which: Tensor, width: int) -> None:
        """Everything of one step; reads and writes device memory only."""
        assert self._rows is not None
        ids, targets, hints = assemble(self.data, self._rows, which, width)
        with autocast(ids.device):
            loss = self._loss(disturb(ids, self.data.config, self._noise), targets, hints)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
        self.optimizer.step()
        self.loss_sum += loss.detach()

    def _replay(self, which: Tensor, width: int) -> None:
        found = self._graphs.get(width)
        if found is None and width not in self._seen:
            # The first step of a width runs eagerly: libraries and the compiler set themselves up meanwhile.
            self._seen.add(width)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._work(which, width)
            torch.cuda.current_stream().wait_stream(side)
            return
        if found is None:
            static = which.clone()
            graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool):
                self._work(static, width)
            self._pool = self._pool or graph.pool()
            found = self._graphs[width] = (graph, static)
        graph, static = found
        static.copy_(which)
        graph.replay()


def rows_of(positions: int, width: int) -> int:
    """How many rows a batch has: a multiple of 8 where it can be, so that the compiler meets few kinds of shapes."""
    count = positions // width
    return max(1, count if count < 8 else count - count % 8)


def bucketed(
    totals: np.ndarray, positions: int, random: np.random.Generator, widths: Sequence[int] = WIDTHS
) -> Iterator[tuple[np.ndarray, int]]:
    """An epoch's batches in random order: row numbers, as many for each width as ``positions`` allow, and the width.

    Rows that do not fill a batch go to the next larger width; the largest batch is filled up with repeats. Rows longer
    than the largest width (there are next to none) are left out.
    """
    place = np.searchsorted(np.array(widths), totals)
    parts: list[tuple[np.ndarray, int]] = []
    left = np.zeros(0, dtype=np.int64)
    for index, width in enumerate(widths):
        rows = np.concatenate([left, random.permutation((place == index).nonzero()[0])])
        count = rows_of(positions, width)
        full = len(rows) // count * count
        parts += [(batch, width) for batch in rows[:full].reshape(-1, count)]
        left = rows[full:]
    if len(left):
        longest = int(np.searchsorted(np.array(widths), totals[left].max()))
        count = rows_of(positions, widths[longest])
        for begin in range(0, len(left), count):
            parts.append((np.resize(left[begin : begin + count], count), widths[longest]))
    for index in random.permutation(len(parts)):
        yield parts[index]


def synthetic_data(config: SpeechLMConfig, device: torch.device, items: int = 2000) -> LMData:
    """Random tokens in the shapes of the real corpus, for timing."""
    random = np.random.default_rng(0)
    speech = np.clip(random.gamma(6.0, 11.7, items), 31, 216).astype(np.int64)
    text = np.clip(speech / 1.75, 10, 110).astype(np.int64)
    prefix = np.array([29, *random.integers(40, 100, 600)])
    flat = np.concatenate(
        [
            random.integers(0, config.text_vocab_size, text.sum() + prefix.sum() + 1),
            random.integers(0, config.speech_token_size, speech.sum()) + config.text_vocab_size,
        ]
    )
    starts = [np.concatenate([[0], np.cumsum(lengths)[:-1]]) for lengths in (text, prefix, speech)]
    hints = torch.randint(0, 45, (len(flat), 3), device=device)
    return LMData(
        hints=hints,
        num_hint_classes=45,
        config=config,
        items=[],
        text=[],
        speech=[],
        prefixes=[],
        flat=torch.from_numpy(flat).to(device),
        text_start=starts[0],
        text_length=text,
        speech_start=starts[2] + text.sum() + prefix.sum() + 1,
        speech_length=speech,
        prefix_start=starts[1] + text.sum(),
        prefix_length=prefix,
        voice=random.integers(0, 50, items),
        space_start=int(text.sum() + prefix.sum()),
        full_stop=0,
    )
