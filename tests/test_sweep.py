"""Whole sweeps of tiny cells, in real processes: with Ray and without, with cells that fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sweep_help import ONE_CPU, TINY, records, results, sweep

from tinydit_ray.record import COLUMNS, is_disturbed
from tinydit_ray.sweep.results import RESULT_COLUMNS

TWO = [*TINY, *ONE_CPU, "--set", "attention=manual,sdpa"]


def check_two_good_cells(folder: Path) -> None:
    rows = records(folder)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert {row["effective.attention_op"] for row in rows} == {"manual", "sdpa-flash"}
    assert len({row["batch_hash"] for row in rows}) == 1
    for row in rows:
        assert list(row) == list(COLUMNS)
        assert row["effective.fresh_process"] == "yes"
        assert row["effective.threads"] == 1
        assert row["effective.nice"] == os.nice(0)
        assert row["speedup_vs_control"] > 0
        assert row["velocity_mse"] > 0
        assert row["steps_trained"] == 4
        assert (row["probe_fd_n"], row["probe_fd"] > 0, row["probe_id"].startswith("shapes-")) == (130, True, True)
        assert row["peak_rss_mb"] > 100
    assert rows[0]["effective.pid"] != rows[1]["effective.pid"]
    table = results(folder)
    assert list(table.columns) == list(RESULT_COLUMNS)
    assert table["verdict"].notna().all()
    for cell in (folder / "cells").iterdir():
        steps = json.loads((cell / "r1-a1" / "steps.json").read_text())
        assert len(steps["cell_ms"]) == len(steps["control_ms"]) >= 8
        assert (cell / "r1-a1" / "log.txt").exists()
        assert (cell / "r1-a1" / "samples.png").stat().st_size > 0
        assert (cell / "r1-a1" / "loss.csv").read_text().startswith("step,loss,seconds")
    assert {"machine", "versions", "grid", "data", "command", "git_commit"} <= json.loads(
        (folder / "sweep.json").read_text()
    ).keys()


@pytest.mark.ray
@pytest.mark.mlflow
def test_two_cells_through_ray_and_mlflow(tmp_path: Path) -> None:
    done = sweep("speed_grid.py", *TWO, "--rounds", "1", "--name", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_two_good_cells(tmp_path / "runs" / "two")
    assert "sweep folder:" in done.stdout
    assert "speed-up" in done.stdout
    assert "Trial " not in done.stdout
    assert done.stderr == ""  # Ray's and MLflow's chatter is in the log
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("tinydit")
    runs = client.search_runs([experiment.experiment_id])
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len(runs) == 3
    assert len(children) == 2
    for run in children:
        assert {"ms_per_step", "velocity_mse"} <= run.data.metrics.keys()
        assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_without_ray_in_a_path_with_a_space_and_another_letter(tmp_path: Path) -> None:
    cwd = tmp_path / "mein Größe Ordner"
    cwd.mkdir()
    done = sweep("speed_grid.py", *TWO, "--rounds", "1", "--no-ray", "--name", "zwei Zellen", "--out", "läufe", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    check_two_good_cells(cwd / "läufe" / "zwei Zellen")


@pytest.mark.ray
def test_through_ray_in_a_path_with_a_space_and_another_letter(tmp_path: Path) -> None:
    cwd = tmp_path / "mein Größe Ordner"
    cwd.mkdir()
    done = sweep("speed_grid.py", *TWO, "--rounds", "1", "--name", "zwei Zellen", "--out", "läufe", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    check_two_good_cells(cwd / "läufe" / "zwei Zellen")


@pytest.mark.parametrize(
    "ray", [pytest.param(True, marks=pytest.mark.ray), pytest.param(False, marks=pytest.mark.slow)]
)
def test_bad_cells_are_rows_with_a_reason_and_the_exit_status_is_3(ray: bool, tmp_path: Path) -> None:
    """One that diverges, one that runs out of memory, one that cannot run here, and a good one."""
    grid = tmp_path / "bad.yaml"
    grid.write_text(
        "base: {model: 32/1/2, batch_size: 16, cpus_per_worker: 1}\n"
        "cells:\n  - {}\n  - {lr: 1e30}\n  - {batch_size: 8192}\n  - {attention: sdpa-cudnn}\n  - {batch_size: 9000}\n"
    )
    options = ["--grid", "bad.yaml", "--data", "shapes", "--time", "0.6", "--steps", "12", "--rounds", "1"]
    options += ["--memory-limit", "1.2", "--name", "bad", *([] if ray else ["--no-ray"])]
    done = sweep("speed_grid.py", *options, cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    rows = {
        (row["config.lr"], row["config.batch_size"], row["config.attention"]): row
        for row in records(tmp_path / "runs" / "bad")
    }
    assert len(rows) == 5
    assert rows[3e-4, 16, "manual"]["status"] == "ok"
    assert rows[1e30, 16, "manual"]["status"] == "diverged"
    big = [rows[3e-4, size, "manual"] for size in (8192, 9000)]
    assert "oom" in {row["status"] for row in big}
    for row in big:
        assert row["status"] in ("oom", "skipped")
        assert ("out of memory" in row["reason"]) if row["status"] == "oom" else row["reason"].startswith("oom at")
    assert rows[3e-4, 16, "sdpa-cudnn"]["status"] == "unsupported"
    logs = [Path(line.split(", see ")[1]) for line in done.stdout.splitlines() if ", see " in line]
    assert len(logs) == len([row for row in rows.values() if row["status"] in ("oom", "diverged")])
    assert all(log.exists() for log in logs)
    for row in rows.values():
        assert row["status"] == "ok" or row["reason"]
        assert row["status"] == "ok" or row["reason"].split()[0] in done.stdout


@pytest.mark.slow
def test_resume_runs_what_is_missing_or_not_ok(tmp_path: Path) -> None:
    options = [*TINY, *ONE_CPU, "--no-ray", "--rounds", "1"]
    first = sweep("speed_grid.py", *options, "--name", "again", "--memory-limit", "0.2", cwd=tmp_path)
    assert first.returncode == 3, first.stdout + first.stderr
    # a resumed sweep keeps its options, so the limit is given anew
    done = sweep("speed_grid.py", *options, "--resume", "again", "--memory-limit", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(tmp_path / "runs" / "again")
    assert [(row["status"], row["attempt"]) for row in rows] == [("oom", 1), ("ok", 2)]
    again = sweep("speed_grid.py", *options, "--resume", "again", cwd=tmp_path)
    assert again.returncode == 0
    assert len(records(tmp_path / "runs" / "again")) == 2


@pytest.mark.slow
def test_the_null_check_names_its_floor(tmp_path: Path) -> None:
    env = {"TINYDIT_CACHE": str(tmp_path / "cache")}
    options = [*TINY, *ONE_CPU, "--no-ray", "--rounds", "2", "--comparisons", "2", "--name", "null"]
    done = sweep("null_check.py", *options, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(tmp_path / "runs" / "null")
    assert {(row["repeat"], row["round"]) for row in rows} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert len({row["cell_id"] for row in rows}) == 2
    assert "of 2 null comparisons name a winner" in done.stdout
    kept = list((tmp_path / "cache" / "floors").glob("*.json"))
    if sum(not is_disturbed(row) for row in rows) >= 2:
        assert "noise floor: processes differ by" in done.stdout
        assert len(kept) == 1
    else:  # other programs ran beside it
        assert "no floor can be told" in done.stdout
        assert not kept


@pytest.mark.slow
@pytest.mark.parametrize("limit", [["--cell-timeout", "2m"], ["--budget", "60s"]])
def test_a_cell_too_slow_to_be_trained_in_its_time_is_timed_all_the_same(limit: list[str], tmp_path: Path) -> None:
    arguments = [*TWO, "--no-ray", "--rounds", "1", "--name", "slow", "--only", "sdpa*", "--steps", "9000000", *limit]
    done = sweep("speed_grid.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = records(tmp_path / "runs" / "slow")
    assert (row["status"], row["velocity_mse"], row["steps_trained"]) == ("ok", None, None)
    assert row["speedup_vs_control"] > 0
    assert "not-trained" in row["flags"].split(",")
    assert row["reason"].startswith("not trained: 9000000 steps would take")
    assert "not-trained" in done.stdout


def test_rounds_that_a_budget_left_out_do_not_hide_the_one_that_ran() -> None:
    from fake_sweep import record_of

    from tinydit_ray.config import from_mapping
    from tinydit_ray.sweep.summary import summary_rows

    cell = from_mapping({"attention": "sdpa"})
    rows = [record_of(cell, sweep_id="s", round_=number) for number in (1, 2, 3)]
    for row in rows[1:]:
        row |= {"status": "skipped", "reason": "--budget 660 s is used up"}
    (shown,) = summary_rows(rows)
    assert (shown["status"], shown["reason"], shown["rounds_ok"], shown["rounds"]) == ("ok", None, 1, 3)
    rows[2] |= {"status": "failed", "reason": "it broke"}
    (shown,) = summary_rows(rows)
    assert (shown["status"], shown["reason"]) == ("failed", "it broke")


def test_a_null_round_under_foreign_load_is_no_part_of_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from tinydit_ray.sweep.null import quiet_rows

    rows = [{"flags": flags} for flags in ("", None, "few-steps", "few-steps,foreign-load")]
    assert quiet_rows(rows, Console()) == rows[:3]
    assert "1 of 4 rounds ran under foreign load" in capsys.readouterr().out
