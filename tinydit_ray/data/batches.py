"""Training batches of flow matching, made without a step per image, and repeatable to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinydit_ray.data.spec import DataError

# Noise is drawn in blocks of this many images, each from its own seed, so that a worker draws only its share.
_NOISE_ROWS = 16
_FLIP_PROBABILITY = 0.5


class FlowBatch(NamedTuple):
    """``x0`` float32 (N, 3, 32, 32) in [-1, 1]; ``noise`` of the same shape; ``t`` float32 (N,) in [0, 1]."""

    x0: Tensor
    noise: Tensor
    t: Tensor


def to_pixels(images: Tensor) -> Tensor:
    """uint8 (…, 3, H, W) as float32 in [-1, 1]: ``images / 127.5 - 1``."""
    return images.float().div_(127.5).sub_(1.0)


def flip_some(images: Tensor, flips: Tensor) -> Tensor:
    """Images (N, 3, H, W) with those mirrored left to right where ``flips`` bool (N,) is true."""
    count = len(images)
    both = torch.cat([images, images.flip(-1)])
    # choosing rows of a double-length tensor is 10x faster here than torch.where with a broadcast mask
    rows = torch.arange(count, device=images.device) + count * flips
    return both.index_select(0, rows)


class BatchStream(Iterator[FlowBatch]):
    """Endless training batches of one image set, on one device.

    Each epoch is a fresh permutation, less the tail that would not fill a batch. ``batch_size`` is
    global: worker ``rank`` of ``world_size`` gets its equal slice, and the slices of all workers in
    rank order are exactly the batch of a single one. Order, flips, noise and times come from private CPU
    generators seeded by (seed, purpose, step), so they are the same for every configuration and device,
    and the state is just the number of batches taken.

    Args:
        images: uint8 (N, 3, H, W), as in ``ImageSet.images``.
        batch_size: images per global batch; DataError when there are fewer.
        seed: any whole number.
        device: where the images are held and the batches made.
        flip: mirror each image with probability 0.5.
    """

    def __init__(
        self,
        images: Tensor,
        batch_size: int,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        flip: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_arguments(images, batch_size, rank, world_size)
        self.batch_size = batch_size
        self.seed = seed
        self.flip = flip
        self.step = 0
        self.device = torch.device(device)
        self._images = images.to(self.device)
        self._share = range(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self._order = torch.empty(0, dtype=torch.int64)
        self._order_epoch = -1
        self._generator = torch.Generator()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._images) // self.batch_size

    def __next__(self) -> FlowBatch:
        step, share = self.step, slice(self._share.start, self._share.stop)
        images = self._images.index_select(0, self._to_device(self._rows(step)[share]))
        if self.flip:
            chances = torch.rand(self.batch_size, generator=self._seeded("flip", step))
            images = flip_some(images, self._to_device(chances[share] < _FLIP_PROBABILITY))
        times = torch.rand(self.batch_size, generator=self._seeded("time", step))[share]
        batch = FlowBatch(to_pixels(images), self._to_device(self._noise(step)), self._to_device(times))
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Plain values; with them a later stream goes on with exactly the batches this one would give."""
        return {**self._identity(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, with any number of workers; other settings are DataError."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise DataError(
                    f"batches: the saved state has {name} {state.get(name)!r}, this run has {value!r}"
                )
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "images": len(self._images),
            "flip": self.flip,
        }

    def _seeded(self, purpose: str, *numbers: int) -> torch.Generator:
        """The private generator, set to a place in the stream that no other purpose shares."""
        key = f"{self.seed} {purpose} {' '.join(map(str, numbers))}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
        return self._generator.manual_seed(seed)

    def _rows(self, step: int) -> Tensor:
        """Row numbers int64 (batch_size,) of the global batch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._order_epoch:
            self._order = torch.randperm(len(self._images), generator=self._seeded("order", epoch))
            self._order_epoch = epoch
        return self._order[within * self.batch_size : (within + 1) * self.batch_size]

    def _noise(self, step: int) -> Tensor:
        """This worker's rows of the global noise, from the blocks that overlap its share."""
        first = self._share.start // _NOISE_ROWS
        last = -(-self._share.stop // _NOISE_ROWS)
        noise = torch.empty(((last - first) * _NOISE_ROWS, *self._images.shape[1:]))
        for block in range(first, last):
            start = (block - first) * _NOISE_ROWS
            noise[start : start + _NOISE_ROWS].normal_(generator=self._seeded("noise", step, block))
        offset = self._share.start - first * _NOISE_ROWS
        return noise[offset : offset + len(self._share)]

    def _to_device(self, values: Tensor) -> Tensor:
        """Without waiting for the device: pinned memory lets the copy run beside the computation."""
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)


def _check_arguments(images: Tensor, batch_size: int, rank: int, world_size: int) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise DataError(
            f"batches: images are {images.dtype} {tuple(images.shape)}; expected uint8 (N, 3, H, W)"
        )
    if batch_size < 1 or world_size < 1 or batch_size % world_size:
        raise DataError(f"batch_size {batch_size} cannot be shared equally by {world_size} workers")
    if not 0 <= rank < world_size:
        raise DataError(f"rank {rank} is not one of {world_size} workers")
    check_enough(len(images), batch_size)


def check_enough(count: int, batch_size: int) -> None:
    """A training set must fill at least one batch."""
    if count < batch_size:
        raise DataError(f"batch_size {batch_size} is more than the {count} training images there are")
