"""The driver of a sweep: checks what was asked, runs every round, keeps every record, prints the table."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from tinydit_ray.bench.machine import granted_cpus, machine_facts, node_kind, versions
from tinydit_ray.bench.memory import available_mb
from tinydit_ray.cell import CellTask, blank_record
from tinydit_ray.record import BAD_STATUSES, Record
from tinydit_ray.sweep.errors import BAD_CELL, INTERRUPTED, OK, UsageError
from tinydit_ray.sweep.floor import load_floor
from tinydit_ray.sweep.folder import SweepFolder, default_name, git_commit
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.pace import MIN_WINDOW_S, Pace
from tinydit_ray.sweep.plan import Cell, Round, estimate_s, make_cells, make_rounds, round_estimate_s
from tinydit_ray.sweep.queue import Executor
from tinydit_ray.sweep.results import result_rows, write_results
from tinydit_ray.sweep.screen import Screen, print_plan, summary_text
from tinydit_ray.tracking import NullTracker, Tracker, TrackingError, round_name, summary_files

MEMORY_SHARE = 0.9  # of what is free when the sweep starts, for its trials together


class Sweep:
    """The state of a running sweep, and the queue its executor draws from."""

    def __init__(self, options: SweepOptions, folder: SweepFolder, content: dict[str, Any], cells: list[Cell]) -> None:
        self.options, self.folder, self.content, self.cells = options, folder, content, cells
        self.records = folder.records()
        self.new: list[Record] = []  # of this session: an older failure does not stop a resumed sweep
        rounds = make_rounds(cells, options.rounds, content["sweep_id"])
        self.rounds = deque(item for item in rounds if not self._is_done(item))
        self.running: dict[str, Round] = {}
        self.tracker: Tracker | NullTracker = NullTracker()
        self.screen: Screen | None = None
        self.memory_limit_mb = _memory_limit_mb(options)
        self.pace = Pace(lambda item: round_estimate_s(item, options))
        self.started_at = time.monotonic()
        self.handed_out: dict[str, float] = {}
        self._results_due = 0.0
        self.floor, self.floor_source = load_floor(content["node_kind"])

    def _is_done(self, item: Round) -> bool:
        return any(row["status"] in ("ok", "unsupported") for row in self._attempts(item))

    def _attempts(self, item: Round) -> list[Record]:
        key = (item.cell.cell_id, item.number)
        return [row for row in self.records if (row["cell_id"], row["round"]) == key]

    def next(self) -> CellTask | None:
        while self.rounds:
            window_s = self._window_s()
            item = self.rounds.popleft()
            task = self.task_of(item, window_s or 0.0)
            reason = self._skip_reason(item) or (
                "" if window_s else f"--budget {self.options.budget_s:.0f} s is used up"
            )
            if reason:
                status = "unsupported" if reason.startswith("unsupported") else "skipped"
                self._keep(
                    item, task, {**blank_record(task), "status": status, "reason": reason.removeprefix("unsupported: ")}
                )
                continue
            self.running[task.folder] = item
            self.handed_out[task.folder] = time.monotonic()
            if self.screen:
                self.screen.started(item, Path(task.folder))
            return task
        return None

    def _window_s(self) -> float | None:
        """Timed seconds of the next round, within the budget; None where the budget has no place for it."""
        options = self.options
        planned = options.time_s / options.rounds
        if not options.budget_s:
            return planned
        left = options.budget_s - (time.monotonic() - self.started_at)
        window = self.pace.window_s(planned, self.rounds, left)
        if window is None and self.rounds[0].number == 1:
            return min(planned, MIN_WINDOW_S)  # each cell gets a row of its own, late or not
        return window

    def _skip_reason(self, item: Round) -> str:
        """Why a round needs no trial: its cell cannot run or went wrong before, or a smaller one ran out of memory."""
        for row in self.new:
            if row["cell_id"] == item.cell.cell_id and row["status"] == "unsupported":
                return f"unsupported: {row['reason']}"
            if row["cell_id"] == item.cell.cell_id and row["status"] in BAD_STATUSES:
                return f"{row['status']} in round {row['round']}"
            if row["status"] == "oom" and not self.options.keep_larger and _is_larger(item.cell, row):
                return f"oom at {row['cell_name']}: this cell is not smaller (--keep-larger runs it all the same)"
        return ""

    def task_of(self, item: Round, window_s: float) -> CellTask:
        """The next attempt at a round."""
        options, cell = self.options, item.cell
        attempt = 1 + max((row["attempt"] or 0 for row in self._attempts(item)), default=0)
        first = item.number == 1
        return CellTask(
            identity=self._identity(item, attempt), config=cell.config.asdict(), control=cell.control.asdict(),
            data=self.content["data"]["spec"], folder=str(self.folder.round_folder(item, attempt)),
            compile_cache=str(self.folder.compile_cache), seconds=window_s, ci=options.ci,
            train_steps=options.steps if first else 0, fd_images=options.fd_images, timeout_s=options.cell_timeout_s,
            memory_limit_mb=self.memory_limit_mb, wait_quiet_s=options.wait_quiet_s, concurrent=options.concurrent,
            queued_at=time.time(),
        )  # fmt: skip

    def _identity(self, item: Round, attempt: int) -> dict[str, Any]:
        content, cell = self.content, item.cell
        return {
            "sweep_id": content["sweep_id"], "config_id": cell.config.config_id, "cell_id": cell.cell_id,
            "cell_name": cell.name, "repeat": cell.repeat, "round": item.number, "attempt": attempt,
            "product_version": content["product_version"], "git_commit": content["git_commit"],
            "node_kind": content["node_kind"], "node_id": content["machine"]["node_id"],
            "data_source": content["data"]["source"], "data_digest": content["data"]["digest"],
        }  # fmt: skip

    def done(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        item = self.running.pop(task.folder)
        if record["status"] == "ok":
            self.pace.finished(item, time.monotonic() - self.handed_out[task.folder])
        folder = Path(task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if not (folder / name).exists():
                (folder / Path(name).name).write_bytes(content)
        self._keep(item, task, record)

    def _keep(self, item: Round, task: CellTask, record: Record) -> None:
        """The sweep folder first, then MLflow, then the screen."""
        self.folder.append(record)
        self.records.append(record)
        self.new.append(record)
        self._write_results_when_due()
        folder = Path(task.folder)
        files = {path.name: path for path in folder.glob("*") if path.is_file()} if folder.exists() else {}
        self.tracker.log_record(record, files)
        if self.screen:
            self.screen.finished(item, record)

    def _write_results_when_due(self) -> None:
        """The parquet file follows the records, at a tenth of the time at most: it grows with the sweep."""
        if time.monotonic() < self._results_due:
            return
        start = time.monotonic()
        write_results(self.folder.path / "results.parquet", self.rows())
        self._results_due = time.monotonic() + 10 * (time.monotonic() - start)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of this sweep's cells and of removed ones, in the order of the grid."""
        order = {cell.cell_id: i for i, cell in enumerate(self.cells)}
        rows = result_rows(self.records, self.floor)
        return sorted(rows, key=lambda row: (order.get(row["cell_id"], len(order)), row["round"] or 0))


