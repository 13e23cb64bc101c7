"""The ways to run decoding steps that ``vivace bench llm`` compares. Each draws its tokens by the model's own rule."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vivace.datatypes import SamplingParams
from vivace.engine.lm_kernels import draw_rows, kernels_run_on, single_kernel
from vivace.engine.sampler import SamplingRows, TokenKind, allowed_tokens, sample
from vivace.layers.attention import rotary_tables, rotate
from vivace.models.capture import before_capture, capturing
from vivace.models.lm_launches import BUCKETS, PAGE_TOKENS, Launch, RowCommand
from vivace.models.lm_paged import PagedLM
from vivace.models.speech_lm import DecoderLayer, SpeechLM

_BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
CHOICES = (
    "eager",
    "eager-math",
    "eager-efficient",
    "eager-flash",
    "compile",
    "graph",
    "kernels",
    "deterministic",
    "persistent",
)
"""``eager…``: PyTorch's calls one by one, with its own choice of attention or one named. ``compile``: the same with
static shapes and layers that ``torch.compile`` has made. ``graph``: the plain step of static shapes in a CUDA graph.
``kernels``: ``PagedLM``; ``deterministic``: the same with one order of sums in all batches; ``persistent``: with the
resident kernel for one row."""


class Steps(Protocol):
    """Some decoding steps of a batch."""

    def reset(self) -> None:
        """Back to the context at which every run starts."""

    def run(self) -> None:
        """Gives all steps to the device."""

    def finish(self) -> None:
        """Brings the tokens to the host where the way does that, and checks them."""


def open_steps(choice: str, lm: SpeechLM, batch: int, context: int, steps: int) -> Steps | str:
    """The way named, ready to run, or why it is not available here."""
    on_cuda = lm.llm_decoder.weight.device.type == "cuda"
    if choice.startswith("eager"):
        return EagerSteps(lm, batch, context, steps, choice.removeprefix("eager").strip("-") or None)
    if not on_cuda:
        return "needs a CUDA device"
    if choice == "compile":
        torch.compiler.reset()  # it takes a few shapes of one piece of code only
        return StaticSteps(lm, batch, context, steps, is_compiled=True)
    if choice == "graph":
        return GraphSteps(StaticSteps(lm, batch, context, steps))
    if not kernels_run_on(lm.llm_decoder.weight.device):
        return "needs Triton and compute capability 8.0"
    if choice == "persistent" and batch > 1:
        return "serves one row"
    paged = PagedSteps(lm, batch, context, steps, deterministic=choice == "deterministic")
    if choice == "persistent" and not paged.use_single():
        return "does not fit this model or device"
    return paged


class _Drawing:
    """Sampling state of a batch: one set of tensors that the steps change in place."""

    def __init__(self, lm: SpeechLM, batch: int) -> None:
        device, config = lm.llm_decoder.weight.device, lm.config
        params = [SamplingParams(seed=seed) for seed in range(batch)]
        self._rows = SamplingRows.from_params(params, config.sampling, device)
        self._allowed = allowed_tokens(config, device)[torch.full((batch,), int(TokenKind.SPEECH))]
        self.places = torch.zeros(batch, dtype=torch.int64, device=device)
        self.recent = torch.full((batch, max(1, config.sampling.win_size)), -1, device=device)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)

    def draw(self, scores: Tensor) -> None:
        drawn, _ = sample(scores, self._rows, self.places, self.recent, self._allowed)
        self.tokens.copy_(drawn)
        self.recent.copy_(torch.cat((self.recent[:, 1:], drawn[:, None]), dim=1))
        self.places += 1

    def reset(self) -> None:
        self.places.zero_()
        self.recent.fill_(-1)


class EagerSteps:
    """``SpeechLM.forward`` with its growing cache."""

    def __init__(self, lm: SpeechLM, batch: int, context: int, steps: int, backend: str | None) -> None:
        self._lm, self._context, self._steps = lm, context, steps
        self._backends = list(_BACKENDS.values()) if backend is None else [_BACKENDS[backend]]
        self._drawing = _Drawing(lm, batch)
        self._cache = lm.new_cache(batch, context + steps)
        self._cache.storage.normal_()

    def reset(self) -> None:
        self._cache.length = self._context
        self._drawing.reset()

    def run(self) -> None:
        lm, drawing = self._lm, self._drawing
        with sdpa_kernel(self._backends):
            for _ in range(self._steps):
                hidden = lm(lm.embed_speech(drawing.tokens[:, None]), self._cache)[:, -1]
                drawing.draw(lm.logits(hidden))

    def finish(self) -> None:
        self._drawing.tokens.tolist()


class StaticSteps:
    """The plain step with static shapes: positions as a tensor, the whole cache behind a mask.

    Compiled are its layers and not the step: the code of one serves all, so that it takes seconds whatever the depth.
    """

    def __init__(
        self, lm: SpeechLM, batch: int, context: int, steps: int, *, is_compiled: bool = False
    ) -> None:
        config, weight = lm.config, lm.llm_decoder.weight
        self._lm, self._context, self._steps, self._batch = lm, context, steps, batch
        self._drawing = _Drawing(lm, batch)
        capacity = context + steps
        shape = (config.num_layers, 2, batch, config.num_kv_heads, capacity, config.head_dim)
        self._cache = torch.randn(shape, device=weight.device, dtype=weight.dtype)
        cos, sin = rotary_tables(0, capacity, config.head_dim, config.rope_theta, weight.device)
        self._cos, self._sin = cos.to(weight.dtype), sin.to(weight.dtype)
        self._at = torch.full((1,), context, device=weight.device)
        self._ages = torch.arange(capacity, device=weight.device)
        # Whole or an error: where PyTorch gives up it would run, and be measured, uncompiled.
        compiled = torch.compile(self._layer, dynamic=False, fullgraph=True) if is_compiled else None
        self._run_layer = compiled or self._layer

    @property
    def device(self) -> torch.device:
        return self._cache.device

    def reset(self) -> None:
        self._at.fill_(self._context)
        self._drawing.reset()

    def run(self) -> None:
        for _ in range(self._steps):
            self.step()

    def finish(self) -> None:
        self._drawing.tokens.tolist()

    def step(self) -> None:
        """One token for every row."""
        lm = self._lm
        x = lm.embed_speech(self._drawing.tokens[:, None])
        rotary = self._cos[self._at], self._sin[self._at]
        mask = (self._ages <= self._at)[None, None, None]
        for layer, cache in zip(lm.layers, self._cache, strict=True):
            x = self._run_layer(layer, cache, x, rotary, mask)  # type: ignore[arg-type]
        self._drawing.draw(lm.logits(lm.norm(x)[:, 0]))
        self._at += 1

    def _layer(
        self, layer: DecoderLayer, cache: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        attention, heads = layer.self_attn, (self._batch, 1, -1, self._lm.config.head_dim)
        y = layer.input_layernorm(x)
        queries = rotate(attention.q_proj(y).view(heads).transpose(1, 2), *rotary)
        keys = rotate(attention.k_proj(y).view(heads).transpose(1, 2), *rotary)
        cache[0].index_copy_(2, self._at, keys)
        cache[1].index_copy_(2, self._at, attention.v_proj(y).view(heads).transpose(1, 2))
        groups = queries.shape[1] // keys.shape[1]
        stored = cache.repeat_interleave(groups, dim=2)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries, stored[0], stored[1], attn_mask=mask
        )
        x = x + attention.o_proj(attended.transpose(1, 2).reshape(self._batch, 1, -1))
        out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return out


def capture_step(steps: StaticSteps) -> torch.cuda.CUDAGraph:
    """One step as a CUDA graph, after one that compiles what is to be compiled."""
    device = steps.device
    with before_capture(device):
        steps.reset()
        steps.step()
    graph = torch.cuda.CUDAGraph()
    steps.reset()
    with capturing(graph, device):
        steps.step()
    return graph


class GraphSteps:
    """``StaticSteps`` as one CUDA graph per step, replayed."""

    def __init__(self, plain: StaticSteps) -> None:
        self._plain, self._graph = plain, capture_step(plain)

    def reset(self) -> None:
        self._plain.reset()

    def run(self) -> None:
        for _ in range(self._plain._steps):
            self._graph.replay()

    def finish(self) -> None:
        self._plain.finish()


class PagedSteps:
    """``PagedLM``: its kernels in graphs of several steps, tokens read back at the end."""

    def __init__(self, lm: SpeechLM, batch: int, context: int, steps: int, *, deterministic: bool) -> None:
        row_pages = -(-(context + steps) // PAGE_TOKENS)
        bucket = next(size for size in BUCKETS if size >= batch)
        device = lm.llm_decoder.weight.device
        self._paged = PagedLM(
            lm,
            draw_rows(lm.config),
            num_pages=batch * row_pages + 1,
            num_slots=bucket,
            max_positions=row_pages * PAGE_TOKENS,
            use_kernels=True,
            pdl=torch.cuda.get_device_capability(device) >= (9, 0),
            deterministic=deterministic,
        )
        self._batch, self._context, self._steps = batch, context, steps
        self._launches: list[Launch] = []
        pages = torch.arange(1, batch * row_pages + 1, dtype=torch.int32, device=device)
        self._paged.table[:batch] = pages.view(batch, row_pages)
        self._paged.pool.normal_()
        state, sampling = self._paged.state, lm.config.sampling
        for name in ("top_p", "top_k", "win_size", "tau_r"):
            getattr(state, name).fill_(getattr(sampling, name))
        state.temperature.fill_(1.0)
        state.seed.copy_(torch.arange(bucket, device=device))

    def use_single(self) -> bool:
        """Takes the resident kernel, where there is one."""
        kernel = single_kernel(self._paged)
        if kernel is None:
            return False
        self._paged.use_single(kernel)
        return True

    def reset(self) -> None:
        state = self._paged.state
        state.length.fill_(self._context)
        for tensor in (state.place, state.decoded, state.stop, state.token):
            tensor.zero_()
        torch.cuda.synchronize(self._paged.device)

    def run(self) -> None:
        paged, speech = self._paged, int(TokenKind.SPEECH)
        launches, left = [], self._steps
        while left:
            steps = paged.next_steps(self._batch, left)
            launches.append(
                paged.launch([RowCommand(slot, steps, speech, 0) for slot in range(self._batch)], steps)
            )
            left -= steps
        self._launches = launches

    def finish(self) -> None:
        made = [self._paged.collect(launch) for launch in self._launches]
        count = sum(len(row.ids) for result in made for row in result.values())
        if count != self._batch * self._steps:
            raise RuntimeError(f"{count} tokens came instead of {self._batch * self._steps}")
