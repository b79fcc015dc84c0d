"""The transformer block with adaptive LayerNorm, after DiT (arXiv:2212.09748), without zero gates."""

from __future__ import annotations

import math

from torch import Tensor, nn

from tinydit_ray.model.attention import MultiHeadAttention


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (N, L, D) * (1 + scale) + shift, with shift and scale (N, D) the same for every token."""
    return x * (1 + scale[:, None]) + shift[:, None]


class SigmoidGELU(nn.Module):
    """The tanh form of GELU written as x · sigmoid(2u), u = sqrt(2/π) (x + 0.044715 x³), in fp32 inside.

    (1 + tanh u) / 2 = sigmoid(2u), so it is the same function (Hendrycks & Gimpel, arXiv:1606.08415, section 2).
    One exponential vectorises better on CPUs than a tanh; it pays where a compiler fuses it into one loop.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        inner = (8 / math.pi) ** 0.5 * (wide + 0.044715 * wide * wide * wide)
        return (wide * inner.sigmoid()).to(x.dtype)


def gelu_of(form: str) -> nn.Module:
    """GELU of the ``gelu`` axis: exact (erf), tanh, or tanh written with a sigmoid."""
    return SigmoidGELU() if form == "tanh-sigmoid" else nn.GELU(approximate="tanh" if form == "tanh" else "none")


class FeedForward(nn.Module):
    """Linear(D, 4D), GELU, Linear(4D, D)."""

    def __init__(self, dim: int, gelu: str = "exact") -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, 4 * dim),
            gelu_of(gelu),
            nn.Linear(4 * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class DiTBlock(nn.Module):
    """Tokens (N, L, D) and condition (N, D) -> tokens (N, L, D).

    ``modulation`` (N, 4D), where given, is this block's adaLN output computed elsewhere
    (all blocks in one matmul); otherwise the block computes it from the condition.
    """

    def __init__(
        self, dim: int, num_heads: int, *, kernel: str = "manual", qkv: str = "fused", gelu: str = "exact"
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = MultiHeadAttention(dim, num_heads, kernel=kernel, qkv=qkv)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = FeedForward(dim, gelu)
        self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(dim, 4 * dim))

    def forward(self, x: Tensor, c: Tensor, modulation: Tensor | None = None) -> Tensor:
        if modulation is None:
            modulation = self.adaLN(c)
        shift1, scale1, shift2, scale2 = modulation.chunk(4, dim=-1)
        x = x + self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    """Tokens (N, L, D) and condition (N, D) -> patch pixels (N, L, P*P*C)."""

    def __init__(self, dim: int, out_features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.linear = nn.Linear(dim, out_features)

    def forward(self, x: Tensor, c: Tensor, modulation: Tensor | None = None) -> Tensor:
        if modulation is None:
            modulation = self.adaLN(c)
        shift, scale = modulation.chunk(2, dim=-1)
        return self.linear(modulate(self.norm(x), shift, scale))
