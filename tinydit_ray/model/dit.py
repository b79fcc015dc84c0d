"""TinyDiT: a diffusion transformer small enough to train on a laptop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinydit_ray.config import CHANNELS, IMAGE_SIZE, PATCH_SIZE, CellConfig, check_size
from tinydit_ray.model.blocks import DiTBlock, FinalLayer
from tinydit_ray.model.embeddings import PatchEmbed, PosEmbed2D, TimestepEmbedding, unpatchify


@dataclass
class TinyDiTConfig:
    """Size of the model, and which of several equal ways computes it. ``vars(cfg)`` goes into checkpoints.

    The parameters depend on the size alone, so a checkpoint loads under any kernel.
    Raises ValueError for sizes the model cannot have.
    """

    dim: int = 256
    depth: int = 6
    num_heads: int = 4
    image_size: int = IMAGE_SIZE
    patch_size: int = PATCH_SIZE
    channels: int = CHANNELS
    attention: str = "manual"
    qkv: str = "fused"
    gelu: str = "exact"
    adaln: str = "per-block"
    patches: str = "conv"
    residual: str = "fp32"

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(f"channels {self.channels}: an image has at least 1")
        check_size(self.dim, self.depth, self.num_heads, image=self.image_size, patch=self.patch_size)

    @classmethod
    def of(cls, cell: CellConfig) -> TinyDiTConfig:
        """The model of a sweep's cell."""
        return cls(
            dim=cell.dim, depth=cell.depth, num_heads=cell.heads, attention=cell.attention, qkv=cell.qkv,
            gelu=cell.gelu, adaln=cell.adaln, patches=cell.patches, residual=cell.residual,
        )  # fmt: skip


class TinyDiT(nn.Module):
    """x_t (N, 3, 32, 32), t (N,) in [0, 1] -> velocity (N, 3, 32, 32).

    ``use_sdpa=True`` is short for ``cfg.attention = "sdpa"``.
    """

    def __init__(self, cfg: TinyDiTConfig, use_sdpa: bool = False) -> None:
        super().__init__()
        kernel = "sdpa" if use_sdpa else cfg.attention
        self.cfg = cfg
        self.embed = PatchEmbed(cfg.dim, cfg.patch_size, cfg.channels, cfg.patches)
        self.pos = PosEmbed2D(cfg.dim, cfg.image_size // cfg.patch_size)
        self.t_embed = TimestepEmbedding(cfg.dim)
        self.blocks = nn.ModuleList(
            DiTBlock(cfg.dim, cfg.num_heads, kernel=kernel, qkv=cfg.qkv, gelu=cfg.gelu) for _ in range(cfg.depth)
        )
        self.final = FinalLayer(cfg.dim, cfg.channels * cfg.patch_size**2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c = self.t_embed(t)
        tokens = self._stream(self.pos(self.embed(x)))
        modulations = self._modulations(c)
        for block, modulation in zip(self.blocks, modulations, strict=False):
            tokens = block(tokens, c, modulation)
        patches = self.final(tokens, c, modulations[-1])
        return unpatchify(patches, self.cfg.patch_size, self.cfg.channels)

    def _stream(self, tokens: Tensor) -> Tensor:
        """Tokens as they go from block to block. Adding the fp32 positions makes them fp32 under autocast, and
        each LayerNorm and residual sum then casts; in the autocast dtype none does."""
        if self.cfg.residual == "fp32" or not torch.is_autocast_enabled(tokens.device.type):
            return tokens
        return tokens.to(torch.get_autocast_dtype(tokens.device.type))

    def _modulations(self, c: Tensor) -> list[Tensor] | list[None]:
        """adaLN outputs of all blocks and of the final layer, in one matmul; or None for each to do its own."""
        layers: list[Any] = [*(block.adaLN for block in self.blocks), self.final.adaLN]
        if self.cfg.adaln == "per-block":
            return [None] * len(layers)
        projections: list[nn.Linear] = [layer[1] for layer in layers]
        weight = torch.cat([projection.weight for projection in projections])
        bias = torch.cat([projection.bias for projection in projections])
        merged = F.linear(F.silu(c), weight, bias)
        return list(merged.split([projection.out_features for projection in projections], dim=-1))


def build_model(cfg: TinyDiTConfig, seed: int) -> TinyDiT:
    """A model with PyTorch's default initialisation, the same weights for a seed whatever the kernels;
    the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyDiT(cfg)
