"""A sweep's driver as a process that tests send signals to, and the processes below it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sweep_help import ROOT


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