def _is_larger(cell: Cell, row: Record) -> bool:
    """Whether the cell needs at least the memory of one that ran out: no smaller in size and batch, and alike
    in everything else."""
    sizes = ("dim", "depth", "batch_size")
    config = cell.config.asdict()
    alike = all(row[f"config.{key}"] == value for key, value in config.items() if key not in (*sizes, "heads"))
    return alike and cell.cell_id != row["cell_id"] and all(config[key] >= row[f"config.{key}"] for key in sizes)


def _memory_limit_mb(options: SweepOptions) -> float:
    if options.memory_limit_gb:
        return options.memory_limit_gb * 1e3
    free = available_mb()
    return MEMORY_SHARE * free / options.concurrent if free else 0.0


def run_sweep(options: SweepOptions, console: Console, finish: Callable[[Sweep, Console], None] | None = None) -> int:
    """Run a sweep to its end and print its table; returns the exit status.

    ``finish`` adds what a script prints beyond the table. Raises UsageError before any trial where
    something asked for cannot be done.
    """
    content, cells, duplicates = prepare(options, console)
    if options.dry_run:
        print_plan(console, cells, estimate_s(make_rounds(cells, options.rounds, ""), options), options)
        return OK
    name = options.name or default_name(options.grid_name)
    content["name"] = name
    folder = SweepFolder.open(options.out, name, resume=options.resume)
    try:
        if options.resume:
            content["sweep_id"] = folder.read_sweep()["sweep_id"]
            content["created_at"] = folder.read_sweep()["created_at"]
        folder.write_sweep(content)
        sweep = Sweep(options, folder, content, cells)
        if duplicates:
            console.print(f"{duplicates} duplicate cells removed")
        return _run(sweep, console, finish)
    except UsageError:
        if not options.resume:
            folder.discard()  # nothing was measured: the same name can be used again
        raise
    finally:
        folder.close()


