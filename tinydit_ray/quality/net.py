"""The probe's network: a small classifier of 32×32 images whose pooled last block is the feature vector."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


class ConvBlock(nn.Module):
    """conv → halve → BN → ReLU, then one residual conv of the same width: (N, C, H, W) → (N, C', H/2, W/2).

    Pooling before the normalisation leaves a quarter of the values to normalise, as in cifar10-airbench.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return x + F.relu(self.norm2(self.conv2(x)))


class ProbeNet(nn.Module):
    """Images (N, 3, 32, 32) in [−1, 1] → features (N, F) and logits (N, 10).

    ``widths`` are the channels of the stem and of each block; F is the last of them.
    """

    def __init__(self, widths: tuple[int, ...] = (24, 64, 128, 128), classes: int = CLASSES) -> None:
        super().__init__()
        self.widths, self.classes = tuple(widths), classes
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        self.blocks = nn.Sequential(*(ConvBlock(*pair) for pair in pairwise(widths)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.stem_norm(self.stem(images)))
        features = self.blocks(x).mean(dim=(2, 3))
        return features, self.head(features)

    @property
    def feature_width(self) -> int:
        return self.widths[-1]


def to_pixels(images: Tensor) -> Tensor:
    """Images of any kind as the probe sees them: fp32 (N, 3, H, W) clipped to [−1, 1].

    uint8 is scaled by /127.5 − 1; floats are taken to be in [−1, 1] already. Raises ValueError for other
    shapes or types, and for values that are not numbers, naming the first image that has one.
    """
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images must have the shape (N, 3, H, W), not {tuple(images.shape)}")
    if images.dtype == torch.uint8:
        return images.float() / 127.5 - 1
    if not images.is_floating_point():
        raise ValueError(f"images must be uint8 or floats in [-1, 1], not {images.dtype}")
    pixels = images.float()
    broken = torch.isnan(pixels).flatten(1).any(dim=1)
    if bool(broken.any()):
        first = int(broken.nonzero()[0])
        raise ValueError(f"{int(broken.sum())} of {len(images)} images hold NaN, the first is number {first}")
    return pixels.clamp(-1, 1)
