"""What a person sees of a sweep: the plan, a live bar with time left and the cell in work, the table at the end."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tinydit_ray.record import Record, flags_of
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.pace import Pace
from tinydit_ray.sweep.plan import Cell, Round
from tinydit_ray.sweep.progress import Progress as Standing
from tinydit_ray.sweep.progress import Working, best_words, count_words, now
from tinydit_ray.sweep.seeds import is_seed_row, verdict_lines

VERDICT_STYLE = {"faster": "green", "slower": "red", "within noise": "dim", "too noisy": "yellow"}
QUALITY_STYLE = {"better": "green", "worse": "red"}
NAME_WIDTH = 44
STATUS_STYLE = {"ok": "green", "unsupported": "dim", "skipped": "dim"}


PrintTable = Callable[[Console, Sequence[dict[str, Any]]], None]


class _TimeLeft(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = task.fields["left"]() if "left" in task.fields else None
        return Text("" if left is None else f"{minutes(left)} left", style="cyan")


class _InWork(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["work"](), style="bold")


class _Bars(Progress):
    """The bar, and under it a line of words."""

    words = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.words:
            yield Text(self.words, style="dim", no_wrap=True, overflow="ellipsis")


class Screen:
    """Live progress of a sweep; each record is a line when it ends.

    Time left is the estimates of the rounds to come, scaled by how long the finished ones took.
    """

    def __init__(self, console: Console, rounds: Iterable[Round], pace: Pace) -> None:
        self.console, self.pace = console, pace
        self.waiting = list(rounds)
        self.total = len(self.waiting)
        self.working: dict[tuple[str, int], tuple[Round, Path, float]] = {}
        self.statuses: list[str] = []
        self.best = ""
        self.progress = _Bars(
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

    def more(self, rounds: Sequence[Round]) -> None:
        """Rounds that were not known at the start."""
        self.waiting += rounds
        self.total += len(rounds)
        self.progress.update(self.bar, total=self.total)

    def started(self, item: Round, folder: Path) -> None:
        self.working[item.cell.cell_id, item.number] = (item, folder, time.monotonic())

    def finished(self, item: Round, record: Record) -> None:
        self.working.pop((item.cell.cell_id, item.number), None)
        self.waiting = [other for other in self.waiting if other != item]
        self.progress.update(self.bar, advance=1)
        self.statuses.append(record["status"])
        self._show_words()
        self.console.print(round_line(item, record), highlight=False)

    def time_left_s(self) -> float:
        left = 0.0
        for item in list(self.waiting):
            expected = self.pace.expected(item)
            work = self.working.get((item.cell.cell_id, item.number))
            left += max(0.0, expected - (time.monotonic() - work[2])) if work else expected
        return left

    def note(self, rows: Sequence[dict[str, Any]]) -> None:
        """The best cell of these pooled rows, under the bar."""
        self.best = best_words(rows)
        self._show_words()

    def _show_words(self) -> None:
        self.progress.words = " · ".join(filter(None, [count_words(self.statuses), self.best]))

    def standing(self, top: Path, *, ended: bool = False) -> Standing:
        """The same in plain data, for whoever watches from elsewhere; ``top`` is the sweep's folder."""
        working = [
            Working(
                cell=item.cell.name, round=item.number, since_s=round(time.monotonic() - start, 1),
                folder=folder.relative_to(top).as_posix() if folder.is_relative_to(top) else "",
            )
            for item, folder, start in self.working.values()
        ]  # fmt: skip
        return Standing(
            total=self.total, done=self.total - len(self.waiting), left_s=round(self.time_left_s(), 1), at=now(),
            working=working, ended=ended,
        )  # fmt: skip

    def in_work(self) -> str:
        items = list(self.working.values())
        if not items:
            return "starting" if self.waiting else ""
        item, folder, _ = items[0]
        more = f" (+{len(items) - 1})" if len(items) > 1 else ""
        return f"{item.cell.name} · round {item.number} · {phase_of(folder)}{more}"

    def print_summary(
        self, rows: Sequence[dict[str, Any]], records: Sequence[Record], print_table: PrintTable
    ) -> None:
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
        line.append(f" {record['ms_per_step']:8.1f} ms/step")
        if record["speedup_vs_control"]:
            line.append(f"  ×{record['speedup_vs_control']:.3f}")
    elif record["sample_ms_per_image"]:
        line.append(f" {record['sample_ms_per_image']:8.2f} ms/image  ×{record['speedup_vs_control']:.3f}")
    if record["velocity_mse"] is not None and not record["speedup_vs_control"]:  # trained and scored alone
        line.append(f"  velocity MSE {record['velocity_mse']:.4f} after {record['steps_trained']} steps")
    if record["reason"]:
        line.append(f"  {record['reason']}", "red" if record["status"] not in STATUS_STYLE else "dim")
    return line


def print_plan(console: Console, cells: Sequence[Cell], seconds: float, options: SweepOptions) -> None:
    """--dry-run: the cells and the estimated time."""
    seeds = f", and the control with {options.seeds} more seeds" if options.seeds else ""
    table = Table("cell", "id", "model", "control", title=f"{len(cells)} cells × {options.rounds} rounds{seeds}")
    for cell in cells:
        control = cell.control
        table.add_row(cell.name, cell.cell_id, str(cell.config.model), f"{control.attention} {control.precision}")
    console.print(table)
    console.print(f"about {minutes(seconds)} in all, estimated for two CPU cores; nothing was run", highlight=False)


