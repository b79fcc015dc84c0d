"""Training of a probe: one-cycle SGD with Nesterov momentum, flips and random crops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tinydit_ray.quality.net import ProbeNet, to_pixels

CROP_PADDING = 2
Report = Callable[[int, int, float], None]  # (steps done, steps in all, loss of the last step)


@dataclass(frozen=True, kw_only=True)
class ProbeRecipe:
    """What decides the weights. ``minutes`` is a ceiling: a slow machine runs fewer epochs."""

    widths: tuple[int, ...] = (24, 64, 128, 128)
    epochs: int = 14
    batch_size: int = 128
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    warmup: float = 0.2  # share of the steps over which the rate rises
    seed: int = 0
    minutes: float = 35.0
    amp: bool = True  # bf16 autocast of the training steps; scores are always taken in fp32

    def lr_at(self, progress: float) -> float:
        """Learning rate at a share of the run in [0, 1]: up linearly, then down linearly to 0."""
        if progress < self.warmup:
            return self.lr * (progress / self.warmup)
        return self.lr * (1 - progress) / (1 - self.warmup)


def train_net(images: Tensor, labels: Tensor, recipe: ProbeRecipe, report: Report | None = None) -> ProbeNet:
    """Train a classifier on uint8 images (N, 3, 32, 32) and their labels (N,); returns it in eval mode.

    The run repeats exactly for one seed on one machine. The global random state is left as it was.
    """
    if len(images) < recipe.batch_size:
        raise ValueError(f"{len(images)} training images are fewer than one batch of {recipe.batch_size}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = ProbeNet(recipe.widths).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    whiten(net.stem, images[:2000])
    net.train()
    optimizer = _optimizer(net, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    steps_per_epoch = len(images) // recipe.batch_size
    total, done, start = recipe.epochs * steps_per_epoch, 0, 0.0
    while done < total:
        for batch in _epoch(len(images), recipe.batch_size, generator):
            pixels = to_pixels(augment(images[batch], generator))
            loss = _step(net, optimizer, pixels, labels[batch], recipe, done / total)
            done += 1
            if done == 3:
                start = time.perf_counter()
            if done == 23:
                step_s = (time.perf_counter() - start) / 20
                total = _affordable(total, steps_per_epoch, step_s, recipe.minutes)
            if report is not None:
                report(done, total, loss)
    return net.eval()


def _step(
    net: ProbeNet,
    optimizer: torch.optim.SGD,
    pixels: Tensor,
    labels: Tensor,
    recipe: ProbeRecipe,
    progress: float,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr_at(progress)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.amp):
        _, logits = net(pixels)
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=recipe.label_smoothing)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError("the probe's training diverged: its loss is no longer a finite number")
    return value


def _optimizer(net: nn.Module, recipe: ProbeRecipe) -> torch.optim.SGD:
    """Weight decay acts on matrices and kernels, not on biases and normalisation."""
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=True)


def _epoch(count: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of one pass in random order; the odd tail is left out."""
    order = torch.randperm(count, generator=generator)
    yield from order[: count // batch_size * batch_size].split(batch_size)


def _affordable(total: int, steps_per_epoch: int, step_s: float, minutes: float) -> int:
    """Whole epochs that fit in ``minutes`` at the measured seconds per step; at least one."""
    epochs = int(minutes * 60 / step_s / steps_per_epoch)
    return min(total, max(1, epochs) * steps_per_epoch)


@torch.no_grad()
def whiten(stem: nn.Conv2d, images: Tensor) -> None:
    """Start the stem at the whitening transform of image patches and its negative, as cifar10-airbench does:
    after two epochs 1 point of accuracy more than from random kernels."""
    size, half = stem.kernel_size[0], stem.out_channels // 2
    patches = to_pixels(images).unfold(2, size, 1).unfold(3, size, 1).permute(0, 2, 3, 1, 4, 5)
    values, vectors = torch.linalg.eigh(torch.cov(patches.flatten(3).flatten(0, 2).T))  # ascending
    kernels = (vectors / (values.clamp_min(0) + 5e-4).sqrt()).T.flip(0)[:half].view(-1, 3, size, size)
    stem.weight[: 2 * half] = torch.cat([kernels, -kernels])


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random horizontal flips and crops of reflected borders, for a whole batch (N, 3, H, W) at once."""
    count, _, height, width = images.shape
    flip = torch.rand(count, generator=generator) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    padded = F.pad(images.float(), (CROP_PADDING,) * 4, mode="reflect").to(images.dtype)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, 3, 9, 9, H, W)
    rows, columns = torch.randint(0, 2 * CROP_PADDING + 1, (2, count), generator=generator)
    return windows[torch.arange(count), :, rows, columns]


@torch.inference_mode()
def accuracy(net: ProbeNet, images: Tensor, labels: Tensor, batch_size: int = 500) -> float:
    """Share of images (N, 3, H, W) whose class is recognised, in fp32."""
    right = 0
    with torch.autocast("cpu", enabled=False):
        for chunk, wanted in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            right += int((net(to_pixels(chunk))[1].argmax(dim=1) == wanted).sum())
    return right / len(images)
