"""Many cells: what one costs does not grow with their number. 1,000 and 5,000 by hand: ``tests/scale.py``."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from analysis_help import make_grid_sweep
from sweep_help import ROOT

from analysis.load import frame_of, load
from tinydit_ray.config import from_mapping
from tinydit_ray.record import new_record
from tinydit_ray.sweep.ledger import Ledger
from tinydit_ray.sweep.pace import Pace
from tinydit_ray.sweep.plan import Cell, Round
from tinydit_ray.sweep.screen import Screen


def scale(what: str, count: int, folder: Path) -> dict[str, Any]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "scale.py"), what, str(count), str(folder)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.ray
@pytest.mark.mlflow
@pytest.mark.slow
def test_a_hundred_cells_through_tune_cost_the_driver_the_same_each(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    found = scale("cells", 100, tmp_path)
    assert (found["status"], found["rows"]) == (0, 100)
    assert found["last_part_cpu_s_per_cell"] < 3 * found["first_part_cpu_s_per_cell"], found
    assert found["memory_mb"] < found["memory_before_mb"] + 800, found


def rounds(count: int) -> list[Round]:
    config = from_mapping({})
    return [Round(Cell(config=config, control=config, cell_id=f"{i:012}", name=f"seed={i}"), 1) for i in range(count)]


def seconds_of_the_screen(items: list[Round]) -> float:
    """What the bar, its words, the time left and the ledger take for a whole sweep."""
    from rich.console import Console

    ledger, pace = Ledger([]), Pace(lambda item: 1.0)
    screen = Screen(Console(file=io.StringIO(), width=200), items, pace)
    start = time.process_time()
    with screen:
        for item in items:
            assert ledger.skip_reason(item, keep_larger=False) == ("", "")
            screen.started(item, Path("/nowhere"))
            record = new_record(cell_id=item.cell.cell_id, round=1, status="ok")
            ledger.add(record)
            screen.finished(item, record)
            screen.standing(Path("/nowhere"))
    assert screen.time_left_s() == pytest.approx(0.0, abs=1e-6)
    assert screen.standing(Path("/")).done == len(items)
    return time.process_time() - start


def test_what_a_record_costs_does_not_grow_with_the_sweep() -> None:
    # the least of three: a collection of garbage falls into some of them
    few, many = (min(seconds_of_the_screen(rounds(count)) for _ in range(3)) for count in (300, 1500))
    assert many < 5 * 2.5 * few, (few, many)  # five times the cells


def test_the_time_left_is_that_of_the_rounds_that_wait_and_the_rest_of_those_in_work() -> None:
    from rich.console import Console

    items = rounds(5)
    screen = Screen(Console(file=io.StringIO()), items[:4], Pace(lambda item: 10.0))
    with screen:
        assert screen.time_left_s() == pytest.approx(40.0)
        screen.more(items[4:])
        screen.started(items[0], Path("/nowhere"))
        assert screen.time_left_s() == pytest.approx(50.0, abs=0.5)
        screen.pace.finished(items[0], 20.0)  # twice as long as estimated
        record = {"ms_per_step": None, "sample_ms_per_image": None, "velocity_mse": None, "reason": None}
        screen.finished(items[0], record | {"status": "ok"})
        screen.finished(items[1], record | {"status": "skipped"})  # needed no trial
        assert screen.time_left_s() == pytest.approx(60.0, abs=0.5)


def seconds_of_reading(folder: Path, count: int) -> float:
    """From the records of a sweep to one frame with the numbers pooled over rounds."""
    cells = [{"seed": seed, "attention": ("manual", "sdpa")[seed % 2]} for seed in range(count // 2)]
    make_grid_sweep(folder / str(count), cells, rounds=2)
    (folder / str(count) / "results.parquet").unlink()
    start = time.process_time()
    assert len(frame_of(load([folder / str(count)]))) == count
    return time.process_time() - start


@pytest.mark.slow
def test_reading_a_sweep_takes_as_long_per_record_with_many_as_with_few(tmp_path: Path) -> None:
    few, many = (seconds_of_reading(tmp_path, count) for count in (100, 500))
    assert many < 5 * 2.5 * few, (few, many)
