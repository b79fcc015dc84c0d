"""What else the machine did: CPU time of other processes during a window, from /proc."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
FOREIGN_LOAD_PCT = 10.0  # of all CPUs; a row measured under more is flagged, and --wait-quiet waits for less
# user, nice, system, irq, softirq, steal of /proc/stat's first line (man 5 proc): busy time, no idle, no iowait
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)


@dataclass
class LoadWindow:
    """CPU seconds in a window of wall ``seconds``; ``foreign_pct`` is of all CPUs of the machine."""

    seconds: float = 0.0
    own_cpu_s: float = 0.0
    foreign_cpu_s: float | None = None
    ray_cpu_s: float = 0.0  # of that, Ray's own processes (raylet, GCS, agents, other workers)

    @property
    def foreign_pct(self) -> float | None:
        if self.foreign_cpu_s is None or self.seconds <= 0:
            return None
        return 100.0 * self.foreign_cpu_s / (self.seconds * (os.cpu_count() or 1))

    def own(self) -> tuple[str, int, float]:
        """Host, process and CPU seconds, as other workers of the cell are told."""
        return socket.gethostname(), os.getpid(), self.own_cpu_s

    def without(self, workers: Sequence[tuple[str, int, float]]) -> LoadWindow:
        """The same window where the cell's other workers on this machine are not foreign."""
        host, pid, _ = self.own()
        others = sum(seconds for name, number, seconds in workers if name == host and number != pid)
        foreign = None if self.foreign_cpu_s is None else max(0.0, self.foreign_cpu_s - others)
        return replace(self, foreign_cpu_s=foreign, ray_cpu_s=max(0.0, self.ray_cpu_s - others))


def machine_busy_s() -> float | None:
    """CPU seconds that this machine was busy since it booted; None where /proc does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    return sum(int(fields[i]) for i in _BUSY_FIELDS) / TICKS_PER_S


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def ray_cpu_s() -> float:
    """CPU seconds so far of all processes of Ray on this machine but this one, by their command lines."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            if int(folder.name) == os.getpid() or not (b"ray::" in command or b"/ray/" in command):
                continue
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])  # utime, stime (man 5 proc)
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
    return ticks / TICKS_PER_S


@contextmanager
def watch_load() -> Iterator[LoadWindow]:
    """Fills a LoadWindow with what the block's own process used, and what everything else did."""
    window = LoadWindow()
    ray = ray_cpu_s()
    busy, own, start = machine_busy_s(), _own_cpu_s(), time.perf_counter()
    yield window
    window.seconds = time.perf_counter() - start
    window.own_cpu_s = _own_cpu_s() - own
    after = machine_busy_s()
    if busy is not None and after is not None:
        window.foreign_cpu_s = max(0.0, after - busy - window.own_cpu_s)
    window.ray_cpu_s = max(0.0, ray_cpu_s() - ray)


def wait_until_quiet(limit_s: float, *, quiet_pct: float = FOREIGN_LOAD_PCT, sample_s: float = 1.0) -> float:
    """Wait until the rest of the machine uses less than ``quiet_pct`` of its CPUs, ``limit_s`` at most.

    Returns the seconds waited.
    """
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < limit_s:
        with watch_load() as window:
            time.sleep(min(sample_s, max(0.05, limit_s - waited)))
        if window.foreign_pct is None or window.foreign_pct < quiet_pct:
            break
    return time.perf_counter() - start
