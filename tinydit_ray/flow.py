"""Flow matching with straight paths: the loss and the samplers. t = 0 is data, t = 1 is noise.

x_t = (1 - t) x0 + t noise, and the model predicts the velocity dx/dt = noise - x0
(Lipman et al., arXiv:2210.02747; Liu et al., arXiv:2209.03003).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VelocityModel = Callable[[Tensor, Tensor], Tensor]


def interpolate(x0: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(x_t, target velocity), both (N, C, H, W), for images x0, noise and times t (N,)."""
    weight = t.view(-1, 1, 1, 1)
    return (1 - weight) * x0 + weight * noise, noise - x0


def flow_matching_loss(model: VelocityModel, batch: Any) -> Tensor:
    """Mean squared error of the predicted velocity, a scalar in fp32.

    ``batch`` is (x0, noise, t) with the randomness already drawn (what sweeps use: the same for every
    cell), or images (N, C, H, W) in [-1, 1], alone or with labels, whose noise and times are then
    drawn from the global generator.
    """
    x0, noise, t = _complete(batch)
    x_t, target = interpolate(x0, noise, t)
    return F.mse_loss(model(x_t, t).float(), target)


def _complete(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(batch, (tuple, list)) and len(batch) == 3:
        return batch[0], batch[1], batch[2]
    x0 = batch if isinstance(batch, Tensor) else batch[0]
    return x0, torch.randn_like(x0), torch.rand(len(x0), device=x0.device)


@torch.no_grad()
def euler_sample(model: VelocityModel, noise: Tensor, steps: int = 20) -> Tensor:
    """Images from noise (N, C, H, W) in ``steps`` Euler steps from t = 1 to 0; one model call each."""
    x = noise
    for t, step in _times(noise, steps):
        x = x - step * model(x, t).to(x.dtype)
    return x


@torch.no_grad()
def heun_sample(model: VelocityModel, noise: Tensor, steps: int = 20) -> Tensor:
    """Images from noise in ``steps`` steps of Heun's second-order method; two model calls each."""
    x = noise
    for t, step in _times(noise, steps):
        here = model(x, t).to(x.dtype)
        there = model(x - step * here, (t - step).clamp_min(0)).to(x.dtype)
        x = x - step * (here + there) / 2
    return x


def _times(noise: Tensor, steps: int) -> list[tuple[Tensor, float]]:
    """(t (N,), step length) for each of ``steps`` equal steps from t = 1 down to 0."""
    if steps < 1:
        raise ValueError(f"steps {steps}: a sampler takes at least one step")
    return [
        (torch.full((len(noise),), 1 - i / steps, dtype=torch.float32, device=noise.device), 1 / steps)
        for i in range(steps)
    ]
