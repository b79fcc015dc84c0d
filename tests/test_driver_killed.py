"""The driver of a sweep is killed (SIGKILL) at several moments; what it had finished stays, the rest is run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sweep_help import ONE_CPU, ROOT, TINY, records, results, sweep

pytestmark = pytest.mark.slow

GRID = [*TINY, *ONE_CPU, "--steps", "80", "--set", "attention=manual,sdpa", "--rounds", "1", "--no-ray"]
PHASES = ("build", "timing", "training")


def wait_for_phase(folder: Path, phase: str, driver: subprocess.Popen[bytes]) -> Path | None:
    """The folder of a trial that is in this phase right now; None where the sweep ended before one was seen."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and driver.poll() is None:
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


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a parent-death signal")
def test_a_killed_driver_loses_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "killed"
    arguments = [*GRID, "--name", "killed"]
    for phase in PHASES:
        kept = written(folder)
        driver = subprocess.Popen(
            [sys.executable, str(ROOT / "sweeps" / "speed_grid.py"), *arguments],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ},
        )  # fmt: skip
        try:
            seen = wait_for_phase(folder, phase, driver)
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        assert seen is not None, f"no trial was seen in {phase}"
        deadline = time.monotonic() + 30
        while trials_of(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert trials_of(folder) == []
        assert written(folder)[: len(kept)] == kept
        arguments = [*GRID, "--resume", "killed"]
    done = sweep("speed_grid.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(folder)
    good = [row for row in rows if row["status"] == "ok"]
    assert len(good) == len({row["cell_id"] for row in good}) == 2
    assert len(results(folder)) == 2
    numbers = [(row["cell_id"], row["round"], row["attempt"]) for row in rows]
    assert len(numbers) == len(set(numbers))
    again = sweep("speed_grid.py", *GRID, "--resume", "killed", cwd=tmp_path)
    assert again.returncode == 0
    assert records(folder) == rows
