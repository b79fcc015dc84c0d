"""What orchestration costs: one small cell through Ray's documented pattern, our path, and no Ray at all."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tinydit_ray.atomic import replace_text
from tinydit_ray.cell import CellTask
from tinydit_ray.record import Record
from tinydit_ray.sweep.driver import Sweep
from tinydit_ray.sweep.errors import BAD_CELL
from tinydit_ray.sweep.folder import SweepFolder, default_name
from tinydit_ray.sweep.local import LocalExecutor
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.plan import Round
from tinydit_ray.sweep.prepare import prepare
from tinydit_ray.sweep.queue import Executor, Ready
from tinydit_ray.sweep.table import Column, print_columns, text_of

STARTING = ("queued_s", "start_s")  # waiting and starting a process; the rest are the cell's own phases
LIMIT_S = 6.0  # what our path may cost a trial above --no-ray


@dataclass(frozen=True)
class Trial:
    """Wall seconds of one trial from when it was handed out until its record was back, and its phases."""

    wall_s: float
    record: Record
    phases: dict[str, float]

    @property
    def work_s(self) -> float:
        return sum(self.phases.values())


class _Trials:
    """A queue of copies of one task, timed from outside."""

    def __init__(self, task: CellTask, name: str, count: int, keep: Callable[[Record], None]) -> None:
        self.task, self.name, self.left, self.keep = task, name, count, keep
        self.started = 0.0
        self.trials: list[Trial] = []

    @property
    def waiting(self) -> int:
        return self.left

    def next(self, ready: Ready | None = None) -> CellTask | None:
        if ready and not ready(self.task.cell, self.task.identity["node_kind"]):
            return None
        if not self.left:
            return None
        self.left -= 1
        self.started = time.perf_counter()
        number = len(self.trials) + 1
        slug = f"{self.name.replace(' ', '-').replace(',', '')}-{self.task.identity['cell_id']}"
        return dataclasses.replace(
            self.task,
            identity={**self.task.identity, "cell_name": self.name, "round": number},
            folder=str(Path(self.task.folder).parents[1] / slug / f"r{number}-a1"),
            queued_at=time.time(),
        )

    def lost(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        raise NotImplementedError("one machine has no node to lose")

    def standing(self, at_once: int, waits_for: str = "") -> None:
        """One trial at a time, here."""

    def give_up(self, ready: Ready, reason: str) -> None:
        raise NotImplementedError(reason)

    def done(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        wall = time.perf_counter() - self.started
        phases = Path(task.folder, "phases.json")
        self.keep(record)
        self.trials.append(Trial(wall, record, json.loads(phases.read_text()) if phases.exists() else {}))

    def executor_lost(self, why: str) -> None:
        os._exit(BAD_CELL)


def run_overhead(options: SweepOptions, console: Console, trials: int) -> int:
    """Run every path, one after the other, and print the seconds per trial by phase."""
    from tinydit_ray.distributed import RayExecutor
    from tinydit_ray.sweep.quiet import quiet_output

    content, cells, _ = prepare(options, console)
    folder = SweepFolder.open(options.out, options.name or default_name("overhead"), resume=False)
    folder.write_sweep({**content, "name": folder.path.name})
    task = Sweep(options, folder, content, cells[:1]).task_of(Round(cells[0], 1), options.time_s)
    configs = [cells[0].config]
    paths: list[Callable[[], Executor]] = [
        LocalExecutor,
        lambda: RayExecutor(cells=configs, kind=content["node_kind"]),
        lambda: RayExecutor(cells=configs, kind=content["node_kind"], documented=True),
    ]
    with quiet_output(folder.logs / "driver.log") as screen:
        found = {}
        for make in paths:
            start = time.perf_counter()
            executor = make()
            startup = time.perf_counter() - start
            screen.print(f"{executor.name}: {trials + 1} trials …", highlight=False)
            queue = _Trials(task, executor.name, trials + 1, folder.append)
            try:
                executor.run(queue)
            finally:
                executor.close()
            found[executor.name] = (startup, queue.trials[1:])
        replace_text(folder.path / "summary.txt", text_of(lambda file: print_costs(file, found)))
        print_costs(screen, found)
        screen.print(f"sweep folder: {folder.path}", highlight=False, soft_wrap=True)
    folder.close()
    return 0 if all(trial.record["status"] == "ok" for _, runs in found.values() for trial in runs) else 3


def print_costs(console: Console, found: dict[str, tuple[float, list[Trial]]]) -> None:
    names = list(dict.fromkeys(name for _, runs in found.values() for trial in runs for name in trial.phases))
    count = len(next(iter(found.values()))[1])
    medians = [_seconds(startup, runs, names) for startup, runs in found.values()]
    starting = [name.removesuffix("_s") for name in STARTING]
    ranks = {"trial": 0, "own work": 0, "around it": 0, "queued": 1, "start": 1, "import": 1, "start-up, once": 2}
    columns = [
        Column(name, [Text(f"{row[place]:.2f}") for row in medians], ranks.get(name, 3))
        for place, name in enumerate(("trial", "own work", "around it", *starting, *names, "start-up, once"))
    ]
    title = f"seconds per trial, median of {count} (a first one left out)"
    print_columns(console, title, [Column("path", [Text(name) for name in found], right=False), *columns])
    walls = {name: _median([t.wall_s for t in runs]) for name, (_, runs) in found.items()}
    above = walls["ray"] - walls["no-ray"]
    console.print(
        f"Ray costs {above:+.1f} s per trial above --no-ray (at most {LIMIT_S:.0f} wanted);"
        f" the documented pattern {walls['ray, worker group'] - walls['no-ray']:+.1f} s",
        style="green" if above <= LIMIT_S else "red", highlight=False,
    )  # fmt: skip


def _seconds(startup: float, runs: Sequence[Trial], phases: Sequence[str]) -> list[float]:
    """Median seconds per trial: wall, own work, the rest, what starting took, each phase; and the start-up's."""
    work, wall = _median([t.work_s for t in runs]), _median([t.wall_s for t in runs])
    starting = [_median([t.record[key] or 0.0 for t in runs]) for key in STARTING]
    spent = [_median([t.phases.get(key, 0.0) for t in runs]) for key in phases]
    return [wall, work, wall - work, *starting, *spent, startup]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")
