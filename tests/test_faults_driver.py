"""The driver of a Ray sweep is interrupted, and loses its Ray: what was finished stays, the rest is run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from driver_help import attempts, descendants, driver, wait_for, wait_until_ended
from sweep_help import ONE_CPU, TINY, records, results, sweep
from tracking_help import children, parents, runs_in

pytestmark = [pytest.mark.ray, pytest.mark.mlflow, pytest.mark.slow]
pytest.importorskip("mlflow")

GRID = [*TINY, *ONE_CPU, "--set", "attention=manual,sdpa", "--rounds", "2"]
CELLS, ROUNDS = 2, 4  # rounds of all cells together


def rounds_of(folder: Path) -> set[tuple[str, int]]:
    return {(row["cell_name"], row["round"]) for row in records(folder) if row["status"] == "ok"}


def check_whole(folder: Path, uri: str) -> None:
    """As an uninterrupted sweep would have left it: each round ok once, in the folder and in MLflow."""
    rows = records(folder)
    good = [row for row in rows if row["status"] == "ok"]
    assert len(good) == len(rounds_of(folder)) == ROUNDS
    assert len({row["cell_id"] for row in good}) == CELLS
    keys = [(row["cell_id"], row["round"], row["attempt"]) for row in rows]
    assert len(keys) == len(set(keys))
    table = results(folder)
    assert (len(table), set(table["status"]), table["verdict"].isna().sum()) == (ROUNDS, {"ok"}, 0)
    runs = runs_in(uri, "tinydit")
    assert [run.info.status for run in parents(runs)] == ["FINISHED"]
    sent = [run.data.tags["record_key"] for run in children(runs) if run.info.status == "FINISHED"]
    assert len(sent) == len(set(sent)) == ROUNDS
    assert {run.info.status for run in children(runs)} <= {"FINISHED", "FAILED", "KILLED"}


def test_ctrl_c_keeps_what_is_done_and_the_sweep_goes_on_later(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "c"
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with driver(*GRID, "--name", "c", cwd=tmp_path) as process:
        wait_for("record", lambda: folder.joinpath("records.jsonl").exists() and attempts(folder) > 1, process)
        below = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    wait_until_ended(below)
    assert "once more to leave at once" in err
    assert "Traceback" not in out + err
    assert "sweep folder:" in out  # the table of what is done, and where it lies
    kept = records(folder)
    assert [row["status"] for row in kept] == ["ok"] * len(kept)
    assert 1 <= len(kept) < ROUNDS
    runs = runs_in(uri, "tinydit")
    assert [(run.info.status, bool(run.info.end_time)) for run in parents(runs)] == [("KILLED", True)]
    assert len(children(runs)) == len(kept)
    done = sweep("speed_grid.py", "--resume", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert records(folder)[: len(kept)] == kept
    check_whole(folder, uri)


@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_ray_that_dies_ends_the_sweep_in_one_line(part: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    with driver(*GRID, "--name", "r", cwd=tmp_path) as process:
        wait_for("record", lambda: folder.joinpath("records.jsonl").exists() and attempts(folder) > 1, process)
        below = descendants(process.pid)
        (pid,) = [pid for pid, name in below.items() if Path(name).name == part]
        os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 3, out + err
    (line,) = err.strip().splitlines()
    assert line.startswith("error: Ray")
    assert "--resume r" in line
    # without their head Ray's own agents take a minute to notice; no trial may stay
    wait_until_ended({pid: name for pid, name in below.items() if "Agent" not in name})
    kept = records(folder)
    assert kept
    assert [row["status"] for row in kept] == ["ok"] * len(kept)
