"""What the driver's machine does while a sweep runs, under the names of MLflow's system metrics (``--system-metrics``).

A thread reads /proc every ten seconds; nothing is sent from it, so that no window meets more than that reading.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tinydit_ray.bench.load import machine_busy_s

EVERY_S = 10.0


@dataclass(frozen=True)
class Sample:
    """Numbers at a moment: milliseconds since 1970, and how many samples came before."""

    at_ms: int
    step: int
    values: dict[str, float]


class SystemMetrics:
    """Samples until closed; ``take`` hands over those that are new."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._new: list[Sample] = []
        self._step = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def take(self) -> list[Sample]:
        with self._lock:
            new, self._new = self._new, []
        return new

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        busy, start = machine_busy_s(), time.monotonic()
        wait_s = min(1.0, self._every_s)  # a short sweep has a sample as well
        while not self._stop.wait(wait_s):
            wait_s = self._every_s
            busy_now, now = machine_busy_s(), time.monotonic()
            values = memory_values()
            if busy is not None and busy_now is not None:
                share = (busy_now - busy) / ((now - start) * (os.cpu_count() or 1))
                values["system/cpu_utilization_percentage"] = round(100 * min(1.0, share), 1)
            busy, start = busy_now, now
            with self._lock:
                self._new.append(Sample(int(time.time() * 1000), self._step, values))
                self._step += 1


def memory_values() -> dict[str, float]:
    """Memory in use of all processes; empty where /proc does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    kb = {name: float(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    used = kb["MemTotal"] - kb["MemAvailable"]
    return {
        "system/system_memory_usage_megabytes": round(used / 1e3, 1),
        "system/system_memory_usage_percentage": round(100 * used / kb["MemTotal"], 1),
    }
