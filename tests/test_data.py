"""From what the user names to decoded data: resolve, the cache, digests."""

import ast
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from data_makers import DEAD_PROXY, write_batches, write_images, write_parquet

import tinydit_ray.data
from tinydit_ray.data import CachedCIFAR10, DataError, DataSpec, load, parse_classes, prepare, resolve

REAL = os.environ.get("TINYDIT_DATA", "")
needs_real = pytest.mark.skipif(not REAL, reason="TINYDIT_DATA is not set")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache of ünï"


@pytest.fixture
def no_network(monkeypatch):
    """Downloads are refused at once, whatever network this machine has."""
    # urlopen keeps the proxies of its first call for the whole process: give it back what it had
    monkeypatch.setattr("urllib.request._opener", None)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, DEAD_PROXY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def cache_file(cache: Path) -> Path:
    (path,) = cache.glob("*.safetensors")
    return path


# --- resolve ---


def test_the_layout_of_a_folder_is_detected(tmp_path):
    write_parquet(tmp_path / "a parquet")
    write_batches(tmp_path / "b")
    write_images(tmp_path / "c é", 3)
    expected = {"a parquet": "parquet", "a parquet/plain_text": "parquet", "b": "cifar10", "c é": "folder"}
    for name, source in expected.items():
        spec, why = resolve(name, cwd=tmp_path, env={})
        assert (spec.source, spec.root) == (source, str(tmp_path / name))
        assert str(tmp_path / name) in why
    inside, _ = resolve(str(tmp_path / "b" / "cifar-10-batches-py"), env={})
    assert inside.root == str(tmp_path / "b")


def test_shapes_need_nothing_and_ignore_the_variable(tmp_path):
    spec, why = resolve("shapes", classes=[9, 1], cwd=tmp_path, env={"TINYDIT_DATA": "/nowhere"})
    assert spec == DataSpec(source="shapes", root="", classes=(1, 9))
    assert "as asked" in why


def test_auto_prefers_the_variable_then_the_data_folder(tmp_path):
    write_parquet(tmp_path / "named")
    write_batches(tmp_path / "data")
    spec, why = resolve("auto", cwd=tmp_path, env={"TINYDIT_DATA": "named"})
    assert spec.root == str(tmp_path / "named")
    assert "TINYDIT_DATA" in why
    spec, why = resolve("auto", cwd=tmp_path, env={"TINYDIT_DATA": ""})
    assert (spec.source, spec.root) == ("cifar10", str(tmp_path / "data"))


@pytest.mark.parametrize("word", ["auto", "cifar10"])
@pytest.mark.parametrize("value", ["/nowhere/at/all", "empty", "a file"])
def test_a_variable_that_cannot_be_used_is_an_error(tmp_path, word, value):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("x")
    write_parquet(tmp_path / "data")  # would do, but is not what was named
    with pytest.raises(DataError, match=f"TINYDIT_DATA={value}"):
        resolve(word, cwd=tmp_path, env={"TINYDIT_DATA": value})


def test_auto_without_data_or_network_falls_back_loudly_and_soon(tmp_path, no_network):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.txt").write_text("no data yet")
    start = time.monotonic()
    spec, why = resolve("auto", cwd=tmp_path, env={})
    assert time.monotonic() - start < 15
    assert spec.source == "shapes"
    assert "WARNING" in why
    assert "download failed" in why
    assert "\n" not in why


def test_cifar10_without_network_is_an_error_and_leaves_nothing_behind(tmp_path, no_network):
    with pytest.raises(DataError, match=r"cannot download .*--data PATH"):
        resolve("cifar10", cwd=tmp_path, env={})
    assert list(tmp_path.iterdir()) == []


