"""Attention kernels behind one interface: q, k, v (N, H, L, d) -> (N, H, L, d).

Every kernel computes softmax(q k^T / sqrt(d)) v; which one runs is the sweep's first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Hand-written attention. q, k, v (..., L, d) -> (out (..., L, d), weights (..., L, L)).

    "Attention Is All You Need" (arXiv:1706.03762), equation 1.
    """
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
    return weights @ v, weights


def _manual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)[0]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _forced(backend: str) -> Kernel:
    """SDPA that may use this one backend; PyTorch raises where it cannot."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    choice = getattr(SDPBackend, backend)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(choice):
            return F.scaled_dot_product_attention(q, k, v)

    return kernel


def _upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA in fp32 whatever the autocast dtype: some CPUs' 16-bit attention backward is slow."""
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(q.dtype)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention; its kernel exists only compiled, so it is compiled by itself in an eager model."""
    if torch.compiler.is_compiling():
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v)
    return _compiled_flex()(q, k, v)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _xformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from xformers.ops import memory_efficient_attention

    return memory_efficient_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _sage(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from sageattention import sageattn

    return sageattn(q, k, v)


SDPA_BACKENDS = {
    "sdpa-math": "MATH",
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
}
_PLAIN: dict[str, Kernel] = {
    "manual": _manual,
    "sdpa": _sdpa,
    "sdpa-upcast": _upcast,
    "flex": _flex,
    "flash-attn": _flash_attn,
    "xformers": _xformers,
    "sage": _sage,
}


def kernel_of(name: str) -> Kernel:
    """The kernel with this name of the ``attention`` axis."""
    return _forced(SDPA_BACKENDS[name]) if name in SDPA_BACKENDS else _PLAIN[name]


class MultiHeadAttention(nn.Module):
    """Self-attention over tokens (N, L, D) with H heads; qkv and output projections with bias.

    ``qkv="separate"`` runs three matmuls on slices of the one fused weight: the parameters, and so
    checkpoints and gradients, are the same either way.
    """

    def __init__(self, dim: int, num_heads: int, *, kernel: str = "manual", qkv: str = "fused") -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim {dim} is not divisible by heads {num_heads}")
        self.num_heads, self.qkv_mode, self.kernel_name = num_heads, qkv, kernel
        self.kernel: Any = kernel_of(kernel)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv_mode == "fused":
            parts = self.qkv(x).chunk(3, dim=-1)
        else:
            weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
            parts = tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts]
        return heads[0], heads[1], heads[2]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._project(x)
        return self.proj(self.kernel(q, k, v).transpose(1, 2).flatten(2))
