"""Tables in the terminal: as many columns as it is wide, and below them what the marks mean."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinydit_ray.bench.seeds import NOT_JUDGED
from tinydit_ray.record import FLAGS, Record, flags_of
from tinydit_ray.sweep.kinds import each_kind
from tinydit_ray.sweep.seeds import verdict_lines
from tinydit_ray.sweep.summary import summary_rows

Row = dict[str, Any]
PrintTable = Callable[[Console, Sequence[Row]], None]

VERDICT_STYLE = {"faster": "green", "slower": "red", "within noise": "dim", "too noisy": "yellow"}
QUALITY_STYLE = {"better": "green", "worse": "red"}
STATUS_STYLE = {"ok": "green", "unsupported": "dim", "skipped": "dim"}
NAME_WIDTH = 44
WRAPPED_WIDTH = 30
FILE_WIDTH = 250  # of summary.txt: no terminal limits it


class Column(NamedTuple):
    """``rank`` says how early a narrow terminal goes without it: 0 never, then the highest first. One that ``wraps``
    takes what width the others leave."""

    name: str
    cells: list[Text]
    rank: int = 0
    right: bool = True
    wraps: bool = False


def setup_column(rows: Sequence[Row]) -> Column:
    """Where many axes vary a name goes over several lines, so that the numbers keep their width."""
    return Column("setup", [Text(row["cell_name"]) for row in rows], right=False, wraps=True)


def status_column(cells: list[Text]) -> Column:
    return Column("status", cells, right=False, wraps=True)


def print_columns(
    console: Console, title: str | None, columns: Sequence[Column], elsewhere: str = "see summary.txt"
) -> None:
    """The columns that fit the console's width; those that do not are named below, and where they can be seen."""
    shown = list(columns)
    while _width(shown) > console.width and any(column.rank for column in shown):
        shown.remove(max(shown, key=lambda column: column.rank))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in shown:
        table.add_column(
            column.name, justify="right" if column.right else "left", no_wrap=not column.wraps, overflow="fold",
            max_width=NAME_WIDTH if column.wraps else None, min_width=_longest_word(column) if column.wraps else None,
        )  # fmt: skip
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*cells)
    console.print(table)
    left_out = [column.name for column in columns if column not in shown]
    if left_out:
        names = ", ".join(left_out)
        console.print(f"[dim]not in {console.width} columns: {names} ({elsewhere})", highlight=False)


def _width(columns: Sequence[Column]) -> int:
    """Terminal columns that the table needs, where what wraps does so at ``WRAPPED_WIDTH``."""
    return sum(2 + _cell_width(column) for column in columns) + 2


def _cell_width(column: Column) -> int:
    widest = max((cell.cell_len for cell in column.cells), default=0)
    return max(cell_len(column.name), min(widest, WRAPPED_WIDTH) if column.wraps else widest)


