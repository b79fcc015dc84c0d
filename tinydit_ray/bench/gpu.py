"""What else a GPU did during a window: other processes on it, and what held its clock down.

Read from ``nvidia-smi`` before and after, never during the window. How long the clock was held down for each
reason is a counter of the driver's (microseconds since it was loaded), so two readings tell all that happened
between them. Names and units: ``nvidia-smi --help-query-gpu`` and ``--help-query-compute-apps``.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

THROTTLE_REASONS = (
    "sw_power_cap",
    "hw_slowdown",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)
THROTTLED_PCT = 1.0  # of the window; below it a reason is not named


@dataclass(frozen=True)
class GpuState:
    """``processes`` that hold this GPU, this one among them; microseconds of throttling by reason so far.
    None and empty where the driver does not say."""

    processes: int | None = None
    throttled_us: dict[str, int] = field(default_factory=dict)


def gpu_state(gpu: str) -> GpuState:
    """The state of the GPU with this UUID (``GPU-…``). A driver without a query leaves that part empty."""
    counters = ",".join(f"clocks_event_reasons_counters.{name}" for name in THROTTLE_REASONS)
    pids = _nvidia_smi(gpu, "--query-compute-apps=pid")
    return GpuState(_count_lines(pids), _microseconds(_nvidia_smi(gpu, f"--query-gpu={counters}")))


def _nvidia_smi(gpu: str, query: str) -> str:
    """What nvidia-smi answers, "" where it does not exist or does not know the query."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--id={gpu}", query, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _count_lines(text: str) -> int | None:
    """Each process is a line; no line at all means that the query told nothing, for this process is one."""
    lines = [line for line in text.splitlines() if line.strip().isdigit()]
    return len(lines) or None


def _microseconds(text: str) -> dict[str, int]:
    values = [value.strip() for value in text.strip().split(",")]
    if len(values) != len(THROTTLE_REASONS):
        return {}
    return {name: int(value) for name, value in zip(THROTTLE_REASONS, values, strict=True) if value.isdigit()}


def foreign_processes(before: GpuState, after: GpuState) -> int | None:
    """Processes other than this one on the GPU, before or after. In a container their numbers are the host's, so
    this one is not looked for by its own, but known to be one of them."""
    counts = [state.processes for state in (before, after) if state.processes is not None]
    return max(counts) - 1 if counts else None


def throttle_words(before: GpuState, after: GpuState, seconds: float) -> str | None:
    """``sw_power_cap 12 %`` for each reason over 1 % of the window, ``none``, or None where the driver says nothing."""
    shares = {
        name: 100.0 * (after.throttled_us[name] - us) / (1e6 * seconds)
        for name, us in before.throttled_us.items()
        if name in after.throttled_us
    }
    if not shares or seconds <= 0:
        return None
    named = [f"{name} {share:.0f} %" for name, share in shares.items() if share >= THROTTLED_PCT]
    return ", ".join(named) or "none"


@dataclass
class GpuWindow:
    """What a window's GPU did beside the cell; None on a CPU, and where the driver does not say."""

    foreign_processes: int | None = None
    throttle: str | None = None

    @property
    def flags(self) -> list[str]:
        raised = {"foreign-gpu": bool(self.foreign_processes), "throttled": self.throttle not in (None, "none")}
        return [name for name, on in raised.items() if on]


@contextmanager
def watch_gpu(device: str) -> Iterator[GpuWindow]:
    """Fills a GpuWindow from the states before and after the block; on a CPU it stays empty."""
    window = GpuWindow()
    if device != "cuda":
        yield window
        return
    gpu = current_gpu()
    before, start = gpu_state(gpu), time.perf_counter()
    yield window
    seconds = time.perf_counter() - start
    after = gpu_state(gpu)
    window.foreign_processes = foreign_processes(before, after)
    window.throttle = throttle_words(before, after, seconds)


def current_gpu() -> str:
    """UUID of the CUDA device that this process uses: its index here need not be nvidia-smi's."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
