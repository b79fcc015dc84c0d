"""Image grids as PNG, with Pillow alone."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from tinydit_ray.quality.net import to_pixels


def to_uint8(images: Tensor) -> Tensor:
    """Images (N, 3, H, W) as uint8; floats are clipped to [−1, 1] first."""
    if images.dtype == torch.uint8:
        return images
    return ((to_pixels(images) + 1) * 127.5).round().to(torch.uint8)


def make_grid(images: Tensor, *, nrow: int = 8, padding: int = 2) -> Tensor:
    """One uint8 picture (3, H', W') of images (N, 3, H, W), ``nrow`` in a row, in reading order, on white."""
    if not len(images) or nrow < 1:
        raise ValueError(f"a grid needs images and at least one in a row, not {len(images)} and {nrow}")
    pixels = to_uint8(images.detach().cpu())
    count, channels, height, width = pixels.shape
    columns = min(nrow, count)
    rows = -(-count // columns)
    high, wide = height + padding, width + padding
    grid = torch.full((channels, rows * high + padding, columns * wide + padding), 255, dtype=torch.uint8)
    for i, image in enumerate(pixels):
        top, left = i // columns * high + padding, i % columns * wide + padding
        grid[:, top : top + height, left : left + width] = image
    return grid


def save_grid(images: Tensor, path: str | Path, nrow: int = 8, *, padding: int = 2) -> Path:
    """Write images (N, 3, H, W), uint8 or floats in [−1, 1], as one PNG; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid = make_grid(images, nrow=nrow, padding=padding)
    Image.fromarray(grid.permute(1, 2, 0).contiguous().numpy()).save(path, format="PNG")
    return path
