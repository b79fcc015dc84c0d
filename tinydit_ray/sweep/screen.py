"""What a person sees of a sweep: the plan, a live bar with time left and the cell in work, the table at the end."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tinydit_ray.record import Record
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.pace import Pace
from tinydit_ray.sweep.plan import Cell, Round

VERDICT_STYLE = {"faster": "green", "slower": "red", "within noise": "dim", "too noisy": "yellow"}
STATUS_STYLE = {"ok": "green", "unsupported": "dim", "skipped": "dim"}


class _TimeLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = task.fields["left"]() if "left" in task.fields else None
        return Text("" if left is None else f"{minutes(left)} left", style="cyan")


class _InWork(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["work"](), style="bold")


class Screen:
    """Live progress of a sweep; each record is a line when it ends.

    Time left is the estimates of the rounds to come, scaled by how long the finished ones took.
    """

    def __init__(self, console: Console, rounds: Iterable[Round], pace: Pace) -> None:
        self.console, self.pace = console, pace
        self.waiting = list(rounds)
        self.total = len(self.waiting)
        self.working: dict[tuple[str, int], tuple[Round, Path, float]] = {}
        self.progress = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"), BarColumn(), TimeElapsedColumn(),
            _TimeLeft(), _InWork(), console=console, refresh_per_second=2,
            redirect_stdout=False, redirect_stderr=False,  # what Ray prints belongs in the log
        )  # fmt: skip

    def __enter__(self) -> Screen:
        self.progress.start()
        self.bar = self.progress.add_task("", total=self.total, left=self.time_left_s, work=self.in_work)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def started(self, item: Round, folder: Path) -> None:
        self.working[item.cell.cell_id, item.number] = (item, folder, time.monotonic())

    def finished(self, item: Round, record: Record) -> None:
        self.working.pop((item.cell.cell_id, item.number), None)
        self.waiting = [other for other in self.waiting if other != item]
        self.progress.update(self.bar, advance=1)
        self.console.print(round_line(item, record), highlight=False)

    def time_left_s(self) -> float:
        left = 0.0
        for item in list(self.waiting):
            expected = self.pace.expected(item)
            work = self.working.get((item.cell.cell_id, item.number))
            left += max(0.0, expected - (time.monotonic() - work[2])) if work else expected
        return left

    def in_work(self) -> str:
        items = list(self.working.values())
        if not items:
            return "starting" if self.waiting else ""
        item, folder, _ = items[0]
        more = f" (+{len(items) - 1})" if len(items) > 1 else ""
        return f"{item.cell.name} · round {item.number} · {phase_of(folder)}{more}"

    def print_summary(self, rows: Sequence[dict[str, Any]], records: Sequence[Record]) -> None:
        self.console.print()
        print_table(self.console, rows)
        print_footnotes(self.console, rows, records)


def phase_of(folder: Path) -> str:
    try:
        return (folder / "phase").read_text() or "starting"
    except OSError:
        return "starting"


def minutes(seconds: float) -> str:
    whole = round(seconds)
    return (
        f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
        if whole >= 3600
        else f"{whole // 60}:{whole % 60:02}"
    )


def round_line(item: Round, record: Record) -> Text:
    line = Text(f"  round {item.number}  {item.cell.name:<34}")
    line.append(f" {record['status']:<11}", STATUS_STYLE.get(record["status"], "red"))
    if record["ms_per_step"]:
        line.append(f" {record['ms_per_step']:8.1f} ms/step  ×{record['speedup_vs_control']:.3f}")
    if record["reason"]:
        line.append(f"  {record['reason']}", "red" if record["status"] not in STATUS_STYLE else "dim")
    return line


def print_plan(console: Console, cells: Sequence[Cell], seconds: float, options: SweepOptions) -> None:
    """--dry-run: the cells and the estimated time."""
    table = Table("cell", "id", "model", "control", title=f"{len(cells)} cells × {options.rounds} rounds")
    for cell in cells:
        control = cell.control
        table.add_row(cell.name, cell.cell_id, str(cell.config.model), f"{control.attention} {control.precision}")
    console.print(table)
    console.print(f"about {minutes(seconds)} in all, estimated for two CPU cores; nothing was run", highlight=False)


def summary_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per cell: pooled numbers, the first round's training and scores, the worst status."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["cell_id"], []).append(row)
    return [_cell_summary(rounds) for rounds in cells.values()]


def _cell_summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    bad = [row for row in rounds if row["status"] != "ok"]
    scored = next((row for row in rounds if row["velocity_mse"] is not None), rounds[0])
    spreads = [row["ms_per_step_iqr"] for row in rounds if row["ms_per_step_iqr"] is not None]
    cold = [row["first_step_s"] for row in rounds if row["first_step_s"] is not None]
    return {
        **rounds[0],
        "status": bad[0]["status"] if bad else "ok",
        "reason": bad[0]["reason"] if bad else None,
        "rounds": len(rounds),
        "ms_per_step_iqr": statistics.median(spreads) if spreads else None,
        "first_step_s": cold[0] if cold else None,
        "train_loss_last": scored["train_loss_last"],
        "velocity_mse": scored["velocity_mse"],
        "probe_fd": scored["probe_fd"],
        "flags": ",".join(sorted({flag for row in rounds for flag in (row["flags"] or "").split(",") if flag})),
    }


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(
        title="speed-up = control ÷ cell time (above 1 is faster), 95 % interval over rounds", title_justify="left"
    )
    table.add_column("setup", no_wrap=True)
    for name in ("ms/step", "± iqr/2", "speed-up", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("first step s", "loss", "velocity MSE", "probe-FD"):
        table.add_column(name, justify="right")
    table.add_column("status")
    for row in summary_rows(rows):
        table.add_row(*_cells_of(row))
    console.print(table)


def _cells_of(row: dict[str, Any]) -> list[Text]:
    low, high = row["speedup_pooled_ci_low"], row["speedup_pooled_ci_high"]
    interval = f"{low:.3f} – {high:.3f}" if low is not None else "–"
    half_iqr = row["ms_per_step_iqr"] / 2 if row["ms_per_step_iqr"] is not None else None
    status = Text(row["status"], STATUS_STYLE.get(row["status"], "red"))
    if row["flags"]:
        status.append(f" ({row['flags']})", "dim")
    if row["reason"]:
        status.append(f" {row['reason']}", "dim")
    verdict = row["verdict"] or "–"
    return [
        Text(row["cell_name"]),
        _number(row["ms_per_step_pooled"], "8.1f"),
        _number(half_iqr, "6.1f"),
        _number(row["speedup_pooled"], "6.3f"),
        Text(interval),
        Text(verdict, VERDICT_STYLE.get(verdict, "dim")),
        _number(row["first_step_s"], "6.2f"),
        _number(row["train_loss_last"], "6.4f"),
        _number(row["velocity_mse"], "6.4f"),
        _number(row["probe_fd"], "6.1f"),
        status,
    ]


def _number(value: float | None, form: str) -> Text:
    return Text("–", "dim") if value is None else Text(format(value, form))


def print_footnotes(console: Console, rows: Sequence[dict[str, Any]], records: Sequence[Record]) -> None:
    ok = [row for row in records if row["status"] == "ok"]
    batch = [row["batch_ms"] / row["ms_per_step"] for row in ok if row["batch_ms"] is not None and row["ms_per_step"]]
    costs = [row["orchestration_s"] for row in ok if row["orchestration_s"] is not None]
    if batch:
        console.print(f"making a batch took {100 * statistics.median(batch):.1f} % of a step", highlight=False)
    if costs:
        console.print(
            f"orchestration {statistics.median(costs):.1f} s per trial"
            f" (median of {len(costs)}; highest {max(costs):.1f} s)",
            highlight=False,
        )


def summary_text(rows: Sequence[dict[str, Any]], width: int = 150) -> str:
    buffer = io.StringIO()
    print_table(Console(file=buffer, width=max(width, 150)), rows)
    return buffer.getvalue()
