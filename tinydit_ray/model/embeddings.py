"""What goes into the transformer: patches, positions, time. And the way back from tokens to an image."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIME_FEATURES = 256


def sinusoidal_embedding(t: Tensor, dim: int = TIME_FEATURES) -> Tensor:
    """Times t in [0, 1], shape (N,), to fp32 features (N, dim): [cos(1000 t w_i), sin(1000 t w_i)].

    w_i = 10000^(-i / (dim/2)). Always fp32, also under autocast: at 1000 t a 16-bit angle has lost
    its fraction. Frequencies as in "Attention Is All You Need" (arXiv:1706.03762, 3.5).
    """
    half = dim // 2
    index = torch.arange(half, dtype=torch.float32, device=t.device)
    frequencies = torch.exp(index * (-math.log(10000.0) / half))
    angles = 1000.0 * t.float()[:, None] * frequencies[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbedding(nn.Module):
    """t (N,) -> condition c (N, D): sinusoidal features, Linear, SiLU, Linear."""

    def __init__(self, dim: int, features: int = TIME_FEATURES) -> None:
        super().__init__()
        self.features = features
        self.mlp = nn.Sequential(nn.Linear(features, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        features = sinusoidal_embedding(t, self.features)
        return self.mlp(features.to(next(self.mlp.parameters()).dtype))


class PatchEmbed(nn.Module):
    """Images (N, C, H, W) -> tokens (N, L, D), one linear map per patch.

    ``patches="conv"`` runs it as a strided convolution, ``"linear"`` as reshape + matmul; the
    parameters (one Conv2d) and the function are the same.
    """

    def __init__(self, dim: int, patch_size: int = 4, channels: int = 3, patches: str = "conv") -> None:
        super().__init__()
        self.patch_size, self.patches = patch_size, patches
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        if self.patches == "conv":
            return self.proj(x).flatten(2).transpose(1, 2)
        n, c, h, w = x.shape
        p = self.patch_size
        cut = x.reshape(n, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        return F.linear(cut.reshape(n, -1, c * p * p), self.proj.weight.flatten(1), self.proj.bias)


class PosEmbed2D(nn.Module):
    """Adds a learned row vector and a learned column vector to each of side x side tokens (N, L, D)."""

    def __init__(self, dim: int, side: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(side, dim) * 0.02)
        self.col = nn.Parameter(torch.randn(side, dim) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + (self.row[:, None] + self.col[None, :]).flatten(0, 1)


def unpatchify(tokens: Tensor, patch_size: int = 4, channels: int = 3) -> Tensor:
    """Tokens (N, L, C*P*P), row by row over a square image, -> images (N, C, H, W)."""
    n, length, _ = tokens.shape
    side, p = int(length**0.5), patch_size
    grid = tokens.reshape(n, side, side, channels, p, p).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(n, channels, side * p, side * p)
