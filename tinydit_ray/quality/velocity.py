"""Velocity MSE: the flow-matching loss on held-out images, with noise and times fixed by a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from tinydit_ray.flow import interpolate
from tinydit_ray.quality.net import to_pixels
from tinydit_ray.quality.precision import VelocityModel, evaluating


def velocity_mse(model: VelocityModel, images: Tensor, *, seed: int = 0, batch_size: int = 250) -> float:
    """Mean squared error of the predicted velocity on images (N, 3, H, W), uint8 or floats in [−1, 1].

    Noise and times of all N images come from a CPU generator of their own before batches are cut, and
    squared errors are summed per image in float64 over the exact count: neither the batch size nor an odd
    tail matters. The model runs in fp32, eager, in eval mode, whatever surrounds the call. Not a number
    where the model's output is not. Raises ValueError where there is no image or no batch.
    """
    with evaluating(model) as (net, device):
        return velocity_error(net, images, device=device, seed=seed, batch_size=batch_size)


@torch.no_grad()
def velocity_error(
    net: VelocityModel, images: Tensor, *, device: torch.device | str, seed: int = 0, batch_size: int = 250
) -> float:
    """``velocity_mse`` of a net as it is, in whatever precision and form; for scores see ``velocity_mse``."""
    if not len(images) or batch_size < 1:
        raise ValueError(
            f"velocity MSE of {len(images)} images in batches of {batch_size}: both must be positive"
        )
    x0 = to_pixels(images).cpu()
    generator = torch.Generator().manual_seed(seed)
    t = torch.rand(len(x0), generator=generator)
    noise = torch.randn(x0.shape, generator=generator)
    sums = []
    for chunk in zip(*(values.split(batch_size) for values in (x0, noise, t)), strict=True):
        images_, noise_, t_ = (values.to(device) for values in chunk)
        x_t, target = interpolate(images_, noise_, t_)
        error = net(x_t, t_).float() - target
        sums.append(error.double().square().flatten(1).sum(dim=1).cpu())
    return float(torch.cat(sums).sum() / x0.numel())
