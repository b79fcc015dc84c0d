"""Sweeps without Ray: signals, two at once, trials that hang or are killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import fault_nets
import pytest
from driver_help import attempts, descendants, driver, wait_for, wait_until_ended
from sweep_help import ONE_CPU, ROOT, TINY, records, results, sweep
from tracking_help import children, parents, runs_in

pytestmark = pytest.mark.slow

GRID = [*TINY, *ONE_CPU, "--fd-n", "0", "--rounds", "1", "--no-ray"]
PATHS = (ROOT, ROOT / "tests")
LONG = [*GRID, "--time", "60", "--set", "attention=manual"]


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_a_signal_ends_the_sweep_with_130_and_no_process_stays(signals: list[int], tmp_path: Path) -> None:
    """While a trial is being timed. Two in a row leave at once, without a table."""
    folder = tmp_path / "runs" / "s"
    with driver(*LONG, "--name", "s", cwd=tmp_path) as process:
        wait_for("window", lambda: any(p.read_text() == "timing" for p in folder.glob("cells/*/*/phase")), process)
        below = descendants(process.pid)
        start = time.monotonic()
        for number in signals:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert time.monotonic() - start < 20
    assert err.count("once more to leave at once") == 1
    assert "Traceback" not in out + err
    wait_until_ended(below)
    assert len(signals) == 2 or "sweep folder:" in out
    assert not (folder / "records.jsonl").exists()  # nothing was finished, and nothing is made up
    assert json.loads((folder / "sweep.json").read_text())["name"] == "s"


FAULTY = """
base: {batch_size: 16}
cells:
  - {network: 'fault_nets:plain'}
  - {network: 'fault_nets:hanging'}
  - {network: 'fault_nets:killed_in_timing'}
"""
LIMIT_S = 25


def test_trials_that_hang_or_are_killed_end_alone(tmp_path: Path) -> None:
    """Through Ray, with more faults: test_faults_trial.py."""
    (tmp_path / "faulty.yaml").write_text(FAULTY)
    options = ["--grid", "faulty.yaml", "--data", "shapes", "--time", "0.6", "--steps", "4", "--fd-n", "0", *ONE_CPU]
    options += ["--rounds", "2", "--cell-timeout", f"{LIMIT_S}s", "--no-ray", "--no-report", "--name", "f"]
    done = sweep("speed_grid.py", *options, cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(map(str, PATHS))})
    assert done.returncode == 3, done.stdout + done.stderr
    rows = {(row["config.network"].partition(":")[2], row["round"]): row for row in records(tmp_path / "runs" / "f")}
    assert [rows["plain", number]["status"] for number in (1, 2)] == ["ok", "ok"]
    hung, killed = rows["hanging", 1], rows["killed_in_timing", 1]
    assert (hung["status"], hung["reason"]) == (
        "timeout", f"ended after {LIMIT_S} s in the phase 'training' (--cell-timeout)",
    )  # fmt: skip
    assert (rows["hanging", 2]["status"], rows["hanging", 2]["reason"]) == ("skipped", "timeout in round 1")
    assert (killed["status"], killed["reason"]) == (
        "failed", "the trial's process was killed by SIGKILL in the phase 'timing'",
    )  # fmt: skip
    assert (rows["killed_in_timing", 2]["status"], rows["killed_in_timing", 2]["reason"]) == (
        "skipped", "failed in round 1",
    )  # fmt: skip
    assert fault_nets.children() == []


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Any]]:
    """Two sweeps started together in one folder; what others that took the first one's name were told."""
    pytest.importorskip("mlflow")
    here = tmp_path_factory.mktemp("together")
    refused = []
    with driver(*GRID, "--name", "one", cwd=here) as one, driver(*GRID, "--name", "two", cwd=here) as two:
        wait_for("trial", lambda: attempts(here / "runs" / "one") > 0, one)
        refused.append(sweep("speed_grid.py", *GRID, "--name", "one", cwd=here))
        ends = [(process.communicate(timeout=120), process.returncode) for process in (one, two)]
    return here, ends, refused


@pytest.mark.mlflow
def test_two_sweeps_at_once_share_data_and_store(together: Any) -> None:
    here, ends, _ = together
    assert [status for _, status in ends] == [0, 0], ends
    assert [err for (_, err), _ in ends] == ["", ""]
    for name in ("one", "two"):
        assert [row["status"] for row in records(here / "runs" / name)] == ["ok"]
    runs = runs_in(f"sqlite:///{here}/mlflow.db", "tinydit")
    assert sorted(run.info.run_name for run in parents(runs)) == ["one", "two"]
    assert len(children(runs)) == 2


def test_another_of_the_same_name_is_refused_while_the_first_goes_on(together: Any) -> None:
    for done in together[2]:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "another process runs this sweep" in done.stderr or "holds a sweep already" in done.stderr


@pytest.mark.mlflow
def test_an_edited_grid_adds_its_new_cells_and_keeps_the_rows_of_those_it_lost(together: Any) -> None:
    here, _, _ = together
    done = sweep("speed_grid.py", "--resume", "two", "--set", "attention=sdpa", *GRID[:4], cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cells are no longer in the grid; their rows stay" in done.stdout
    rows = records(here / "runs" / "two")
    assert [(row["config.attention"], row["status"], row["attempt"]) for row in rows] == [
        ("manual", "ok", 1), ("sdpa", "ok", 1),
    ]  # fmt: skip
    assert results(here / "runs" / "two")["config.attention"].tolist() == ["sdpa", "manual"]
    runs = runs_in(f"sqlite:///{here}/mlflow.db", "tinydit")
    assert len(parents(runs)) == 2
    assert len(children(runs)) == 3
