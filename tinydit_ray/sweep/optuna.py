"""``--search optuna``: cells are proposed one by one from what the earlier ones showed, in step time and in quality.

The driver, its executors, records and tables are those of every sweep; only the queue is another.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.text import Text

from tinydit_ray.bench.tradeoff import SAME, SAME_MSE, pareto_front
from tinydit_ray.cell import CellTask
from tinydit_ray.config import CellConfig
from tinydit_ray.grid import varying_axes
from tinydit_ray.record import last_attempts
from tinydit_ray.sweep.driver import Sweep
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.folder import SweepFolder
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.plan import Cell, Round, estimate_s
from tinydit_ray.sweep.prepare import prepare
from tinydit_ray.sweep.queue import Ready
from tinydit_ray.sweep.results import pool
from tinydit_ray.sweep.screen import minutes
from tinydit_ray.sweep.seeds import is_seed_row, seed_rounds
from tinydit_ray.sweep.table import Column, number, print_columns, print_table, setup_column

TRIALS = 20
MOST_REPEATS = 50  # proposals in a row of what is known already, after which the search has nothing new
OBJECTIVES = ("ms_per_step", "velocity_mse")
Row = dict[str, Any]


def add_search(p: argparse.ArgumentParser) -> None:
    own = p.add_argument_group("search")
    own.add_argument(
        "--search", choices=("optuna",), help="do not run the whole grid: let Optuna choose, for step time and quality"
    )
    own.add_argument("--trials", type=int, metavar="N", help=f"with --search: cells to run (default: {TRIALS})")


def prepare_search(args: argparse.Namespace) -> None:
    """Check the options of a search together, and set its defaults. Raises UsageError."""
    if not args.search:
        if args.trials is not None:
            raise UsageError("--trials: only with --search optuna")
        return
    if args.trials is not None and args.trials < 1:
        raise UsageError(f"--trials {args.trials}: at least 1")
    if not args.ray:
        raise UsageError("--search optuna and --no-ray: the search is Ray Tune's")
    if args.repeat:
        raise UsageError("--search optuna and --repeat: one cell leaves nothing to search")
    if find_spec("optuna") is None:
        raise UsageError("Optuna is not installed: pip install 'tinydit-ray[search]'")
    args.rounds = args.rounds or 1


def check_search(options: SweepOptions, cells: Sequence[Cell]) -> None:
    """Raises UsageError where one of the two objectives would be missing, or nothing is left to choose."""
    if options.steps == 0:
        raise UsageError("--search optuna: the quality of a cell is one objective; give --steps")
    if any(cell.times != "step" for cell in cells):
        raise UsageError("--search optuna: the step time is one objective; this grid times samplers")
    if len({cell.kind for cell in cells}) > 1:
        raise UsageError(f"--search optuna: on one kind of node, not --placement {options.placement}; --on KIND")
    if len(cells) < 2:
        raise UsageError("--search optuna: the grid has one cell; there is nothing to choose")


class SearchedSweep(Sweep):
    """Draws its cells from Optuna's proposals within the grid, the first being the cell nearest to the control."""

    def __init__(self, options: SweepOptions, folder: SweepFolder, content: dict[str, Any], cells: list[Cell]) -> None:
        from tinydit_ray.distributed.optuna import OptunaAsk

        check_search(options, cells)
        content["grid"] |= {"cells": [], "possible_cells": len(cells), "search": "optuna", "trials": options.trials}
        super().__init__(options, folder, content, [])
        self.space = cells
        self.rounds = deque(item for item in seed_rounds(cells, content) if not self.ledger.is_done(item))
        self.axes = axes_of(cells)
        self.by_point = {point_of(cell.config, self.axes): cell for cell in cells}
        first = nearest_to_control(cells, list(self.axes))
        seed = int(content["sweep_id"][:8], 16)  # the same proposals when the sweep is resumed
        self.search = OptunaAsk(self.axes, dict(zip(self.axes, first, strict=True)), OBJECTIVES, seed)
        self.proposed: dict[str, str] = {}  # cell_id -> the proposal that waits for its numbers
        self.again = self.outside = 0
        self.searching = True

    def next(self, ready: Ready | None = None) -> CellTask | None:
        while (task := super().next(ready)) is None and not self.rounds and self._is_free(ready) and self._propose():
            pass
        return task

    def _is_free(self, ready: Ready | None) -> bool:
        """Whether a cell could start now: what is proposed earlier knows less."""
        return ready is None or ready(self.space[0].config, self.space[0].kind)

    def _propose(self) -> bool:
        """Put the next new cell's rounds into the queue; False where the search is at its end."""
        enough = min(self.options.trials, len(self.space))
        if len(self.cells) >= enough or self.pace.budget_left_s() < 0:
            self.searching = False
            return False
        for _ in range(MOST_REPEATS):
            self._tell()
            name, point = self.search.ask()
            cell = self.by_point.get(tuple(point[axis] for axis in self.axes))
            if cell is None or cell in self.cells:  # a grid may have holes; a cell that is known teaches nothing
                self.outside, self.again = self.outside + (cell is None), self.again + (cell is not None)
                self.search.tell(name, None)
                continue
            self.proposed[cell.cell_id] = name
            self.cells.append(cell)
            self._enter(cell)
            return True
        self.searching = False
        return False

    def _enter(self, cell: Cell) -> None:
        items = [Round(cell, number) for number in range(1, self.options.rounds + 1)]
        items = [item for item in items if not self.ledger.is_done(item)]
        self.rounds.extend(items)
        if self.screen:
            self.screen.more(items)

    def _tell(self) -> None:
        """Tell the search of cells whose rounds have all ended."""
        open_cells = {item.cell.cell_id for item in (*self.rounds, *self.running.values())}
        ended = [cell_id for cell_id in self.proposed if cell_id not in open_cells]
        found = objectives(self.rows()) if ended else {}
        for cell_id in ended:
            self.search.tell(self.proposed.pop(cell_id), found.get(cell_id))

    def print_table(self, console: Console, rows: Sequence[Row]) -> None:  # type: ignore[override]
        print_table(console, rows)
        print_front(console, rows)


