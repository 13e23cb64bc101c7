"""Which kernels the speech LM can use on a device, and the plain sampler on row state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vivace.config import LMConfig, SpeechLMConfig
from vivace.engine.sampler import SamplingRows, allowed_tokens, sample
from vivace.kernels.cuda_compile import KernelUnavailableError
from vivace.kernels.gpu import NEEDED, gpu_name, gpu_of
from vivace.kernels.reference import DrawRows
from vivace.kernels.row_state import RowState
from vivace.models.lm_packed import PackedLayer
from vivace.models.lm_paged import PagedLM

if TYPE_CHECKING:
    from vivace.kernels.lm_persistent import Packed, PersistentKernel

_log = logging.getLogger(__name__)


def kernels_run_on(device: torch.device) -> bool:
    """Whether the Triton kernels can be used; says why not, once, where a GPU has to do without them."""
    gpu = gpu_of(device)
    if gpu is None:
        return False
    try:
        import vivace.kernels.lm_launch  # noqa: F401
    except ImportError:
        _log.warning("Triton is not installed: the speech LM takes the plain way, which is slower")
        return False
    if gpu.capability < NEEDED:
        _log.warning(
            "%s has compute capability %d.%d: the speech LM takes the plain way, which is slower; its kernels "
            "need 8.0",
            gpu_name(device),
            *gpu.capability,
        )
        return False
    return True


def single_kernel(paged: PagedLM) -> PersistentKernel | None:
    """The resident kernel for a row that steps alone, with weights of its own; None where it does not fit."""
    config = paged.config
    if not isinstance(config, SpeechLMConfig):
        return None
    weights, gpu = paged.weights, gpu_of(paged.device)
    fits = weights.head.dtype == torch.bfloat16 and gpu is not None and gpu.capability >= (9, 0)
    if not fits or config.start_rows_apart or config.head_bias or config.head_dim != 64:
        return None
    from vivace.kernels import lm_persistent

    shape = lm_persistent.Shape.of(config)
    try:
        return lm_persistent.PersistentKernel(
            shape,
            [_packed(layer) for layer in weights.layers],
            weights.last,
            weights.head[: config.num_speech_rows],
            weights.speech,
            torch.stack((paged.cos, paged.sin), dim=-1),
        )
    except (KernelUnavailableError, ValueError) as error:
        _log.warning("the resident kernel of the speech LM is not used: %s", error)
        return None


def _packed(layer: PackedLayer) -> Packed:
    from vivace.kernels.lm_persistent import pack_layer

    half = layer.gate_up.shape[0] // 2
    gate, up = layer.gate_up[:half], layer.gate_up[half:]
    return pack_layer(layer.before, layer.qkv, layer.qkv_bias, layer.out, layer.between, gate, up, layer.down)


def draw_rows(config: LMConfig) -> DrawRows:
    """``sampler.sample`` on the rows of a ``RowState``."""
    tables: dict[torch.device, Tensor] = {}

    def draw(
        logits: Tensor, state: RowState, slots: Tensor, kinds: Tensor, recent: Tensor
    ) -> tuple[Tensor, Tensor]:
        if logits.device not in tables:
            tables[logits.device] = allowed_tokens(config, logits.device)
        rows = SamplingRows(
            seeds=state.seed[slots],
            top_p=state.top_p[slots],
            top_k=state.top_k[slots].long(),
            win_size=state.win_size[slots].long(),
            tau_r=state.tau_r[slots],
            temperature=state.temperature[slots],
        )
        allowed = tables[logits.device][kinds.long()]
        return sample(logits[:, : config.num_speech_rows], rows, state.place[slots], recent, allowed)

    return draw
