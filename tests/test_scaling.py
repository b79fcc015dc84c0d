"""Scaling grids: which cells they have, and efficiency with its interval from the rounds' times."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import pytest
from rich.console import Console

from tinydit_ray.bench.machine import granted_cpus
from tinydit_ray.config import from_mapping
from tinydit_ray.record import new_record
from tinydit_ray.sweep.cli import COMMANDS
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.plan import make_cells
from tinydit_ray.sweep.results import result_rows
from tinydit_ray.sweep.scaling import KINDS, efficiencies, print_scaling, scaling_options


def options_of(*arguments: str) -> SweepOptions:
    p = parser("scaling_grid.py", "")
    p.add_argument("--scaling", choices=(*KINDS, "both"), default="both")
    return scaling_options(p.parse_args(["--device", "cpu", *arguments]), ["scaling-grid", *arguments])


def sizes(options: SweepOptions) -> list[tuple[Any, Any]]:
    cells, _ = make_cells(options, device="cpu", cpus=1, node_kind="k", data_digest="d")
    return [(cell.config.workers, cell.config.batch_size) for cell in cells]


def test_strong_and_weak_cells_share_one_baseline() -> None:
    both = [(1, 32), (2, 32), (2, 64), (4, 32), (4, 128)]
    small = ("--set", "batch_size=32", "--workers", "2,4")
    assert sizes(options_of(*small)) == both
    assert sizes(options_of(*small, "--scaling", "strong")) == [(1, 32), (2, 32), (4, 32)]
    assert sizes(options_of(*small, "--scaling", "weak")) == [(1, 32), (2, 64), (4, 128)]
    two_batches = sizes(options_of("--set", "batch_size=32,64", "--workers", "1,2"))
    assert sorted(two_batches) == [(1, 32), (1, 64), (2, 32), (2, 64), (2, 128)]  # 2 × 32 is both kinds at once


def test_without_a_word_it_takes_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinydit_ray.sweep.scaling.granted_cpus", lambda: 6)
    assert options_of().sets["workers"] == [1, 2, 4]
    assert options_of("--cpus-per-worker", "2").sets["workers"] == [1, 2]
    with pytest.raises(UsageError, match="only 1 worker fits"):
        options_of("--cpus-per-worker", "4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--workers", "1"], "nothing to be compared with"), (["--address", "auto"], "--workers 1,2,4")],
)
def test_what_cannot_be_compared_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options_of(*arguments)


def test_it_is_a_command() -> None:
    assert "scaling-grid" in COMMANDS
    assert granted_cpus() >= 1


# --- efficiency -------------------------------------------------------------------------------------------


def rows_of(times: dict[tuple[int, int], list[float]], iqr: float = 0.4) -> list[dict[str, Any]]:
    """Result rows of cells (workers, batch) with these ms/step by round."""
    records = []
    for (workers, batch), found in times.items():
        cell = from_mapping({"workers": workers, "batch_size": batch})
        for number, ms in enumerate(found, 1):
            records.append(new_record(
                cell_id=f"{workers}x{batch}", cell_name=f"workers={workers} batch_size={batch}", repeat=0, round=number,
                attempt=1, status="ok", node_kind="k", data_digest="d", ms_per_step=ms, ms_per_step_iqr=iqr,
                timed_steps=40, speedup_vs_control=1.0, speedup_ci_low=0.99, speedup_ci_high=1.01, **cell.columns(),
            ))  # fmt: skip
    return result_rows(records)


def test_efficiency_is_of_the_same_images_by_one_worker() -> None:
    rows = rows_of({(1, 32): [40.0] * 3, (2, 32): [25.0] * 3, (2, 64): [50.0] * 3})
    found = efficiencies(rows)
    assert found["2x32", "strong"].value == pytest.approx(40 / (2 * 25))
    assert found["2x64", "weak"].value == pytest.approx(40 / 50)
    kept = {row["cell_id"]: (row["scaling_efficiency"], row["scaling_baseline"]) for row in rows}
    assert kept["2x32"] == (pytest.approx(0.8), "strong")
    assert kept["2x64"] == (pytest.approx(0.8), "weak")
    assert kept["1x32"] == (None, None)


def test_the_interval_covers_and_follows_the_rounds() -> None:
    """Coverage over 300 sweeps of 3 rounds whose machine changes by 4 % from process to process."""
    rng, hits, widths = random.Random(1), 0, []
    for _ in range(300):
        def noisy(ms: float) -> list[float]:
            return [ms * math.exp(rng.gauss(0, 0.04)) for _ in range(3)]

        found = efficiencies(rows_of({(1, 32): noisy(40.0), (2, 32): noisy(25.0), (2, 64): noisy(50.0)}))
        hits += found["2x32", "strong"].ci_low <= 0.8 <= found["2x32", "strong"].ci_high
        widths.append(found["2x32", "strong"].half_width)
    assert 0.90 <= hits / 300 <= 0.995
    calm = efficiencies(rows_of({(1, 32): [40.0, 40.1, 39.9], (2, 32): [25.0, 25.1, 24.9]}))
    assert calm["2x32", "strong"].half_width < 0.7 * sorted(widths)[150]


def test_one_round_has_no_interval_and_says_so() -> None:
    rows = rows_of({(1, 32): [40.0], (2, 32): [25.0]})
    assert math.isnan(efficiencies(rows)["2x32", "strong"].ci_low)
    buffer = io.StringIO()
    print_scaling(Console(file=buffer, width=160), rows)
    text = buffer.getvalue()
    assert "0.800" in text
    assert "one round has no interval" in text
    assert "nan" not in text


def test_a_failed_baseline_is_said_and_not_guessed() -> None:
    rows = rows_of({(2, 32): [25.0]})
    buffer = io.StringIO()
    print_scaling(Console(file=buffer, width=160), rows)
    assert "no scaling can be told" in buffer.getvalue()
