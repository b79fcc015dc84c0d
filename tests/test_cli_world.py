"""What a person asks for is well written and cannot be had here: one line that names it, exit status 2, no sweep."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sweep_help import TINY, sweep, sweep_here

Run = Callable[..., subprocess.CompletedProcess[str]]
OPTIONS = [*TINY, "--name", "x"]


def refused(*arguments: str, cwd: Path, run: Run = sweep) -> str:
    """The line that says why; nothing is left of the sweep, so that its name can be used again."""
    done = run("speed_grid.py", *OPTIONS, *arguments, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout
    assert not (cwd / "runs" / "x").exists()
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("no picture")
    assert "papers" in (line := refused("--no-ray", "--data", "papers", cwd=tmp_path, run=sweep_here))
    assert "no image" in line


def test_a_data_file_cut_short(tmp_path: Path) -> None:
    from test_data_sources import train_file, write_parquet

    root = write_parquet(tmp_path / "data")
    train_file(root).write_bytes(train_file(root).read_bytes()[:1000])
    assert str(train_file(root)) in refused("--no-ray", "--data", str(root), cwd=tmp_path, run=sweep_here)


def test_gpus_for_cells_on_the_cpu(tmp_path: Path) -> None:
    line = refused("--no-ray", "--device", "cpu", "--gpus-per-worker", "2", cwd=tmp_path, run=sweep_here)
    assert line == "error: --gpus-per-worker 2: cells on the CPU have none; give --device cuda"


@pytest.mark.ray
@pytest.mark.slow
def test_more_gpus_than_the_cluster_has(tmp_path: Path) -> None:
    line = refused("--device", "cuda", "--gpus-per-worker", "999", cwd=tmp_path)
    assert "a trial asks for 999 GPU, the cluster has" in line


@pytest.mark.mlflow
@pytest.mark.slow
def test_the_name_of_a_deleted_experiment(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.delete_experiment(client.create_experiment("mine"))
    line = refused("--no-ray", "--experiment", "mine", "--tracking-uri", uri, cwd=tmp_path)
    assert "'mine'" in line
    assert "deleted" in line


@pytest.mark.mlflow
@pytest.mark.slow
def test_a_store_made_by_an_older_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from test_tracking_store import older_store

    older_store(tmp_path / "old.db")
    before = (tmp_path / "old.db").read_bytes()
    line = refused("--no-ray", "--tracking-uri", f"sqlite:///{tmp_path}/old.db", cwd=tmp_path)
    assert "made by an older MLflow" in line
    assert (tmp_path / "old.db").read_bytes() == before
