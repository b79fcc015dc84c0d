"""CIFAR-10 in its two layouts: what is read, and what a damaged file says; a local download."""

import functools
import hashlib
import http.server
import pickle
import tarfile
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_makers import encode, parquet_table, random_pixels, write_batches, write_images, write_parquet
from PIL import Image

from tinydit_ray.data import CachedCIFAR10, DataError, DataSpec, load, prepare
from tinydit_ray.data.cifar10 import download_cifar10


def parquet_spec(root):
    return DataSpec(source="parquet", root=str(root))


def cifar10_spec(root):
    return DataSpec(source="cifar10", root=str(root))


def train_file(root):
    return root / "plain_text" / "train-00000-of-00001.parquet"


# --- parquet ---


def test_jpeg_bytes_are_taken_too(tmp_path):
    spec = parquet_spec(write_parquet(tmp_path / "d", kind="JPEG"))
    first = load(spec, "train", tmp_path / "c").images[0].permute(1, 2, 0).numpy()
    with Image.open(pa.BufferReader(encode(random_pixels(40)[0], "JPEG"))) as image:
        assert np.array_equal(first, np.asarray(image))


def test_a_grey_picture_among_them_becomes_rgb(tmp_path):
    root = write_parquet(tmp_path / "d", train=1)
    grey = random_pixels(1)[0, :, :, 0]
    pq.write_table(parquet_table([encode(grey)], [0]), train_file(root))
    image = load(parquet_spec(root), "train", tmp_path / "c").images[0]
    assert torch.equal(image, torch.from_numpy(grey).expand(3, 32, 32))


def test_shards_are_joined_in_order(tmp_path):
    root = write_parquet(tmp_path / "d", train=4)
    train_file(root).rename(root / "plain_text" / "train-00001-of-00002.parquet")
    with pytest.raises(DataError, match="lacks shard 0 of the 2 of train"):
        prepare(parquet_spec(root), tmp_path / "c")
    first = parquet_table([encode(pixels) for pixels in random_pixels(2, seed=7)], [8, 8])
    pq.write_table(first, root / "plain_text" / "train-00000-of-00002.parquet")
    assert load(parquet_spec(root), "train", tmp_path / "c").labels.tolist() == [8, 8, 0, 1, 2, 3]


def test_many_row_groups_keep_their_order(tmp_path):
    root = write_parquet(tmp_path / "d", train=30)
    table = pq.read_table(train_file(root))
    expected = load(parquet_spec(root), "train", tmp_path / "c")
    pq.write_table(table, train_file(root), row_group_size=7)
    again = load(parquet_spec(root), "train", tmp_path / "c2")
    assert again.digest == expected.digest


def test_a_missing_split_is_an_error(tmp_path):
    root = write_parquet(tmp_path / "d")
    (root / "plain_text" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"has no test\*\.parquet"):
        prepare(parquet_spec(root), tmp_path / "c")


@pytest.mark.parametrize("keep", [0, 4, 1000, 0.5, 0.999])
def test_a_parquet_file_cut_short_is_named(tmp_path, keep):
    root = write_parquet(tmp_path / "d ü")
    content = train_file(root).read_bytes()
    train_file(root).write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    with pytest.raises(DataError) as caught:
        prepare(parquet_spec(root), tmp_path / "c")
    assert str(train_file(root)) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "c").glob("*.safetensors"))


def test_a_parquet_file_with_damaged_pages_is_named(tmp_path):
    root = write_parquet(tmp_path / "d")
    content = bytearray(train_file(root).read_bytes())
    content[200 : len(content) // 2] = bytes(len(content) // 2 - 200)  # the footer stays whole
    train_file(root).write_bytes(content)
    with pytest.raises(DataError, match="train-00000-of-00001"):
        prepare(parquet_spec(root), tmp_path / "c")


GOOD = [encode(pixels) for pixels in random_pixels(2)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (parquet_table(GOOD, [0, 1]).rename_columns(["image", "label"]), "no column 'img'.*image, label"),
        (parquet_table(GOOD, [0, 1]).drop_columns("label"), "no column 'label'"),
        (pa.table({"img": GOOD, "label": [0, 1]}), "img as binary"),
        (pa.table({"img": [{"path": "x"}], "label": [0]}), "img as struct"),
        (pa.table({"img": [{"bytes": GOOD[0]}], "label": ["cat"]}), "label as string"),
        (parquet_table(GOOD, [0, None]), "without a label"),
        (parquet_table(GOOD, [0, -3]), "label -3"),
        (parquet_table([], []), "no rows"),
        (parquet_table([GOOD[0], b"junk"], [0, 1]), "row 1: not an image"),
        (parquet_table([GOOD[0], None], [0, 1]), "row 1: not an image"),
        (parquet_table([GOOD[0][:2000]], [0]), "row 0: cut short"),
        (
            parquet_table([encode(np.zeros((28, 30, 3), np.uint8))], [0]),
            "row 0: 30×28 pixels; expected 32×32",
        ),
    ],
)
def test_unusable_parquet_tables(tmp_path, table, message):
    root = write_parquet(tmp_path / "d")
    pq.write_table(table, train_file(root))
    with pytest.raises(DataError, match=f"train-00000-of-00001.parquet.*{message}"):
        prepare(parquet_spec(root), tmp_path / "c")


