"""Nets that are not TinyDiT, for ``--model own_nets:…``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Two convolutions, the time added between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.first(x) + self.time(t[:, None])[:, :, None, None]))


def conv(*, dim: int = 8) -> nn.Module:
    return ConvNet(dim)


def one_size() -> nn.Module:
    return ConvNet(8)


def wrong_shape() -> nn.Module:
    return nn.Bilinear(32, 1, 5)


def odd_parameter(width: int) -> nn.Module:
    return ConvNet(width)


def no_net() -> Any:
    return torch.zeros(3)