def _run(sweep: Sweep, console: Console, finish: Callable[[Sweep, Console], None] | None) -> int:
    from tinydit_ray.sweep.quiet import quiet_output

    options, folder = sweep.options, sweep.folder
    interrupted = False
    with ExitStack() as stack:
        console = stack.enter_context(quiet_output(folder.logs / "driver.log"))
        sweep.tracker = open_tracker(options, sweep.content, folder)
        folder.write_sweep(sweep.content)
        executor = make_executor(options, sweep)
        stack.callback(executor.close)
        sweep.screen = Screen(console, sweep.rounds, sweep.pace)
        try:
            with sweep.screen:
                executor.run(sweep)
        except KeyboardInterrupt:
            interrupted = True
        except BaseException:
            sweep.tracker.finish(status="FAILED", summary=summary_files(folder.path), pooled=None)
            raise
        rows = sweep.rows()
        write_results(folder.path / "results.parquet", rows)
        text = summary_text(rows, width=console.width)
        (folder.path / "summary.txt").write_text(text, encoding="utf-8")
        sweep.screen.print_summary(rows, sweep.records)
        console.print(f"noise floor: {sweep.floor_source}", highlight=False)
        if finish and not interrupted:
            finish(sweep, console)
        sweep.tracker.finish(
            status="KILLED" if interrupted else "FINISHED",
            summary=summary_files(folder.path),
            pooled=_pooled_frame(rows),
        )
        print_where(console, sweep)
    if interrupted:
        return INTERRUPTED
    last = {(row["cell_id"], row["round"]): row["status"] for row in rows}
    return BAD_CELL if any(status in BAD_STATUSES for status in last.values()) else OK


def _pooled_frame(rows: list[dict[str, Any]]) -> Any:
    import pandas as pd

    return pd.DataFrame(rows)


def prepare(options: SweepOptions, console: Console) -> tuple[dict[str, Any], list[Cell], int]:
    """Everything that is decided before a folder is made: device, data, machine, cells."""
    if options.ray and find_spec("ray") is None:
        raise UsageError("Ray is not installed: pip install 'tinydit-ray[ray,mlflow]', or use --no-ray")
    device = resolve_device(options, console)
    kind = node_kind(device)
    cpus = options.cpus_per_worker or granted_cpus()
    if options.cpus_per_worker and options.cpus_per_worker > granted_cpus() and not options.address:
        raise UsageError(f"--cpus-per-worker {options.cpus_per_worker}: this machine has {granted_cpus()} CPUs")
    # the grid is checked before the data is touched: a typing mistake must not cost a decode
    make_cells(options, device=device, cpus=cpus, node_kind=kind, data_digest="")
    data = prepare_data(options, console)
    cells, duplicates = make_cells(options, device=device, cpus=cpus, node_kind=kind, data_digest=data["digest"])
    content: dict[str, Any] = {
        "sweep_id": uuid.uuid4().hex[:12],
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "product_version": product_version(),
        "git_commit": git_commit(),
        "node_kind": kind,
        "machine": {**machine_facts(), "node_id": node_id()},
        "versions": versions(),
        "data": data,
        "command": options.command,
        "grid": {
            "name": options.grid_name, "rounds": options.rounds, "time_s": options.time_s, "steps": options.steps,
            "ci": options.ci, "cells": [{"name": c.name, "cell_id": c.cell_id, **c.config.asdict()} for c in cells],
            "control": options.control,
        },
    }  # fmt: skip
    return content, cells, duplicates


