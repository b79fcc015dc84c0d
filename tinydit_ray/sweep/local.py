"""Cells one after another in subprocesses, without Ray: the ``--no-ray`` path and the yardstick for Ray's cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tinydit_ray.cell import RECORD_FILE, CellTask, blank_record
from tinydit_ray.process import thread_environment
from tinydit_ray.record import Record, update
from tinydit_ray.sweep.queue import Queue

KILL_AFTER_S = 10.0  # beyond the trial's own watchdog
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
    environment = {**os.environ, **thread_environment(task.cell.cpus_per_worker)}
    with open(folder / "log.txt", "ab") as log:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "tinydit_ray.cell", str(task_file)],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(task.timeout_s + KILL_AFTER_S if task.timeout_s else None)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            end_group(process)
    return read_record(task, folder) or lost_record(task, code, time.monotonic() - start)


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
