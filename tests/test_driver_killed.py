"""The driver of a sweep without Ray is killed (SIGKILL), in known phases and at random; what it had finished stays, the
rest is run. Through Ray: test_faults_driver.py."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from driver_help import check_whole, driver, planned
from sweep_help import ONE_CPU, TINY, records, sweep

pytestmark = [pytest.mark.slow, pytest.mark.mlflow]

GRID = [*TINY, *ONE_CPU, "--fd-n", "0", "--set", "attention=manual,sdpa", "--rounds", "1", "--no-ray"]
GRID += ["--steps", "80"]
RANDOM = ""
MOMENTS = ("timing", RANDOM, "training", RANDOM)  # phases of a trial; any time from the driver's start on
LONGEST_S = 10.0  # until a random kill: from the imports to the first trial's training


def wait_for_phase(folder: Path, phase: str, process: subprocess.Popen[str]) -> Path | None:
    """The folder of a trial that is in this phase right now; None where the sweep ended before one was seen."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for path in folder.glob("cells/*/*/phase"):
            if path.read_text() == phase and not (path.parent / "record.json").exists():
                return path.parent
        time.sleep(0.002)
    return None


def trials_of(folder: Path) -> list[int]:
    """Processes of this sweep's trials."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tinydit_ray.cell" in words and any(str(folder).encode() in word for word in words):
            found.append(int(path.parent.name))
    return found


def written(folder: Path) -> list[dict[str, Any]]:
    """Records so far; the file begins with the first."""
    return records(folder) if (folder / "records.jsonl").exists() else []


def kill_in(folder: Path, phase: str, process: subprocess.Popen[str]) -> None:
    if phase == RANDOM:
        time.sleep(random.uniform(0.0, LONGEST_S))
    else:
        assert wait_for_phase(folder, phase, process) is not None, f"no trial was seen in {phase}"
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while trials_of(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert trials_of(folder) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a parent-death signal")
def test_a_killed_driver_loses_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "killed"
    for phase in MOMENTS:
        kept = written(folder)
        start = ["--resume", "killed"] if (folder / "sweep.json").exists() else [*GRID, "--name", "killed"]
        with driver(*start, cwd=tmp_path) as process:
            kill_in(folder, phase, process)
        assert written(folder)[: len(kept)] == kept
    done = sweep("speed_grid.py", "--resume", "killed", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_whole(folder, f"sqlite:///{tmp_path}/mlflow.db", planned(*GRID, cwd=tmp_path), 1)
    rows = records(folder)
    again = sweep("speed_grid.py", "--resume", "killed", cwd=tmp_path)
    assert again.returncode == 0
    assert records(folder) == rows
