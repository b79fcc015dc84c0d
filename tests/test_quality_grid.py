"""The quality grid: time to quality, the Pareto front, budgets, and early stopping through Ray Tune."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_help import ONE_CPU, records, sweep, sweep_here

from tinydit_ray.bench.tradeoff import pareto_front, time_to_quality
from tinydit_ray.config import from_mapping
from tinydit_ray.record import new_record
from tinydit_ray.sweep.quality import front_of, print_quality, quality_options

SMALL = ["--set", "batch_size=16", "--data", "shapes", "--fd-n", "130", *ONE_CPU]
SIZES = ["--set", "model=32/1/2,48/1/2"]


# --- time to quality --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curve", "seconds"),
    [
        ([(0, 1.5), (10, 0.5), (20, 0.3)], 15.0),  # 0.4 lies half-way between 0.5 and 0.3
        ([(0, 1.4), (10, 0.4)], 10.0),
        ([(0, 0.4), (10, 0.2)], 0.0),
        ([(0, 1.4), (10, 0.41)], None),
        ([(0, 1.0), (10, 0.2), (20, 0.9)], 7.5),  # the first crossing counts
        ([], None),
    ],
    ids=str,
)
def test_the_time_to_a_score_is_linear_between_points(curve: list[tuple[float, float]], seconds: float | None):
    assert time_to_quality(curve, 0.4) == (None if seconds is None else pytest.approx(seconds))


@given(st.lists(st.floats(0.1, 2.0), min_size=2, max_size=8), st.floats(0.1, 2.0))
def test_the_time_lies_between_the_points_around_the_crossing(scores: list[float], target: float):
    found = time_to_quality([(10.0 * i, score) for i, score in enumerate(scores)], target)
    first = next((i for i, score in enumerate(scores) if score <= target), None)
    assert (found is None) == (first is None)
    if found is not None and first is not None:
        assert 10 * max(0, first - 1) <= found <= 10 * first


# --- the front --------------------------------------------------------------------------------------------


def test_the_front_is_what_no_other_beats_in_everything():
    points = {"cheap": (1.0, 9.0), "good": (9.0, 1.0), "middle": (5.0, 5.0), "beaten": (5.0, 6.0), "twin": (5.0, 5.0)}
    assert pareto_front(points, (0, 0)) == ["cheap", "good", "middle", "twin"]
    assert pareto_front({}, (0, 0)) == []


def test_equal_up_to_the_tolerance_is_equal():
    points = {"a": (100.0, 0.30), "b": (101.0, 0.29)}
    assert pareto_front(points, (0.02, 0)) == ["b"]
    assert pareto_front(points, (0.0, 0)) == ["a", "b"]


def test_the_front_agrees_with_a_search_by_hand():
    rng = random.Random(1)
    points = {str(i): tuple(rng.random() for _ in range(3)) for i in range(60)}
    costs = np.array(list(points.values()))
    beaten = [(np.all(costs <= x, axis=1) & np.any(costs < x, axis=1)).any() for x in costs]
    assert pareto_front(points, (0, 0, 0)) == [name for name, lost in zip(points, beaten, strict=True) if not lost]


def row_of(name: str, ms: float, seconds: float, mse: float | None, fd: float | None, **values: Any) -> dict[str, Any]:
    costs = {"ms_per_step": ms, "train_wall_s": seconds, "velocity_mse": mse, "probe_fd": fd}
    identity = {"cell_id": name, "cell_name": name, "status": "ok", "steps_trained": 9, "probe_id": "p"}
    return {**new_record(**identity, **costs, **from_mapping({}).columns()), **values}


def test_cells_that_were_stopped_or_failed_are_not_on_the_front():
    rows = [
        row_of("slow", 10, 60, 0.30, 20), row_of("fast", 5, 60.5, 0.28, 18),
        row_of("stopped", 1, 5, 0.9, None, flags="training-pace,stopped-early"),
        row_of("stopped and scored", 1, 5, 0.1, 1, flags="stopped-early"),
        row_of("failed", 1, 1, 0.1, 1, status="failed"),
    ]  # fmt: skip
    assert front_of(rows) == {"fast"}
    without_fd = [{**row, "probe_fd": None} for row in rows[:2]]
    assert front_of(without_fd) == {"fast"}


def test_scores_of_different_probes_are_not_in_one_front():
    assert front_of([row_of("a", 1, 1, 0.3, 20), row_of("b", 2, 2, 0.2, 10, probe_id="q")]) == set()


def test_the_table_says_what_was_not_reached(capsys: pytest.CaptureFixture[str]):
    from rich.console import Console

    rows = [row_of("a", 10, 60, 0.30, 20, time_to_quality_s=41.26), row_of("b", 5, 60, 0.5, 30)]
    print_quality(Console(width=200), rows, 0.35)
    out = capsys.readouterr().out
    assert "s to 0.35" in out
    assert "41.3" in out
    assert "not reached" in out


# --- options ----------------------------------------------------------------------------------------------


def options_of(*arguments: str) -> Any:
    from tinydit_ray.sweep.cli import quality_parser

    return quality_options(quality_parser().parse_args(arguments), [])


def test_the_budget_is_two_minutes_or_what_was_asked():
    assert (options_of().train_s, options_of().steps) == (120, 0)
    assert (options_of("--steps", "50").train_s, options_of("--steps", "50").steps) == (0, 50)
    both = options_of("--steps", "50", "--train-time", "20m")
    assert (both.train_s, both.steps, both.cell_timeout_s) == (1200, 50, 2700)
    assert options_of("--cell-timeout", "5m").cell_timeout_s == 300


def test_a_profile_is_crossed_with_sizes(tmp_path: Path):
    profile = tmp_path / "best.yaml"
    profile.write_text("dim: 128\ndepth: 4\nheads: 4\nprecision: bf16\nseed: 3\ndevice: cpu\n")
    options = options_of("--profile", str(profile))
    cells, _ = options.grid.resolve({"device": "cpu"}, options.sets)
    assert [(cell.model, cell.precision, cell.seed) for cell in cells] == [
        ("micro", "fp32", 0), ("tiny", "fp32", 0), ("micro", "bf16", 0), ("tiny", "bf16", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--rounds", "3"], "--set seed=0,1,2"), (["--time", "3"], "--train-time"), (["--ci", "0.1"], "in a window"),
        (["--seeds", "3"], "--set seed"), (["--steps", "0"], "at least 1 step"), (["--asha", "--no-ray"], "Ray Tune"),
        (["--control", "precision=bf16"], "no control"), (["--profile", "nowhere.yaml"], "cannot be read"),
        (["--set", "sampler=bf16"], "samples with the eager one"), (["--target", "0"], "not a number above 0"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_has_no_meaning_here_is_refused(arguments: list[str], part: str, tmp_path: Path) -> None:
    done = sweep_here("quality_grid.py", *SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert part in done.stderr.strip().splitlines()[-1]


# --- whole grids ------------------------------------------------------------------------------------------


def place_of(folder: Path, row: dict[str, Any]) -> Path:
    return next(folder.glob(f"cells/*{row['cell_id']}/r1-a1"))


def points_of(folder: Path, row: dict[str, Any]) -> list[dict[str, str]]:
    return list(csv.DictReader((place_of(folder, row) / "quality.csv").read_text().splitlines()))


def check_curve(folder: Path, row: dict[str, Any]) -> list[dict[str, str]]:
    place, points = place_of(folder, row), points_of(folder, row)
    steps, seconds = [int(p["step"]) for p in points], [float(p["seconds"]) for p in points]
    assert steps[0] == 0
    assert steps == sorted(set(steps))
    assert seconds == sorted(seconds)
    assert float(points[-1]["velocity_mse"]) == row["velocity_mse"]
    assert float(points[-1]["velocity_mse"]) < float(points[0]["velocity_mse"])
    assert (place / "strip.png").stat().st_size > 0
    return points


@pytest.mark.slow
def test_a_budget_of_steps_without_ray(tmp_path: Path) -> None:
    done = sweep("quality_grid.py", *SMALL, *SIZES, "--steps", "64", "--ema", "0.9", "--target", "1.2", "--no-ray",
                 "--name", "q", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(tmp_path / "runs" / "q")
    assert [row["status"] for row in rows] == ["ok", "ok"]
    for row in rows:
        points = check_curve(tmp_path / "runs" / "q", row)
        assert len(points) == 11
        assert row["steps_trained"] == 64
        assert row["velocity_mse_ema"] == float(points[-1]["velocity_mse_ema"]) != row["velocity_mse"]
        assert row["probe_fd"] > 0
        assert row["probe_fd_ema"] > 0
        assert row["ms_per_step"] > 0
        assert row["effective.attention_op"] == "manual"
        assert "training-pace" in row["flags"]
        curve = [(float(p["seconds"]), float(p["velocity_mse"])) for p in points]
        assert row["time_to_quality_s"] == time_to_quality(curve, 1.2)
    assert "front: no other setup" in done.stdout
    assert "noise floor" not in done.stdout
    assert json.loads((tmp_path / "runs" / "q" / "sweep.json").read_text())["grid"]["target"] == 1.2


@pytest.mark.ray
@pytest.mark.mlflow
def test_early_stopping_through_ray_and_what_is_left_of_a_trial(tmp_path: Path) -> None:
    """Trials one after another, in a random order: those are ended that the rule ends, and no others."""
    grid = tmp_path / "g.yaml"
    grid.write_text("base: {model: 32/1/2}\naxes:\n  lr: [3e-3, 1e-3, 1e-8, 2e-8]\n")
    done = sweep("quality_grid.py", *SMALL, "--grid", "g.yaml", "--steps", "160", "--asha", "--target", "0.01",
                 "--name", "q", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(tmp_path / "runs" / "q")
    assert [row["status"] for row in rows] == ["ok"] * 4
    stopped = [row for row in rows if "stopped-early" in row["flags"]]
    whole = [row for row in rows if row not in stopped]
    assert {row["cell_id"]: row["steps_trained"] for row in stopped} == ended_by_the_rule(tmp_path / "runs" / "q", rows)
    for row in whole:
        assert (row["steps_trained"], row["reason"]) == (160, None)
        assert row["probe_fd"] > 0
    for row in stopped:
        assert row["steps_trained"] in (20, 40, 80)
        assert row["reason"].startswith(f"stopped early by ASHA after {row['steps_trained']} steps of 160")
        assert row["probe_fd"] is None
        left = {path.name for path in place_of(tmp_path / "runs" / "q", row).iterdir()}
        assert {"quality.csv", "strip.png"} <= left
    assert "stopped early by ASHA" in " ".join(done.stdout.split())
    check_grids_in_mlflow(tmp_path, whole[0])


def ended_by_the_rule(folder: Path, rows: list[dict[str, Any]]) -> dict[str, int]:
    """Cell -> step at which it was above the median of those that had come as far, from the curves alone."""
    rungs: dict[int, list[float]] = {20: [], 40: [], 80: []}
    ended = {}
    for row in rows:  # in the order in which they ran
        scores = {int(point["step"]): float(point["velocity_mse"]) for point in points_of(folder, row)}
        for step, before in rungs.items():
            if step not in scores:
                break
            if before and scores[step] > np.median(before):
                ended[row["cell_id"]] = step
            before.append(scores[step])
    return ended


def check_grids_in_mlflow(folder: Path, row: dict[str, Any]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("tinydit").experiment_id])
    run = next(run for run in found if run.data.tags.get("cell_id") == row["cell_id"])
    assert {"samples.png", "strip.png", "quality.csv"} <= {item.path for item in client.list_artifacts(run.info.run_id)}
    assert run.data.metrics["velocity_mse"] == pytest.approx(row["velocity_mse"], rel=1e-6)


@pytest.mark.slow
def test_a_budget_of_seconds_ends_in_time(tmp_path: Path) -> None:
    done = sweep("quality_grid.py", *SMALL, "--set", "model=32/1/2", "--train-time", "3s", "--no-ray", "--name", "q",
                 "--target", "0.0001", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = records(tmp_path / "runs" / "q")
    check_curve(tmp_path / "runs" / "q", row)
    assert row["train_wall_s"] >= 3
    assert row["time_to_quality_s"] is None
    assert "not reached" in done.stdout
