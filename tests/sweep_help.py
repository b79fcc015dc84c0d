"""Running the sweep scripts as a person would: real processes, small cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd

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


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def results(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "results.parquet")