def _longest_word(column: Column) -> int:
    return min(WRAPPED_WIDTH // 2, max((len(word) for cell in column.cells for word in cell.plain.split()), default=0))


def print_table(console: Console, rows: Sequence[Row]) -> None:
    """Speed-ups with intervals and verdicts beside quality, a row per cell, and what the flags of the rows mean."""
    summary = summary_rows(rows)
    title = "speed-up = control ÷ cell time (above 1 is faster), 95 % interval over rounds"
    print_columns(console, title, _columns(summary))
    print_remarks(console, summary)


def _columns(summary: Sequence[Row]) -> list[Column]:
    def numbers(name: str, key: str, form: str, rank: int) -> Column:
        return Column(name, [number(row[key], form) for row in summary], rank)

    sampling = any(row["sample_ms_per_image"] is not None for row in summary)
    averaged = any(row["velocity_mse_ema"] is not None for row in summary)
    quality = [_styled(row["quality_verdict"], QUALITY_STYLE) for row in summary]
    judged = any(row["quality_verdict"] not in (None, NOT_JUDGED) for row in summary)
    return [
        setup_column(summary),
        Column("ms/image" if sampling else "ms/step", [_time(row) for row in summary]),
        Column("± iqr/2", [_half_spread(row) for row in summary], rank=6),
        numbers("speed-up", "speedup_pooled", ".3f", 0),
        Column("95 % interval", [_interval(row) for row in summary]),
        Column("verdict", [_styled(row["verdict"], VERDICT_STYLE) for row in summary], right=False),
        numbers("first step s", "first_step_s", ".2f", 5),
        numbers("loss", "train_loss_last", ".4f", 8),
        Column("velocity MSE", [_velocity(row) for row in summary], rank=1),
        numbers("probe-FD", "probe_fd", ".1f", 4),
        *([numbers("EMA velocity MSE", "velocity_mse_ema", ".4f", 3)] if averaged else []),
        *([numbers("EMA probe-FD", "probe_fd_ema", ".1f", 7)] if averaged else []),
        *([Column("quality", quality, 2, right=False)] if judged else []),
        status_column([status_text(row) for row in summary]),
    ]


def _time(row: Row) -> Text:
    sampled = row["sample_ms_per_image"]
    return number(row["ms_per_step_pooled"], ".1f") if sampled is None else number(sampled, ".2f")


def _half_spread(row: Row) -> Text:
    return number(None if row["ms_per_step_iqr"] is None else row["ms_per_step_iqr"] / 2, ".1f")


def _interval(row: Row) -> Text:
    low, high = row["speedup_pooled_ci_low"], row["speedup_pooled_ci_high"]
    return Text("–", "dim") if low is None else Text(f"{low:.3f} – {high:.3f}")


def _velocity(row: Row) -> Text:
    """Where the sampler is timed, of the net that samples, as it samples."""
    return number(row["velocity_mse" if row["sample_ms_per_image"] is None else "sample_velocity_mse"], ".4f")


def _styled(word: str | None, styles: dict[str, str]) -> Text:
    return Text(word or "–", styles.get(word or "", "dim"))


def status_text(row: Row) -> Text:
    status = Text(row["status"], STATUS_STYLE.get(row["status"], "red"))
    if row["status"] == "ok" and row["rounds_ok"] < row["rounds"]:
        status.append(f" {row['rounds_ok']}/{row['rounds']} rounds", "yellow")
    if row["reason"] and row["status"] != "ok":
        status.append(f" {row['reason']}", "dim")
    return status


def number(value: float | None, form: str) -> Text:
    return Text("–", "dim") if value is None else Text(format(value, form))


def print_remarks(console: Console, summary: Sequence[Row]) -> None:
    """Below a table: what an ok cell has to say, and which flags which cells carry."""
    for row in summary:
        if row["reason"] and row["status"] == "ok":
            console.print(f"{row['cell_name']}: {row['reason']}", highlight=False, soft_wrap=True)
    for flag in dict.fromkeys(flag for row in summary for flag in flags_of(row)):
        names = [row["cell_name"] for row in summary if flag in flags_of(row)]
        where = "all cells" if len(names) == len(summary) > 1 else ", ".join(names)
        meaning = f" ({FLAGS[flag]})" if flag in FLAGS else ""
        console.print(f"[dim]flag {flag}{meaning}: {where}", highlight=False, soft_wrap=True)


def print_footnotes(console: Console, rows: Sequence[Row], records: Sequence[Record]) -> None:
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


def summary_text(rows: Sequence[Row], print_table: PrintTable = print_table) -> str:
    """``summary.txt``: every column, whatever the terminal's width."""

    def show(console: Console) -> None:
        for _, group in each_kind(console, rows):
            print_table(console, group)

    return text_of(show)


def text_of(show: Callable[[Console], None]) -> str:
    """What ``show`` prints, for a file."""
    buffer = io.StringIO()
    show(Console(file=buffer, width=FILE_WIDTH))
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())