def resolve_device(options: SweepOptions, console: Console) -> str:
    """The device, and a word why, where it was left open."""
    if options.device != "auto":
        return options.device
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.cuda.get_device_name() if device == "cuda" else "no CUDA device was found"
    console.print(f"device: {device}, since {'there is ' if device == 'cuda' else ''}{found}")
    return device


def prepare_data(options: SweepOptions, console: Console) -> dict[str, Any]:
    """Find and decode the data once, before any trial."""
    from tinydit_ray import data

    try:
        spec, why = data.resolve(options.data, options.classes)
        console.print(why, highlight=False)
        start = time.perf_counter()
        spec = data.prepare(spec)
        train = data.load(spec, "train")
    except data.DataError as error:
        raise UsageError(str(error)) from None
    took = time.perf_counter() - start
    console.print(
        f"data: {len(train):,} training images, digest {spec.digest}, ready after {took:.1f} s", highlight=False
    )
    for note in train.notes:
        console.print(f"data: {note}", highlight=False)
    return {"source": train.source, "digest": spec.digest, "spec": spec.as_dict(), "images": len(train)}


def product_version() -> str:
    try:
        return metadata.version("tinydit-ray")
    except metadata.PackageNotFoundError:
        return "0+checkout"


def node_id() -> str:
    import socket

    return socket.gethostname()


def open_tracker(options: SweepOptions, content: dict[str, Any], folder: SweepFolder) -> Tracker | NullTracker:
    """MLflow, opened before any trial. ``--no-ray`` does without where it is not installed."""
    if not options.ray and find_spec("mlflow") is None and options.tracking_uri is None:
        return NullTracker()
    try:
        tracker = Tracker.open(
            uri=options.tracking_uri, experiment=options.experiment, sweep=content, sweep_dir=folder.path
        )
    except TrackingError as error:
        raise UsageError(f"--tracking-uri: {error}") from None
    content["tracking"] = {"uri": tracker.uri, "experiment": options.experiment, "run_id": tracker.run_id}
    return tracker


def make_executor(options: SweepOptions, sweep: Sweep) -> Executor:
    if not options.ray:
        from tinydit_ray.sweep.local import LocalExecutor

        return LocalExecutor()
    from tinydit_ray.distributed import RayExecutor

    cells = [cell.config for cell in sweep.cells]
    return RayExecutor(address=options.address, concurrent=options.concurrent, cells=cells)


def print_where(console: Console, sweep: Sweep) -> None:
    """The path of the sweep folder, of the logs of cells that went wrong, and how to open MLflow."""
    slugs = {cell.cell_id: cell.slug for cell in sweep.cells}
    for row in sweep.new:
        if row["status"] in BAD_STATUSES and row["cell_id"] in slugs:
            log = sweep.folder.path / "cells" / slugs[row["cell_id"]] / round_name(row) / "log.txt"
            console.print(f"{row['cell_name']}: {row['status']}, see {log}", highlight=False, soft_wrap=True)
    console.print(f"sweep folder: {sweep.folder.path}", highlight=False, soft_wrap=True)
    tracking = sweep.content.get("tracking")
    if tracking:
        console.print(
            f"MLflow: experiment {tracking['experiment']!r} in {tracking['uri']}; open it with: make ui, or"
            f" python -m tinydit_ray.tracking ui --tracking-uri '{tracking['uri']}'",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    for warning in sweep.tracker.warnings:
        console.print(f"[yellow]{warning}", highlight=False)
