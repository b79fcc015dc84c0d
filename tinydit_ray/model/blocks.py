"""The transformer block with adaptive LayerNorm, after DiT (arXiv:2212.09748), without zero gates."""

from __future__ import annotations

from torch import Tensor, nn

from tinydit_ray.model.attention import MultiHeadAttention


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (N, L, D) * (1 + scale) + shift, with shift and scale (N, D) the same for every token."""
    return x * (1 + scale[:, None]) + shift[:, None]


class FeedForward(nn.Module):
    """Linear(D, 4D), GELU, Linear(4D, D). ``gelu``: exact (erf) or its tanh approximation."""

    def __init__(self, dim: int, gelu: str = "exact") -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, 4 * dim),
            nn.GELU(approximate="tanh" if gelu == "tanh" else "none"),
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
