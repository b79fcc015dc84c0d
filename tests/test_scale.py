"""Many cells: what the driver does for a record costs the same with few of them and with many."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from tinydit_ray.config import from_mapping
from tinydit_ray.sweep.ledger import Ledger
from tinydit_ray.sweep.pace import Pace
from tinydit_ray.sweep.plan import Cell, Round
from tinydit_ray.sweep.screen import Screen


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
            record = dict.fromkeys(("ms_per_step", "sample_ms_per_image", "velocity_mse", "reason", "attempt"))
            record |= {"cell_id": item.cell.cell_id, "round": 1, "status": "ok", "speedup_vs_control": None}
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
