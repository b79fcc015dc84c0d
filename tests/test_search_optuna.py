"""``--search optuna``: proposals within the grid, told in both objectives, and a front that brute force confirms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sweep_help import ONE_CPU, SMALL, records, sweep

from tinydit_ray.bench.tradeoff import SAME, SAME_MSE
from tinydit_ray.config import from_mapping
from tinydit_ray.record import new_record
from tinydit_ray.sweep.cli import run, speed_grid
from tinydit_ray.sweep.optuna import front_of, objectives

pytest.importorskip("optuna")

SEARCH = [
    *SMALL, *ONE_CPU, "--data", "shapes", "--time", "0.6", "--fd-n", "0", "--steps", "8", "--device", "cpu",
    "--no-report", "--set", "attention=manual,sdpa", "--set", "gelu=exact,tanh", "--set", "lr=3e-4,3e-3,1e-2",
    "--search", "optuna", "--trials", "3",
]  # fmt: skip


@pytest.mark.ray
@pytest.mark.slow
def test_a_small_search_yields_normal_records_and_its_front(tmp_path: Path) -> None:
    done = sweep("speed_grid.py", *SEARCH, "--name", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "found"
    rows = records(folder)
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert len({row["cell_id"] for row in rows}) == 3
    first = rows[0]
    assert (first["config.attention"], first["config.gelu"]) == ("manual", "exact")  # the control's own cell
    assert all(row["speedup_vs_control"] > 0 and row["velocity_mse"] > 0 for row in rows)
    points = {row["cell_name"]: (row["ms_per_step"], row["velocity_mse"]) for row in rows}
    front = {name for name, mine in points.items() if not any(beats(other, mine) for other in points.values())}
    for text in (done.stdout, (folder / "summary.txt").read_text()):
        shown = text[text.index("front: no other cell") :]
        assert {name for name in points if name in shown} == front
    assert "Optuna: ran 3 of 12 possible cells" in done.stdout
    grid = json.loads((folder / "sweep.json").read_text())["grid"]
    assert {row["cell_name"] for row in rows if row["cell_id"] in grid["front"]} == front
    again = sweep("speed_grid.py", *SEARCH, "--resume", "found", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert records(folder) == rows  # the same proposals, all of them known


def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    low_ms, low_mse = a[0] * (1 + SAME) < b[0], a[1] * (1 + SAME_MSE) < b[1]
    same_ms, same_mse = a[0] <= b[0] * (1 + SAME), a[1] <= b[1] * (1 + SAME_MSE)
    return (low_ms and same_mse) or (same_ms and low_mse)


@pytest.mark.ray
def test_the_search_learns_from_both_objectives_and_bears_failures() -> None:
    """25 of 5 × 5 × 5 points, of which a fifth cannot run: more low ones are tried than chance gives, none twice."""
    from tinydit_ray.distributed.optuna import OptunaAsk

    values = list(range(5))
    search = OptunaAsk({"a": values, "b": values, "c": values}, {"a": 4, "b": 4, "c": 4}, ["x", "y"], seed=7)
    tried: list[tuple[int, ...]] = []
    for _ in range(400):
        name, point = search.ask()
        a, b, c = place = tuple(point.values())
        known = place in tried
        search.tell(name, None if known or c == 3 else {"x": 1.0 + a + c, "y": 1.0 + b + c})
        if not known:
            tried.append(place)
        if len(tried) == 25:
            break
    assert tried[0] == (4, 4, 4)
    assert len(tried) == 25
    low = sum(sum(place) <= 3 for place in tried)
    assert low >= 8  # 20 of the 125 points are that low: chance gives 4 of 25


def row_of(name: str, ms: float | None, mse: float | None, status: str = "ok", round_: int = 1) -> dict[str, Any]:
    speed = {"speedup_vs_control": 1.0, "speedup_ci_low": 0.99, "speedup_ci_high": 1.01} if ms else {}
    return new_record(
        cell_id=name, cell_name=name, repeat=0, round=round_, attempt=1, status=status, ms_per_step=ms, timed_steps=20,
        velocity_mse=mse, **from_mapping({}).columns(), **speed,
    )  # fmt: skip


def test_the_front_is_of_whole_cells_alone() -> None:
    rows = [
        row_of("fast", 10.0, 0.5), row_of("good", 20.0, 0.3), row_of("beaten", 21.0, 0.5), row_of("worse", 10.1, 0.6),
        row_of("half", 1.0, 0.1), row_of("half", None, None, "failed", 2), row_of("no score", 1.0, None),
    ]  # fmt: skip
    assert front_of(rows) == ["fast", "good"]
    other_kernel = row_of("other kernel", 30.0, 0.3 * (1 - 1e-5))  # slower, and no better than its summation order
    assert front_of([*rows, other_kernel]) == ["fast", "good"]
    assert front_of([*rows, row_of("better", 30.0, 0.3 * (1 - 1e-3))]) == ["fast", "good", "better"]
    assert objectives(rows)["good"] == {"ms_per_step": 20.0, "velocity_mse": 0.3}


MISTAKES = {
    "trials alone": (["--trials", "3"], "--trials: only with --search optuna"),
    "no trials": (["--search", "optuna", "--trials", "0"], "--trials 0: at least 1"),
    "no ray": (["--search", "optuna", "--no-ray"], "the search is Ray Tune's"),
    "no quality": (["--search", "optuna", "--steps", "0", "--dry-run"], "give --steps"),
    "one cell": (["--search", "optuna", "--set", "attention=sdpa", "--dry-run"], "nothing to choose"),
    "samplers": (["--search", "optuna", "--grid", "sampling", "--dry-run"], "this grid times samplers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_search_that_cannot_be_is_one_line(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = MISTAKES[mistake]
    assert run(speed_grid, [*arguments, "--data", "shapes", "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err


def test_the_plan_says_how_many_of_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(speed_grid, [*SEARCH, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "12 possible cells; --search optuna runs at most 3" in printed
    assert "lr: 0.0003, 0.003, 0.01" in printed
