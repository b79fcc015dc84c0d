"""The quality grid: cells trained for a budget and scored on the way, instead of timed against a control."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinydit_ray.bench.tradeoff import SAME, pareto_front
from tinydit_ray.cell import CellTask
from tinydit_ray.config import SIZE_AXES
from tinydit_ray.grid import Grid
from tinydit_ray.record import flags_of
from tinydit_ray.sweep.driver import Sweep
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.folder import SweepFolder
from tinydit_ray.sweep.options import CELL_TIMEOUT_S, SweepOptions, options_from
from tinydit_ray.sweep.plan import Cell, Round
from tinydit_ray.sweep.queue import STOPPED_FLAG, EarlyStop
from tinydit_ray.sweep.screen import NAME_WIDTH, STATUS_STYLE, number

TRAIN_S = 120.0
PACE_FLAG = "training-pace"  # ms_per_step is that of training, batches included, not of a timed window
PROFILE_SIZES = ["micro", "tiny"]
NOT_THE_PROFILES = (*SIZE_AXES, "model", "network", "seed", "device", "cpus_per_worker", "gpus_per_worker")
# (column, how far two values of it may differ and be called equal); scores are exact, times are not
COSTS = (("ms_per_step", SAME), ("train_wall_s", SAME), ("velocity_mse", 0.0), ("probe_fd", 0.0))
Row = dict[str, Any]


def quality_options(args: argparse.Namespace, command: list[str]) -> SweepOptions:
    """Checked options of a quality grid. Raises UsageError."""
    _check(args)
    args.rounds = 1
    options = options_from(args, default_grid="quality", command=command)
    if args.profile:
        _use_profile(options, Path(args.profile))
    budget_s = args.train_s or (0.0 if args.steps else TRAIN_S)
    options.times, options.asha, options.target, options.train_s = "quality", args.asha, args.target, budget_s
    options.steps = args.steps or 0
    # without a limit of seconds nobody knows here how long the steps take
    options.cell_timeout_s = args.cell_timeout_s or max(CELL_TIMEOUT_S, 2 * budget_s + 300 if budget_s else 7200)
    return options


def _check(args: argparse.Namespace) -> None:
    """Options of speed grids that have no meaning here are refused, not ignored. Raises UsageError."""
    for name, value, instead in (
        ("--rounds", args.rounds, "each cell is trained once; --set seed=0,1,2 trains it with several seeds"),
        ("--time", args.time_s, "nothing is timed in a window; --train-time is the time to train"),
        ("--ci", args.ci, "nothing is timed in a window"),
        ("--control", args.control, "no control is timed beside the cells"),
        ("--seeds", args.seeds, "--set seed=0,1,2 trains each cell with several seeds"),
        ("--repeat", args.repeat, "it measures one cell of a speed grid again"),
    ):
        if value:
            raise UsageError(f"{name}: a quality grid has no such option: {instead}")
    if args.steps == 0:
        raise UsageError("--steps 0: a quality grid trains; give at least 1 step, or --train-time")
    if args.asha and not args.ray:
        raise UsageError("--asha and --no-ray: trials are ended early by Ray Tune")
    if args.profile and args.grid:
        raise UsageError("--profile and --grid: the profile's settings and the control's are the grid")


def _use_profile(options: SweepOptions, path: Path) -> None:
    """The profile's settings and the control's, at each size."""
    from tinydit_ray.train.options import read_profile

    try:
        profile = read_profile(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    settings = {key: value for key, value in profile.items() if key not in NOT_THE_PROFILES}
    options.grid, options.grid_name = Grid(cells=[{}, settings]), "quality"
    if not {"model", *SIZE_AXES} & options.sets.keys():
        options.sets["model"] = PROFILE_SIZES


class QualitySweep(Sweep):
    """Its tasks train for the budget; its table is one of qualities."""

    def __init__(self, options: SweepOptions, folder: SweepFolder, content: dict[str, Any], cells: list[Cell]) -> None:
        for cell in cells:
            if cell.config.sampler != "eager":
                raise UsageError("sampler: a quality grid samples with the eager one; speed_grid.py compares samplers")
        budget = {"train_s": options.train_s, "target": options.target, "asha": options.asha}
        content["grid"] = content["grid"] | budget
        super().__init__(options, folder, content, cells)
        self.target = options.target
        if options.asha:
            seconds = bool(options.train_s)
            self.early_stop = EarlyStop(options.train_s or float(options.steps), "s" if seconds else "steps")

    def task_of(self, item: Round, window_s: float) -> CellTask:
        options = self.options
        return dataclasses.replace(
            super().task_of(item, window_s), flags=PACE_FLAG, explain=False, train_s=options.train_s,
            target=options.target, reports=options.asha,
        )  # fmt: skip

    def print_table(self, console: Console, rows: Sequence[Row]) -> None:  # type: ignore[override]
        print_quality(console, rows, self.target)


# --- the table --------------------------------------------------------------------------------------------


def print_quality(console: Console, rows: Sequence[Row], target: float) -> None:
    """Cells in the order of the grid, and the front: those that no other one beats in all four costs."""
    front = front_of(rows)
    table = Table(title="quality over training; probe-FD is not FID", title_justify="left")
    longest = max((len(row["cell_name"]) for row in rows), default=0)
    table.add_column("setup", no_wrap=longest <= NAME_WIDTH, max_width=NAME_WIDTH)
    averaged = any(row["velocity_mse_ema"] is not None for row in rows)
    names = ["ms/step", "steps", "training s", "first step s", "velocity MSE", "probe-FD"]
    names += ["EMA velocity MSE", "EMA probe-FD"] if averaged else []
    for name in (*names, f"s to {target:g}"):
        table.add_column(name, justify="right")
    table.add_column("front")
    table.add_column("status")
    for row in rows:
        table.add_row(*_cells_of(row, averaged, row["cell_id"] in front))
    console.print(table)
    console.print(
        "front: no other setup is at most as high in ms/step, training seconds, velocity MSE and probe-FD, and lower"
        f" in one (times within {100 * SAME:.0f} % count as equal; setups stopped early are not on it)",
        highlight=False,
    )


def front_of(rows: Sequence[Row]) -> set[str]:
    """Ids of the cells on the Pareto front; cells that lack one of the costs take no part."""
    used = [name for name, _ in COSTS if any(row[name] is not None for row in rows)]
    points = {
        row["cell_id"]: [row[name] for name in used]
        for row in rows
        if row["status"] == "ok" and not is_stopped(row) and all(row[name] is not None for name in used)
    }
    ids = {row["probe_id"] for row in rows if row["cell_id"] in points}
    if len(ids) > 1:  # scores of different probes are never put in one ranking
        return set()
    return set(pareto_front(points, [tolerance for name, tolerance in COSTS if name in used]))


def is_stopped(row: Row) -> bool:
    return STOPPED_FLAG in flags_of(row)


def _cells_of(row: Row, averaged: bool, on_front: bool) -> list[Text]:
    status = Text(row["status"], STATUS_STYLE.get(row["status"], "red"))
    if row["reason"]:
        status.append(f" {row['reason']}", "dim")
    return [
        Text(row["cell_name"]),
        number(row["ms_per_step"], ".1f"),
        number(row["steps_trained"], "d"),
        number(row["train_wall_s"], ".1f"),
        number(row["first_step_s"], ".2f"),
        number(row["velocity_mse"], ".4f"),
        number(row["probe_fd"], ".1f"),
        *((number(row["velocity_mse_ema"], ".4f"), number(row["probe_fd_ema"], ".1f")) if averaged else ()),
        _reached(row),
        Text("yes" if on_front else "–", "green" if on_front else "dim"),
        status,
    ]


def _reached(row: Row) -> Text:
    if row["velocity_mse"] is None:
        return Text("–", "dim")
    if row["time_to_quality_s"] is None:
        return Text("not reached", "yellow")
    return Text(format(row["time_to_quality_s"], ".1f"))
