"""Reading back what a sweep left in MLflow, for tests; and processes that play the driver."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine's own server, never a proxy


class Server:
    """The project's ``ui`` command on a store of its own; stopped by its process group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.store = f"sqlite:///{folder}/mlflow.db"
        self.output = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tinydit_ray.tracking", "ui", "--port", str(self.port)],
                cwd=self.folder,
                env={name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
                | {"PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with LOCAL.open(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(self.output.read_text())

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)
            self.process = None
            self._wait_until_closed()

    def _wait_until_closed(self) -> None:
        """The server's workers are children of the command: until they too are gone, the port answers."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                return
            time.sleep(0.05)
        raise AssertionError(f"port {self.port} still answers")


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