# --- torchvision's layout ---


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_torchvision_batches(tmp_path, protocol):
    pixels = write_batches(tmp_path / "d é", protocol=protocol)
    train = load(cifar10_spec(tmp_path / "d é"), "train", tmp_path / "c")
    assert train.source == "cifar10"
    assert torch.equal(train.images, torch.from_numpy(pixels))
    assert train.labels.tolist() == [i % 10 for i in range(30)]
    assert len(load(cifar10_spec(tmp_path / "d é"), "test", tmp_path / "c")) == 6


def test_a_missing_batch_is_named(tmp_path):
    write_batches(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(DataError, match="lacks cifar-10-batches-py/data_batch_3"):
        prepare(cifar10_spec(tmp_path), tmp_path / "c")


@pytest.mark.parametrize(
    "entry",
    [
        {"data": np.zeros((6, 100), np.uint8), "labels": [0] * 6},
        {"data": np.zeros((6, 3072), np.float32), "labels": [0] * 6},
        {"data": np.zeros((6, 3072), np.uint8), "labels": [0] * 5},
        {"data": np.zeros((6, 3072), np.uint8), "fine_labels": [0] * 6},
        {"data": np.zeros((6, 3072), np.uint8), "labels": [10] * 6},
        {"data": np.zeros((6, 3072), np.uint8), "labels": [0.5] * 6},
        ["nothing"],
    ],
)
def test_batches_of_another_shape_are_refused(tmp_path, entry):
    write_batches(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps(entry))
    with pytest.raises(DataError, match="data_batch_2"):
        prepare(cifar10_spec(tmp_path), tmp_path / "c")


def test_a_cut_batch_is_named(tmp_path):
    write_batches(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="test_batch is damaged"):
        prepare(cifar10_spec(tmp_path), tmp_path / "c")


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_batch_file_cannot_run_code(tmp_path):
    write_batches(tmp_path)
    made = tmp_path / "made by the pickle"
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps({"data": Evil(str(made))}))
    with pytest.raises(DataError, match="data_batch_1"):
        prepare(cifar10_spec(tmp_path), tmp_path / "c")
    assert not made.exists()


# --- the download ---


@pytest.fixture
def served(tmp_path):
    """(torchvision's class with the address and checksums of a small archive, times it was fetched)."""
    datasets = pytest.importorskip("torchvision.datasets")
    folder = tmp_path / "served"
    write_batches(folder)
    inner = folder / "cifar-10-batches-py"
    (inner / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    with tarfile.open(folder / "archive.tar.gz", "w:gz") as archive:
        archive.add(inner, "cifar-10-batches-py")
    fetched = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            fetched.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            pass

    def md5(path):
        return hashlib.md5(path.read_bytes()).hexdigest()

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request, address):
            pass  # a client that closes early is no matter

    server = Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    class Small(datasets.CIFAR10):
        url = f"http://127.0.0.1:{server.server_port}/archive.tar.gz"
        filename = "archive.tar.gz"
        tgz_md5 = md5(folder / "archive.tar.gz")
        train_list = [[f"data_batch_{i}", md5(inner / f"data_batch_{i}")] for i in range(1, 6)]  # noqa: RUF012
        test_list = [["test_batch", md5(inner / "test_batch")]]  # noqa: RUF012
        meta = {"filename": "batches.meta", "key": "label_names", "md5": md5(inner / "batches.meta")}  # noqa: RUF012

    yield Small, fetched
    server.shutdown()
    server.server_close()


def test_two_downloads_at_once_fetch_once(tmp_path, served, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    dataset, fetched = served
    download_cifar10(tmp_path / "alone", dataset)
    by_one = list(fetched)  # torchvision asks more than once, to follow redirects
    fetched.clear()
    root = tmp_path / "dötä"
    threads = [threading.Thread(target=download_cifar10, args=(root, dataset)) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == by_one != []
    assert {path.name for path in root.iterdir()} <= {"cifar-10-batches-py", ".cifar10.lock"}
    assert len(load(cifar10_spec(root), "train", tmp_path / "c")) == 30


def test_a_download_with_another_checksum_is_refused(tmp_path, served, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    dataset, _ = served
    dataset.tgz_md5 = "0" * 32
    with pytest.raises(DataError, match="cannot download"):
        download_cifar10(tmp_path / "d", dataset)
    assert not (tmp_path / "d" / "cifar-10-batches-py").exists()


# --- by the tutorial's name ---


def test_cached_cifar10_reads_both_layouts(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYDIT_CACHE", str(tmp_path / "c"))
    write_parquet(tmp_path / "p")
    write_batches(tmp_path / "t")
    assert len(CachedCIFAR10(tmp_path / "p", train=True)) == 40
    test = CachedCIFAR10(str(tmp_path / "t"), train=False, classes=[0, 1])
    assert set(test.labels.tolist()) <= {0, 1}
    image, label = test[0]
    assert image.shape == (3, 32, 32)
    assert torch.allclose(image.double(), test.images[0].double() / 127.5 - 1, atol=1e-6)
    assert isinstance(label, int)
    write_images(tmp_path / "i", 3)
    with pytest.raises(DataError, match="ImageFolderDataset"):
        CachedCIFAR10(tmp_path / "i")
