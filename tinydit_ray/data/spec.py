"""What the other data modules speak in: a decoded split, where data is, digests, errors."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

SOURCES = ("cifar10", "parquet", "folder", "shapes")
SPLITS = ("train", "test")
Split = Literal["train", "test"]

CIFAR10_FOLDER = "cifar-10-batches-py"
DIGEST_LENGTH = 16
_NAMES_SHOWN = 3
_ERROR_LENGTH = 200


class DataError(ValueError):
    """Something a user can cause: one line naming the setting or file, what was found, what is possible."""


@dataclass(frozen=True)
class ImageSet:
    """One split, decoded.

    ``images`` uint8 (N, 3, 32, 32); ``labels`` int64 (N,), -1 where there is none; ``source`` is
    "cifar10", "cifar10-parquet", "folder" or "shapes"; ``digest`` 16 hex digits over pixels and labels
    of this split; ``notes`` what a person should be told (how many were used, converted, skipped).
    """

    images: Tensor
    labels: Tensor
    source: str
    digest: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """How a trial on any node finds the data; plain, picklable, ready for JSON.

    ``source`` is one of ``SOURCES``, already resolved; ``root`` an absolute path ("" for shapes);
    ``classes`` the labels kept (all when empty; the labels keep their numbers); ``digest`` covers both
    splits and is filled in by ``prepare``: data with another digest is then refused.
    """

    source: str
    root: str
    classes: tuple[int, ...] = ()
    digest: str = ""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise DataError(f"data source {self.source!r} is not one of {', '.join(SOURCES)}")
        if self.source != "shapes" and not Path(self.root).is_absolute():
            raise DataError(f"data root {self.root!r} is not an absolute path")
        object.__setattr__(self, "classes", check_classes(self.classes))

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "classes": list(self.classes)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataSpec:
        """Inverse of ``as_dict``; unknown or missing keys are DataError."""
        known = {field.name for field in dataclasses.fields(cls)}
        if not {"source", "root"} <= set(values) <= known:
            raise DataError(f"data spec has the keys {sorted(values)}; possible: {sorted(known)}")
        return cls(**values)


def check_classes(classes: Iterable[int]) -> tuple[int, ...]:
    """Class numbers sorted and without repeats, so that ``9,1`` and ``1,9`` are the same data."""
    chosen = tuple(classes)
    for number in chosen:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise _no_class(number)
    return tuple(sorted(set(chosen)))


def _no_class(given: object) -> DataError:
    return DataError(f"classes: {given!r} is not a class number; give whole numbers from 0, such as 1,9")


def parse_classes(text: str) -> tuple[int, ...]:
    """``"1,9"`` from a command line as (1, 9); an empty text means all classes."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise _no_class(word)
    return check_classes(int(word) for word in words)


@dataclass(frozen=True)
class Listing:
    """The files of a source in reading order, as (name within the source, path), and what was passed over."""

    files: tuple[tuple[str, Path], ...]
    skipped: tuple[tuple[str, str], ...] = ()  # (name, reason)


@dataclass(frozen=True)
class Decoded:
    """One split as a source decodes it: images uint8 (N, 3, 32, 32), labels int64 (N,), notes."""

    images: Tensor
    labels: Tensor
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A kind of data: its name in records, the version of its decoder, and how it is listed and decoded."""

    label: str
    version: int
    listing: Callable[[Path], Listing]
    decode: Callable[[Path, Listing], dict[str, Decoded]]


def keep_classes(split: Decoded, classes: Sequence[int], where: str) -> Decoded:
    """Only the images whose label is among ``classes``; a class without any image is DataError."""
    if not classes:
        return split
    present = sorted(set(split.labels.tolist()) - {-1})
    missing = [number for number in classes if number not in present]
    if missing:
        known = ", ".join(map(str, present[:20])) + (", …" if len(present) > 20 else "")
        raise DataError(
            f"classes: {', '.join(map(str, missing))} not in {where}; "
            + (f"its labels are {known}" if present else "it has no labels")
        )
    rows = torch.isin(split.labels, torch.tensor(classes)).nonzero()[:, 0]
    return Decoded(split.images[rows], split.labels[rows], split.notes)


def split_digest(images: Tensor, labels: Tensor) -> str:
    """16 hex digits over shape, pixels and labels of one split; the same on every machine."""
    content = hashlib.sha256(repr(tuple(images.shape)).encode())
    content.update(images.contiguous().numpy().data)
    content.update(np.ascontiguousarray(labels.numpy(), dtype="<i8").data)
    return content.hexdigest()[:DIGEST_LENGTH]


def joint_digest(digests: Mapping[str, str]) -> str:
    """16 hex digits over the digests of both splits."""
    return hashlib.sha256("".join(digests[split] for split in SPLITS).encode()).hexdigest()[:DIGEST_LENGTH]


def some_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def one_line(error: Exception) -> str:
    """The start of an error's text, since some quote whole arrays; its type where it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= _ERROR_LENGTH else lines[0][:_ERROR_LENGTH] + "…"