def test_cifar10_is_never_an_image_folder(tmp_path, no_network):
    write_images(tmp_path / "data", 3)
    with pytest.raises(DataError, match="image folder"):
        resolve("cifar10", cwd=tmp_path, env={"TINYDIT_DATA": str(tmp_path / "data")})
    with pytest.raises(DataError, match="cannot download"):
        resolve("cifar10", cwd=tmp_path, env={})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("cifar-10", "'cifar-10' is neither .*did you mean 'cifar10'"),
        ("", "neither"),
        ("some file", "not a folder"),
        ("empty", "holds no train"),
    ],
)
def test_data_that_is_nothing_known(tmp_path, data, message):
    (tmp_path / "some file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        resolve(data, cwd=tmp_path, env={})


@pytest.mark.parametrize("classes", [(10,), (-1,), ("1",), (1.0,), (True,)])
def test_impossible_classes(classes):
    with pytest.raises(DataError, match="classes"):
        resolve("shapes", classes=classes)


def test_classes_from_text():
    assert parse_classes(" 9, 1,9") == (1, 9)
    assert parse_classes(" ") == ()
    for text in ("1,", "cat", "-1", "²"):
        with pytest.raises(DataError, match="classes"):
            parse_classes(text)


def test_a_spec_survives_json_and_pickle():
    spec = DataSpec(source="parquet", root="/data/ü", classes=(3, 1), digest="ab")
    assert DataSpec.from_dict(json.loads(json.dumps(spec.as_dict()))) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    for wrong in (
        {"source": "parquet"},
        {"source": "web", "root": "/"},
        {"source": "shapes", "root": "", "n": 1},
        {"source": "folder", "root": "here"},
    ):
        with pytest.raises(DataError):
            DataSpec.from_dict(wrong)


# --- the cache ---


def test_prepare_then_load(tmp_path, cache):
    spec, _ = resolve(str(write_parquet(tmp_path / "dätä set")), env={})
    done = prepare(spec, cache)
    train, test = load(done, "train", cache), load(done, "test", cache)
    assert train.images.shape == (40, 3, 32, 32)
    assert train.images.dtype == torch.uint8
    assert train.labels.tolist() == [i % 10 for i in range(40)]
    assert test.labels.dtype == torch.int64
    assert train.source == "cifar10-parquet"
    assert len(done.digest) == len(train.digest) == 16
    assert train.digest != test.digest
    assert prepare(done, cache) == done


def test_the_pixels_are_those_of_the_files(tmp_path, cache):
    from data_makers import random_pixels

    spec, _ = resolve(str(write_parquet(tmp_path / "d")), env={})
    expected = torch.from_numpy(random_pixels(40)).permute(0, 3, 1, 2)
    assert torch.equal(load(spec, "train", cache).images, expected)


def test_load_decodes_where_this_node_has_no_cache(tmp_path, cache):
    spec, _ = resolve(str(write_parquet(tmp_path / "d")), env={})
    done = prepare(spec, cache)
    assert load(done, "test", tmp_path / "other node").digest == load(done, "test", cache).digest


def test_the_cache_folder_comes_from_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYDIT_CACHE", str(tmp_path / "mine"))
    spec, _ = resolve(str(write_parquet(tmp_path / "d")), env={})
    prepare(spec)
    assert cache_file(tmp_path / "mine")


def test_a_cache_folder_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="TINYDIT_CACHE"):
        prepare(DataSpec(source="shapes", root=""), tmp_path / "file" / "cache")


def _damage_cut(path):
    os.truncate(path, path.stat().st_size - 1000)


def _damage_header(path):
    path.write_bytes(b"not safetensors")


def _damage_one_bit(path):
    content = bytearray(path.read_bytes())
    content[-5000] ^= 1  # among the training pixels or labels or the test's: see the loop over splits
    path.write_bytes(content)


def _damage_gone(path):
    path.unlink()


@pytest.mark.parametrize("damage", [_damage_cut, _damage_header, _damage_one_bit, _damage_gone])
def test_a_damaged_cache_file_is_made_again(tmp_path, cache, damage):
    spec, _ = resolve(str(write_parquet(tmp_path / "d")), env={})
    done = prepare(spec, cache)
    sets = {split: load(done, split, cache).images.clone() for split in ("train", "test")}
    whole = cache_file(cache).read_bytes()
    damage(cache_file(cache))
    damaged = [path.stat().st_ino for path in cache.glob("*.safetensors")]
    for split, images in sets.items():
        assert torch.equal(load(done, split, cache).images, images)
    assert cache_file(cache).read_bytes() == whole
    assert cache_file(cache).stat().st_ino not in damaged  # renamed into place, for those still reading
    damage(cache_file(cache))
    assert prepare(spec, cache) == done
    assert cache_file(cache).read_bytes() == whole


def test_a_changed_source_is_new_content(tmp_path, cache):
    root = write_parquet(tmp_path / "d", seed=0)
    spec, _ = resolve(str(root), env={})
    first = prepare(spec, cache)
    write_parquet(root, seed=1)
    second = prepare(spec, cache)
    assert first.digest != second.digest
    with pytest.raises(DataError, match=f"digest {second.digest}.*digest {first.digest}"):
        load(first, "train", cache)
    with pytest.raises(DataError, match="digest"):
        prepare(first, cache)


def test_a_change_that_keeps_size_and_times_is_seen(tmp_path, cache):
    root = tmp_path / "d"
    write_images(root, 12)
    victim, other = root / "000.png", root / "001.png"
    size = max(victim.stat().st_size, other.stat().st_size)
    for path in (victim, other):  # bytes after the end of a PNG are ignored
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))
    for path in root.iterdir():
        os.utime(path, ns=(10**18, 10**18))
    spec, _ = resolve(str(root), env={})
    first = prepare(spec, cache)
    victim.write_bytes(other.read_bytes())
    os.utime(victim, ns=(10**18, 10**18))
    assert prepare(spec, cache).digest != first.digest


def test_an_unchanged_source_is_not_read_again(tmp_path, cache, monkeypatch):
    """Once its files are old enough for their times to be trusted."""
    root = write_parquet(tmp_path / "d")
    spec, _ = resolve(str(root), env={})
    monkeypatch.setattr("tinydit_ray.data.cache._SETTLED_NS", 0)
    time.sleep(0.05)
    done = prepare(spec, cache)
    reads = []
    monkeypatch.setattr("tinydit_ray.data.cache._file_hash", lambda path: reads.append(path) or b"")
    load(done, "train", cache)
    assert reads == []
    os.utime(root / "plain_text" / "train-00000-of-00001.parquet")
    with pytest.raises(DataError):  # the stand-in hash names other content: what counts is that it was asked
        load(DataSpec(source="parquet", root=str(root), digest="0" * 16), "train", cache)
    assert len(reads) == 2


