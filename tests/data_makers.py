"""Small real data sets on disk, for the tests of tinydit_ray.data."""

import io
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

# nothing listens on the discard port, so a download through this "proxy" is refused at once
DEAD_PROXY = "http://127.0.0.1:9"


def random_pixels(count: int, seed: int = 0) -> np.ndarray:
    """uint8 (N, 32, 32, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def parquet_table(encoded: list[bytes], labels: list[int]) -> pa.Table:
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(encoded)]
    return pa.table({"img": pa.array(rows, image_type), "label": pa.array(labels, pa.int64())})


def write_parquet(root: Path, train: int = 40, test: int = 20, kind: str = "PNG", seed: int = 0) -> Path:
    """A data set in the parquet layout, image i with label i % 10."""
    folder = root / "plain_text"
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, offset in (("train", train, 0), ("test", test, 1)):
        encoded = [encode(pixels, kind) for pixels in random_pixels(count, seed * 2 + offset)]
        table = parquet_table(encoded, [i % 10 for i in range(count)])
        pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return root


def write_batches(root: Path, per_batch: int = 6, protocol: int = 2) -> np.ndarray:
    """A data set in torchvision's layout; returns the training pixels uint8 (N, 3, 32, 32)."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = random_pixels(6 * per_batch).transpose(0, 3, 1, 2)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        part = pixels[number * per_batch : (number + 1) * per_batch]
        labels = [(number * per_batch + i) % 10 for i in range(per_batch)]
        entry = {"data": part.reshape(per_batch, -1), "labels": labels, "filenames": ["x.png"] * per_batch}
        (folder / name).write_bytes(pickle.dumps(entry, protocol=protocol))
    return pixels[: 5 * per_batch]


def write_images(folder: Path, count: int, prefix: str = "", seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, pixels in enumerate(random_pixels(count, seed)):
        (folder / f"{prefix}{i:03}.png").write_bytes(encode(pixels))
    return folder
