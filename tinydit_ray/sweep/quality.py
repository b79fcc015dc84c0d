"""The quality grid: cells trained for a budget and scored on the way, instead of timed against a control."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
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
from tinydit_ray.sweep.table import STATUS_STYLE, Column, number, print_columns, setup_column, status_column

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
    averaged = any(row["velocity_mse_ema"] is not None for row in rows)

    def numbers(name: str, key: str, form: str, rank: int = 0) -> Column:
        return Column(name, [number(row[key], form) for row in rows], rank)

    columns = [
        setup_column(rows),
        numbers("ms/step", "ms_per_step", ".1f"),
        numbers("steps", "steps_trained", "d", 1),
        numbers("training s", "train_wall_s", ".1f", 4),
        numbers("first step s", "first_step_s", ".2f", 5),
        numbers("velocity MSE", "velocity_mse", ".4f"),
        numbers("probe-FD", "probe_fd", ".1f"),
        *([numbers("EMA velocity MSE", "velocity_mse_ema", ".4f", 2)] if averaged else []),
        *([numbers("EMA probe-FD", "probe_fd_ema", ".1f", 3)] if averaged else []),
        Column(f"s to {target:g}", [_reached(row) for row in rows]),
        Column("front", [_front(row["cell_id"] in front) for row in rows], right=False),
        status_column([_status(row) for row in rows]),
    ]
    print_columns(console, "quality over training; probe-FD is not FID", columns)
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


def _status(row: Row) -> Text:
    status = Text(row["status"], STATUS_STYLE.get(row["status"], "red"))
    if row["reason"]:
        status.append(f" {row['reason']}", "dim")
    return status


def _front(on_front: bool) -> Text:
    return Text("yes", "green") if on_front else Text("–", "dim")


def _reached(row: Row) -> Text:
    if row["velocity_mse"] is None:
        return Text("–", "dim")
    if row["time_to_quality_s"] is None:
        return Text("not reached", "yellow")
    return Text(format(row["time_to_quality_s"], ".1f"))
