"""Data-parallel cells: two workers train as one does, are timed as one step, and fail as one trial."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from sweep_help import records, results, sweep

from tinydit_ray.bench.timing import GroupStopwatch, HostStopwatch, time_pairs

TINY = ["--set", "model=32/1/2", "--set", "batch_size=16", "--data", "shapes", "--time", "0.6", "--rounds", "1"]
GROUP = [*TINY, "--workers", "1,2", "--cpus-per-worker", "1", "--steps", "20", "--fd-n", "0"]


def check_scaling_rows(folder: Path) -> None:
    """One worker and two: the same data, the same curve, metrics of the whole group."""
    rows = {row["config.workers"]: row for row in records(folder)}
    assert [rows[n]["status"] for n in (1, 2)] == ["ok", "ok"], [rows[n]["reason"] for n in (1, 2)]
    one, two = rows[1], rows[2]
    assert (one["effective.workers"], two["effective.workers"]) == (1, 2)
    assert (one["effective.backend"], two["effective.backend"]) == ("none", "gloo")
    assert one["batch_hash"] == two["batch_hash"]  # the shares of both workers, put together, are the whole batch
    assert two["effective.threads"] == 1
    assert two["velocity_mse"] == pytest.approx(one["velocity_mse"], rel=1e-3)
    curves = [pd.read_csv(next(folder.glob(f"cells/workers={n}*/r1-a1/loss.csv"))) for n in (1, 2)]
    assert curves[0]["step"].tolist() == curves[1]["step"].tolist() == [10, 20]
    assert curves[1]["loss"].tolist() == pytest.approx(curves[0]["loss"].tolist(), rel=1e-4)
    steps = [json.loads(path.read_text()) for path in sorted(folder.glob("cells/workers=2*/r1-a1/**/steps.json"))]
    assert len(steps) == 2
    assert steps[0]["cell_ms"] == steps[1]["cell_ms"]  # both know each step as the slower of them took it
    table = results(folder).set_index("config.workers")
    efficiency = table["ms_per_step_pooled"][1] / (2 * table["ms_per_step_pooled"][2])
    assert table["scaling_efficiency"][2] == pytest.approx(efficiency)
    assert table["scaling_baseline"][2] == "strong"
    assert pd.isna(table["scaling_efficiency"][1])


@pytest.mark.slow
def test_two_workers_without_ray_train_as_one(tmp_path: Path) -> None:
    done = sweep("scaling_grid.py", *GROUP, "--scaling", "strong", "--no-ray", "--name", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "two"
    check_scaling_rows(folder)
    (efficiency,) = results(folder)["scaling_efficiency"].dropna()
    for text in (done.stdout, (folder / "summary.txt").read_text()):
        row = next(line for line in text.splitlines() if "workers=2" in line and "strong" in line)
        assert f"{efficiency:.3f}" in row


@pytest.mark.ray
@pytest.mark.slow
def test_two_workers_in_a_train_worker_group_train_as_one(tmp_path: Path) -> None:
    done = sweep("speed_grid.py", *GROUP, "--name", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_scaling_rows(tmp_path / "runs" / "two")


def test_a_step_takes_what_it_took_the_slowest_worker() -> None:
    """Two workers with clocks of their own: one always takes twice as long."""
    order: list[str] = []
    ticks = iter(range(1000))
    watch = GroupStopwatch(
        HostStopwatch(lambda: next(ticks)), lambda: order.append("align"), lambda ms: [2 * t for t in ms]
    )
    choices = iter([True, True, False, False])
    window = time_pairs(
        lambda b: order.append("cell"), lambda b: order.append("control"), [0], seconds=9.0, stopwatch=watch,
        clock=lambda: 0.0, agree=lambda mine: next(choices),
    )  # fmt: skip
    assert window.quads == 4 + 2  # four at least, then as long as rank 0 says
    assert window.cell_ms == window.control_ms == [2000.0] * 12
    assert order[:8] == ["align", "cell", "align", "control", "align", "control", "align", "cell"]
