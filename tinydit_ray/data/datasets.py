"""The data sets and the loader by the names that readers of the published tutorial know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tinydit_ray.config import IMAGE_SIZE
from tinydit_ray.data.batches import check_enough, flip_some, to_pixels
from tinydit_ray.data.cache import load
from tinydit_ray.data.folder import read_folder
from tinydit_ray.data.resolve import spec_at
from tinydit_ray.data.spec import CIFAR10_FOLDER, DataError, DataSpec, split_digest


class PixelDataset(Dataset[tuple[Tensor, int]]):
    """A whole data set in memory: ``images`` uint8 (N, 3, H, W), ``labels`` int64 (N,).

    Item i is (float32 (3, H, W) in [-1, 1], label).
    """

    def __init__(self, images: Tensor, labels: Tensor, *, train: bool = True) -> None:
        self.images = images
        self.labels = labels
        self.train = train

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return to_pixels(self.images[index]), int(self.labels[index])


class CachedCIFAR10(PixelDataset):
    """CIFAR-10 below ``root``, in torchvision's layout or the parquet one; downloaded when neither is there.

    ``classes`` keeps only these labels (with their numbers). Decoded once per machine. DataError when
    ``root`` holds something else.
    """

    def __init__(
        self, root: str | Path = "data", train: bool = True, classes: Sequence[int] | None = None
    ) -> None:
        split = load(_cifar10_spec(Path(root), tuple(classes or ())), "train" if train else "test")
        super().__init__(split.images, split.labels, train=train)
        self.digest = split.digest


def _cifar10_spec(root: Path, classes: tuple[int, ...]) -> DataSpec:
    root = root.expanduser().absolute()
    try:
        spec = spec_at(root, classes)
    except DataError:
        if root.is_dir() and ((root / CIFAR10_FOLDER).exists() or root.name == CIFAR10_FOLDER):
            raise
        return DataSpec(source="cifar10", root=str(root), classes=classes)  # load downloads it
    if spec.source == "folder":
        raise DataError(f"cifar10: {root} is an image folder; use ImageFolderDataset")
    return spec


class ImageFolderDataset(PixelDataset):
    """All images of a folder as squares of ``img_size`` pixels; prints what was used, converted and skipped.

    Class subfolders give the labels in the order of their names, -1 for images outside any. DataError
    when no image is usable.
    """

    def __init__(self, folder: str | Path, img_size: int = IMAGE_SIZE) -> None:
        if img_size < 1:
            raise DataError(f"img_size {img_size} is not possible; give at least 1")
        decoded = read_folder(Path(folder).expanduser().absolute(), img_size)
        super().__init__(decoded.images, decoded.labels)
        self.digest = split_digest(self.images, self.labels)
        self.notes = decoded.notes
        for note in self.notes:
            print(f"{folder}: {note}")


def make_loader(
    dataset: Any,
    batch_size: int = 128,
    num_workers: int = 0,
    *,
    train: bool | None = None,
    seed: int | None = None,
) -> DataLoader[Any]:
    """Batches (images float32 (N, 3, H, W) in [-1, 1], labels int64 (N,)) of a set in memory.

    ``dataset`` has ``images`` and ``labels``, as the sets above and ``ImageSet`` have. Training data
    (``train``, by default the set's own) comes shuffled, flipped with probability 0.5, in full batches
    only; test data in order, with its tail. ``seed`` None draws one from torch's global generator, so
    ``torch.manual_seed`` decides. The batches do not depend on ``num_workers``. DataError when training
    data do not fill a batch.
    """
    training = getattr(dataset, "train", True) if train is None else train
    if batch_size < 1 or num_workers < 0:
        raise DataError(f"batch_size {batch_size}, num_workers {num_workers}: at least 1 and 0 are possible")
    if training:
        check_enough(len(dataset.images), batch_size)
    sampler = _BatchSampler(len(dataset.images), batch_size, training, seed)
    rows: Any = _Rows(dataset.images, dataset.labels)
    return DataLoader(
        rows, sampler=sampler, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0
    )


class _BatchSampler(Sampler[tuple[Tensor, Tensor]]):
    """Yields (row numbers, flips) of whole batches; made in the main process, so workers change nothing."""

    def __init__(self, count: int, batch_size: int, training: bool, seed: int | None) -> None:
        self.count, self.batch_size, self.training = count, batch_size, training
        self.generator = torch.Generator()
        self.generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)

    def __len__(self) -> int:
        return self.count // self.batch_size if self.training else -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.training:
            order = torch.randperm(self.count, generator=self.generator)
            flips = torch.rand(self.count, generator=self.generator) < 0.5
        else:
            order, flips = torch.arange(self.count), torch.zeros(self.count, dtype=torch.bool)
        for batch in range(len(self)):
            part = slice(batch * self.batch_size, (batch + 1) * self.batch_size)
            yield order[part], flips[part]


class _Rows(Dataset[tuple[Tensor, Tensor]]):
    """Fetches a whole batch at once."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __getitem__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, flips = batch
        images = self.images.index_select(0, rows)
        if flips.any():
            images = flip_some(images, flips)
        return to_pixels(images), self.labels[rows]
