"""The null sweep: one cell against itself, several times. What it finds is what this machine invents."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tinydit_ray.bench.verdict import Floor, half_width_vs_time, noise_floor
from tinydit_ray.record import is_disturbed, last_attempts
from tinydit_ray.sweep.driver import Sweep
from tinydit_ray.sweep.floor import ratios_of, save_floor
from tinydit_ray.sweep.results import pool
from tinydit_ray.tracking import round_name

WINNERS = ("faster", "slower")


def finish_null(sweep: Sweep, console: Console) -> None:
    """Print and keep the floor, who "won", and what difference this machine can show in what time."""
    rows = [row for row in last_attempts(sweep.records) if row["status"] == "ok"]
    quiet = quiet_rows(rows, console)
    series = ratios_of(_folder(sweep, row) for row in quiet)
    if len(series) < 2:
        console.print("[red]fewer than two null rounds are ok and ran without foreign load: no floor can be told")
        print_winners(console, pool(rows))
        return
    floor = noise_floor(series)
    path = save_floor(sweep.content["node_kind"], floor, sweep.content["name"])
    print_floor(console, floor, rounds=sweep.options.rounds)
    print_winners(console, pool(rows))
    quad_s = statistics.median(2 * (row["ms_per_step"] + row["control_ms_per_step"]) / 1e3 for row in rows)
    print_times(console, half_width_vs_time(series, quad_s, floor, sweep.options.rounds), sweep.options.rounds)
    console.print(f"floor kept in {path}; later sweeps on this kind of machine use it", highlight=False, soft_wrap=True)


def quiet_rows(rows: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    """The floor is what the machine does by itself: rounds under the load of others are flagged in every sweep, and
    one of them can hold more spread than all the rest. Who won is told from all rounds."""
    quiet = [row for row in rows if not is_disturbed(row)]
    if len(quiet) < len(rows):
        console.print(
            f"{len(rows) - len(quiet)} of {len(rows)} rounds ran under foreign load: left out of the floor",
            highlight=False,
        )
    return quiet


def _folder(sweep: Sweep, row: dict[str, Any]) -> Path:
    slug = next(cell.slug for cell in sweep.cells if cell.cell_id == row["cell_id"])
    return sweep.folder.path / "cells" / slug / round_name(row)


def print_floor(console: Console, floor: Floor, rounds: int) -> None:
    console.print(
        f"noise floor: processes differ by {100 * floor.process_sd:.2f} % (sd; {100 * floor.process_sd_raw:.2f} % from"
        f" these {floor.processes} alone), bias {100 * floor.bias:+.2f} %,"
        f" one process's interval ±{100 * floor.half_width:.1f} %",
        highlight=False,
    )
    console.print(
        f"smallest difference that {rounds} such rounds show four times in five:"
        f" {100 * floor.detectable(rounds):.1f} %",
        highlight=False,
    )


def print_winners(console: Console, pooled: dict[str, dict[str, Any]]) -> None:
    verdicts = [found["verdict"] for found in pooled.values()]
    winners = sum(verdict in WINNERS for verdict in verdicts)
    console.print(
        f"{winners} of {len(verdicts)} null comparisons name a winner (there is none to name)",
        style="green" if winners <= max(1, len(verdicts) // 20) else "red", highlight=False,
    )  # fmt: skip


def print_times(console: Console, rows: list[Any], rounds: int) -> None:
    table = Table(
        "timing per cell", "quads a round", "± one process", f"± pooled over {rounds}",
        title="half-width of the 95 % interval", title_justify="left",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"{row.seconds * rounds:.0f} s", str(row.quads), f"{100 * row.within:.1f} %", f"{100 * row.pooled:.1f} %"
        )
    console.print(table)
