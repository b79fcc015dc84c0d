"""Trials that go wrong, all in one sweep through Ray: each ends alone, says why, and leaves no process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fault_nets
import pytest
from sweep_help import ONE_CPU, records
from tracking_help import python

from tinydit_ray.record import Record

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KILLED = ("build", "timing", "training", "scores")  # scores: the evaluation
NETS = ("plain", "hanging", "stopped", *(f"killed_in_{phase}" for phase in KILLED))
GRID = "base: {batch_size: 16}\ncells:\n" + "".join(f"  - {{network: 'fault_nets:{name}'}}\n" for name in NETS)
# a learning rate that sends the weights beyond fp16 at once: from then on the scaler refuses every step
GRID += "  - {network: 'fault_nets:plain', precision: fp16, lr: 1e30}\n  - {network: 'fault_nets:plain', lr: 1e30}\n"
LIMIT_S, OVERDUE_S = 35, 12  # a good trial takes 6 s alone, and over 20 beside other work
OPTIONS = ["--data", "shapes", "--time", "0.6", "--steps", "12", "--fd-n", "0", "--rounds", "1", *ONE_CPU]
OPTIONS += ["--no-report", "--concurrent", "2", "--cell-timeout", f"{LIMIT_S}s"]
# a trial that does not end itself is ended from outside, in a sweep of hours 90 s late
CODE = f"""
import sys
from tinydit_ray.distributed import search
from tinydit_ray.sweep.cli import run, speed_grid
search.OVERDUE_S = {OVERDUE_S}
sys.exit(run(speed_grid, sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Record], str, Path]:
    """Record by network (and precision, where it is not the default), what was printed, the folder."""
    here = tmp_path_factory.mktemp("faults")
    (here / "faults.yaml").write_text(GRID)
    process = python(CODE, "--grid", "faults.yaml", "--name", "faults", *OPTIONS, cwd=here)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 3, printed
    rows = {_name(row): row for row in records(here / "runs" / "faults")}
    return rows, printed, here / "runs" / "faults"


def _name(row: Record) -> str:
    name = row["config.network"].partition(":")[2]
    return name if row["config.lr"] < 1 else f"{row['config.precision']} far too fast"


def test_every_cell_has_its_row_and_the_good_one_is_good(swept: Any) -> None:
    rows, printed, _ = swept
    assert len(rows) == len(NETS) + 2
    assert rows["plain"]["status"] == "ok", rows["plain"]["reason"]
    assert "Traceback" not in printed


@pytest.mark.parametrize("phase", KILLED)
def test_a_killed_trial_is_a_failed_row_that_names_its_phase(swept: Any, phase: str) -> None:
    rows, printed, folder = swept
    row = rows[f"killed_in_{phase}"]
    assert row["status"] == "failed"
    assert "died" in row["reason"]
    assert row["reason"].endswith(f"in the phase '{phase}'")
    assert row["ms_per_step"] is None
    assert f"{row['cell_name']}: failed, see {folder}" in printed


def test_a_cell_that_hangs_is_ended_by_the_time_limit_with_its_children(swept: Any) -> None:
    rows, _, folder = swept
    row = rows["hanging"]
    assert (row["status"], row["ms_per_step"]) == ("timeout", None)
    assert row["reason"] == f"ended after {LIMIT_S} s in the phase 'training' (--cell-timeout)"
    (log,) = folder.glob("cells/*hanging*/r1-a1/log.txt")
    assert "in hang" in log.read_text()  # the stacks of its threads say where it hung
    assert [pid for pid in os.listdir("/proc") if pid.isdigit() and fault_nets.CHILD_S in _command(pid)] == []


def _command(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_fp16_whose_steps_are_all_skipped_is_diverged_not_ok(swept: Any) -> None:
    row = swept[0]["fp16 far too fast"]
    assert row["status"] == "diverged"
    assert row["reason"] == "the loss scaler refused 30 steps in a row: gradients are never finite"


def test_a_loss_that_is_no_number_is_diverged(swept: Any) -> None:
    row = swept[0]["fp32 far too fast"]
    assert row["status"] == "diverged"
    assert "the loss is" in row["reason"]
    assert row["velocity_mse"] is None


def test_a_trial_that_cannot_end_itself_is_ended_from_outside(swept: Any) -> None:
    """Stopped (SIGSTOP), so that its own watchdog does not run either."""
    rows, _, folder = swept
    row = rows["stopped"]
    assert (row["status"], row["ms_per_step"]) == ("timeout", None)
    assert row["reason"] == f"ended after {LIMIT_S} s in the phase 'build' (--cell-timeout)"
    (log,) = folder.glob("cells/*stopped*/r1-a1/log.txt")
    assert "Timeout (" not in log.read_text()  # the watchdog's word
    assert _processes_of(folder) == []


def _processes_of(folder: Path) -> list[str]:
    """Processes whose output goes to a trial's log in this sweep's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            found += [str(entry)] if Path(os.readlink(entry)).is_relative_to(folder / "cells") else []
        except OSError:
            continue
    return found
