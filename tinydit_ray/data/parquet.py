"""The public CIFAR-10 parquet set's layout: columns ``img: struct<bytes, path>`` and ``label: int64``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinydit_ray.config import IMAGE_SIZE
from tinydit_ray.data.pictures import PictureError, read_exact
from tinydit_ray.data.spec import SPLITS, DataError, Decoded, Listing, Source, one_line

_SUBFOLDERS = ("plain_text", ".", "data")  # where public sets of this layout keep their files
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.parquet$")


def parquet_folder(root: Path) -> Path | None:
    """The folder at or below ``root`` that holds the ``train*.parquet`` files, if there is one."""
    for name in _SUBFOLDERS:
        if any((root / name).glob("train*.parquet")):
            return root / name
    return None


def list_shards(root: Path) -> Listing:
    """The shards of both splits in order; a split or shard that is missing is DataError."""
    folder = parquet_folder(root)
    if folder is None:
        raise DataError(f"parquet: {root} has no train*.parquet (looked in {', '.join(_SUBFOLDERS)})")
    files = []
    for split in SPLITS:
        shards = sorted(path for path in folder.glob(f"{split}*.parquet") if path.is_file())
        if not shards:
            raise DataError(f"parquet: {folder} has no {split}*.parquet")
        _check_whole(folder, split, shards)
        files += [(f"{split}/{path.name}", path) for path in shards]
    return Listing(tuple(files))


def _check_whole(folder: Path, split: str, shards: Sequence[Path]) -> None:
    """Shards named ``-00000-of-00002`` must all be there."""
    matches = [match for path in shards if (match := _SHARD.search(path.name))]
    for total in {int(match[2]) for match in matches}:
        missing = set(range(total)) - {int(match[1]) for match in matches}
        if missing:
            raise DataError(f"parquet: {folder} lacks shard {min(missing)} of the {total} of {split}")


def decode_shards(root: Path, listing: Listing) -> dict[str, Decoded]:
    splits = {}
    for split in SPLITS:
        parts = [_read_shard(path) for name, path in listing.files if name.startswith(f"{split}/")]
        images = torch.cat([images for images, _ in parts])
        splits[split] = Decoded(images, torch.cat([labels for _, labels in parts]), (f"used {len(images)}",))
    return splits


def _read_shard(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 (N, 3, 32, 32) and labels int64 (N,) of one file.

    In one thread: at 50 µs an image, threads lose more by waiting for the interpreter lock than they gain.
    """
    encoded, labels = _read_columns(path)
    images = np.empty((len(encoded), IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for row, data in enumerate(encoded):
        try:
            images[row] = read_exact(data or b"", IMAGE_SIZE)
        except PictureError as error:
            raise DataError(f"parquet: {path}, row {row}: {error}") from error
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels


def _read_columns(path: Path) -> tuple[list[bytes | None], torch.Tensor]:
    """The encoded images and the labels, with the schema checked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_schema(path, file.schema_arrow)
            table = file.read(columns=["img.bytes", "label"])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"parquet: {path} cannot be read; it may be cut short ({one_line(error)})") from error
    if not table.num_rows:
        raise DataError(f"parquet: {path} has no rows")
    labels = table.column("label")
    if labels.null_count:
        raise DataError(f"parquet: {path} has rows without a label")
    numbers = torch.from_numpy(labels.to_numpy().astype(np.int64))
    if int(numbers.min()) < 0:
        raise DataError(f"parquet: {path} has the label {int(numbers.min())}; labels start at 0")
    encoded = [row for chunk in table.column("img").chunks for row in chunk.field("bytes").to_pylist()]
    return encoded, numbers


def _check_schema(path: Path, schema: Any) -> None:
    import pyarrow as pa

    kinds = dict(zip(schema.names, schema.types, strict=True))
    for name in ("img", "label"):
        if name not in kinds:
            raise DataError(
                f"parquet: {path} has no column {name!r}; its columns are {', '.join(schema.names)}"
            )
    image, label = kinds["img"], kinds["label"]
    fields = {field.name: field.type for field in image} if pa.types.is_struct(image) else {}
    content = fields.get("bytes", pa.null())
    if not (pa.types.is_binary(content) or pa.types.is_large_binary(content)):
        raise DataError(f"parquet: {path} has img as {image}; expected struct<bytes: binary, path: string>")
    if not pa.types.is_integer(label):
        raise DataError(f"parquet: {path} has label as {label}; expected int64")


PARQUET = Source("cifar10-parquet", 1, list_shards, decode_shards)