def test_classes_are_content_of_their_own(tmp_path, cache):
    root = str(write_parquet(tmp_path / "d"))
    everything, _ = resolve(root, env={})
    some, _ = resolve(root, classes=(9, 1), env={})
    assert set(load(some, "train", cache).labels.tolist()) == {1, 9}
    assert len(load(some, "test", cache)) == 4
    assert len(load(everything, "test", cache)) == 20
    assert prepare(some, cache).digest != prepare(everything, cache).digest
    missing, _ = resolve(root, classes=(1, 12), env={})
    with pytest.raises(DataError, match=r"classes: 12 not in train of .*; its labels are 0, 1"):
        prepare(missing, cache)


def test_a_source_missing_on_a_node_is_a_clear_error(tmp_path, cache):
    with pytest.raises(DataError, match="image folder /no/such does not exist"):
        load(DataSpec(source="folder", root="/no/such"), "train", cache)
    with pytest.raises(DataError, match=r"/no/such has no train\*\.parquet"):
        load(DataSpec(source="parquet", root="/no/such"), "train", cache)
    with pytest.raises(DataError, match="split 'val'"):
        load(DataSpec(source="shapes", root=""), "val", cache)


PREPARE = """
import sys, time
from pathlib import Path
import tinydit_ray.data.parquet as parquet
from tinydit_ray.data import DataSpec, prepare

read = parquet._read_shard
def counted(path):
    with open(sys.argv[3], "a") as log:
        log.write(path.name + "\\n")
    time.sleep(0.3)  # long enough that the other process arrives meanwhile
    return read(path)
parquet._read_shard = counted
print("ready", flush=True)
sys.stdin.readline()
print(prepare(DataSpec(source="parquet", root=sys.argv[1]), Path(sys.argv[2])).digest)
"""


@pytest.mark.slow
def test_two_processes_that_start_together_decode_once(tmp_path, cache):
    root, log = write_parquet(tmp_path / "d"), tmp_path / "log"
    command = [sys.executable, "-c", PREPARE, str(root), str(cache), str(log)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    digests = [process.communicate(timeout=60)[0].strip() for process in both]
    assert digests[0] == digests[1] == prepare(DataSpec(source="parquet", root=str(root)), cache).digest
    assert sorted(log.read_text().split()) == ["test-00000-of-00001.parquet", "train-00000-of-00001.parquet"]
    assert not list(cache.glob(".*.tmp"))


def test_what_a_killed_process_left_is_removed(tmp_path, cache):
    spec, _ = resolve(str(write_parquet(tmp_path / "d")), env={})
    prepare(spec, cache)
    left = cache / f".{cache_file(cache).name}.12345.tmp"
    left.write_bytes(b"half")
    cache_file(cache).unlink()
    prepare(spec, cache)
    assert not left.exists()


def test_writing_into_loaded_images_does_not_reach_the_cache(tmp_path, cache):
    spec, _ = resolve(str(write_parquet(tmp_path / "d")), env={})
    images = load(spec, "train", cache).images
    before = images.clone()
    images.zero_()
    assert torch.equal(load(spec, "train", cache).images, before)


# --- what the package may import ---


@pytest.mark.slow
def test_importing_data_needs_no_torchvision_ray_or_mlflow():
    code = "import sys, tinydit_ray.data; print(sorted({'torchvision', 'ray', 'mlflow'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_data_knows_nothing_of_the_rest_of_the_project():
    for path in Path(tinydit_ray.data.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("tinydit_ray"):
                    known = name in ("tinydit_ray.atomic", "tinydit_ray.config") or name.startswith("tinydit_ray.data")
                    assert known, (path, name)


# --- the real CIFAR-10 ---


@pytest.mark.slow
@needs_real
def test_the_real_cifar10(tmp_path):
    spec, _ = resolve("auto")
    start = time.monotonic()
    done = prepare(spec, tmp_path)
    assert time.monotonic() - start < 60
    start = time.monotonic()
    train = load(done, "train", tmp_path)
    assert time.monotonic() - start < 2
    assert train.images.shape == (50_000, 3, 32, 32)
    assert train.labels.bincount().tolist() == [5_000] * 10
    assert load(done, "test", tmp_path).labels.bincount().tolist() == [1_000] * 10
    # channel means and deviations of the training set as published everywhere, x 255
    means = train.images.double().mean((0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64), atol=2e-3)


@pytest.mark.slow
@needs_real
def test_cached_cifar10_of_the_tutorial(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYDIT_CACHE", str(tmp_path))
    cars = CachedCIFAR10(REAL, False, (1, 9))
    assert cars.images.shape == (2_000, 3, 32, 32)
    assert set(cars.labels.tolist()) == {1, 9}
