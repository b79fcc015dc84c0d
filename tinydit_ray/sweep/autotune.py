"""The fastest setup without the full product: a sweep that decides from its results what to time next.

The driver, its executors, records and tables are those of every sweep; only the queue is another.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import deque
from typing import Any

from rich.console import Console

from tinydit_ray.atomic import replace_text
from tinydit_ray.cell import CellTask
from tinydit_ray.config import CellConfig
from tinydit_ray.grid import varying_axes
from tinydit_ray.record import last_attempts
from tinydit_ray.sweep.driver import Sweep
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.folder import SweepFolder
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.plan import Cell, Round
from tinydit_ray.sweep.prepare import prepare
from tinydit_ray.sweep.queue import Ready
from tinydit_ray.sweep.results import pool
from tinydit_ray.sweep.search import Point, Search
from tinydit_ray.sweep.seeds import seed_rounds

TRACE_FILE = "autotune.json"
FIXED = ("model", "batch_size", "workers", "device", "sampler", "seed", "lr", "max_grad_norm")


class TunedSweep(Sweep):
    """Draws its rounds from a ``Search`` over the cells of the grid, which are all that could be timed."""

    def __init__(self, options: SweepOptions, folder: SweepFolder, content: dict[str, Any], cells: list[Cell]) -> None:
        check_space(options, cells)
        content["grid"] |= {"cells": [], "possible_cells": len(cells)}
        super().__init__(options, folder, content, [])
        self.space = cells
        self.rounds = deque(item for item in seed_rounds(cells, content) if not self.ledger.is_done(item))
        self.search = search_of(cells, options.rounds)
        self.by_point = {point_of(cell.config, self.search.axes): cell for cell in cells}
        self.requests = self.search.run()
        self.asked: list[Point] = []
        self.searching, self.out_of_time = True, False

    def next(self, ready: Ready | None = None) -> CellTask | None:
        while (task := super().next(ready)) is None and not (self.rounds or self.running) and self._ask():
            pass
        return task

    def _ask(self) -> bool:
        """Put the search's next request into the queue; False at its end."""
        self.out_of_time = self.pace.budget_left_s() < 0
        if self.out_of_time:
            self.searching = False
            return False
        try:
            request = self.requests.send(self._answers()) if self.asked else next(self.requests)
        except StopIteration:
            self.searching = False
            return False
        self.asked = request.points
        cells = [self.by_point[point] for point in request.points]
        self.cells += [cell for cell in cells if cell not in self.cells]
        if request.round == self.options.rounds:  # the control's own cell once more, scored for comparison
            cells += [self.cells[0]] if self.cells[0] not in cells else []
        rounds = [item for item in (Round(cell, request.round) for cell in cells) if not self.ledger.is_done(item)]
        random.Random(f"{self.content['sweep_id']}/{request.what}").shuffle(rounds)
        self.rounds.extend(rounds)
        if self.screen:
            self.screen.more(rounds)
        return True

    def _answers(self) -> dict[Point, float | None]:
        """Pooled speed-ups of what was asked last; None for a cell with any round that is not ok."""
        rows = last_attempts(self.records)
        bad = {row["cell_id"] for row in rows if row["status"] != "ok"}
        found = {cell_id: row["speedup_pooled"] for cell_id, row in pool(rows, self.floor).items()}
        ids = {point: self.by_point[point].cell_id for point in self.asked}
        return {point: None if cell_id in bad else found.get(cell_id) for point, cell_id in ids.items()}

    def _window_s(self) -> float:
        """Twice as long in each round; all rounds of a finalist together take ``--time``."""
        return self.options.time_s * 2 ** (self.rounds[0].number - 1) / (2**self.options.rounds - 1)

    def task_of(self, item: Round, window_s: float) -> CellTask:
        """Only the last round trains and scores, and the control's other seeds."""
        task = super().task_of(item, window_s)
        scores = item.number == self.options.rounds or item.cell.times == "nothing"
        steps = self.options.steps if scores else 0
        return dataclasses.replace(task, train_steps=steps, explain=False)

    def best_rows(self) -> list[dict[str, Any]]:
        """Rows of the finalists: a single short round is enough to go on, not to win."""
        rows = self.rows()
        finalists = {row["cell_id"] for row in rows if row["round"] == self.options.rounds}
        return [row for row in rows if row["cell_id"] in finalists]


