"""The words of the report: what to use, how sure that is, what it costs, however a sweep ended."""

from __future__ import annotations

import pytest
from analysis_help import make_grid_sweep, product

from analysis.advice import advice, break_even
from analysis.cells import cells_of
from analysis.load import load
from tinydit_ray.bench.seeds import WORSE
from tinydit_ray.config import CellConfig

CELLS = product(precision=["fp32", "bf16"], compile=["off", "default"])
NOTHING = dict.fromkeys(("ms_per_step", "speedup_vs_control", "speedup_ci_low", "speedup_ci_high", "velocity_mse"))


def words_of(folder, cells=CELLS, **made):
    make_grid_sweep(folder / "s", cells, **made)
    found = cells_of(load([folder / "s"])[0].rows)
    return found, dict(advice(found)["lines"])


def as_fast_as_the_control(config: CellConfig) -> float:
    return 1.0


def test_all_within_noise_keeps_the_control_and_says_what_may_have_been_missed(tmp_path):
    cells, words = words_of(tmp_path, speed=as_fast_as_the_control)
    assert {cell["verdict"] for cell in cells} == {"within noise"}
    assert words["Keep the control."] == "No setup was found faster than it, beyond noise."
    most = max(cells, key=lambda cell: cell["high"])
    gain = f"{100 * (most['high'] - 1):.0f} %"
    assert words["How sure"] == f"The intervals leave open a gain of at most {gain} ({most['name']}, 3 rounds)."
    assert words["What it costs"].startswith("Nothing is compiled")


def test_a_winner_with_worse_quality_is_named_and_not_advised(tmp_path):
    make_grid_sweep(tmp_path / "s", CELLS)
    cells = cells_of(load([tmp_path / "s"])[0].rows)
    fastest = max(cells, key=lambda cell: cell["speedup"])
    fastest["quality"] = WORSE
    found = advice(cells)
    assert found["best"]["name"] == "fp32 compile=default"
    line = dict(found["lines"])["Faster, but worse in quality"]
    assert line == f"{fastest['name']} ({fastest['speedup']:.2f} times as fast; velocity MSE {fastest['mse']:.4f}," \
                   f" probe-FD {fastest['fd']:.1f})."  # fmt: skip


def test_nothing_ok_says_what_happened_and_why(tmp_path):
    def fails(record):
        slow = record["config.compile"] == "off"
        status, reason = ("timeout", "too\nlong") if slow else ("failed", "CppCompileError")
        return {**NOTHING, "status": status, "reason": reason}

    _, words = words_of(tmp_path, change=fails, rounds=1, cells=[*CELLS, {"attention": "sdpa"}])
    assert words["No advice:"] == "no setup here has a speed-up. Rounds: 3 timeout, 2 failed."
    assert words["Most frequent reason"] == "too long (3 ×)."
    assert dict(advice([])["lines"]) == {"No advice:": "the sweep has no records yet."}


def test_one_cell_alone_is_said_to_be_alone(tmp_path):
    (cell,), words = words_of(tmp_path, cells=[{}], speed=as_fast_as_the_control)
    alone = f"One setup alone was measured, {cell['name']}: {cell['speedup']:.2f} times"
    assert words["Keep the control."].startswith(alone)
    assert words["Keep the control."].endswith("verdict “within noise”.")


def test_a_winner_has_its_gain_its_certainty_and_its_cost(tmp_path):
    cells, words = words_of(tmp_path)
    best = next(cell for cell in cells if cell["name"] == "bf16 compile=default")
    gain = f"It is {best['speedup']:.2f} times as fast as its control (95 % interval "
    assert words["Use bf16 compile=default."].startswith(gain)
    assert words["How sure"] == "3 rounds, verdict “faster”."
    assert "first step 20.0 s, of it compiling 20.0 s; pays after " in words["What it costs"]
    assert "not judged against other seeds of the control (--seeds 3 does)" in words["What it costs"]


@pytest.mark.parametrize(
    ("speedup", "low", "high", "words"),
    [
        (2.0, 1.5, 3.0, "pays after 200 steps (100 to 400)"),  # 20 s of compiling; the control's step is 200 ms
        (1.1, 0.9, 1.2, "pays after about 2,000 steps, if it is faster at all"),
        (0.9, 0.8, 0.95, "never pays: not faster"),
    ],
)
def test_break_even_by_hand(speedup, low, high, words):
    cell = {"compile": 20.0, "ms": 100.0, "speedup": speedup, "low": low, "high": high, "setup": {"compile": "default"}}
    assert break_even(cell) == words
    assert break_even({**cell, "setup": {"compile": "off"}}) == "nothing is compiled"
