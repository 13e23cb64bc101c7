"""Stores the flow's largest dispensable weights in eight bits.

Two fifths of the flow's weights (the adaptive norms' linear layers) only ever see ten inputs: the embedding of the
ten times of the Euler grid. So they can be rounded to float8 such that their outputs at those ten inputs hardly
change: columns are rounded one after the other, and what a rounding spoils is made good by the columns that are left
(the method of GPTQ, Frantar et al. 2022, with exactly known inputs).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vivace.models.flow import FlowModel, time_grid

DTYPE = torch.float8_e4m3fn
DAMPING = 0.01


def rounded(weight: Tensor, inputs: Tensor) -> Tensor:
    """``weight [out, in]`` in float8, true at ``inputs [n, in]``."""
    weight, inputs = weight.double().clone(), inputs.double()
    hessian = inputs.T @ inputs
    hessian += DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    for column in range(weight.shape[1]):
        exact = weight[:, column].clone()
        weight[:, column] = exact.to(DTYPE).double()
        error = (exact - weight[:, column]) / upper[column, column]
        weight[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
    return weight.to(DTYPE)


def shrink_flow(path: Path, flow: FlowModel) -> float:
    """Rewrites an official ``flow.pt``; returns the largest relative error of any modulation at the ten times."""
    times = torch.tensor([t for t, _ in time_grid(flow.config.num_steps)])
    with torch.no_grad():
        inputs = F.silu(flow.dit.time_embed(times))
    state = torch.load(path, map_location="cpu", weights_only=True)
    worst = 0.0
    for name, value in state.items():
        if not name.endswith(("attn_norm.linear.weight", "norm_out.linear.weight")):
            continue
        state[name] = rounded(value, inputs)
        wanted, found = inputs @ value.float().T, inputs @ state[name].float().T
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    torch.save(state, path)
    return worst