def check_space(options: SweepOptions, cells: list[Cell]) -> None:
    """Raises UsageError where the cells are not comparable, or the search could not decide one by one."""
    varying = varying_axes([cell.config for cell in cells])
    for name in varying:
        if name in FIXED:
            raise UsageError(f"autotune: {name} varies in the grid; give one value, such as --set {name}=…")
    if not varying:
        raise UsageError("autotune: the grid has one cell; there is nothing to choose")
    if options.rounds < 2:
        raise UsageError(f"--rounds {options.rounds}: autotune needs at least 2, for a second look in another process")
    if options.concurrent not in (None, 1):
        raise UsageError("autotune decides from each result what to time next: one trial at a time")
    if len({cell.kind for cell in cells}) > 1:
        raise UsageError(f"autotune searches on one kind of node: not --placement {options.placement}; --on KIND")
    options.concurrent = 1  # also where there are many nodes


def search_of(cells: list[Cell], rounds: int) -> Search:
    """A search over the axes that vary, from the cell that is nearest to the control."""
    rows = [cell.config.asdict() for cell in cells]
    names = varying_axes([cell.config for cell in cells])
    axes: dict[str, list[Any]] = {name: list(dict.fromkeys(row[name] for row in rows)) for name in names}
    points = {point_of(cell.config, axes): cell for cell in cells}
    control = point_of(cells[0].control, axes)
    start = min(points, key=lambda point: sum(a != b for a, b in zip(point, control, strict=True)))
    return Search(axes, set(points), start, rounds)


def point_of(config: CellConfig, axes: Any) -> Point:
    values = config.asdict()
    return tuple(values[name] for name in axes)


def plan_autotune(options: SweepOptions, console: Console) -> None:
    """--dry-run: the axes and how many cells there could be."""
    _, cells, _ = prepare(options, console)
    check_space(options, cells)
    search = search_of(cells, options.rounds)
    console.print(f"{len(cells):,} possible cells; the search starts from {search.named(search.start)}")
    for name, values in search.axes.items():
        console.print(f"  {name}: {', '.join(map(str, values))}", highlight=False)
    console.print("nothing was run")


def finish_autotune(sweep: Sweep, console: Console) -> None:
    """What was timed of what there is, and how the search got there; kept as ``autotune.json``."""
    assert isinstance(sweep, TunedSweep)
    search, timed = sweep.search, [cell for cell in sweep.cells if _is_timed(sweep, cell)]
    for step in search.trace:
        console.print(trace_line(step), highlight=False, soft_wrap=True)
    if sweep.out_of_time:
        console.print(f"--budget {sweep.options.budget_s:.0f} s is used up: the search ended early", style="yellow")
    console.print(f"timed {len(timed)} of {len(sweep.space):,} possible cells", highlight=False)
    sweep.content["grid"]["cells"] = [
        {"name": cell.name, "cell_id": cell.cell_id, **cell.config.asdict()} for cell in sweep.cells
    ]
    sweep.folder.write_sweep(sweep.content)
    content = {"possible_cells": len(sweep.space), "timed_cells": len(timed), "trace": search.trace}
    replace_text(sweep.folder.path / TRACE_FILE, json.dumps(content, indent=1) + "\n")


def _is_timed(sweep: TunedSweep, cell: Cell) -> bool:
    return any(row["cell_id"] == cell.cell_id and row["status"] == "ok" for row in sweep.records)


def trace_line(step: dict[str, Any]) -> str:
    """``pass 1: compile: default ×1.95 (off ×1.90)``; what was kept comes first."""
    names = _differing(step["timed"])

    def text(entry: dict[str, Any]) -> str:
        words = " ".join(str(entry["point"][name]) for name in names) or "as it is"
        return f"{words} ×{entry['speedup']:.3f}" if entry["speedup"] else f"{words} –"

    kept = [text(entry) for entry in step["timed"] if entry["point"] in step["kept"]]
    rest = [text(entry) for entry in step["timed"] if entry["point"] not in step["kept"]]
    return f"{step['what']}: {', '.join(kept)}" + (f" (others: {', '.join(rest)})" if rest else "")


def _differing(timed: list[dict[str, Any]]) -> list[str]:
    points = [entry["point"] for entry in timed]
    return [name for name in points[0] if len({str(point[name]) for point in points}) > 1]
