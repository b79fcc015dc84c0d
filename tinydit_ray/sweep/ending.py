"""The end of a sweep: its results, table, recommendation and MLflow summary, and where all of it lies."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from tinydit_ray.atomic import replace_text
from tinydit_ray.record import BAD_STATUSES, NODE_LOST_FLAG, flags_of
from tinydit_ray.sweep.attach import attach_report
from tinydit_ray.sweep.best import write_bests
from tinydit_ray.sweep.errors import BAD_CELL, OK, SweepBroken
from tinydit_ray.sweep.results import write_results
from tinydit_ray.sweep.table import summary_text
from tinydit_ray.tracking import how_to_open, round_name, summary_files

if TYPE_CHECKING:
    from tinydit_ray.sweep.driver import Finish, Sweep


def conclude(sweep: Sweep, console: Console, finish: Finish | None, *, interrupted: bool) -> list[dict[str, Any]]:
    """Write and print what a sweep came to, interrupted or not; returns its rows.

    ``finish`` adds what a script prints beyond the table.
    """
    folder = sweep.folder
    sweep.tell(ended=True)
    rows = sweep.rows()
    write_results(folder.path / "results.parquet", rows)
    replace_text(folder.path / "summary.txt", summary_text(rows, print_table=sweep.print_table))
    if sweep.screen:
        sweep.screen.print_summary(rows, sweep.records, sweep.print_table)
    if sweep.space[0].times != "quality":
        console.print(f"noise floor: {sweep.floor_source}", highlight=False)
    if finish and not interrupted:
        finish(sweep, console)
    if not sweep.options.self_control and sweep.space[0].times == "step":
        write_bests(folder.path, sweep.best_rows(), sweep.content, console)
    if sweep.options.report and not interrupted:
        attach_report(folder.path, console)
    sweep.tracker.finish(
        status="KILLED" if interrupted else "FINISHED", summary=summary_files(folder.path), pooled=_pooled_frame(rows)
    )
    print_where(console, sweep)
    return rows


def leave(sweep: Sweep, error: SweepBroken) -> NoReturn:
    """End the process at once, from a thread that is not the main one: results, the sweep's run in MLflow, one line."""
    try:
        rows = sweep.rows()
        write_results(sweep.folder.path / "results.parquet", rows)
        sweep.tracker.finish(status="FAILED", summary=summary_files(sweep.folder.path), pooled=_pooled_frame(rows))
    except Exception:
        traceback.print_exc()  # into the driver's log
    sweep.interrupts.say(f"\nerror: {error}\n")
    os._exit(BAD_CELL)


def _pooled_frame(rows: list[dict[str, Any]]) -> Any:
    import pandas as pd

    return pd.DataFrame(rows)


def print_where(console: Console, sweep: Sweep) -> None:
    """The path of the sweep folder, of the logs of cells that went wrong, and how to open MLflow."""
    slugs = {cell.cell_id: cell.slug for cell in sweep.cells}
    for row in sweep.new:
        if row["status"] in BAD_STATUSES and row["cell_id"] in slugs and NODE_LOST_FLAG not in flags_of(row):
            log = sweep.folder.path / "cells" / slugs[row["cell_id"]] / round_name(row) / "log.txt"
            console.print(f"{row['cell_name']}: {row['status']}, see {log}", highlight=False, soft_wrap=True)
    console.print(f"sweep folder: {sweep.folder.path}", highlight=False, soft_wrap=True)
    tracking = sweep.content.get("tracking")
    if tracking:
        console.print(
            f"MLflow: experiment {tracking['experiment']!r} in {tracking['uri']};"
            f" {how_to_open(tracking['uri'], sweep.tracker.experiment_id)}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for warning in sweep.tracker.warnings:
        console.print(f"[yellow]{warning}", highlight=False)


def exit_status(rows: list[dict[str, Any]], sweep: Sweep) -> int:
    """Of what the grid has now: what was removed from it is history."""
    here = {cell.cell_id for cell in sweep.cells} | {row["cell_id"] for row in sweep.new}
    return BAD_CELL if any(row["status"] in BAD_STATUSES for row in rows if row["cell_id"] in here) else OK
