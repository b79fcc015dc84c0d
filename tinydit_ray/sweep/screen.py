"""What a person sees of a sweep: the plan, a live bar with time left and the cell in work, the table at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tinydit_ray.record import Record
from tinydit_ray.sweep.kinds import by_kind, each_kind
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.pace import Pace
from tinydit_ray.sweep.plan import Cell, Round
from tinydit_ray.sweep.progress import Progress as Standing
from tinydit_ray.sweep.progress import Working, best_words, count_words, now
from tinydit_ray.sweep.table import STATUS_STYLE, PrintTable, print_footnotes


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
        self.waiting: dict[tuple[str, int], Round] = {}  # and working; by cell and round, since there may be thousands
        self.total = 0
        self.expected_s = self.first_s = 0.0  # estimates of those that nobody works on yet; of first rounds alone
        self.working: dict[tuple[str, int], tuple[Round, Path, float]] = {}
        self.statuses: Counter[str] = Counter()
        self.best = self.reason = ""
        self.progress = _Bars(
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"), BarColumn(), TimeElapsedColumn(),
            _TimeLeft(), _InWork(), console=console, refresh_per_second=2,
            redirect_stdout=False, redirect_stderr=False,  # what Ray prints belongs in the log
        )  # fmt: skip
        self._enter(rounds)

    def _enter(self, rounds: Iterable[Round]) -> None:
        for item in rounds:
            self.waiting[_key(item)] = item
            self._expect(item, 1)
            self.total += 1

    def _expect(self, item: Round, sign: int) -> None:
        seconds = sign * self.pace.estimate(item)
        self.expected_s += seconds
        self.first_s += seconds if item.number == 1 else 0.0

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
        self._enter(rounds)
        self.progress.update(self.bar, total=self.total)

    def started(self, item: Round, folder: Path) -> None:
        self._expect(item, -1)
        self.working[_key(item)] = (item, folder, time.monotonic())

    def finished(self, item: Round, record: Record) -> None:
        known = self.waiting.pop(_key(item), None)
        if self.working.pop(_key(item), None) is None and known:  # it needed no trial
            self._expect(item, -1)
        self.progress.update(self.bar, advance=1)
        self.statuses[record["status"]] += 1
        self._show_words()
        self.console.print(round_line(item, record), highlight=False)

    def lost(self, item: Round, record: Record) -> None:
        """An attempt that was lost with its node: the round is still to be done."""
        if self.working.pop(_key(item), None):
            self._expect(item, 1)
        self.console.print(round_line(item, record), highlight=False)

    def waits_for(self, reason: str) -> None:
        """Why rounds do not start, under the bar; said once where the screen does not live."""
        if reason and reason != self.reason and not self.console.is_terminal:
            self.console.print(f"  {reason}", highlight=False, soft_wrap=True)
        self.reason = reason
        self._show_words()

    def time_left_s(self) -> float:
        """Within a budget no more than it leaves, but for first rounds, which are run late or not."""
        now_s = time.monotonic()
        working = list(self.working.values())  # a copy: the bar asks from a thread of its own
        in_work = sum(max(0.0, self.pace.expected(item) - (now_s - start)) for item, _, start in working)
        left, first = (in_work + max(0.0, seconds) * self.pace.scale for seconds in (self.expected_s, self.first_s))
        return max(first / self.pace.at_once, min(left / self.pace.at_once, self.pace.budget_left_s()))

    def note(self, rows: Sequence[dict[str, Any]]) -> None:
        """The best cell of these pooled rows, under the bar."""
        self.best = best_words(rows)
        self._show_words()

    def _show_words(self) -> None:
        self.progress.words = " · ".join(filter(None, [self.reason, count_words(self.statuses), self.best]))

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
        for kind, group in each_kind(self.console, rows):
            print_table(self.console, group)
            print_footnotes(self.console, group, by_kind(records).get(kind, []))


def _key(item: Round) -> tuple[str, int]:
    return item.cell.cell_id, item.number


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
