"""Time left and a budget: what the bar promises, and what the next round gets."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path

import pytest
from rich.console import Console

from tinydit_ray.sweep.options import options_from
from tinydit_ray.sweep.pace import MIN_WINDOW_S, Pace
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.plan import Round, make_cells
from tinydit_ray.sweep.screen import Screen


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def rounds(count: int) -> list[Round]:
    args = parser("x", "").parse_args(["--set", "attention=manual,sdpa"])
    options = options_from(args, default_grid="published", command=[])
    cells, _ = make_cells(options, device="cpu", cpus=1, node_kind="k", data_digest="d")
    return [Round(cell, number) for number in range(1, count + 1) for cell in cells]


def test_the_bar_promises_no_more_than_the_budget_leaves(clock: Clock) -> None:
    items = rounds(3)
    pace = Pace(lambda _: 100.0, budget_s=300.0)
    screen = Screen(Console(file=io.StringIO()), items, pace)
    assert screen.time_left_s() == pytest.approx(300.0)  # six rounds would take 600
    clock.now += 250.0
    assert Screen(Console(file=io.StringIO()), items[2:], pace).time_left_s() == pytest.approx(50.0)
    assert screen.time_left_s() == pytest.approx(200.0)  # first rounds are run, late or not
    assert Screen(Console(file=io.StringIO()), items, Pace(lambda _: 100.0)).time_left_s() == pytest.approx(600.0)


def test_a_round_in_work_counts_with_what_is_left_of_it(clock: Clock) -> None:
    items = rounds(2)
    screen = Screen(Console(file=io.StringIO()), items, Pace(lambda _: 100.0))
    screen.started(items[0], Path("x"))
    clock.now += 30.0
    assert screen.time_left_s() == pytest.approx(370.0)


def test_a_budget_shortens_windows_before_it_skips_rounds(clock: Clock) -> None:
    items = rounds(2)
    assert Pace(lambda _: 20.0).window_s(8.0, items, math.inf) == 8.0
    pace = Pace(lambda _: 20.0, budget_s=72.0)
    assert pace.window_s(8.0, items, pace.budget_left_s()) == pytest.approx(6.0)  # 8 s too much for 4 rounds
    clock.now += 60.0
    assert pace.window_s(8.0, items[:1], pace.budget_left_s()) is None  # 12 s left for a round of 16
    assert Pace(lambda _: 20.0).window_s(8.0, items, 40.0) == MIN_WINDOW_S
