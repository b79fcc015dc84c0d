"""Reading back what a sweep left in MLflow, for tests; and processes that play the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def runs_in(uri: str, experiment: str = "speed") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id], max_results=1000)) if found else []


def parents(runs: list[Any]) -> list[Any]:
    return [run for run in runs if "mlflow.parentRunId" not in run.data.tags]


def children(runs: list[Any]) -> list[Any]:
    return [run for run in runs if "mlflow.parentRunId" in run.data.tags]


def state(uri: str) -> dict[str, Any]:
    """Everything of every run that a second sync could double or change."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return {
        run.info.run_id: (
            run.info.status,
            run.info.end_time,
            run.data.params,
            run.data.tags,
            [
                (m.value, m.step)
                for key in sorted(run.data.metrics)
                for m in client.get_metric_history(run.info.run_id, key)
            ],
            sorted(item.path for item in client.list_artifacts(run.info.run_id)),
        )
        for run in runs_in(uri)
    }


def sweep_json(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "sweep.json").read_text("utf-8")))


def python(code: str, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """A Python process that sees the package and these helpers."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``python -m tinydit_ray.tracking ...``"""
    return subprocess.run(
        [sys.executable, "-m", "tinydit_ray.tracking", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
