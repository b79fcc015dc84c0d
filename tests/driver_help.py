"""A sweep's driver as a process that tests send signals to, and the processes below it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sweep_help import ROOT, records, results, sweep_here
from tracking_help import children, parents, runs_in


@contextmanager
def driver(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep's driver in a process of its own; ended at the end of the block at the latest."""
    environment = {**os.environ, "COLUMNS": "200"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "sweeps" / "speed_grid.py"), *arguments],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(what: str, found: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Until ``found()``, or the process has ended."""
    deadline = time.monotonic() + seconds
    while not found() and process.poll() is None:
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


def attempts(folder: Path) -> int:
    """Rounds that were begun, in all sessions."""
    return len(list(folder.glob("cells/*/*/phase")))


def descendants(pid: int) -> dict[int, str]:
    """Processes below this one, with their programs."""
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            below.setdefault(int(path.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(path.parent.name))
        except OSError:
            continue
    found, waiting = {}, [pid]
    while waiting:
        for child in below.get(waiting.pop(), []):
            found[child] = program(child)
            waiting.append(child)
    return found


def program(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def wait_until_ended(processes: dict[int, str]) -> None:
    deadline = time.monotonic() + 30
    left = list(processes)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if program(pid) and program(pid) == processes[pid]]
        time.sleep(0.1)
    assert not left, {pid: program(pid) for pid in left}


def planned(*arguments: str, cwd: Path) -> set[str]:
    """Ids of the cells that a sweep with these arguments runs, from what --dry-run prints."""
    done = sweep_here("speed_grid.py", *arguments, "--dry-run", cwd=cwd)
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    return {row[2].strip() for row in rows}


def check_whole(folder: Path, uri: str, cells: set[str], rounds: int) -> None:
    """As an uninterrupted sweep would have left it: each round of each cell ok once, in the records, in the table and
    in MLflow."""
    rows = records(folder)
    good = sorted((row["cell_id"], row["round"]) for row in rows if row["status"] == "ok")
    assert good == sorted((cell, number) for cell in cells for number in range(1, rounds + 1))
    keys = [(row["cell_id"], row["round"], row["attempt"]) for row in rows]
    assert len(keys) == len(set(keys))
    table = results(folder)
    assert sorted(zip(table["cell_id"], table["round"], strict=True)) == good
    assert (set(table["status"]), table["verdict"].isna().sum()) == ({"ok"}, 0)
    runs = runs_in(uri, "tinydit")
    assert [run.info.status for run in parents(runs)] == ["FINISHED"]
    sent = [run.data.tags["record_key"] for run in children(runs) if run.info.status == "FINISHED"]
    assert len(sent) == len(set(sent)) == len(good)
    assert {run.info.status for run in children(runs)} <= {"FINISHED", "FAILED", "KILLED"}
