"""Where trained weights go: a folder, and S3 as a local server speaks it; what cannot be used is said at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load
from sweep_help import ONE_CPU, TINY, records, sweep

from tinydit_ray.config import CellConfig
from tinydit_ray.data import DataSpec
from tinydit_ray.data import load as load_data
from tinydit_ray.network import build_network
from tinydit_ray.quality import velocity_mse
from tinydit_ray.storage import Storage, StorageError, read
from tinydit_ray.train.__main__ import main as train

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
ONE = [*TINY, *ONE_CPU, "--device", "cpu", "--rounds", "1", "--set", "attention=manual", "--fd-n", "0", "--no-ray"]
COLUMNS = {f"config.{name}" for name in CellConfig().asdict()}
TRAINING = ["--data", "shapes", "--set", "model=32/1/2", "--batch-size", "16", "--threads", "1", "--fd-n", "0",
            "--eval-every", "100", "--samples", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket on a server of this machine: s3://weights?…"""
    moto = pytest.importorskip("moto.server")
    before = {name: os.environ.get(name) for name in KEYS}
    os.environ.update(KEYS)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    query = f"scheme=http&endpoint_override={host}:{port}&region=us-east-1"
    from pyarrow import fs

    fs.FileSystem.from_uri(f"s3://weights?{query}&allow_bucket_creation=true")[0].create_dir("weights")
    yield f"s3://weights/some/where?{query}"
    server.stop()
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def check_weights(row: dict[str, object], storage: str, sweep_name: str) -> None:
    """What the record names is the trained model: under SWEEP/CELL, and with its velocity MSE."""
    uri = str(row["weights_uri"])
    base, _, query = storage.partition("?")
    assert uri.startswith(f"{base}/{sweep_name}/")
    assert uri.endswith(f"{row['cell_id']}/r1-a1/weights.safetensors" + (f"?{query}" if query else ""))
    cell = CellConfig(**{k.removeprefix("config."): v for k, v in row.items() if k in COLUMNS})
    net = build_network(cell)
    net.load_state_dict(load(read(uri)), strict=True)
    images = load_data(DataSpec(source="shapes", root="", classes=()), "test").images[:2000]
    assert velocity_mse(net, images) == pytest.approx(row["velocity_mse"], rel=1e-5)


@pytest.mark.slow
def test_trained_weights_of_a_sweep_lie_in_a_folder(tmp_path: Path) -> None:
    place = tmp_path / "my share"
    done = sweep("speed_grid.py", *ONE, "--storage", str(place), "--name", "kept", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = records(tmp_path / "runs" / "kept")
    check_weights(row, place.as_uri(), "kept")
    files = [path for path in place.rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["weights.safetensors"]  # no file of the check, none half written
    with safe_open(files[0], framework="pt") as file:
        assert json.loads(file.metadata()["config"])["dim"] == 32


@pytest.mark.ray
@pytest.mark.slow
def test_trained_weights_of_a_sweep_lie_in_s3(tmp_path: Path, s3: str) -> None:
    arguments = [word for word in ONE if word != "--no-ray"]
    done = sweep("speed_grid.py", *arguments, "--storage", s3, "--name", "kept", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = records(tmp_path / "runs" / "kept")
    check_weights(row, s3, "kept")


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.at(str(tmp_path))
    storage.write("a/b.bin", b"first")

    def full(self: Path, content: bytes) -> int:
        with open(self, "wb") as file:
            file.write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="No space left"):
        storage.write("a/b.bin", b"second")
    assert read(storage.child("a/b.bin")) == b"first"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.bin"]


@pytest.mark.slow
def test_s3_keeps_finds_and_replaces(s3: str) -> None:
    storage = Storage.at(s3)
    assert storage.find("x/y") is None
    large = bytes(range(256)) * 50_000  # in several parts
    for content in (b"one", large):
        assert read(storage.write("x/y", content)) == content
    assert storage.find("x/y") == large


@pytest.mark.slow  # the libraries behind S3 try again for seconds
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("ftp://host/x", "neither a folder nor s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", "AWS_ACCESS_KEY_ID"),
        ("{file}/below", "Not a directory"),
        ("s3://weights/x?scheme=http&endpoint_override=127.0.0.1:9&region=us-east-1", "s3://weights/x"),
        ("s3://no-such-bucket/x?{query}", "s3://no-such-bucket/x"),
    ],
)
def test_a_storage_that_cannot_be_is_one_line_before_any_trial(
    tmp_path: Path, s3: str, place: str, words: str
) -> None:
    (tmp_path / "file").write_text("")
    place = place.format(file=tmp_path / "file", query=s3.partition("?")[2])
    done = sweep("speed_grid.py", *ONE, "--storage", place, "--name", "never", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: --storage")
    assert words in line
    assert "secret" not in line
    assert not (tmp_path / "runs" / "never").exists()


@pytest.mark.slow
def test_a_training_goes_on_from_its_copy_on_another_machine(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is lost with the machine; the same command elsewhere takes up the copy."""
    monkeypatch.setattr("tinydit_ray.train.run.SCORED_IMAGES", 64)
    whole = tmp_path / "whole"
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "run"
    assert train([*TRAINING, "--out", str(whole), "--steps", "6"]) == 0
    assert train([*TRAINING, "--out", str(here), "--steps", "3", "--storage", s3]) == 0
    assert train([*TRAINING, "--out", str(there), "--steps", "6", "--storage", s3]) == 0
    report = json.loads((there / "metrics.json").read_text())
    assert report["sessions"] == 2
    ends = [torch.load(path / "checkpoint.pt", weights_only=True)["model"] for path in (whole, there)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_training_without_its_storage_does_not_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    arguments = [*TRAINING, "--out", str(tmp_path / "run"), "--steps", "3"]
    assert train([*arguments, "--storage", f"{tmp_path}/file/below"]) == 2
    assert "Not a directory" in capsys.readouterr().err