def axes_of(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    """Axes that vary in the grid, each with its values; sizes as ``model``."""
    columns = [cell.config.columns() for cell in cells]
    names = varying_axes([cell.config for cell in cells])
    return {name: list(dict.fromkeys(row[f"config.{name}"] for row in columns)) for name in names}


def point_of(config: CellConfig, axes: Any) -> tuple[Any, ...]:
    columns = config.columns()
    return tuple(columns[f"config.{name}"] for name in axes)


def nearest_to_control(cells: Sequence[Cell], axes: Sequence[str]) -> tuple[Any, ...]:
    def apart(cell: Cell) -> int:
        pairs = zip(point_of(cell.config, axes), point_of(cell.control, axes), strict=True)
        return sum(mine != others for mine, others in pairs)

    return point_of(min(cells, key=apart).config, axes)


def objectives(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """cell_id -> pooled step time and velocity MSE; cells that lack one, or have a round that is not ok, are left
    out."""
    last = last_attempts(rows)
    bad = {row["cell_id"] for row in last if row["status"] != "ok"}
    pooled = pool(last)
    found: dict[str, dict[str, float]] = {}
    for row in last:
        key, ms = row["cell_id"], pooled.get(row["cell_id"], {}).get("ms_per_step_pooled")
        if key not in bad and ms and row["velocity_mse"] is not None and not is_seed_row(row):
            found[key] = {"ms_per_step": ms, "velocity_mse": row["velocity_mse"]}
    return found


def front_of(rows: Sequence[Row]) -> list[str]:
    """Ids of the cells that no other one beats in both objectives, the fastest first. Times within ``SAME`` and scores
    within ``SAME_MSE`` are equal, as in the report."""
    found = objectives(rows)
    points = {key: [values[name] for name in OBJECTIVES] for key, values in found.items()}
    return sorted(pareto_front(points, [SAME, SAME_MSE]), key=lambda key: points[key][0])


def print_front(console: Console, rows: Sequence[Row]) -> None:
    found, by_id = objectives(rows), {row["cell_id"]: row for row in rows}
    keys = front_of(rows)
    if not keys:
        console.print("no cell has both a step time and a velocity MSE, so there is no front")
        return
    front = [by_id[key] for key in keys]
    columns = [
        setup_column(front),
        Column("ms/step", [number(found[key]["ms_per_step"], ".1f") for key in keys]),
        Column("velocity MSE", [number(found[key]["velocity_mse"], ".4f") for key in keys]),
        Column("speed-up", [number(row["speedup_pooled"], ".3f") for row in front]),
        Column("95 % interval", [Text(_interval(row)) for row in front], rank=1),
    ]
    print_columns(console, "front: no other cell that was run is both faster and better", columns)


def _interval(row: Row) -> str:
    low, high = row["speedup_pooled_ci_low"], row["speedup_pooled_ci_high"]
    return "–" if low is None else f"{low:.3f} – {high:.3f}"


def finish_search(sweep: Sweep, console: Console) -> None:
    """How far the search came; the cells and the front are kept in ``sweep.json``."""
    assert isinstance(sweep, SearchedSweep)
    console.print(
        f"Optuna: ran {len(sweep.cells)} of {len(sweep.space):,} possible cells; {sweep.again} proposals were of cells"
        f" already run, {sweep.outside} of none in the grid; times within {100 * SAME:.0f} % and scores"
        f" within {100 * SAME_MSE:.2f} % count as equal",
        highlight=False,
    )
    cells = [{"name": cell.name, "cell_id": cell.cell_id, **cell.config.asdict()} for cell in sweep.cells]
    sweep.content["grid"] |= {"cells": cells, "front": front_of(sweep.rows())}
    sweep.folder.write_sweep(sweep.content)


def plan_search(options: SweepOptions, console: Console) -> None:
    """--dry-run: the axes, how many cells there could be, and the estimated time."""
    _, cells, _ = prepare(options, console)
    check_search(options, cells)
    count = min(options.trials, len(cells))
    rounds = [Round(cell, number) for cell in cells for number in range(1, options.rounds + 1)]
    seconds = estimate_s(rounds, options) * count / len(cells)
    console.print(f"{len(cells):,} possible cells; --search optuna runs at most {count}", highlight=False)
    for name, values in axes_of(cells).items():
        console.print(f"  {name}: {', '.join(map(str, values))}", highlight=False)
    console.print(f"about {minutes(seconds)} in all, estimated for two CPU cores; nothing was run", highlight=False)
