"""CIFAR-10 in torchvision's layout: five pickled training batches and one for testing, and their download."""

from __future__ import annotations

import pickle
import shutil
import socket
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from tinydit_ray.data.spec import CIFAR10_FOLDER, DataError, Decoded, Listing, Source, one_line

BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_REACH_SECONDS = 10.0
_STALL_SECONDS = 30.0
_INSTALL = "pip install 'tinydit-ray[vision]'"


def has_cifar10(root: Path) -> bool:
    return (root / CIFAR10_FOLDER / BATCHES["train"][0]).is_file()


def list_batches(root: Path) -> Listing:
    """The six batch files below ``root``; a missing one is DataError."""
    names = [f"{CIFAR10_FOLDER}/{name}" for batches in BATCHES.values() for name in batches]
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise DataError(
            f"cifar10: {root} lacks {', '.join(missing)} (torchvision's layout has six batch files)"
        )
    return Listing(tuple((name, root / name) for name in names))


def decode_batches(root: Path, listing: Listing) -> dict[str, Decoded]:
    splits = {}
    for split, names in BATCHES.items():
        parts = [_read_batch(root / CIFAR10_FOLDER / name) for name in names]
        images = torch.cat([images for images, _ in parts])
        splits[split] = Decoded(images, torch.cat([labels for _, labels in parts]), (f"used {len(images)}",))
    return splits


def _read_batch(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 (N, 3, 32, 32) and labels int64 (N,) of one batch file."""
    try:
        with open(path, "rb") as file:
            entry = _ArraysOnly(file, encoding="latin1").load()
        pixels, labels = np.asarray(entry["data"]), np.asarray(entry["labels"])
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"cifar10: {path} is damaged or not a CIFAR-10 batch ({one_line(error)})") from error
    whole = pixels.dtype == np.uint8 and pixels.ndim == 2 and pixels.shape[1] == 3 * 32 * 32
    if not whole or labels.shape != (len(pixels),) or labels.dtype.kind != "i" or not len(pixels):
        raise DataError(
            f"cifar10: {path} holds data {pixels.dtype} {pixels.shape} with labels {labels.shape};"
            " expected uint8 (N, 3072) with whole numbers (N,)"
        )
    if labels.min() < 0 or labels.max() > 9:
        raise DataError(f"cifar10: {path} has labels from {labels.min()} to {labels.max()}; expected 0 to 9")
    images = torch.from_numpy(np.array(pixels)).view(-1, 3, 32, 32)
    return images, torch.from_numpy(labels.astype(np.int64))


# What a pickled uint8 array asks for, by name: NumPy has moved these between modules over the years.
_ARRAY_PARTS: dict[str, Any] = {
    "_reconstruct": np.empty(0).__reduce__()[0],
    "_frombuffer": np.empty(1).__reduce_ex__(5)[0],
    "ndarray": np.ndarray,
    "dtype": np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Loads plain containers and NumPy arrays: a batch file from anywhere must not be able to run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in _ARRAY_PARTS:
            return _ARRAY_PARTS[name]
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def download_cifar10(root: Path, dataset: Any = None) -> None:
    """Download CIFAR-10 through torchvision into ``root``, once, whoever else asks at the same time.

    ``dataset`` is torchvision's class, or one like it with another address. The batches appear under
    their final name only when whole. Raises DataError when that cannot be done; without a network in
    about ten seconds.
    """
    dataset = dataset or _torchvision_cifar10()
    try:
        _reach(dataset.url)  # before anything is made, so that a failure leaves no empty folder
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".cifar10.lock"):
            if not has_cifar10(root):
                _fetch(root, dataset)
    except (OSError, NotImplementedError, RuntimeError, EOFError, tarfile.TarError) as error:
        raise DataError(f"cifar10: cannot download {dataset.url} to {root} ({one_line(error)})") from error


def _torchvision_cifar10() -> Any:
    try:
        from torchvision.datasets import CIFAR10
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        raise DataError(f"cifar10: the download needs torchvision ({one_line(error)}): {_INSTALL}") from error
    return CIFAR10


def _fetch(root: Path, dataset: Any) -> None:
    """Download and unpack beside the final place, then rename. The caller holds the lock."""
    for stale in root.glob(".cifar10-download-*"):
        shutil.rmtree(stale, ignore_errors=True)
    before = socket.getdefaulttimeout()
    scratch = Path(tempfile.mkdtemp(prefix=".cifar10-download-", dir=root))
    socket.setdefaulttimeout(_STALL_SECONDS)  # torchvision sets none: a stalled server would hold us for ever
    try:
        dataset(scratch, download=True)
        (scratch / CIFAR10_FOLDER).rename(root / CIFAR10_FOLDER)
    finally:
        socket.setdefaulttimeout(before)
        shutil.rmtree(scratch, ignore_errors=True)


def _reach(url: str) -> None:
    """Raise OSError when ``url`` does not answer soon.

    In a thread, because the look-up of a host name heeds no timeout.
    """
    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "tinydit-ray"})
            urllib.request.urlopen(request, timeout=_REACH_SECONDS / 2).close()
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_REACH_SECONDS)
    if not outcome:
        raise OSError(f"no answer within {_REACH_SECONDS:.0f} s")
    if outcome[0] is not None:
        raise OSError(one_line(outcome[0])) from outcome[0]


CIFAR10 = Source("cifar10", 1, list_batches, decode_batches)
