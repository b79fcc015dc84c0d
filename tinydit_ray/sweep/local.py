"""Cells one after another in subprocesses, without Ray: the ``--no-ray`` path and the yardstick for Ray's cost.

A cell of several workers is as many processes, that meet through torch.distributed on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tinydit_ray.cell import RECORD_FILE, CellTask, blank_record
from tinydit_ray.process import thread_environment
from tinydit_ray.record import Record, update
from tinydit_ray.sweep.queue import Queue

KILL_AFTER_S = 10.0  # beyond the trial's own watchdog
LOST_WORDS = ("Connection", "gloo", "NCCL", "process group")  # what a worker says whose partner is gone
WATCHDOG_WORDS = b"Timeout ("  # faulthandler's first line when it ends a process


class LocalExecutor:
    """Runs what the queue gives, a fresh Python process each, and hands back every record."""

    name = "no-ray"

    def run(self, queue: Queue) -> None:
        while (task := queue.next()) is not None:
            queue.done(task, run_task(task), {})

    def close(self) -> None:
        """Nothing stays behind."""


def run_task(task: CellTask) -> Record:
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    task_file = folder / "task.json"
    task_file.write_text(task.to_json())
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        meeting = _meeting(task)
        processes += [_start(task, rank, task_file, meeting) for rank in range(task.cell.workers)]
        codes = _wait(processes, task.timeout_s + KILL_AFTER_S if task.timeout_s else None)
    finally:
        for process in processes:
            end_group(process)
    return _record_of(task, codes, time.monotonic() - start)


def _meeting(task: CellTask) -> dict[str, str]:
    """Where several workers meet."""
    if task.cell.workers == 1:
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"WORLD_SIZE": str(task.cell.workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _start(task: CellTask, rank: int, task_file: Path, meeting: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **thread_environment(task.cell.cpus_per_worker), **meeting, "RANK": str(rank)}
    if meeting and task.cell.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    folder = Path(task.of_rank(rank).folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tinydit_ray.cell", str(task_file)],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip


def _wait(processes: list[subprocess.Popen[bytes]], limit_s: float | None) -> list[int | None]:
    """Exit statuses by rank; None for those that had to be ended, since another failed or the time is up."""
    if len(processes) == 1:
        try:
            return [processes[0].wait(limit_s)]
        except subprocess.TimeoutExpired:
            return [-signal.SIGKILL]
    end = time.monotonic() + (limit_s or float("inf"))
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return codes
        time.sleep(0.1)
    return [-signal.SIGKILL] * len(processes)


def _record_of(task: CellTask, codes: list[int | None], seconds: float) -> Record:
    """Rank 0's record where all ended well; else that of the rank that failed."""
    failed = [rank for rank, code in enumerate(codes) if code]
    found = [read_record(task.of_rank(rank), Path(task.of_rank(rank).folder)) for rank in failed or [0]]
    told = [record for record in found if record]
    silent = [rank for rank, record in zip(failed or [0], found, strict=True) if not record]
    if told and not (silent and lost_partner(worst(told))):
        return told[0] if task.cell.workers == 1 else worst(told)
    rank = silent[0] if silent else 0
    return lost_record(task.of_rank(rank), codes[rank], seconds)


def worst(records: Iterable[Record]) -> Record:
    """Of the records of a cell's workers the one that says why: the others only lost their connection to it."""
    return min(records, key=lambda row: (row["status"] == "ok", lost_partner(row)))


def lost_partner(record: Record) -> bool:
    """Whether a worker's record only says that another one is gone."""
    return any(word in str(record["reason"]) for word in LOST_WORDS)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the trial and whatever it started; a finished one leaves nothing to end."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def read_record(task: CellTask, folder: Path) -> Record | None:
    try:
        return {**blank_record(task), **json.loads((folder / RECORD_FILE).read_text())}
    except (OSError, ValueError):
        return None


def lost_record(task: CellTask, code: int | None, seconds: float, detail: str = "") -> Record:
    """The record of a trial that ended without one: past its time limit, killed, or crashed."""
    folder = Path(task.folder)
    status = "failed"
    if _timed_out(task, seconds):
        status, reason = "timeout", f"ended after {task.timeout_s:.0f} s{read_phase(folder)} (--cell-timeout)"
    elif code is not None and code < 0:
        reason = f"the trial's process was killed by {signal.Signals(-code).name}{read_phase(folder)}"
    else:
        reason = detail or f"the trial's process ended with status {code} without a record"
        reason += read_phase(folder)
    record = blank_record(task)
    update(record, {"status": status, "reason": reason})
    return record


def _timed_out(task: CellTask, seconds: float) -> bool:
    """Whether the trial's watchdog ended it, by its own words in the log; by the clock where the log is elsewhere."""
    if not task.timeout_s or seconds < task.timeout_s - 1.0:
        return False
    try:
        return (
            WATCHDOG_WORDS in Path(task.folder, "log.txt").read_bytes() or seconds > task.timeout_s + KILL_AFTER_S - 1.0
        )
    except OSError:
        return True


def read_phase(folder: Path) -> str:
    try:
        return f" in the phase '{(folder / 'phase').read_text()}'"
    except OSError:
        return ""