def summary_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per cell: pooled numbers, the first round's training and scores, the worst status. The control's other
    seeds are no cells of the grid; one that went wrong is shown all the same."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not is_seed_row(row) or row["status"] != "ok":
            cells.setdefault(row["cell_id"], []).append(row)
    return [_cell_summary(rounds) for rounds in cells.values()]


def _cell_summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    ok = [row for row in rounds if row["status"] == "ok"]
    bad = sorted((row for row in rounds if row["status"] != "ok"), key=lambda row: row["status"] == "skipped")
    if ok and all(row["status"] == "skipped" for row in bad):  # fewer rounds than asked, by a budget: a wider interval
        bad = []
    notes = [row["reason"] for row in ok if row["reason"]]
    scored = next((row for row in rounds if row["velocity_mse"] is not None), rounds[0])
    spreads = [row["ms_per_step_iqr"] for row in rounds if row["ms_per_step_iqr"] is not None]
    cold = [row["first_step_s"] for row in rounds if row["first_step_s"] is not None]
    sampling = [row["sample_ms_per_image"] for row in rounds if row["sample_ms_per_image"] is not None]
    return {
        **rounds[0],
        "status": bad[0]["status"] if bad else "ok",
        "reason": bad[0]["reason"] if bad else next(iter(notes), None),
        "rounds": len(rounds),
        "rounds_ok": len(ok),
        "ms_per_step_iqr": statistics.median(spreads) if spreads else None,
        "first_step_s": cold[0] if cold else None,
        "train_loss_last": scored["train_loss_last"],
        "velocity_mse": scored["velocity_mse"],
        "sample_velocity_mse": scored["sample_velocity_mse"],
        "sample_ms_per_image": statistics.median(sampling) if sampling else None,
        "probe_fd": scored["probe_fd"],
        "velocity_mse_ema": scored["velocity_mse_ema"],
        "probe_fd_ema": scored["probe_fd_ema"],
        "flags": ",".join(sorted({flag for row in rounds for flag in flags_of(row)})),
    }


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    summary = summary_rows(rows)
    unit = "ms/image" if any(row["sample_ms_per_image"] for row in summary) else "ms/step"
    table = Table(
        title="speed-up = control ÷ cell time (above 1 is faster), 95 % interval over rounds", title_justify="left"
    )
    # where many axes vary a name goes over several lines, so that the numbers keep their width
    longest = max((len(row["cell_name"]) for row in summary), default=0)
    table.add_column("setup", no_wrap=longest <= NAME_WIDTH, max_width=NAME_WIDTH)
    for name in (unit, "± iqr/2", "speed-up", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("first step s", "loss", "velocity MSE", "probe-FD"):
        table.add_column(name, justify="right")
    averaged = any(row["velocity_mse_ema"] is not None for row in summary)
    for name in ("EMA velocity MSE", "EMA probe-FD") if averaged else ():
        table.add_column(name, justify="right")
    table.add_column("quality", no_wrap=True)
    table.add_column("status")
    for row in summary:
        table.add_row(*_cells_of(row, averaged))
    console.print(table)
    for row in summary:  # a narrow column is no place for what an ok cell has to say
        if row["reason"] and row["status"] == "ok":
            console.print(f"{row['cell_name']}: {row['reason']}", highlight=False, soft_wrap=True)


def _cells_of(row: dict[str, Any], averaged: bool) -> list[Text]:
    low, high = row["speedup_pooled_ci_low"], row["speedup_pooled_ci_high"]
    interval = f"{low:.3f} – {high:.3f}" if low is not None else "–"
    half_iqr = row["ms_per_step_iqr"] / 2 if row["ms_per_step_iqr"] is not None else None
    status = Text(row["status"], STATUS_STYLE.get(row["status"], "red"))
    if row["status"] == "ok" and row["rounds_ok"] < row["rounds"]:
        status.append(f" {row['rounds_ok']} of {row['rounds']} rounds", "yellow")
    if row["flags"]:
        status.append(f" ({row['flags'].replace(',', ', ')})", "dim")
    if row["reason"] and row["status"] != "ok":
        status.append(f" {row['reason']}", "dim")
    verdict = row["verdict"] or "–"
    sampled = row["sample_ms_per_image"]  # then the scores are of the net that samples, as it samples
    return [
        Text(row["cell_name"]),
        number(row["ms_per_step_pooled"], "8.1f") if sampled is None else number(sampled, "8.2f"),
        number(half_iqr, "6.1f"),
        number(row["speedup_pooled"], "6.3f"),
        Text(interval),
        Text(verdict, VERDICT_STYLE.get(verdict, "dim")),
        number(row["first_step_s"], "6.2f"),
        number(row["train_loss_last"], "6.4f"),
        number(row["velocity_mse"] if sampled is None else row["sample_velocity_mse"], "6.4f"),
        number(row["probe_fd"], "6.1f"),
        *((number(row["velocity_mse_ema"], "6.4f"), number(row["probe_fd_ema"], "6.1f")) if averaged else ()),
        Text(row["quality_verdict"] or "–", QUALITY_STYLE.get(row["quality_verdict"], "dim")),
        status,
    ]


def number(value: float | None, form: str) -> Text:
    return Text("–", "dim") if value is None else Text(format(value, form))


def print_footnotes(console: Console, rows: Sequence[dict[str, Any]], records: Sequence[Record]) -> None:
    for line in verdict_lines(rows):
        console.print(line, highlight=False)
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


def summary_text(
    rows: Sequence[dict[str, Any]], width: int = 150, print_table: PrintTable = print_table
) -> str:
    buffer = io.StringIO()
    print_table(Console(file=buffer, width=max(width, 150)), rows)
    return buffer.getvalue()
