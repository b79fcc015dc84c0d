"""Running the sweep scripts as a person would: real processes, small cells."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd

from tinydit_ray.record import read_records

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--set", "model=32/1/2", "--set", "batch_size=16"]
TINY = [*SMALL, "--data", "shapes", "--time", "0.6", "--steps", "4", "--fd-n", "130", "--no-report"]
ONE_CPU = ["--cpus-per-worker", "1"]


def sweep(
    script: str, *arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``sweeps/SCRIPT`` in ``cwd``; the store and the runs folder are made there."""
    environment = {**os.environ, "COLUMNS": "200", **(env or {})}
    environment.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.run(
        [sys.executable, str(ROOT / "sweeps" / script), *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def sweep_here(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``sweeps/SCRIPT`` in this process, for what ends before any trial: no interpreter that imports torch anew.

    That a process of its own prints the same is a test of test_cli.py.
    """
    return run_here(ROOT / "sweeps" / script, *arguments, cwd=cwd)


def run_here(script: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A script run as ``__main__`` in this process; its exit status, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    with (
        patch.dict(os.environ, environment | {"COLUMNS": "200"}, clear=True),
        patch.object(sys, "argv", [str(script), *arguments]), patch.object(sys, "path", list(sys.path)),
        chdir(cwd), redirect_stdout(out), redirect_stderr(err),
    ):  # fmt: skip
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            return subprocess.CompletedProcess(arguments, int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError(f"{script} ended without an exit status")


def records(folder: Path) -> list[dict[str, Any]]:
    return read_records(folder / "records.jsonl")


def results(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "results.parquet")
