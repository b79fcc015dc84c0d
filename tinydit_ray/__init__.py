"""TinyDiT sweeps: a tiny diffusion transformer, trained and timed under every switch, honestly.

The names below are loaded when they are first used, so that ``import tinydit_ray`` costs nothing and a
process that only needs the config does not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "tinydit_ray.model": (
        "DiTBlock", "FeedForward", "FinalLayer", "MultiHeadAttention", "PatchEmbed", "PosEmbed2D",
        "TimestepEmbedding", "TinyDiT", "TinyDiTConfig", "attention", "build_model", "modulate",
        "sinusoidal_embedding", "unpatchify",
    ),
    "tinydit_ray.flow": ("euler_sample", "flow_matching_loss", "heun_sample"),
    "tinydit_ray.train": ("FastTrainer", "Trainer", "load_checkpoint"),
    "tinydit_ray.data": ("BatchStream", "CachedCIFAR10", "DataError", "ImageFolderDataset", "make_loader"),
    "tinydit_ray.quality": ("load_probe", "probe_features", "probe_scores", "save_grid", "velocity_mse"),
    "tinydit_ray.bench.timing": ("time_steps",),
    "tinydit_ray.config": ("CellConfig",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tinydit_ray' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME_OF]
